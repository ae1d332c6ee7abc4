"""Building blocks against their formulas in NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxserve.models.families import model_config_from_hf
from jaxserve.models.layers import embed, linear, psum, rms_norm
from jaxserve.models.rope import rotary_frequencies, rotate, rotate_tokens_first
from jaxserve.models.sharding import TENSOR, make_mesh
from pallas_kernels.cpu_sums import ROWS
from tests.references.load import load_tiny
from tests.references.test_references import rope_frequencies


def normal(*shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)


@pytest.mark.parametrize("name", ["rope_llama3", "rope_llama3_v5", "rope_linear", "mqa_theta"])
def test_rotary_frequencies(name: str) -> None:
    config = load_tiny(name).config
    parsed = model_config_from_hf(config)
    found = rotary_frequencies(parsed.head_dim, parsed.rope_theta, parsed.rope_scaling)
    np.testing.assert_allclose(found, rope_frequencies(config, parsed.head_dim), rtol=2e-6)


def test_llama3_scaling_has_three_regions() -> None:
    scaling = model_config_from_hf(load_tiny("rope_llama3").config).rope_scaling
    assert scaling is not None
    scaling = dataclasses.replace(scaling, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    ratio = np.asarray(rotary_frequencies(128, 500_000.0, scaling) / rotary_frequencies(128, 500_000.0, None))
    assert (ratio[:20] == 1).all(), "fast ones are kept"
    np.testing.assert_allclose(ratio[-20:], 1 / 8, rtol=1e-6, err_msg="slow ones are divided")
    middle = ratio[(ratio < 1) & (ratio > 0.126)]
    assert len(middle) >= 5
    assert (np.diff(middle) < 0).all(), "between them the factor falls"


@pytest.mark.parametrize("turn", [rotate, rotate_tokens_first])
@pytest.mark.parametrize("heads", [(3,), (3, 2)], ids=str)
def test_rotate_turns_pairs_of_the_two_halves(turn: Callable[..., jax.Array], heads: tuple[int, ...]) -> None:
    dim, tokens = 10, 4
    x, angles = normal(*heads, dim, tokens), normal(dim // 2, tokens)
    as_complex = np.asarray(x[..., : dim // 2, :]) + 1j * np.asarray(x[..., dim // 2 :, :])
    turned = as_complex * np.exp(1j * np.asarray(angles))
    expected = np.concatenate([turned.real, turned.imag], axis=-2)
    np.testing.assert_allclose(turn(x, jnp.cos(angles), jnp.sin(angles)), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rms_norm(dtype: str) -> None:
    x, weight = normal(32, 5, dtype=dtype), normal(32, dtype=dtype)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=0) + 0.3) * np.asarray(weight, np.float64)[:, None]
    found = rms_norm(x, weight, 0.3)
    assert found.dtype == dtype
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=1e-6 if dtype == "float32" else 1e-2, atol=1e-6)


def test_linear_accumulates_bfloat16_in_float32() -> None:
    """A sum of 4,096 ones: in bfloat16 it would stick at 256."""
    found = linear(jnp.ones((2, 4096), jnp.bfloat16), jnp.ones((4096, 3), jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(jnp.float32), np.full((2, 3), 4096))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_out", [1, 6, 7, 14])
@pytest.mark.parametrize("num_columns", [1, 2, 3, 4, 7, 8, 9])
def test_linear(num_columns: int, num_out: int, dtype: str) -> None:
    weights, x = normal(num_out, 100, dtype=dtype), normal(100, num_columns, dtype=dtype)
    found = linear(weights, x)
    assert found.dtype == dtype
    expected = np.asarray(weights, np.float64) @ np.asarray(x, np.float64)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=1e-6 if dtype == "float32" else 4e-3, atol=1e-4)


@pytest.mark.parametrize("num_columns", [1, 4, 8])
def test_what_a_few_columns_are_made_of_is_computed_once(num_columns: int) -> None:
    """And not again for each row of the weights."""
    weights, x = normal(12, 64), normal(64, num_columns)
    program = jax.jit(lambda weights, x: linear(weights, 2 * x)).lower(weights, x).compile().as_text()
    assert program is not None
    (sums,) = [computation for computation in program.split("\n\n") if " reduce(" in computation]
    assert sums.count(" multiply(") == ROWS * min(num_columns, 2), "one for each sum"


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_embed_looks_up_a_split_table(devices: int) -> None:
    table, ids = normal(20, 6), jnp.array([0, 19, 5, 4, 10, 0])
    looked_up = jax.shard_map(
        partial(embed, axis_name=TENSOR),
        mesh=make_mesh(devices),
        in_specs=(PartitionSpec(TENSOR), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(table, ids)
    np.testing.assert_array_equal(looked_up, np.asarray(table)[np.asarray(ids)].T)


@pytest.mark.parametrize("devices", [1, 4])
def test_psum_adds_over_the_mesh(devices: int) -> None:
    summed = jax.shard_map(
        partial(psum, axis_name=TENSOR),
        mesh=make_mesh(devices),
        in_specs=PartitionSpec(TENSOR),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(jnp.arange(8.0))
    np.testing.assert_array_equal(summed, np.arange(8.0).reshape(devices, -1).sum(axis=0))
