"""Quantised weights and activations as every implementation is given them, and how to make them of floats.

Owns the meaning of the numbers: a weight is `scale * value + offset` of its group, an activation `scale * value` of its
token. Does not know how an implementation lays them out.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from pallas_kernels import pytree

BITS = (4, 8)
GROUPS_OF_INT4 = (32, 64, 128)


@pytree.dataclass
class QuantWeights:
    """A matrix `[out, in]` in groups of `in // G` neighbours along `in`, each with a scale and perhaps an offset.

    One group a row (`G` is 1) is a scale per output channel.

    Attributes:
        values: within -8..7 for 4 bits, each in a byte of its own; `lay_out` packs them.
        offsets: None where all are 0. A zero point `z` is the offset `-scale * z`; a minimum `m` of unsigned values `q`,
            kept as `q - 8`, is the offset `m + 8 * scale`.
        bits: 4 or 8.
    """

    values: Int8[Array, "out in"]
    scales: Float[Array, "out G"]
    offsets: Float[Array, "out G"] | None = None
    bits: int = pytree.static(default=8)


@pytree.dataclass
class QuantActivations:
    """Activations `[in, T]` in eight bits with a scale per token.

    Attributes:
        dtype: of the floats that they were, and of what a product gives.
    """

    values: Int8[Array, "in T"]
    scales: Float[Array, " T"]
    dtype: str = pytree.static(default="float32")


@dataclass(frozen=True, slots=True)
class Form:
    """What a product must know at trace time.

    Attributes:
        group: inputs that share a scale.
    """

    num_out: int
    num_in: int
    bits: int
    group: int
    has_offsets: bool

    @property
    def num_groups(self) -> int:
        return self.num_in // self.group


def form_of(weights: QuantWeights) -> Form:
    """Raises:
    ValueError: the arrays do not fit together, or there is no such quantisation; the message says which and what there is.
    """
    num_out, num_in = weights.values.shape
    rows, num_groups = weights.scales.shape
    if weights.bits not in BITS:
        raise ValueError(f"quantised weights of {weights.bits} bits; there are {BITS}")
    if rows != num_out or num_groups == 0 or num_in % num_groups:
        raise ValueError(
            f"scales {weights.scales.shape} do not fit values {weights.values.shape}: expected [{num_out}, G] with G dividing "
            f"{num_in}"
        )
    if weights.offsets is not None and weights.offsets.shape != weights.scales.shape:
        raise ValueError(f"offsets {weights.offsets.shape}, expected one a scale: {weights.scales.shape}")
    group = num_in // num_groups
    if weights.bits == 4 and group not in GROUPS_OF_INT4:
        raise ValueError(f"4 bits in groups of {group} along the input; there are groups of {GROUPS_OF_INT4}")
    if weights.bits == 8 and num_groups > 1 and group not in GROUPS_OF_INT4:
        raise ValueError(f"8 bits in groups of {group} along the input; there are groups of {GROUPS_OF_INT4}, or one a row")
    return Form(num_out, num_in, weights.bits, group, weights.offsets is not None)


def quantize_weights(
    weights: Float[Array, "out in"],
    *,
    bits: int,
    group: int | None = None,
    symmetric: bool = True,
    largest: Float[Array, "out G"] | None = None,
) -> QuantWeights:
    """Round to nearest.

    Args:
        group: inputs that share a scale; None for all.
        symmetric: scale by the largest magnitude; otherwise fit the range from least to greatest, with an offset.
        largest: magnitudes to scale by where these are only a part of what shares a scale; `symmetric` then.
    """
    num_out, num_in = weights.shape
    group = group or num_in
    most = 2 ** (bits - 1) - 1
    grouped = weights.astype(jnp.float32).reshape(num_out, num_in // group, group)
    if symmetric:
        offsets = None
        scales = (jnp.max(jnp.abs(grouped), axis=-1) if largest is None else largest) / most
        centred = grouped
    else:
        low, high = grouped.min(axis=-1), grouped.max(axis=-1)
        scales = (high - low) / (2 * most + 1)
        offsets = low + (most + 1) * scales
        centred = grouped - offsets[..., None]
    scales = jnp.where(scales > 0, scales, 1.0)
    values = jnp.clip(jnp.round(centred / scales[..., None]), -most - 1, most).astype(jnp.int8)
    quantised = QuantWeights(values=values.reshape(num_out, num_in), scales=scales, offsets=offsets, bits=bits)
    form_of(quantised)
    return quantised


def quantize_activations(x: Float[Array, "in T"]) -> QuantActivations:
    """Round to nearest, with each token's largest magnitude at 127."""
    wide = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(wide), axis=0) / 127
    scales = jnp.where(scales > 0, scales, 1.0)
    values = jnp.round(wide / scales).astype(jnp.int8)
    return QuantActivations(values=values, scales=scales, dtype=str(x.dtype))


def dequantize_weights(weights: QuantWeights) -> Float[Array, "out in"]:
    """The matrix in float32."""
    num_out, num_in = weights.values.shape
    grouped = weights.values.astype(jnp.float32).reshape(num_out, weights.scales.shape[1], -1)
    grouped = grouped * weights.scales.astype(jnp.float32)[..., None]
    if weights.offsets is not None:
        grouped = grouped + weights.offsets.astype(jnp.float32)[..., None]
    return grouped.reshape(num_out, num_in)


def dequantize_rows(values: Int8[Array, "rows in"], scales: Float[Array, " rows"]) -> Float[Array, "rows in"]:
    """Some rows of a matrix with a scale a row, in float32."""
    return values.astype(jnp.float32) * scales.astype(jnp.float32)[:, None]


def check_rows(weights: Form) -> None:
    """Raises:
    ValueError: rows cannot be taken by themselves: they have no scale of their own, or offsets, or 4 bits.
    """
    if weights.bits != 8 or weights.num_groups > 1 or weights.has_offsets:
        raise ValueError(f"rows can be taken of weights in 8 bits with a scale a row and no offsets, found {weights}")


def dequantize_activations(x: QuantActivations) -> Float[Array, "in T"]:
    """The activations in float32."""
    return x.values.astype(jnp.float32) * x.scales.astype(jnp.float32)
