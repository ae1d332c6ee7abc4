"""`paged_attention` as one ragged kernel for TPU: chunks, drafts and decodes of a step in a single call.

Owns the step's work list and the layout in which queries and outputs cross the kernel's border; the kernel itself is in
`tpu_kernel.py`. Knows nothing of models.

Tokens are cut into tiles of `TILE_TOKENS` at fixed places, whoever owns them, so every copy is aligned. What a row owns of
a tile is one item of the flat work list: some queries that see a run of pages. A decode is an item of one token, a long
chunk an item for each tile that it crosses, and a padding row none. The kernel walks the list; the pages that the items
name are all that it reads.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import pytree
from pallas_kernels.paged_attention import tpu_kernel
from pallas_kernels.paged_attention.tpu_kernel import pool_width

TILE_TOKENS = 128
"""Queries that share a read of the pages: fewer read a long prompt's pages more often, more fill VMEM."""

MAX_TABLE_BYTES = 768 * 2**10
"""Of the 1 MiB of scalar memory that every TPU since v4 has, what the block table may take."""


@pytree.dataclass
class Work:
    """The flat list of items, in the order of their tokens.

    Attributes:
        items_of_tile: each tile's items are `[items_of_tile[t], items_of_tile[t + 1])`.
        table_start: where the item's row begins in `table`.
        first_token: first token of the tile that the item owns.
        end_token: one past its last.
        position: of the first token in its sequence.
        first_page: first page that a token of the item sees, counted in its sequence.
        end_page: one past the last.
        table: the block table, row after row.
    """

    items_of_tile: Int[Array, "tiles+1"]
    table_start: Int[Array, " I"]
    first_token: Int[Array, " I"]
    end_token: Int[Array, " I"]
    position: Int[Array, " I"]
    first_page: Int[Array, " I"]
    end_page: Int[Array, " I"]
    table: Int[Array, " S*W"]
    window: int | None = pytree.static()
    tile_tokens: int = pytree.static()
    block_tokens: int = pytree.static()


def schedule(
    block_table: Int[Array, "S W"],
    row_offsets: Int[Array, "S+1"],
    lengths: Int[Array, " S"],
    *,
    num_tokens: int,
    num_single: int,
    page_size: int,
    window: int | None = None,
    tile_tokens: int = TILE_TOKENS,
    block_tokens: int = 0,
) -> Work:
    """See `pallas_kernels.paged_attention.schedule`.

    Args:
        tile_tokens: queries that share a read of the pages, a power of two.
        block_tokens: positions a turn of the kernel, whole lane tiles; 0 takes what fits.

    Raises:
        ValueError: the block table does not fit in scalar memory, or sizes that are none.
    """
    del num_single
    num_rows, width = block_table.shape
    _check_table(num_rows, width, page_size)
    if tile_tokens < 1 or tile_tokens & (tile_tokens - 1):
        raise ValueError(f"tile_tokens: expected a power of two, found {tile_tokens}")
    if block_tokens < 0 or block_tokens % tpu_kernel.MIN_BLOCK_TOKENS:
        raise ValueError(f"block_tokens: expected a multiple of {tpu_kernel.MIN_BLOCK_TOKENS}, found {block_tokens}")
    tile_tokens = min(tile_tokens, _power_of_two(num_tokens, at_least=tpu_kernel.MIN_ROWS))
    num_tiles = -(-num_tokens // tile_tokens)

    start, end = row_offsets[:-1], row_offsets[1:]
    owns = (lengths > 0) & (end > start)
    first_tile, last_tile = start // tile_tokens, (end - 1) // tile_tokens
    items_of_row = jnp.where(owns, last_tile - first_tile + 1, 0)
    ends = jnp.cumsum(items_of_row)

    index = jnp.arange(num_tiles + num_rows)  # a row adds an item, and so does each border between tiles
    row = jnp.sum(index[:, None] >= ends[None, :], axis=1)
    real = row < num_rows
    row = jnp.minimum(row, num_rows - 1)
    tile = jnp.where(real, first_tile[row] + index - (ends - items_of_row)[row], num_tiles)
    first_token = jnp.maximum(start[row], tile * tile_tokens)
    end_token = jnp.minimum(end[row], (tile + 1) * tile_tokens)
    position = lengths[row] - (end[row] - first_token)
    last_position = lengths[row] - (end[row] - end_token) - 1
    seen_from = jnp.zeros_like(position) if window is None else jnp.maximum(position - window + 1, 0)
    return Work(
        items_of_tile=jnp.sum(tile[None, :] < jnp.arange(num_tiles + 1)[:, None], axis=1, dtype=jnp.int32),
        table_start=row * width,
        first_token=first_token - tile * tile_tokens,
        end_token=end_token - tile * tile_tokens,
        position=position,
        first_page=seen_from // page_size,
        end_page=last_position // page_size + 1,
        table=block_table.reshape(-1),
        window=window,
        tile_tokens=tile_tokens,
        block_tokens=block_tokens,
    )


def paged_attention(
    queries: Float[Array, "T N D"],
    pages: Num[Array, "P K B D2"],
    work: Work,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    kv_scales: Float[Array, "K 2"] | None = None,
) -> Float[Array, "T N D"]:
    """See `pallas_kernels.paged_attention.paged_attention`. Padding tokens give zeros.

    Raises:
        ValueError: a data type or page size that the kernel does not take.
    """
    num_tokens, num_heads, head_dim = queries.shape
    _, num_kv_heads, page_size, width = pages.shape
    check(queries.dtype, pages.dtype, num_heads, num_kv_heads, head_dim, page_size)
    if width != pool_width(head_dim):
        raise ValueError(f"pages: expected rows of pool_width({head_dim}) = {pool_width(head_dim)}; found {width}")
    group = num_heads // num_kv_heads
    padded_group = _power_of_two(group)
    num_tiles = work.items_of_tile.shape[0] - 1

    # A row of the kernel is a query head of a token: token after token, with the group padded to a power of two.
    padding = (num_tiles * work.tile_tokens - num_tokens, padded_group - group)
    rows = jnp.pad(
        queries.reshape(num_tokens, num_kv_heads, group, head_dim), ((0, padding[0]), (0, 0), (0, padding[1]), (0, 0))
    )
    rows = rows.transpose(1, 0, 2, 3).reshape(num_kv_heads, -1, head_dim)
    if not tpu_kernel.splits_lanes(head_dim):
        # Scores against whole rows of the pool, with zeros where V lies.
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, width - head_dim)))
    if kv_scales is None:
        kv_scales = jnp.ones((num_kv_heads, 2), jnp.float32)
    if sinks is not None:
        sinks = jnp.pad(sinks.reshape(num_kv_heads, group), ((0, 0), (0, padded_group - group)))
    out = tpu_kernel.attend(
        rows,
        pages,
        work,
        kv_scales.astype(jnp.float32),
        sinks,
        scale=scale,
        soft_cap=soft_cap,
        group=padded_group,
        head_dim=head_dim,
    )
    out = out.reshape(num_kv_heads, -1, padded_group, head_dim)[:, :num_tokens, :group]
    return out.transpose(1, 0, 2, 3).reshape(num_tokens, num_heads, head_dim)


def check(dtype: jnp.dtype, kv_dtype: jnp.dtype, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int) -> None:
    """Raise ValueError, saying what is unsupported, unless the kernel takes these shapes."""
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"queries: expected float32 or bfloat16; found {dtype}")
    if kv_dtype not in (dtype, jnp.int8, jnp.float8_e4m3fn):
        raise ValueError(f"pages: expected {dtype} as the queries, int8 or float8_e4m3fn; found {kv_dtype}")
    if num_heads % num_kv_heads:
        raise ValueError(f"heads: expected a multiple of the {num_kv_heads} KV heads; found {num_heads} query heads")
    if head_dim % 8 or not 8 <= head_dim <= 256:
        raise ValueError(f"head_dim: expected a multiple of 8 up to 256; found {head_dim}")
    if page_size not in (8, 16, 32, 64, 128):
        raise ValueError(f"page_size: expected 8, 16, 32, 64 or 128; found {page_size}")


def _check_table(num_rows: int, width: int, page_size: int) -> None:
    table_bytes = 4 * num_rows * width
    if table_bytes > MAX_TABLE_BYTES:
        raise ValueError(
            f"block table: {num_rows} rows of {width} pages of {page_size} tokens take {table_bytes} bytes of scalar memory "
            f"and the kernel has {MAX_TABLE_BYTES}; take larger pages, fewer sequences or a shorter context"
        )


def _power_of_two(number: int, at_least: int = 1) -> int:
    """The smallest that is no less."""
    return max(at_least, 1 << (number - 1).bit_length())
