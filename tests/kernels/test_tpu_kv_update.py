"""`kv_update` into pools wider than K and V and into pools of eight bits, and its TPU kernel, interpreted."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kv_update import kv_update, tpu
from pallas_kernels.page_layout import from_rows
from tests.kernels.ladder.interpret import DMA_MODES, run_interpreted

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


# --- the kernel -------------------------------------------------------------------------------------------------------

NUM_PAGES, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM, NUM_TOKENS = 7, 2, 16, 64, 40
NOBODYS = 2**30


@cache
def kernel_in(dma_mode: str) -> Any:
    """The kernel, jitted for one mode of the interpreter."""
    del dma_mode
    return jax.jit(partial(kv_update, impl="tpu"))


expected_of = jax.jit(kv_update)


def assert_agrees(places: np.ndarray, padding: set[int], dtype: str, dma_mode: str) -> None:
    """The kernel writes the tokens to `places`, but those in `padding`, and nothing else."""
    kv_scales = None if dtype in ("float32", "bfloat16") else jnp.array([[0.03, 0.02], [0.01, 0.05]])
    pages = jnp.asarray(5 * normal(0, NUM_PAGES, NUM_KV_HEADS, PAGE_SIZE, 2 * HEAD_DIM), dtype)
    keys, values = normal(1, NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM), normal(2, NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM)
    nobodys = np.isin(np.arange(NUM_TOKENS), list(padding))
    # A token that is nobody's may hold no numbers, which must not come through to its neighbours.
    keys = jnp.where(nobodys[:, None, None], jnp.nan, keys)
    page_ids = jnp.asarray(np.where(nobodys, NOBODYS, places // PAGE_SIZE), jnp.int32)
    arguments = (pages, keys, values, page_ids, jnp.asarray(places % PAGE_SIZE, jnp.int32))
    found = run_interpreted(partial(kernel_in(dma_mode), kv_scales=kv_scales), *arguments, dma_mode=dma_mode)
    expected = expected_of(*arguments, kv_scales=kv_scales)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


IN_ORDER = np.concatenate([np.arange(5, 30), np.arange(64, 75), [3, 90, 47, 111]])
"""A chunk that begins and ends within tiles, one that begins with a page, and decodes."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("float32", "int8", "float8_e4m3fn"))]
)
@pytest.mark.parametrize("dma_mode", DMA_MODES)
def test_the_kernel_writes_each_token_to_its_place(dtype: str, dma_mode: str) -> None:
    assert_agrees(IN_ORDER, {2, 30, 39}, dtype, dma_mode)


@pytest.mark.slow
@pytest.mark.parametrize("dma_mode", DMA_MODES)
def test_the_kernel_writes_nothing_where_all_is_padding(dma_mode: str) -> None:
    assert_agrees(IN_ORDER, set(range(NUM_TOKENS)), "bfloat16", dma_mode)


@pytest.mark.slow
@settings(max_examples=15)
@given(
    places=st.permutations(range(NUM_PAGES * PAGE_SIZE)),
    padding=st.sets(st.integers(0, NUM_TOKENS - 1), max_size=5),
    dma_mode=st.sampled_from(DMA_MODES),
)
def test_the_kernel_takes_places_in_any_order(places: list[int], padding: set[int], dma_mode: str) -> None:
    """Even where runs that are under way together fall into one tile, as no engine's do."""
    assert_agrees(np.array(places[:NUM_TOKENS]), padding, "bfloat16", dma_mode)


@pytest.mark.slow
def test_more_tokens_than_wait_in_vmem_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "TOKENS_PER_CALL", 16)
    pages, rows = jnp.zeros((NUM_PAGES, 1, PAGE_SIZE, 128)), normal(1, NUM_TOKENS, 1, 64)
    arguments = (pages, rows, rows, jnp.asarray(IN_ORDER // PAGE_SIZE), jnp.asarray(IN_ORDER % PAGE_SIZE))
    found = run_interpreted(jax.jit(lambda *some: kv_update(*some, impl="tpu")), *arguments, dma_mode="on_wait")
    np.testing.assert_array_equal(found, expected_of(*arguments))


def test_a_layout_that_the_kernel_does_not_take_is_refused() -> None:
    pages, rows = jnp.zeros((2, 1, 16, 128)), jnp.zeros((1, 1, 64))
    place = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="expected pages in \"rows\", found 'halves'"):
        kv_update(pages, rows, rows, place, place, layout="halves", impl="tpu")
    with pytest.raises(ValueError, match="no implementation 'gpu'; there are xla, cpu, tpu"):
        kv_update(pages, rows, rows, place, place, impl="gpu")
