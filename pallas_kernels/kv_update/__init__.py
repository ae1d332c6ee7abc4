"""Write a step's K and V into the paged pool.

Owns the signature; in-place update is the caller's donation of the pool.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def kv_update(
    pages: Float[Array, "P K B D2"],
    keys: Float[Array, "T K D"],
    values: Float[Array, "T K D"],
    page_ids: Int[Array, " T"],
    page_offsets: Int[Array, " T"],
) -> Float[Array, "P K B D2"]:
    """Store token `t` at `pages[page_ids[t], :, page_offsets[t]]`, K and V side by side.

    A page id of `P` or more drops the token: that is how padding is written nowhere. No two real tokens share a place.
    """
    # Pads and a sum instead of a concatenation: XLA's CPU backend compiles each concatenation anew, 0.15 s a layer.
    dim = keys.shape[-1]
    rows = jnp.pad(keys, ((0, 0), (0, 0), (0, dim))) + jnp.pad(values, ((0, 0), (0, 0), (dim, 0)))
    rows = rows.astype(pages.dtype)
    return pages.at[page_ids, :, page_offsets].set(rows, mode="drop")
