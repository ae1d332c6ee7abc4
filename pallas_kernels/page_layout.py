"""How the bytes of a KV page hold K and V. A pool is `[P, K, B, 2*D]` in every layout; only what a page holds differs.

- "rows": a position's K and V side by side, `[K, B, 2*D]`: whole lanes for TPUs, one bulk copy a head for GPUs.
- "columns": K transposed, and then V, of all heads: `[2, K, D*B]`, the first half of which is `[K, D, B]` and the second
  `[K, B, D]`. Neither product of attention transposes a page then, which on CPU makes the scores 3 to 4 times as fast.

Owns the two and the way from one to the other. Whole pages may be copied and shared without knowing the layout.
"""

from __future__ import annotations

from typing import Literal, assert_never

import jax.numpy as jnp
from jaxtyping import Array, Num

Layout = Literal["rows", "columns"]


def keys_by_column(pages: Num[Array, "P K B D2"]) -> Num[Array, "P 2 K D B"]:
    """A view of pages in "columns" that holds each page's K at index 0."""
    num_pages, num_kv_heads, page_size, width = pages.shape
    return pages.reshape(num_pages, 2, num_kv_heads, width // 2, page_size)


def values_by_row(pages: Num[Array, "P K B D2"]) -> Num[Array, "P 2 K B D"]:
    """A view of pages in "columns" that holds each page's V at index 1."""
    num_pages, num_kv_heads, page_size, width = pages.shape
    return pages.reshape(num_pages, 2, num_kv_heads, page_size, width // 2)


def from_rows(pages: Num[Array, "P K B D2"], layout: Layout) -> Num[Array, "P K B D2"]:
    """Pages in "rows" made into pages in `layout`."""
    match layout:
        case "rows":
            return pages
        case "columns":
            num_pages, dim = pages.shape[0], pages.shape[3] // 2
            keys, values = pages[..., :dim].swapaxes(2, 3), pages[..., dim:]
            halves = [part.reshape(num_pages, 1, -1) for part in (keys, values)]
            return jnp.concatenate(halves, axis=1).reshape(pages.shape)
        case _:
            assert_never(layout)
