"""`quant_matmul` as a Pallas TPU kernel.

A grid of (rows, tokens, inputs) with the inputs innermost: Pallas copies the next tile of weights and activations while the
matrix unit works on this one. Weights are the operand that streams through the unit and activations the one that stays, so
that a decode's few tokens cost one load of it a tile, and the weights' bytes decide.

Where groups of inputs share a scale, inputs are put in another order within a tile, groups side by side along the 128 lanes
and a group's members in different registers. A tile's scales then are one register a row that multiplies every other one as
it is, with no broadcast along lanes. `lay_out` puts the weights in that order, and `quant_matmul` the activations.

Numbers: values of 8 bits are exact in bfloat16; with scales a row, so is all but the accumulation. Weights with a scale a
group are rounded to bfloat16 where the activations are, and stay in float32 where they are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Int8, Num

from pallas_kernels import pytree
from pallas_kernels.quant_matmul.packing import high_half, low_half
from pallas_kernels.quant_matmul.weights import Form, QuantActivations, QuantWeights, check_rows, dequantize_rows, form_of

LANES = 128
STRETCHES = (512, 1024, 2048, 4096)
"""Inputs of a tile of groups, of which `lay_out` takes what costs the fewest bytes; the last is the most in any case."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """What a kernel's step takes.

    Attributes:
        rows: outputs; a multiple of 32.
        tokens: at most so many; a multiple of 128.
        chunk: inputs that are dequantised at once; a multiple of 128.
    """

    rows: int = 256
    tokens: int = 256
    chunk: int = 256


@pytree.dataclass
class Laid:
    """Weights in the kernel's order; two values a byte for 4 bits.

    Attributes:
        scales: for groups a register of 128 lanes for each row and tile of inputs, else one a row.
        stretch: inputs of a tile.
    """

    values: Int8[Array, "out bytes"]
    scales: Float[Array, "out lanes"]
    offsets: Float[Array, "out G"] | None
    form: Form = pytree.static()
    stretch: int = pytree.static()
    tiles: Tiles = pytree.static()


def lay_out(weights: QuantWeights, **options: int) -> Laid:
    """See `pallas_kernels.quant_matmul.lay_out`; options are those of `Tiles`."""
    form, tiles = form_of(weights), Tiles(**options)
    stretch = _stretch(form)
    padding = -form.num_in % stretch
    values = jnp.pad(weights.values, ((0, 0), (0, padding)))
    scales = weights.scales.astype(jnp.float32)
    if form.num_groups > 1:
        values = _by_lanes_of_groups(values.T, form, stretch).T
        scales = jnp.pad(scales, ((0, 0), (0, padding // form.group)))
        of_tile = scales.reshape(form.num_out, -1, stretch // form.group)
        scales = jnp.tile(of_tile, LANES * form.group // stretch).reshape(form.num_out, -1)
    if form.bits == 4:
        halves = values.reshape(form.num_out, -1, 2, stretch // 2)
        values = (halves[:, :, 0] & 15) | lax.shift_left(halves[:, :, 1], jnp.int8(4))
        values = values.reshape(form.num_out, -1)
    offsets = None if weights.offsets is None else weights.offsets.astype(jnp.float32)
    return Laid(values=values, scales=scales, offsets=offsets, form=form, stretch=stretch, tiles=tiles)


def quant_matmul(x: Float[Array, "in T"] | QuantActivations, weights: Laid) -> Float[Array, "out T"]:
    """See `pallas_kernels.quant_matmul.quant_matmul`."""
    form = weights.form
    quantised = isinstance(x, QuantActivations)
    values = x.values if isinstance(x, QuantActivations) else x
    if quantised and form.num_groups > 1:
        values = values.astype(jnp.bfloat16)
    inputs = jnp.pad(values, ((0, -form.num_in % weights.stretch), (0, 0)))
    if form.num_groups > 1:
        inputs = _by_lanes_of_groups(inputs, form, weights.stretch)
    plain = weights.offsets is None and not quantised
    out = _product(inputs, weights, x.dtype if plain else jnp.float32)
    if weights.offsets is not None:
        sums = values.astype(jnp.float32).reshape(form.num_groups, form.group, -1).sum(axis=1)
        out = out + jnp.matmul(weights.offsets, sums, precision="highest")
    if isinstance(x, QuantActivations):
        out = out * x.scales.astype(jnp.float32)
    return out.astype(x.dtype)


def take_rows(weights: Laid, rows: Int[Array, " R"]) -> Float[Array, "R in"]:
    """See `pallas_kernels.quant_matmul.take_rows`."""
    check_rows(weights.form)
    values, scales = (part.at[rows].get(mode="promise_in_bounds") for part in (weights.values, weights.scales[:, 0]))
    return dequantize_rows(values[:, : weights.form.num_in], scales)


def _stretch(form: Form) -> int:
    """Inputs of a tile: for groups a power of two that holds 128 of them or fewer, by the bytes of padding and spread scales;
    otherwise the longest that needs the least padding."""
    if form.num_groups == 1:
        return min(range(LANES, STRETCHES[-1] + 1, LANES), key=lambda stretch: (-form.num_in % stretch, -stretch))

    def num_bytes(stretch: int) -> float:
        num_tiles = -(-form.num_in // stretch)
        return num_tiles * (stretch * form.bits / 8 + 4 * LANES)

    return min((s for s in STRETCHES if s <= LANES * form.group), key=num_bytes)


def _by_lanes_of_groups(x: Num[Array, "in T"], form: Form, stretch: int) -> Num[Array, "in T"]:
    """Put inputs in the order (tile, register, lane), where a lane belongs to one group."""
    groups = stretch // form.group
    repeats = LANES // groups
    split = x.reshape(-1, groups, form.group // repeats, repeats, x.shape[1])
    return split.transpose(0, 2, 3, 1, 4).reshape(x.shape)


def _product(x: Num[Array, "in T"], weights: Laid, dtype: Any) -> Array:
    form, tiles, stretch = weights.form, weights.tiles, weights.stretch
    num_in, num_tokens = x.shape
    rows = min(tiles.rows, form.num_out)
    tokens = min(tiles.tokens, num_tokens)
    bytes_of = stretch * form.bits // 8
    grouped = form.num_groups > 1
    scales = (
        pl.BlockSpec((rows, LANES), lambda i, t, k: (i, k)) if grouped else pl.BlockSpec((rows, 1), lambda i, t, k: (i, 0))
    )
    exact = x.dtype == jnp.int8
    out_bytes = form.num_out * num_tokens * jnp.dtype(dtype).itemsize
    return pl.pallas_call(
        partial(_kernel, form=form, chunk=min(tiles.chunk, stretch)),
        grid=(pl.cdiv(form.num_out, rows), pl.cdiv(num_tokens, tokens), num_in // stretch),
        in_specs=[
            pl.BlockSpec((stretch, tokens), lambda i, t, k: (k, t)),
            pl.BlockSpec((rows, bytes_of), lambda i, t, k: (i, k)),
            scales,
        ],
        out_specs=pl.BlockSpec((rows, tokens), lambda i, t, k: (i, t)),
        out_shape=jax.ShapeDtypeStruct((form.num_out, num_tokens), dtype),
        scratch_shapes=[pltpu.VMEM((rows, tokens), jnp.int32 if exact else jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * form.num_out * num_in * num_tokens,
            transcendentals=0,
            bytes_accessed=weights.values.size + 4 * weights.scales.size + x.size * x.dtype.itemsize + out_bytes,
        ),
        name=f"quant_matmul_w{form.bits}",
    )(x, weights.values, weights.scales)


def _kernel(x_ref: Any, values_ref: Any, scales_ref: Any, out_ref: Any, sums_ref: Any, *, form: Form, chunk: int) -> None:
    tile = pl.program_id(2)

    @pl.when(tile == 0)
    def _() -> None:
        sums_ref[...] = jnp.zeros_like(sums_ref)

    grouped = form.num_groups > 1
    exact = x_ref.dtype == jnp.int8
    halves = 8 // form.bits
    num_bytes = values_ref.shape[1]
    chunk = min(chunk, num_bytes)
    if grouped:
        scales = jnp.tile(scales_ref[...], (1, chunk // LANES))
    total = jnp.zeros(sums_ref.shape, sums_ref.dtype)
    for first in range(0, num_bytes, chunk):
        packed = values_ref[:, first : first + chunk]
        for half in range(halves):
            weights = _half(packed, half, halves)
            if grouped:
                weights = weights.astype(jnp.float32) * scales
            inputs = x_ref[half * num_bytes + first : half * num_bytes + first + chunk, :]
            if not exact:
                weights = weights.astype(inputs.dtype)
            total += lax.dot_general(
                weights,
                inputs,
                (((1,), (0,)), ((), ())),
                precision=lax.Precision.HIGHEST if inputs.dtype == jnp.float32 else lax.Precision.DEFAULT,
                preferred_element_type=sums_ref.dtype,
            )
    sums_ref[...] += total

    @pl.when(tile == pl.num_programs(2) - 1)
    def _() -> None:
        out = sums_ref[...].astype(jnp.float32)
        out_ref[...] = (out if grouped else out * scales_ref[...]).astype(out_ref.dtype)


def _half(packed: Int8[Array, "rows chunk"], half: int, halves: int) -> Num[Array, "rows chunk"]:
    if halves == 1:
        return packed
    wide = packed.astype(jnp.int32)
    return low_half(wide) if half == 0 else high_half(wide)
