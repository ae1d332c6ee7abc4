"""`sample` as a Pallas TPU kernel: eight rows' weights lie in fast memory while every pass goes over them.

Thresholds by bisection over the bits of floats, as in `xla.py`, 31 passes a filter; a filter that none of the eight rows asks
for costs nothing. The draw is a bisection too, over token ids: the smallest prefix whose sum passes the uniform number. Every
pass adds in the same order and all weights are non-negative, so that rounded sums of longer prefixes are never smaller: the
bisections are exact, and a token of weight 0 is never drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

ROWS = 8
LANES = 128
CHUNK = 2048
"""Lanes of a turn of the loop over a row: enough to unroll."""
ONE = 0x3F800000
"""Bits of 1.0."""
VMEM_LIMIT = 48 << 20
"""Bytes; rows of 262,144 take three buffers of 8 MiB."""


def draw(
    logits: Float[Array, "R V"],
    *,
    temperature: Float[Array, " R"],
    min_p: Float[Array, " R"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    uniform: Float[Array, " R"],
) -> Int[Array, " R"]:
    """See `pallas_kernels.sample.draw`.

    Raises:
        ValueError: the rows do not fit the fast memory.
    """
    num_rows, vocab = logits.shape
    check(vocab)
    padded = _padded(vocab)
    rows = min(ROWS, num_rows)
    logits = jnp.pad(logits.astype(jnp.float32), ((0, 0), (0, padded - vocab)), constant_values=-jnp.inf)
    column = pl.BlockSpec((rows, 1), lambda i: (i, 0))
    out = pl.pallas_call(
        _kernel,
        grid=(pl.cdiv(num_rows, rows),),
        in_specs=[pl.BlockSpec((rows, padded), lambda i: (i, 0)), *[column] * 5],
        out_specs=column,
        out_shape=jax.ShapeDtypeStruct((num_rows, 1), jnp.int32),
        scratch_shapes=[pltpu.VMEM((rows, padded), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_LIMIT),
        cost_estimate=pl.CostEstimate(
            flops=3 * 80 * num_rows * padded, transcendentals=num_rows * padded, bytes_accessed=4 * num_rows * padded
        ),
        name="sample",
    )(logits, *[x[:, None] for x in (temperature, min_p, top_k, top_p, uniform)])
    return out[:, 0]


def check(vocab: int) -> None:
    """Raise ValueError unless the kernel takes rows of so many logits."""
    if 3 * ROWS * _padded(vocab) * 4 > VMEM_LIMIT:
        most = VMEM_LIMIT // (12 * ROWS)
        raise ValueError(f"the TPU kernel samples vocabularies up to {most}, found {vocab}; choose impl='xla'")


def _padded(vocab: int) -> int:
    return -(-vocab // CHUNK) * CHUNK


def _kernel(
    logits_ref: Any, temperature_ref: Any, min_p_ref: Any, top_k_ref: Any, top_p_ref: Any, uniform_ref: Any,
    token_ref: Any, weights_ref: Any,
) -> None:  # fmt: skip
    rows, padded = weights_ref.shape
    temperature, min_p, top_k, top_p = temperature_ref[...], min_p_ref[...], top_k_ref[...], top_p_ref[...]

    def fold(of: Callable[[Array, Array], Array], combine: Callable[[Array, Array], Array], start: Array) -> Array:
        """Combine `of(chunk, its first token)` over the row, a chunk's lanes apart; [rows, CHUNK]."""

        def turn(index: Array, total: Array) -> Array:
            first = pl.multiple_of(index * CHUNK, CHUNK)
            return combine(total, of(weights_ref[:, pl.ds(first, CHUNK)], first))

        return lax.fori_loop(0, padded // CHUNK, turn, start)

    def add_up(of: Callable[[Array, Array], Array]) -> Float[Array, "rows 1"]:
        return jnp.sum(fold(of, jnp.add, jnp.zeros((rows, CHUNK), jnp.float32)), axis=1, keepdims=True)

    def weigh(index: Array, best: Array) -> Array:
        chunk = pl.ds(pl.multiple_of(index * CHUNK, CHUNK), CHUNK)
        weights = jnp.exp((logits_ref[:, chunk] - best) / temperature)
        weights_ref[:, chunk] = jnp.where(weights >= min_p, weights, 0.0)
        return best

    def largest(index: Array, best: Array) -> Array:
        return jnp.maximum(best, logits_ref[:, pl.ds(pl.multiple_of(index * CHUNK, CHUNK), CHUNK)])

    num_chunks = padded // CHUNK
    best = lax.fori_loop(0, num_chunks, largest, jnp.full((rows, CHUNK), -jnp.inf, jnp.float32))
    lax.fori_loop(0, num_chunks, weigh, jnp.max(best, axis=1, keepdims=True))

    def keep(threshold: Float[Array, "rows 1"]) -> None:
        def cut(index: Array, _: Array) -> Array:
            chunk = pl.ds(pl.multiple_of(index * CHUNK, CHUNK), CHUNK)
            weights = weights_ref[:, chunk]
            weights_ref[:, chunk] = jnp.where(weights >= threshold, weights, 0.0)
            return _

        lax.fori_loop(0, num_chunks, cut, 0)

    @pl.when(jnp.max(top_k) > 0)
    def _() -> None:
        wanted = top_k.astype(jnp.float32)  # exact up to 2**24 tokens

        def enough(threshold: Array) -> Array:
            return add_up(lambda weights, _: jnp.where(weights >= threshold, 1.0, 0.0)) >= wanted

        keep(jnp.where(top_k == 0, 0.0, _largest_threshold(enough, rows)))

    @pl.when(jnp.min(top_p) < 1)
    def _() -> None:
        goal = top_p * add_up(lambda weights, _: weights)

        def enough(threshold: Array) -> Array:
            return add_up(lambda weights, _: jnp.where(weights >= threshold, weights, 0.0)) >= goal

        keep(jnp.where(top_p >= 1, 0.0, _largest_threshold(enough, rows)))

    lane = lax.broadcasted_iota(jnp.int32, (rows, CHUNK), 1)
    target = uniform_ref[...] * add_up(lambda weights, _: weights)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # the sum up to and including a token passes the target at high, and not before low
        middle = low + (high - low) // 2
        passes = add_up(lambda weights, first: jnp.where(lane + first <= middle, weights, 0.0)) > target
        return jnp.where(passes, low, middle + 1), jnp.where(passes, middle, high)

    ends = (jnp.zeros((rows, 1), jnp.int32), jnp.full((rows, 1), padded - 1, jnp.int32))
    low, _ = lax.fori_loop(0, (padded - 1).bit_length(), halve, ends)
    token_ref[...] = low


def _largest_threshold(enough: Callable[[Array], Array], rows: int) -> Float[Array, "rows 1"]:
    """As in `xla.py`."""

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low + 1) // 2
        good = enough(lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

    bounds = (jnp.zeros((rows, 1), jnp.int32), jnp.full((rows, 1), ONE, jnp.int32))
    return lax.bitcast_convert_type(lax.fori_loop(0, 31, halve, bounds)[0], jnp.float32)
