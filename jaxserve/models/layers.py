"""Building blocks that families share: products, norm, rotary embedding, embedding lookup.

Activations are `[features, tokens]`, and weights `[out, in]` as checkpoints store them. On CPU the product `weights @ x` in
this orientation is 1.05 to 1.3 times as fast as `x @ weights.T` at 1 to 512 tokens, and elementwise work runs along tokens;
accelerators do not mind.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.config import RopeScaling


def linear(weights: Float[Array, "out in"], x: Float[Array, "in T"]) -> Float[Array, "out T"]:
    """`weights @ x`, accumulated in float32."""
    return lax.dot_general(
        weights, x, (((1,), (0,)), ((), ())), precision="highest", preferred_element_type=jnp.float32
    ).astype(x.dtype)


def rms_norm(x: Float[Array, "E T"], weight: Float[Array, " E"], epsilon: float) -> Float[Array, "E T"]:
    """Root mean square norm over features, in float32 (Zhang and Sennrich, 2019)."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=0, keepdims=True) + epsilon)
    return (wide * scale).astype(x.dtype) * weight[:, None]


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Float[Array, " half"]:
    """Angle per position of each pair, in radians. Llama 3's scaling lowers the frequencies that turn less than
    `low_freq_factor` times in the original context, and blends up to `high_freq_factor`."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = jnp.clip(blend, 0.0, 1.0)
    return frequencies * (blend + (1 - blend) / scaling.factor)


def rotate(
    x: Float[Array, "*heads D T"], cos: Float[Array, "D/2 T"], sin: Float[Array, "D/2 T"]
) -> Float[Array, "*heads D T"]:
    """Rotary embedding on the two halves of each head (Su et al., 2021, in Hugging Face's pairing).

    The halves are swapped by a reversal of an axis of two, which fuses into the arithmetic where a concatenation does not.
    """
    *heads, dim, tokens = x.shape
    halves = x.astype(jnp.float32).reshape(*heads, 2, dim // 2, tokens)
    signed_sin = jnp.stack([-sin, sin])
    rotated = halves * cos + jnp.flip(halves, axis=-3) * signed_sin
    return rotated.reshape(x.shape).astype(x.dtype)


def rotate_tokens_first(
    x: Float[Array, "*heads D T"], cos: Float[Array, "D/2 T"], sin: Float[Array, "D/2 T"]
) -> Float[Array, "*heads D T"]:
    """`rotate` as suits a TPU: heads lie along lanes, where the reversal would be operations of its own.

    By the compiler's estimates for v5e this makes product, rotation and KV write of an 8B layer 26% shorter at 64 decodes and
    5% at a chunk of 512, and for v6e 21% and 4%: as much as not to rotate K at all would, or more.
    """
    tokens_first = jnp.moveaxis(x, -1, 0).astype(jnp.float32)
    first, second = jnp.split(tokens_first, 2, axis=-1)
    along_heads = (x.shape[-1], *(1,) * (x.ndim - 2), cos.shape[0])
    cos, sin = cos.T.reshape(along_heads), sin.T.reshape(along_heads)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.moveaxis(rotated.astype(x.dtype), 0, -1)


def embed(table: Float[Array, "V_local E"], token_ids: Int[Array, " T"], axis_name: str) -> Float[Array, "E T"]:
    """Look up rows of a table whose vocabulary is split over `axis_name`."""
    local = token_ids - lax.axis_index(axis_name) * table.shape[0]
    mine = (local >= 0) & (local < table.shape[0])
    rows = table.at[jnp.where(mine, local, 0)].get(mode="promise_in_bounds")
    rows = jnp.where(mine[:, None], rows, 0)
    return psum(rows.T, axis_name)


def psum(x: Array, axis_name: str) -> Array:
    """Sum over the mesh axis; nothing where it has one device."""
    return x if jax.lax.axis_size(axis_name) == 1 else lax.psum(x, axis_name)
