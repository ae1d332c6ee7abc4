"""Write a step's K and V into the paged pool.

Owns the signature; in-place update is the caller's donation of the pool.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.page_layout import Layout, keys_of, values_of


def kv_update(
    pages: Num[Array, "P K B D2"],
    keys: Float[Array, "T K D"],
    values: Float[Array, "T K D"],
    page_ids: Int[Array, " T"],
    page_offsets: Int[Array, " T"],
    *,
    layout: Layout = "rows",
) -> Num[Array, "P K B D2"]:
    """Store token `t` at position `page_offsets[t]` of page `page_ids[t]`.

    A page id of `P` or more drops the token: that is how padding is written nowhere. No two real tokens share a place.
    """
    if layout == "halves":
        return _update_halves(pages, keys.astype(pages.dtype), values.astype(pages.dtype), page_ids, page_offsets)
    # Pads and a sum instead of a concatenation: XLA's CPU backend compiles each concatenation anew, 0.15 s a layer.
    dim = keys.shape[-1]
    rows = jnp.pad(keys, ((0, 0), (0, 0), (0, dim))) + jnp.pad(values, ((0, 0), (0, 0), (dim, 0)))
    rows = rows.astype(pages.dtype)
    return pages.at[page_ids, :, page_offsets].set(rows, mode="drop")


def _update_halves(
    pages: Num[Array, "P K B D2"],
    keys: Num[Array, "T K D"],
    values: Num[Array, "T K D"],
    page_ids: Int[Array, " T"],
    page_offsets: Int[Array, " T"],
) -> Num[Array, "P K B D2"]:
    shape = pages.shape
    if keys.shape[0] == 1:
        # A scatter of one token XLA's CPU backend turns into a conditional update of a copy of the whole pool.
        keys, values = jnp.pad(keys, ((0, 1), (0, 0), (0, 0))), jnp.pad(values, ((0, 1), (0, 0), (0, 0)))
        page_ids, page_offsets = jnp.pad(page_ids, (0, 1), constant_values=shape[0]), jnp.pad(page_offsets, (0, 1))
    pages = keys_of(pages).at[page_ids, 0, :, page_offsets].set(keys, mode="drop").reshape(shape)
    return values_of(pages).at[page_ids, 1, :, :, page_offsets].set(values, mode="drop").reshape(shape)
