"""`quant_matmul` in plain XLA, for CPU.

XLA's CPU compiler does not fuse a conversion into a product: it writes the dequantised matrix to memory first, which costs
more than never having quantised. Three ways around it:

- Eight bits with a scale a row: products of integers, which XLA gives to YNNPACK, which has them at three to four times the
  rate of float32 on a CPU with VNNI. Activations in floats are rounded to 15 bits of a token's largest and written with two
  digits of eight bits: one product with twice the columns. Few tokens are sums that convert as they read.
- Groups, few tokens: a product written out as multiplications and additions of 16 lanes along `in`, all of a row's terms in
  one elementwise loop, which the compiler vectorises with the conversion in it. What is left, 16 sums a row, is added up by a
  product with ones. Each weight is read once, as a byte or half of one.
- Groups, more tokens: a loop over tiles of rows, each dequantised into the cache and multiplied there. No faster than float32:
  this saves memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int8, Num

from pallas_kernels import pytree
from pallas_kernels.cpu_sums import MOST_COLUMNS, product_by_sums
from pallas_kernels.quant_matmul.packing import high_half, low_half, pack_int4
from pallas_kernels.quant_matmul.weights import Form, QuantActivations, QuantWeights, check_rows, dequantize_rows, form_of

LANES = 16
BASE = 254
"""Of digits: with -127..127 it leaves no gap between them."""
PART = 128
"""Tokens that are worth reading the weights for."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Where the ways part, and how much each takes at once.

    Attributes:
        digits: of eight bits, in which activations are written for weights with a scale a row; 0 leaves them in floats, for
            backends without fast products of integers.
        sums_bytes: of a product's integers, which are to stay in the cache; more tokens go in parts, of 128 at least.
        few_tokens: up to so many go by lanes.
        terms: most terms of one elementwise loop; longer rows leave several partial sums. Compile time grows with it.
        tile_weights: weights of a tile; what it takes dequantised is to stay in the cache.
    """

    digits: int = 2
    sums_bytes: int = 4 << 20
    few_tokens: int = 8
    terms: int = 64
    tile_weights: int = 1 << 20


@pytree.dataclass
class Laid:
    """Weights as they lie in memory; two values a byte for 4 bits, see `packing`."""

    values: Int8[Array, "out bytes"]
    scales: Float[Array, "out G"]
    offsets: Float[Array, "out G"] | None
    form: Form = pytree.static()
    tuning: Tuning = pytree.static()


def lay_out(weights: QuantWeights, **options: int) -> Laid:
    """See `pallas_kernels.quant_matmul.lay_out`; options are those of `Tuning`."""
    form = form_of(weights)
    values = weights.values if form.bits == 8 else pack_int4(weights.values, form.group)
    offsets = None if weights.offsets is None else weights.offsets.astype(jnp.float32)
    return Laid(values=values, scales=weights.scales.astype(jnp.float32), offsets=offsets, form=form, tuning=Tuning(**options))


def quant_matmul(x: Float[Array, "in T"] | QuantActivations, weights: Laid) -> Float[Array, "out T"]:
    """See `pallas_kernels.quant_matmul.quant_matmul`."""
    form, tuning = weights.form, weights.tuning
    values = x.values if isinstance(x, QuantActivations) else x
    # For a scale a row, the scale waits until the sums are there.
    by_row = form.num_groups == 1
    if by_row and form.bits == 8 and (tuning.digits or isinstance(x, QuantActivations)):
        out = _by_integers(values, weights)
    elif values.shape[1] <= tuning.few_tokens and _fits_lanes(form):
        out = _by_lanes(values.astype(jnp.float32), weights)
    else:
        out = _by_tiles(values.astype(jnp.float32), weights)
    if by_row:
        out = out * weights.scales
    if weights.offsets is not None:
        sums = values.astype(jnp.float32).reshape(form.num_groups, form.group, -1).sum(axis=1)
        out = out + jnp.matmul(weights.offsets, sums, precision="highest")
    if isinstance(x, QuantActivations):
        out = out * x.scales.astype(jnp.float32)
    return out.astype(x.dtype)


def take_rows(weights: Laid, rows: Int[Array, " R"]) -> Float[Array, "R in"]:
    """See `pallas_kernels.quant_matmul.take_rows`."""
    check_rows(weights.form)
    return dequantize_rows(*(part.at[rows].get(mode="promise_in_bounds") for part in (weights.values, weights.scales[:, 0])))


def _by_integers(x: Num[Array, "in T"], weights: Laid) -> Float[Array, "out T"]:
    """Products without offsets and without the weights' scales. Exact for integers of 8 bits."""
    scales = None
    if x.dtype == jnp.int8:
        digits = [x]
    else:
        digits, scales = _to_digits(x.astype(jnp.float32), weights.tuning.digits)
    if x.shape[1] <= MOST_COLUMNS:
        whole = sum(digit.astype(jnp.float32) * float(BASE**power) for power, digit in enumerate(digits))
        out = product_by_sums(weights.values, jnp.asarray(whole))
    else:
        out = _by_digits(digits, weights)
    return out if scales is None else out * scales


def _by_digits(digits: list[Int8[Array, "in T"]], weights: Laid) -> Float[Array, "out T"]:
    num_tokens = max(PART, weights.tuning.sums_bytes // (4 * weights.form.num_out * len(digits)) // PART * PART)
    parts = []
    for first in range(0, digits[0].shape[1], num_tokens):
        columns = [digit[:, first : first + num_tokens] for digit in digits]
        sums = jnp.matmul(weights.values, jnp.concatenate(columns, axis=1), preferred_element_type=jnp.int32)
        by_power = jnp.split(sums.astype(jnp.float32), len(digits), axis=1)
        parts.append(sum(part * float(BASE**power) for power, part in enumerate(by_power)))
    return jnp.concatenate(parts, axis=1)


def _to_digits(x: Float[Array, "in T"], num_digits: int) -> tuple[list[Int8[Array, "in T"]], Float[Array, " T"]]:
    """Digits of -127..127 to the base `BASE`, the lowest first, of integers that are `x` once multiplied by the scales."""
    most = sum(127 * BASE**power for power in range(num_digits))
    scales = jnp.max(jnp.abs(x), axis=0) / most
    scales = jnp.where(scales > 0, scales, 1.0)
    rest = x / scales
    digits = []
    for power in reversed(range(num_digits)):
        digit = jnp.clip(jnp.round(rest / BASE**power), -127, 127)
        rest = rest - digit * BASE**power
        digits.append(digit.astype(jnp.int8))
    return digits[::-1], scales


def _fits_lanes(form: Form) -> bool:
    bytes_of_group = form.group * form.bits // 8
    return bytes_of_group % LANES == 0


def _by_lanes(x: Float[Array, "in T"], weights: Laid) -> Float[Array, "out T"]:
    """Products without offsets, and without the scales where a row has one."""
    form = weights.form
    num_out, num_bytes = weights.values.shape
    num_tokens = x.shape[1]
    halves = 8 // form.bits
    terms_of_group = form.group // halves // LANES
    # Whole groups a loop where groups have scales.
    unit = 1 if form.num_groups == 1 else terms_of_group
    num_terms = num_bytes // LANES
    terms = max(n for n in range(unit, max(weights.tuning.terms // halves, unit) + 1, unit) if num_terms % n == 0)
    chunks = num_terms // terms
    bytes_of = weights.values.reshape(num_out, 1, chunks, terms, LANES)
    scales = weights.scales.reshape(num_out, 1, -1, terms // unit if form.num_groups > 1 else 1, 1)
    # [1, T, chunks, terms, halves, lanes]
    inputs = x.T.reshape(1, num_tokens, -1, halves, terms_of_group, LANES).swapaxes(3, 4)
    inputs = inputs.reshape(1, num_tokens, chunks, terms, halves, LANES)

    total = jnp.float32(0)
    for first in range(0, terms, unit):
        part = jnp.float32(0)
        for term in range(first, first + unit):
            term_bytes = bytes_of[:, :, :, term]
            for half in range(halves):
                part = part + _half(term_bytes, half, halves) * inputs[:, :, :, term, half]
        total = total + (part if form.num_groups == 1 else part * scales[:, :, :, first // unit])
    # Without the barrier the compiler adds up inside the product that follows, term by term.
    total = lax.optimization_barrier(total).reshape(num_out * num_tokens, chunks * LANES)
    ones = jnp.ones((chunks * LANES, 1), jnp.float32)
    return jnp.matmul(total, ones, precision="highest").reshape(num_out, num_tokens)


def _half(packed: Int8[Array, "..."], half: int, halves: int) -> Float[Array, "..."]:
    if halves == 1:
        return packed.astype(jnp.float32)
    # In 32 bits: there are no vector shifts of bytes.
    wide = packed.astype(jnp.int32)
    return (low_half(wide) if half == 0 else high_half(wide)).astype(jnp.float32)


def _by_tiles(x: Float[Array, "in T"], weights: Laid) -> Float[Array, "out T"]:
    """The same as `_by_lanes`, a tile of rows at a time."""
    form = weights.form
    halves = 8 // form.bits
    # What a byte's halves multiply, apart: [halves, in / halves, T].
    inputs = x.reshape(form.num_groups, halves, form.group // halves, -1).swapaxes(0, 1).reshape(halves, -1, x.shape[1])

    def product(values: Int8[Array, "rows bytes"], scales: Float[Array, "rows G"]) -> Float[Array, "rows T"]:
        out = jnp.float32(0)
        for half in range(halves):
            wide = _half(values, half, halves)
            if form.num_groups > 1:
                wide = (wide.reshape(*scales.shape, -1) * scales[..., None]).reshape(wide.shape)
            out = out + jnp.matmul(wide, inputs[half], precision="highest")
        return out

    return _each_tile(product, weights, x.shape[1])


def _each_tile(product: Callable[[Array, Array], Array], weights: Laid, num_tokens: int) -> Float[Array, "out T"]:
    """`product` of each tile of rows; the last tile overlaps the one before."""
    num_out = weights.form.num_out
    rows = min(num_out, max(8, weights.tuning.tile_weights // weights.form.num_in))

    def one_tile(index: Array, out: Array) -> Array:
        first = jnp.minimum(index * rows, num_out - rows)
        values = lax.dynamic_slice_in_dim(weights.values, first, rows)
        scales = lax.dynamic_slice_in_dim(weights.scales, first, rows)
        return lax.dynamic_update_slice_in_dim(out, product(values, scales), first, axis=0)

    return lax.fori_loop(0, -(-num_out // rows), one_tile, jnp.zeros((num_out, num_tokens), jnp.float32))
