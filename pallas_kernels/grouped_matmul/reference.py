"""The definition of `grouped_matmul`: each row picks its matrix. Obvious, not fast."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def lay_out(weights: Float[Array, "X out in"]) -> Float[Array, "X out in"]:
    """See `pallas_kernels.grouped_matmul.lay_out`. Nothing to move."""
    return weights


def grouped_matmul(
    x: Float[Array, "M in"], weights: Float[Array, "X out in"], group_sizes: Int[Array, " X"]
) -> Float[Array, "M out"]:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`. Rows past the last group's give zeros."""
    row = jnp.arange(x.shape[0])
    group = jnp.sum(row[:, None] >= jnp.cumsum(group_sizes)[None, :], axis=1)  # [M]
    real = group < group_sizes.shape[0]
    mine = weights[jnp.where(real, group, 0)].astype(jnp.float32)  # [M, out, in]
    out = jnp.einsum("mi,moi->mo", x.astype(jnp.float32), mine, precision="highest")
    return jnp.where(real[:, None], out, 0.0).astype(x.dtype)
