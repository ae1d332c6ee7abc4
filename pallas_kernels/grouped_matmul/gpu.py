"""`grouped_matmul` on Hopper is the Pallas kernel that jax ships; see the package for why."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 64
"""Rows, outputs and inputs of the kernel's tile: what wgmma takes at least, so that few rows waste least."""
STAGES = 4
OUTPUT_BLOCKS = 2
"""Blocks of outputs that run side by side over one block of rows, so that it is read from the cache."""


def check(shape: tuple[int, ...], dtype: Any) -> None:
    """Raise `ValueError` unless the kernel takes matrices of this shape, `[X, out, in]`, and dtype."""
    _, num_out, num_in = shape
    if num_out % (BLOCK * OUTPUT_BLOCKS) or num_in % BLOCK:
        raise ValueError(
            f"grouped_matmul on GPU takes matrices of multiples of {BLOCK * OUTPUT_BLOCKS} x {BLOCK}, found "
            f"{num_out} x {num_in}; choose impl='xla'"
        )
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"grouped_matmul on GPU takes bfloat16 and float16, found {dtype}; choose impl='xla'")


def lay_out(weights: Float[Array, "X out in"]) -> Float[Array, "X out in"]:
    """See `pallas_kernels.grouped_matmul.lay_out`. Nothing to move.

    Raises:
        ValueError: shapes or dtype that the kernel does not take.
    """
    check(weights.shape, weights.dtype)
    return weights


def grouped_matmul(
    x: Float[Array, "M in"], weights: Float[Array, "X out in"], group_sizes: Int[Array, " X"]
) -> Float[Array, "M out"]:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`."""
    # Imported here: it needs what only a GPU's installation has.
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    num_rows = x.shape[0]
    rows = jnp.pad(x.astype(weights.dtype), ((0, -num_rows % BLOCK), (0, 0)))
    out = ragged_dot(
        rows,
        weights,
        group_sizes=group_sizes,
        block_m=BLOCK,
        block_n=BLOCK,
        block_k=BLOCK,
        max_concurrent_steps=STAGES,
        grid_block_n=OUTPUT_BLOCKS,
        transpose_rhs=True,
    )
    # It leaves rows past the last group's as they were in memory.
    real = jnp.arange(num_rows) < group_sizes.sum()
    return jnp.where(real[:, None], out[:num_rows], 0).astype(x.dtype)
