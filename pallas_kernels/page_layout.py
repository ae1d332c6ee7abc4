"""How the bytes of a KV page hold K and V. A pool is `[P, K, B, 2*D]` in every layout; only what a page holds differs.

- "rows": a position's K and V side by side, `[K, B, 2*D]`: whole lanes for TPUs, one bulk copy a head for GPUs.
- "halves": K of all heads, `[K, B, D]`, and then V transposed, `[K, D, B]`: what attention sums over is contiguous in both,
  so that on CPU both products are plain vectorised sums straight from the pool, which nothing has to gather first.

Owns the two and the way from one to the other. Whole pages may be copied and shared without knowing the layout.
"""

from __future__ import annotations

from typing import Literal, assert_never

import jax.numpy as jnp
from jaxtyping import Array, Num

Layout = Literal["rows", "halves"]


def keys_of(pages: Num[Array, "P K B D2"]) -> Num[Array, "2*P K B D"]:
    """A view of pages in "halves" that holds page `p`'s K at `2 * p`."""
    num_pages, num_kv_heads, page_size, width = pages.shape
    return pages.reshape(2 * num_pages, num_kv_heads, page_size, width // 2)


def values_of(pages: Num[Array, "P K B D2"]) -> Num[Array, "2*P K D B"]:
    """A view of pages in "halves" that holds page `p`'s V at `2 * p + 1`."""
    num_pages, num_kv_heads, page_size, width = pages.shape
    return pages.reshape(2 * num_pages, num_kv_heads, width // 2, page_size)


def from_rows(pages: Num[Array, "P K B D2"], layout: Layout) -> Num[Array, "P K B D2"]:
    """Pages in "rows" made into pages in `layout`."""
    match layout:
        case "rows":
            return pages
        case "halves":
            num_pages, dim = pages.shape[0], pages.shape[3] // 2
            keys, values = pages[..., :dim], pages[..., dim:].swapaxes(2, 3)
            halves = [part.reshape(num_pages, 1, -1) for part in (keys, values)]
            return jnp.concatenate(halves, axis=1).reshape(pages.shape)
        case _:
            assert_never(layout)
