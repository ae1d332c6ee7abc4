"""`grouped_matmul` in plain XLA, for CPU: a loop over tiles of rows that share a group, as many turns as there are tiles.

Groups without rows cost nothing. A tile is about as long as a group's share of the rows: shorter ones read a matrix too
often, longer ones compute rows that belong to the next group, whose own tile overwrites them. Where there are fewer rows than
groups it is a single one, whose product takes half the time of one of eight.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

TILE = (1, 64)
"""Least and most rows of a tile."""


def lay_out(weights: Float[Array, "X out in"]) -> Float[Array, "X out in"]:
    """See `pallas_kernels.grouped_matmul.lay_out`. Nothing to move."""
    return weights


def grouped_matmul(
    x: Float[Array, "M in"], weights: Float[Array, "X out in"], group_sizes: Int[Array, " X"]
) -> Float[Array, "M out"]:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`."""
    num_rows = x.shape[0]
    num_groups, num_out, _ = weights.shape
    least, most = TILE
    tile = min(max(1 << (num_rows // num_groups).bit_length(), least), most)
    num_tiles = -(-group_sizes // tile)
    tile_ends = jnp.cumsum(num_tiles)
    index = jnp.arange(num_rows // tile + min(num_groups, num_rows))
    group = jnp.minimum(jnp.sum(index[:, None] >= tile_ends[None, :], axis=1), num_groups - 1)
    first_row = (jnp.cumsum(group_sizes) - group_sizes)[group] + (index - (tile_ends - num_tiles)[group]) * tile
    rows = jnp.pad(x.astype(jnp.float32), ((0, tile), (0, 0)))  # the last tile may run over

    def one_tile(turn: Array, out: Array) -> Array:
        matrix = lax.dynamic_index_in_dim(weights, group[turn], keepdims=False).astype(jnp.float32)
        mine = lax.dynamic_slice_in_dim(rows, first_row[turn], tile)
        product = jnp.einsum("oi,ti->to", matrix, mine, precision="highest")
        return lax.dynamic_update_slice_in_dim(out, product, first_row[turn], axis=0)

    out = lax.fori_loop(0, tile_ends[-1], one_tile, jnp.zeros((num_rows + tile, num_out), jnp.float32))
    return out[:num_rows].astype(x.dtype)
