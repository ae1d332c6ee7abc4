"""`grouped_matmul`: the definition against a loop over groups, every other implementation against the definition."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul import IMPLEMENTATIONS, Implementation, grouped_matmul, lay_out, reference
from pallas_kernels.grouped_matmul.cases import CASES, Case, make_inputs
from pallas_kernels.grouped_matmul.check import check
from tests.cached import CACHED

pytestmark = CACHED

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


@partial(jax.jit, static_argnames="impl")
def _multiply(x: jax.Array, weights: jax.Array, group_sizes: jax.Array, impl: str) -> jax.Array:
    return grouped_matmul(x, lay_out(weights, impl=impl), group_sizes, impl=impl)


def by_groups(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> np.ndarray:
    """In float64; without the rows past the last group's."""
    ends = np.cumsum(np.asarray(group_sizes))
    rows, matrices = np.asarray(x, np.float64), np.asarray(weights, np.float64)
    parts = [
        rows[end - size : end] @ matrix.T for end, size, matrix in zip(ends, np.asarray(group_sizes), matrices, strict=True)
    ]
    return np.concatenate(parts)


def assert_multiplies(case: Case, impl: str) -> None:
    x, weights, group_sizes = make_inputs(case)
    out = _multiply(x, weights, group_sizes, impl)
    assert out.dtype == x.dtype
    found = np.asarray(out, np.float32)
    assert np.isfinite(found).all()
    expected = by_groups(x, weights, group_sizes)
    np.testing.assert_allclose(found[: len(expected)], expected, rtol=2**-7, atol=TOLERANCE[case.dtype])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("impl", ["reference", "xla", "tpu"])
def test_each_row_meets_its_groups_matrix(impl: str, case: Case) -> None:
    """What is compiled on TPU runs anywhere, if slowly."""
    assert_multiplies(case, impl)


@pytest.mark.slow
@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8), padding=st.integers(0, 20))
def test_xla_takes_groups_of_any_size(sizes: list[int], padding: int) -> None:
    if sum(sizes) + padding:
        case = Case(name="", num_out=8, num_in=16, group_sizes=tuple(sizes), padding=padding, dtype="float32")
        assert_multiplies(case, "xla")


def test_gpu_refuses_what_its_kernel_does_not_take() -> None:
    with pytest.raises(ValueError, match="multiples of 128 x 64, found 64 x 64; choose impl='xla'"):
        lay_out(jnp.zeros((2, 64, 64), jnp.bfloat16), impl="gpu")
    with pytest.raises(ValueError, match="bfloat16 and float16, found float32"):
        lay_out(jnp.zeros((2, 128, 64)), impl="gpu")


def test_ragged_dot_on_cpu_multiplies_every_row_with_every_matrix() -> None:
    """Why `xla` is not `jax.lax.ragged_dot`. Once this fails, XLA's CPU compiler has learnt it, and the loop may go."""
    x, weights, group_sizes = jnp.zeros((64, 32)), jnp.zeros((16, 32, 48)), jnp.zeros(16, jnp.int32)
    program = jax.jit(jax.lax.ragged_dot).lower(x, weights, group_sizes).compile().as_text() or ""
    masked = re.findall(r"f32\[(?:16,64,32|64,16,32|64,512)\]", program)
    assert masked, "no copy of the rows for each group is left in the program"


@pytest.mark.slow
def test_the_check_for_other_hardware_passes_here_and_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(passed for _, passed in check("xla").values())
    monkeypatch.setitem(
        IMPLEMENTATIONS, "off", Implementation(reference.lay_out, lambda *args: reference.grouped_matmul(*args) * jnp.inf)
    )
    assert not any(passed for _, passed in check("off").values())
