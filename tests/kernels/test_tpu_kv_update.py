"""`kv_update` into pools wider than K and V, and into pools of eight bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_update import kv_update
from pallas_kernels.page_layout import from_rows

PAGE_IDS, OFFSETS = jnp.array([3, 1, 1, 9]), jnp.array([7, 0, 5, 2])
"""The last page is past the pool's end: its token is padding."""


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def test_lanes_past_keys_and_values_become_zero() -> None:
    pages = normal(0, 4, 2, 8, 32)
    keys, values = normal(1, 4, 2, 10), normal(2, 4, 2, 10)
    found = kv_update(pages, keys, values, PAGE_IDS, OFFSETS)
    expected = np.array(pages)
    for token in range(3):
        row = np.concatenate([keys[token], values[token], np.zeros((2, 12))], axis=1)
        expected[PAGE_IDS[token], :, OFFSETS[token]] = row
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("dtype", "step"), [("int8", 0.5), ("float8_e4m3fn", None)])
@pytest.mark.parametrize("layout", ["rows", "halves"])
def test_what_is_stored_is_the_nearest_in_eight_bits(dtype: str, step: float | None, layout: str) -> None:
    scales = jnp.array([[0.02, 0.03], [0.04, 0.01]])
    keys, values = 3 * normal(1, 4, 2, 8), 3 * normal(2, 4, 2, 8)
    keys = keys.at[0, 0, 0].set(1e6).at[1, 0, 0].set(-1e6)  # far past what eight bits hold
    pages = jnp.zeros((4, 2, 8, 16), dtype)
    found = kv_update(pages, keys, values, PAGE_IDS, OFFSETS, kv_scales=scales, layout=layout)
    assert found.dtype == dtype

    largest = 127.0 if step else 448.0
    exact = np.concatenate([keys / scales[None, :, :1], values / scales[None, :, 1:]], axis=2).clip(-largest, largest)
    stored = np.zeros((4, 2, 8, 16), np.float32)
    for token in range(3):
        stored[PAGE_IDS[token], :, OFFSETS[token]] = exact[token]
    expected = np.asarray(from_rows(jnp.asarray(stored), layout))
    error = np.abs(np.asarray(found, np.float32) - expected)
    # Half a step of integers; of float8, which has three bits after the first, a sixteenth, and near zero half of 2^-9.
    allowed = step + 1e-5 if step else np.maximum(np.abs(expected) / 16, 2.0**-10)
    assert (error <= allowed * (1 + 1e-5)).all()
    assert np.isfinite(np.asarray(found, np.float32)).all()
