"""`quant_matmul`: the definition against NumPy in float64, every other implementation against the definition."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.quant_matmul import (
    IMPLEMENTATIONS,
    Implementation,
    QuantActivations,
    QuantWeights,
    lay_out,
    quant_matmul,
    quantize_activations,
    quantize_weights,
    reference,
    take_rows,
)
from pallas_kernels.quant_matmul.cases import CASES, ODD_CASES, Case, make_inputs
from pallas_kernels.quant_matmul.check import FIFTEEN_BITS, check, writes_digits
from pallas_kernels.quant_matmul.packing import high_half, low_half, pack_int4, unpack_int4
from tests.cached import CACHED

pytestmark = CACHED

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-3, "int8": 1e-5}
"""What the sums may be away before they are rounded; outputs are about standard normal."""
HALF_A_UNIT = {"float32": 0.0, "bfloat16": 2.0**-8, "int8": 2.0**-8}
"""Of an output's last bit, relative to the output: what is not float32 leaves as bfloat16, whatever its size."""


def assert_product(found: Any, x: Any, weights: QuantWeights, impl: str, case: Case) -> None:
    atol = FIFTEEN_BITS if writes_digits(impl, case) else TOLERANCE[case.activations]
    np.testing.assert_allclose(
        np.asarray(found, np.float32), in_float64(x, weights), rtol=HALF_A_UNIT[case.activations], atol=atol
    )


@partial(jax.jit, static_argnames="impl")
def _multiply(x: Any, weights: QuantWeights, impl: str) -> jax.Array:
    return quant_matmul(x, lay_out(weights, impl=impl), impl=impl)


def multiply(x: Any, weights: QuantWeights, impl: str) -> np.ndarray:
    return np.asarray(_multiply(x, weights, impl), np.float32)


def in_float64(x: Any, weights: QuantWeights) -> np.ndarray:
    """One group at a time."""
    num_groups = weights.scales.shape[1]
    values = np.split(np.asarray(weights.values, np.float64), num_groups, axis=1)
    scales = np.split(np.asarray(weights.scales, np.float64), num_groups, axis=1)
    offsets = (
        [0.0] * num_groups if weights.offsets is None else np.split(np.asarray(weights.offsets, np.float64), num_groups, 1)
    )
    matrix = np.concatenate([s * v + o for v, s, o in zip(values, scales, offsets, strict=True)], axis=1)
    if isinstance(x, QuantActivations):
        return matrix @ (np.asarray(x.values, np.float64) * np.asarray(x.scales, np.float64))
    return matrix @ np.asarray(x, np.float64)


QUICK = {"w8_float32_256x512x1", "w8_int8_256x512x17", "w4_g32_offsets_bfloat16_256x512x33", "w4_g64_float32_101x192x2"}
"""One of each path through `xla.py`."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case.name in QUICK else pytest.mark.slow) for case in CASES + ODD_CASES],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("impl", ["reference", "xla"])
def test_implementation_computes_the_product(impl: str, case: Case) -> None:
    x, weights = make_inputs(case)
    out = _multiply(x, weights, impl)
    assert out.dtype == x.dtype
    assert_product(out, x, weights, impl, case)


@pytest.mark.slow
@given(
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([32, 64, 128, None]),
    num_groups=st.integers(1, 4),
    num_out=st.integers(1, 12),
    num_tokens=st.integers(1, 20),
    offsets=st.booleans(),
    quantised=st.booleans(),
)
def test_xla_computes_the_product_at_any_size(
    bits: int, group: int | None, num_groups: int, num_out: int, num_tokens: int, offsets: bool, quantised: bool
) -> None:
    group = 32 if bits == 4 and group is None else group
    case = Case(
        num_out=num_out, num_in=num_groups * (group or 16), num_tokens=num_tokens, bits=bits, group=group, offsets=offsets,
        activations="int8" if quantised else "float32",
    )  # fmt: skip
    x, weights = make_inputs(case)
    assert_product(multiply(x, weights, "xla"), x, weights, "xla", case)


def test_a_token_does_not_depend_on_those_beside_it() -> None:
    """To the last bit, as long as the number of tokens takes the same path."""
    x, weights = make_inputs(Case(num_out=64, num_in=128, num_tokens=4, bits=4, group=32, activations="float32"))
    alone = multiply(x[:, :4].at[:, 1:].set(0.0), weights, "xla")
    np.testing.assert_array_equal(multiply(x, weights, "xla")[:, 0], alone[:, 0])


@pytest.mark.parametrize("num_tokens", [1, 5, 300])
@pytest.mark.parametrize("digits", [0, 1, 2, 3])
def test_each_digit_brings_eight_bits(digits: int, num_tokens: int) -> None:
    """By the error that is left; floats and three digits are as exact as each other."""
    x, weights = make_inputs(Case(num_out=64, num_in=512, num_tokens=num_tokens, activations="float32"))
    out = quant_matmul(x, lay_out(weights, impl="xla", digits=digits, sums_bytes=1), impl="xla")
    error = np.abs(np.asarray(out) - in_float64(x, weights)).max()
    least, most = {0: (0, 1e-5), 1: (1e-3, 9e-2), 2: (2e-5, FIFTEEN_BITS), 3: (0, 1e-5)}[digits]
    assert least <= error <= most


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_rows_are_those_of_the_matrix(impl: str) -> None:
    _, weights = make_inputs(Case(num_out=70, num_in=96, num_tokens=1))
    rows = np.array([69, 0, 3, 3], np.int32)
    found = take_rows(lay_out(weights, impl=impl), jnp.asarray(rows), impl=impl)
    np.testing.assert_allclose(found, in_float64(np.eye(96), weights)[rows], rtol=1e-6)
    for changes in ({"group": 32}, {"group": 32, "bits": 4}, {"offsets": True}):
        _, others = make_inputs(Case(num_out=70, num_in=96, num_tokens=1, **changes))
        with pytest.raises(ValueError, match="8 bits with a scale a row and no offsets"):
            take_rows(lay_out(others, impl=impl), jnp.asarray(rows), impl=impl)


# --- what the numbers mean --------------------------------------------------------------------------------------------


def test_a_row_that_is_split_has_one_scale() -> None:
    matrix = jnp.asarray(np.random.default_rng(0).standard_normal((6, 64)), jnp.float32)
    whole = quantize_weights(matrix, bits=8)
    largest = jnp.max(jnp.abs(matrix), axis=1, keepdims=True)
    parts = [quantize_weights(part, bits=8, largest=largest) for part in jnp.split(matrix, [24], axis=1)]
    np.testing.assert_array_equal(np.concatenate([part.values for part in parts], axis=1), whole.values)
    for part in parts:
        np.testing.assert_array_equal(part.scales, whole.scales)


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 32), (4, 32), (4, 64), (4, 128)])
def test_weights_are_rounded_to_the_nearest_value(bits: int, group: int | None, symmetric: bool) -> None:
    matrix = np.random.default_rng(0).standard_normal((6, 256)).astype(np.float32)
    matrix[3, :128] = 0.0
    quantised = quantize_weights(jnp.asarray(matrix), bits=bits, group=group, symmetric=symmetric)
    assert quantised.scales.shape == (6, 1 if group is None else 256 // group)
    assert (quantised.offsets is None) == symmetric
    found = in_float64(jnp.eye(256), quantised)
    step = np.repeat(np.asarray(quantised.scales), 256 // quantised.scales.shape[1], axis=1)
    assert (np.abs(found - matrix) <= step / 2 + 1e-6).all()
    if group is not None:
        np.testing.assert_allclose(found[3, :128], 0.0, atol=1e-6)


def test_activations_are_rounded_per_token() -> None:
    x = np.random.default_rng(0).standard_normal((64, 5)).astype(np.float32) * np.array([1, 100, 0, 1e-3, 5], np.float32)
    quantised = quantize_activations(jnp.asarray(x))
    found = np.asarray(quantised.values, np.float64) * np.asarray(quantised.scales)
    assert (np.abs(found - x) <= np.asarray(quantised.scales) / 2 + 1e-9).all()
    assert (np.abs(np.asarray(quantised.values)).max(axis=0)[[0, 1, 3, 4]] == 127).all()
    assert quantised.dtype == "float32"


@pytest.mark.parametrize("group", [32, 64, 128])
def test_packing_is_undone_by_unpacking(group: int) -> None:
    values = np.random.default_rng(0).integers(-8, 8, (3, 256)).astype(np.int8)
    packed = pack_int4(jnp.asarray(values), group)
    assert packed.shape == (3, 128)
    np.testing.assert_array_equal(unpack_int4(packed, group), values)
    wide = packed.astype(jnp.int32)
    np.testing.assert_array_equal(low_half(wide)[:, : group // 2], values[:, : group // 2])
    np.testing.assert_array_equal(high_half(wide)[:, : group // 2], values[:, group // 2 : group])


@pytest.mark.parametrize("impl", sorted(set(IMPLEMENTATIONS) - {"tpu"}))
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, "3 bits"),
        ({"scales": np.ones((4, 3), np.float32)}, r"scales \(4, 3\) do not fit"),
        ({"scales": np.ones((3, 2), np.float32)}, r"expected \[4, G\]"),
        ({"scales": np.ones((4, 8), np.float32)}, "groups of 16"),
        ({"scales": np.ones((4, 8), np.float32), "bits": 4}, "4 bits in groups of 16"),
        ({"offsets": np.ones((4, 2), np.float32)}, "one a scale"),
    ],
)
def test_what_is_no_quantisation_is_refused(impl: str, changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"values": np.zeros((4, 128), np.int8), "scales": np.ones((4, 1), np.float32), **changes}
    with pytest.raises(ValueError, match=message):
        lay_out(QuantWeights(**fields), impl=impl)


def test_unknown_implementations_and_options_are_refused() -> None:
    _, weights = make_inputs(CASES[0])
    with pytest.raises(ValueError, match="no implementation 'cuda'; there are reference, xla, tpu, gpu"):
        lay_out(weights, impl="cuda")
    with pytest.raises(TypeError, match="lanes"):
        lay_out(weights, impl="xla", lanes=8)


@pytest.mark.slow
def test_the_check_for_other_hardware_passes_here_and_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(passed for _, passed in check("xla").values())
    monkeypatch.setitem(
        IMPLEMENTATIONS,
        "off",
        Implementation(reference.lay_out, lambda *args: reference.quant_matmul(*args) + 1, reference.take_rows),
    )
    assert not any(passed for _, passed in check("off").values())
