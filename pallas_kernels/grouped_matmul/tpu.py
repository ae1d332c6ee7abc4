"""`grouped_matmul` on TPU is `jax.lax.ragged_dot`; see the package for why. It wants the matrices as `[X, in, out]`: given
the other order it copies them all, every time."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def lay_out(weights: Float[Array, "X out in"]) -> Float[Array, "X in out"]:
    """See `pallas_kernels.grouped_matmul.lay_out`."""
    return weights.swapaxes(1, 2)


def grouped_matmul(
    x: Float[Array, "M in"], weights: Float[Array, "X in out"], group_sizes: Int[Array, " X"]
) -> Float[Array, "M out"]:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = lax.ragged_dot(x, weights, group_sizes, precision=precision, preferred_element_type=jnp.float32)
    return out.astype(x.dtype)
