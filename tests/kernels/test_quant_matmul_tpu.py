"""`quant_matmul` on TPU: interpreted against the definition, and compiled for real targets without one."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.quant_matmul import QuantWeights, lay_out, quant_matmul
from pallas_kernels.quant_matmul.cases import CASES, ODD_CASES, Case, make_inputs
from pallas_kernels.quant_matmul.tpu import lay_out as lay_out_tpu
from tests.cached import CACHED
from tests.kernels.ladder.interpret import DMA_MODES, run_interpreted

pytestmark = CACHED

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 3e-2}
"""Against outputs about standard normal: bfloat16 ones are rounded to 8 bits, and so are weights with a scale a group."""

SMALL_TILES = {"rows": 64, "tokens": 128, "chunk": 128}


def multiplied(x: Any, weights: QuantWeights, dma_mode: str, **tiles: int) -> np.ndarray:
    def run(x: Any, weights: QuantWeights) -> jax.Array:
        return quant_matmul(x, lay_out(weights, impl="tpu", **tiles), impl="tpu")

    out = run_interpreted(jax.jit(run), x, weights, dma_mode=dma_mode)
    assert out.dtype == x.dtype
    return np.asarray(out, np.float32)


def defined(x: Any, weights: QuantWeights) -> np.ndarray:
    return np.asarray(quant_matmul(x, lay_out(weights, impl="reference"), impl="reference"), np.float32)


SHOWN = {"w8_bfloat16_256x512x3", "w4_g32_offsets_bfloat16_256x512x33"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case.name in SHOWN else pytest.mark.slow) for case in CASES + ODD_CASES],
    ids=lambda case: case.name,
)
def test_interpreted_it_computes_the_definition(case: Case) -> None:
    x, weights = make_inputs(case)
    np.testing.assert_allclose(
        multiplied(x, weights, "eager"), defined(x, weights), rtol=2**-7, atol=TOLERANCE[case.activations]
    )


@pytest.mark.slow
@pytest.mark.parametrize("dma_mode", DMA_MODES)
@pytest.mark.parametrize(
    "case",
    [
        Case(num_out=200, num_in=1100, num_tokens=300),
        Case(num_out=130, num_in=5120, num_tokens=3, bits=4, group=32),
        Case(num_out=64, num_in=3072, num_tokens=257, bits=4, group=128, offsets=True, activations="float32"),
        Case(num_out=96, num_in=1536, num_tokens=140, activations="int8"),
    ],
    ids=lambda case: case.name,
)
def test_several_tiles_each_way_and_ragged_ones(case: Case, dma_mode: str) -> None:
    x, weights = make_inputs(case)
    np.testing.assert_allclose(
        multiplied(x, weights, dma_mode, **SMALL_TILES), defined(x, weights), rtol=2**-7, atol=TOLERANCE[case.activations]
    )


@pytest.mark.parametrize(
    ("num_in", "group", "bits"),
    [(4096, 32, 4), (14336, 128, 4), (11008, 64, 4), (576, 32, 8), (576, None, 8), (8192, None, 8)],
)
def test_padding_and_spread_scales_stay_small(num_in: int, group: int | None, bits: int) -> None:
    _, weights = make_inputs(Case(num_out=8, num_in=num_in, num_tokens=1, bits=bits, group=group))
    laid = lay_out_tpu(weights)
    assert (laid.values.shape[1] * 8 // bits) % laid.stretch == 0
    bare = num_in * bits / 8 + 4 * weights.scales.shape[1]
    assert laid.values.shape[1] + 4 * laid.scales.shape[1] <= (2.5 if num_in < 1024 else 1.35) * bare
