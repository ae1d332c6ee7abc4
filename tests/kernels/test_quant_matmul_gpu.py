"""`quant_matmul` for Hopper: interpreted against the definition, races detected, and what it refuses.

The interpreter has no products of registers, so that there weights that are widened pass through shared memory; all else is
what the hardware runs.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams

from pallas_kernels.quant_matmul import IMPLEMENTATIONS, Implementation, QuantActivations, lay_out, quant_matmul, reference
from pallas_kernels.quant_matmul import gpu_kernel as kernel
from pallas_kernels.quant_matmul.cases import CASES, ODD_CASES, Case, make_inputs
from pallas_kernels.quant_matmul.check import check
from pallas_kernels.quant_matmul.gpu import lay_out as lay_out_gpu
from pallas_kernels.quant_matmul.gpu import quant_matmul as multiply_gpu
from tests.cached import CACHED

pytestmark = CACHED

TOLERANCE = 1e-3
"""Of outputs about standard normal, before they are rounded to bfloat16, which may be another 2**-7 of each."""
FEW_WORKERS = 3
"""So few that each has several tiles and the ring goes round."""


def interpreter() -> InterpretGPUParams:
    return InterpretGPUParams(detect_races=True)


def multiplied(case: Case, num_workers: int = FEW_WORKERS, **tuning: int) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel gives, and the definition."""
    x, weights = make_inputs(case)
    laid = lay_out_gpu(weights, **tuning)
    found = jax.jit(lambda x, laid: multiply_gpu(x, laid, interpret=interpreter(), num_workers=num_workers))(x, laid)
    assert found.dtype == x.dtype
    expected = quant_matmul(x, lay_out(weights, impl="reference"), impl="reference")
    return np.asarray(found, np.float32), np.asarray(expected, np.float32)


def taken(case: Case) -> bool:
    return case.activations != "float32"


SHOWN = {"w8_bfloat16_256x512x3"}
LARGER = (
    Case(num_out=384, num_in=576, num_tokens=130, bits=4, group=32),
    Case(num_out=384, num_in=1100, num_tokens=130, activations="int8"),
    Case(num_out=512, num_in=640, num_tokens=128, group=64, offsets=True),
    Case(num_out=128, num_in=3000, num_tokens=40),
    Case(num_out=130, num_in=1280, num_tokens=64, bits=4, group=128, activations="int8"),
    Case(num_out=101, num_in=192, num_tokens=2, bits=4, group=64),
    Case(num_out=101, num_in=64, num_tokens=2, bits=4, group=64),
    Case(num_out=101, num_in=32, num_tokens=2, bits=4, group=32, offsets=True),
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case.name in SHOWN else pytest.mark.slow)
        for case in (*filter(taken, CASES + ODD_CASES), *LARGER)
    ],
    ids=lambda case: case.name,
)
def test_interpreted_it_computes_the_definition_without_races(case: Case) -> None:
    found, expected = multiplied(case)
    np.testing.assert_allclose(found, expected, rtol=2**-7, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "tuning"),
    [
        (Case(num_out=512, num_in=640, num_tokens=40), {"blocks": 2, "tokens": 32, "splits": 1, "stages": 2}),
        (
            Case(num_out=512, num_in=640, num_tokens=40, bits=4, group=64),
            {"blocks": 2, "tokens": 32, "splits": 3, "stages": 2},
        ),
        (
            Case(num_out=256, num_in=640, num_tokens=9, activations="int8"),
            {"blocks": 2, "tokens": 8, "splits": 5, "stages": 3},
        ),
        (Case(num_out=128, num_in=256, num_tokens=70, bits=4, group=32), {"tokens": 8, "splits": 9}),
    ],
    ids=str,
)
def test_any_sizes_give_the_same(case: Case, tuning: dict[str, int]) -> None:
    """More than one block, ragged splits, strips of token tiles, small rings; each with one worker and with many."""
    for num_workers in (1, 7):
        found, expected = multiplied(case, num_workers, **tuning)
        np.testing.assert_allclose(found, expected, rtol=2**-7, atol=TOLERANCE)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([32, 64, 128, None]),
    num_groups=st.integers(1, 9),
    num_out=st.integers(1, 300),
    num_tokens=st.integers(1, 140),
    offsets=st.booleans(),
    quantised=st.booleans(),
    num_workers=st.integers(1, 5),
)
def test_it_computes_the_definition_at_any_size(
    bits: int,
    group: int | None,
    num_groups: int,
    num_out: int,
    num_tokens: int,
    offsets: bool,
    quantised: bool,
    num_workers: int,
) -> None:
    group = 32 if bits == 4 and group is None else group
    case = Case(
        num_out=num_out, num_in=num_groups * (group or 24), num_tokens=num_tokens, bits=bits, group=group, offsets=offsets,
        activations="int8" if quantised else "bfloat16",
    )  # fmt: skip
    found, expected = multiplied(case, num_workers)
    np.testing.assert_allclose(found, expected, rtol=2**-7, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("group", [0, 32])
def test_every_sum_is_written_and_no_other_memory_counts(group: int) -> None:
    """What nobody wrote holds NaN here: outputs, rings, and whatever a copy did not bring."""
    config = kernel.Config(
        group=group, blocks=1, tokens=16, tokens_last=False, splits=3, stages=2, num_workers=2, interpret=interpreter()
    )  # fmt: skip
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((48, 896)), jnp.bfloat16)
    values = jnp.asarray(rng.integers(-8, 8, (256, 896)), jnp.int4)
    scales = jnp.asarray(rng.uniform(0.01, 0.1, (896 // group if group else 1, 256)), jnp.float32)
    out = np.asarray(kernel.product(x, values, scales, None, dtype=jnp.float32, config=config))
    assert np.isfinite(out).all()
    wide = np.asarray(values, np.float64) * np.repeat(np.asarray(scales, np.float64).T, group or 896, axis=1)
    np.testing.assert_allclose(out.sum(axis=0), wide @ np.asarray(x, np.float64).T, atol=1e-3)
    np.testing.assert_allclose(out[0], wide[:, :256] @ np.asarray(x, np.float64)[:, :256].T, atol=1e-3)


def test_four_bits_take_half_a_byte_where_xla_packs_them() -> None:
    """XLA keeps int4 two to a byte on a GPU; here the dtype is what can be seen of it."""
    _, weights = make_inputs(Case(num_out=100, num_in=192, num_tokens=1, bits=4, group=64))
    laid = lay_out_gpu(weights)
    assert laid.values.dtype == jnp.int4
    assert laid.values.shape == (128, 256)
    assert laid.scales.shape == (4, 128)
    assert not np.asarray(laid.scales[3]).any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", [LARGER[0], LARGER[3]], ids=lambda case: case.name)
def test_scales_in_16_bits_stay_so(case: Case, dtype: str) -> None:
    x, weights = make_inputs(case)
    weights = dataclasses.replace(weights, scales=weights.scales.astype(dtype))
    laid = lay_out_gpu(weights)
    assert laid.scales.dtype == dtype
    found = jax.jit(lambda x, laid: multiply_gpu(x, laid, interpret=interpreter(), num_workers=FEW_WORKERS))(x, laid)
    expected = quant_matmul(x, lay_out(weights, impl="reference"), impl="reference")
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=2**-7, atol=TOLERANCE)


def test_other_activations_are_refused() -> None:
    x, weights = make_inputs(Case(num_out=128, num_in=128, num_tokens=1, activations="float32"))
    with pytest.raises(ValueError, match=r"expected activations in bfloat16, or 8 bits per token, found float32; .*xla"):
        quant_matmul(x, lay_out(weights, impl="gpu"), impl="gpu")


@pytest.mark.parametrize(
    ("tuning", "what"),
    [
        ({"tokens": 24}, "no tiles of Tuning(tokens=24"),
        ({"blocks": 2}, "no tiles of Tuning(tokens=0, blocks=2"),
        ({"blocks": 3}, "no tiles of Tuning(tokens=0, blocks=3"),
        ({"stages": 50}, "no ring of 50 tiles"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tuning: dict[str, int], what: str) -> None:
    x, weights = make_inputs(Case(num_out=128, num_in=128, num_tokens=1))
    with pytest.raises(ValueError, match=re.escape(what)):
        multiply_gpu(x, lay_out_gpu(weights, **tuning))


@pytest.mark.slow
def test_the_check_for_hardware_asks_for_nothing_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def like_the_kernel(x: Any, laid: Any) -> jax.Array:
        assert x.dtype != jnp.float32
        return reference.quant_matmul(x, laid)

    own = Implementation(reference.lay_out, like_the_kernel, reference.take_rows)
    monkeypatch.setitem(IMPLEMENTATIONS, "gpu", own)
    assert all(passed for _, passed in check("gpu").values())


def test_unknown_sizes_are_refused() -> None:
    _, weights = make_inputs(CASES[0])
    with pytest.raises(TypeError, match="rows"):
        lay_out(weights, impl="gpu", rows=64)


def test_tokens_are_scaled_where_they_were_quantised() -> None:
    """The scale of a token that is padding is nobody's."""
    x, weights = make_inputs(Case(num_out=128, num_in=128, num_tokens=3, activations="int8"))
    assert isinstance(x, QuantActivations)
    doubled = QuantActivations(values=x.values, scales=x.scales * 2, dtype=x.dtype)
    run: Any = jax.jit(lambda x: multiply_gpu(x, lay_out_gpu(weights), interpret=interpreter(), num_workers=1))
    np.testing.assert_array_equal(np.asarray(run(doubled), np.float32), 2 * np.asarray(run(x), np.float32))
