"""The kernels in the lab: shapes, definitions, costs, and the variants that the project has. Knows no clock and no report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.registry import Cost, Subject, add, variant
from pallas_kernels import grouped_matmul, quant_matmul, sample
from pallas_kernels.grouped_matmul import cases as grouped_cases
from pallas_kernels.quant_matmul import cases as quant_cases
from pallas_kernels.quant_matmul.check import FIFTEEN_BITS
from pallas_kernels.quant_matmul.weights import dequantize_activations, dequantize_weights
from pallas_kernels.sample import cases as sample_cases

ROUNDING = {"float32": 2e-5, "bfloat16": 2e-2, "int8": 3e-2}


def largest_difference(shape: Any, arguments: tuple[Any, ...], found: Any, expected: Any) -> float:
    """Largest difference, as a share of the largest value where that is over 1."""
    del shape, arguments
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))


def size_of(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize


# --- softmax: the example to start from -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rows:
    rows: int
    width: int
    dtype: str = "float32"


def _make_rows(shape: Rows, seed: int) -> tuple[jax.Array]:
    values = np.random.default_rng(seed).standard_normal((shape.rows, shape.width), np.float32)
    return (jnp.asarray(values, shape.dtype),)


add(
    Subject(
        name="softmax",
        shapes={"demo": Rows(32, 49_152), "wide": Rows(32, 262_144), "attention": Rows(4096, 1024)},
        make=_make_rows,
        define=lambda x: jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype),
        cost=lambda shape: Cost(2 * shape.rows * shape.width * size_of(shape.dtype), 4 * shape.rows * shape.width),
        error=largest_difference,
        tolerance=lambda shape: ROUNDING[shape.dtype],
    )
)


@variant("softmax")
def _plain(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x, axis=-1)


@variant("softmax")
def _unshifted(x: jax.Array) -> jax.Array:
    """Without subtracting the maximum: right for small logits only."""
    weights = jnp.exp(x)
    return weights / weights.sum(axis=-1, keepdims=True)


# --- quant_matmul -----------------------------------------------------------------------------------------------------


def _quant_cost(shape: quant_cases.Case) -> Cost:
    scales = shape.num_out * (shape.num_in // (shape.group or shape.num_in)) * 4 * (1 + shape.offsets)
    activations = shape.num_tokens * (shape.num_in + shape.num_out) * size_of(shape.activations)
    weights = shape.num_out * shape.num_in * shape.bits // 8
    return Cost(weights + scales + activations, 2 * shape.num_out * shape.num_in * shape.num_tokens)


add(
    Subject(
        name="quant_matmul",
        shapes={
            "demo": quant_cases.Case(num_out=3072, num_in=576, num_tokens=1, activations="float32"),
            "demo_head": quant_cases.Case(num_out=49_152, num_in=576, num_tokens=1, activations="float32"),
            "8b": quant_cases.Case(num_out=28_672, num_in=4096, num_tokens=1),
            "8b_int4": quant_cases.Case(num_out=28_672, num_in=4096, num_tokens=1, bits=4, group=128),
            "8b_down": quant_cases.Case(num_out=4096, num_in=14_336, num_tokens=1),
            "8b_prompt": quant_cases.Case(num_out=4096, num_in=4096, num_tokens=8192),
        },
        make=quant_cases.make_inputs,
        define=lambda x, weights: quant_matmul.reference.quant_matmul(x, weights),
        cost=_quant_cost,
        error=largest_difference,
        tolerance=lambda shape: FIFTEEN_BITS if shape.activations == "float32" else ROUNDING[shape.activations],
    )
)


def _unquantised(x: Any, weights: Any) -> tuple[Any, ...]:
    quantised = isinstance(x, quant_matmul.QuantActivations)
    x = dequantize_activations(x).astype(x.dtype) if quantised else x
    return x, dequantize_weights(weights).astype(x.dtype)


@variant("quant_matmul", prepare=_unquantised)
def _floats(x: Any, weights: Any) -> Any:
    """What quantisation is to beat: the same product with weights of the activations' dtype."""
    return jnp.matmul(weights, x, precision="highest", preferred_element_type=jnp.float32).astype(x.dtype)


def _laid_out_for_xla(
    x: Any, weights: Any, *, few_tokens: int = 2, terms: int = 64, tile_weights: int = 1 << 20
) -> tuple[Any, ...]:
    tuning = {"few_tokens": few_tokens, "terms": terms, "tile_weights": tile_weights}
    return x, quant_matmul.lay_out(weights, impl="xla", **tuning)


@variant("quant_matmul", prepare=_laid_out_for_xla)
def xla(x: Any, weights: Any) -> Any:
    return quant_matmul.quant_matmul(x, weights, impl="xla")


def _laid_out_for_tpu(x: Any, weights: Any, *, rows: int = 256, tokens: int = 256, chunk: int = 256) -> tuple[Any, ...]:
    return x, quant_matmul.lay_out(weights, impl="tpu", rows=rows, tokens=tokens, chunk=chunk)


@variant("quant_matmul", platforms=("tpu",), prepare=_laid_out_for_tpu)
def tpu(x: Any, weights: Any) -> Any:
    return quant_matmul.quant_matmul(x, weights, impl="tpu")


def _laid_out_for_gpu(
    x: Any, weights: Any, *, tokens: int = 0, blocks: int = 0, splits: int = 0, stages: int = 0
) -> tuple[Any, ...]:
    return x, quant_matmul.lay_out(weights, impl="gpu", tokens=tokens, blocks=blocks, splits=splits, stages=stages)


@variant("quant_matmul", platforms=("gpu",), prepare=_laid_out_for_gpu)
def gpu(x: Any, weights: Any) -> Any:
    return quant_matmul.quant_matmul(x, weights, impl="gpu")


# --- sample -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Draws:
    rows: int
    vocab: int
    temperature: float = 0.8
    min_p: float = 0.0
    top_k: int = 40
    top_p: float = 0.95


def _settings(shape: Draws) -> sample_cases.Settings:
    return sample_cases.Settings(**{key: value for key, value in asdict(shape).items() if key not in ("rows", "vocab")})


def _make_draws(shape: Draws, seed: int) -> tuple[Any, ...]:
    uniform = np.random.default_rng(seed).random(shape.rows)
    settings = [_settings(shape)] * shape.rows
    return sample_cases.make_logits(shape.rows, shape.vocab, seed), sample_cases.arguments(settings, uniform)


def _worst_misfit(shape: Draws, arguments: tuple[Any, ...], found: Any, expected: Any) -> float:
    del expected
    logits, settings = np.asarray(arguments[0]), _settings(shape)
    draws = zip(logits, np.asarray(arguments[1]["uniform"]), np.asarray(found), strict=True)
    return max(sample_cases.misfit(row, settings, float(uniform), int(token)) for row, uniform, token in draws)


add(
    Subject(
        name="sample",
        shapes={"demo": Draws(32, 49_152), "wide": Draws(32, 262_144), "one": Draws(1, 262_144)},
        make=_make_draws,
        define=lambda logits, settings: sample.draw(logits, **settings, impl="reference"),
        cost=lambda shape: Cost(4 * shape.rows * shape.vocab, 8 * shape.rows * shape.vocab),
        error=_worst_misfit,
        tolerance=lambda shape: 2e-5,
    )
)


@variant("sample")
def sort(logits: Any, settings: Any) -> Any:
    return sample.draw(logits, **settings, impl="reference")


@variant("sample")
def thresholds(logits: Any, settings: Any) -> Any:
    return sample.draw(logits, **settings, impl="xla")


@variant("sample", platforms=("tpu",))
def tpu_kernel(logits: Any, settings: Any) -> Any:
    return sample.draw(logits, **settings, impl="tpu")


# --- grouped_matmul ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Experts:
    rows: int
    num_groups: int
    num_out: int
    num_in: int
    dtype: str = "float32"


def _make_experts(shape: Experts, seed: int) -> tuple[Any, ...]:
    chosen = np.random.default_rng(seed).integers(0, shape.num_groups, shape.rows)
    sizes = tuple(np.bincount(chosen, minlength=shape.num_groups).tolist())
    case = grouped_cases.Case(
        name="", num_out=shape.num_out, num_in=shape.num_in, group_sizes=sizes, dtype=shape.dtype
    )  # fmt: skip
    return grouped_cases.make_inputs(case, seed)


def _experts_cost(shape: Experts) -> Cost:
    """Of the groups that have rows, as many as are to be expected."""
    busy = shape.num_groups * (1 - (1 - 1 / shape.num_groups) ** shape.rows)
    numbers = busy * shape.num_out * shape.num_in + shape.rows * (shape.num_in + shape.num_out)
    return Cost(numbers * size_of(shape.dtype), 2 * shape.rows * shape.num_out * shape.num_in)


add(
    Subject(
        name="grouped_matmul",
        shapes={
            "decode": Experts(32, 32, 512, 1024),
            "chunk": Experts(2048, 32, 512, 1024),
            "many": Experts(512, 64, 1408, 2048, "bfloat16"),
        },
        make=_make_experts,
        define=lambda x, weights, sizes: grouped_matmul.reference.grouped_matmul(x, weights, sizes),
        cost=_experts_cost,
        error=largest_difference,
        tolerance=lambda shape: ROUNDING[shape.dtype],
    )
)


def _laid_out_for(impl: str) -> Any:
    return lambda x, weights, sizes: (x, grouped_matmul.lay_out(weights, impl=impl), sizes)


@variant("grouped_matmul", prepare=_laid_out_for("xla"))
def tiles(x: Any, weights: Any, sizes: Any) -> Any:
    return grouped_matmul.grouped_matmul(x, weights, sizes, impl="xla")


@variant("grouped_matmul", prepare=_laid_out_for("tpu"))
def ragged_dot(x: Any, weights: Any, sizes: Any) -> Any:
    return grouped_matmul.grouped_matmul(x, weights, sizes, impl="tpu")


@variant("grouped_matmul", platforms=("gpu",), prepare=_laid_out_for("gpu"))
def ragged_dot_mgpu(x: Any, weights: Any, sizes: Any) -> Any:
    return grouped_matmul.grouped_matmul(x, weights, sizes, impl="gpu")
