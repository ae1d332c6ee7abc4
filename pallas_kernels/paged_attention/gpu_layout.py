"""How a step's rows become blocks of packed queries, and blocks become equal shares for the GPU's multiprocessors.

Owns the integer arithmetic of `gpu.py`, all of it on the device and in fixed shapes. Knows no kernel.

A block is `tokens` consecutive tokens of one row with all query heads of a KV head: queries packed token by token, so that
a wgmma tile is full whatever the group. Its tiles are the ranges of KV positions that some token of it sees. Blocks come
densely: those that exist first.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from pallas_kernels import pytree


class WorkerColumns(NamedTuple):
    """Columns of a worker's row. Tiles are numbered over all blocks, KV head by KV head."""

    first_tile: int = 0
    end_tile: int = 1
    first_segment: int = 2
    num_segments: int = 3
    num_blocks: int = 4
    tiles_per_head: int = 5


class _BlockColumns(NamedTuple):
    tiles_before: int = 0
    num_tiles: int = 1
    row: int = 2
    first_page: int = 3
    last_page: int = 4
    position: int = 5
    end_position: int = 6


BLOCK = _BlockColumns()
"""Columns of a block's row: tiles of blocks before it and its own, its row of the table, the pages that it starts and ends
with, the position of its first token and the one after its last."""


@pytree.dataclass
class Blocks:
    """A step's blocks.

    Attributes:
        columns: see `BLOCK`; zeros for blocks that do not exist.
        first_token: of each block.
        of_token: each token's block; any for padding.
        index_in_block: each token's place in it.
        num_blocks: how many exist.
    """

    columns: Int[Array, "blocks 8"]
    first_token: Int[Array, " blocks"]
    of_token: Int[Array, " T"]
    index_in_block: Int[Array, " T"]
    num_blocks: Int[Array, ""]


def cut_blocks(
    lengths: Int[Array, " S"],
    offsets: Int[Array, "S+1"],
    *,
    num_tokens: int,
    tokens: int,
    tile: int,
    page_size: int,
    window: int | None,
    longest_first: bool,
) -> Blocks:
    """Cut rows into blocks of `tokens` tokens.

    Args:
        lengths, offsets: of `num_tokens` tokens' rows, as in `paged_attention`; a row of length 0 has no blocks. Tokens before
            the first row's are padding.
        longest_first: sort blocks by their number of tiles.
    """
    num_rows = lengths.shape[0]
    max_blocks = num_tokens // tokens + num_rows if tokens > 1 else num_tokens
    counts = jnp.where(lengths > 0, offsets[1:] - offsets[:-1], 0)
    per_row = -(-counts // tokens)
    ends = jnp.cumsum(per_row)
    index = jnp.arange(max_blocks)
    exists = index < ends[-1]
    row = jnp.minimum(jnp.sum(index[:, None] >= ends[None, :], axis=1), num_rows - 1)
    skipped = (index - (ends - per_row)[row]) * tokens
    position = lengths[row] - counts[row] + skipped
    end_position = position + jnp.minimum(counts[row] - skipped, tokens)
    first_seen = 0 if window is None else jnp.maximum(position - window + 1, 0)
    first_page = first_seen // page_size
    num_tiles = jnp.where(exists, -(-(end_position - first_page * page_size) // tile), 0)
    first_token = offsets[row] + skipped

    token = jnp.arange(num_tokens)
    token_row = jnp.minimum(jnp.sum(token[:, None] >= offsets[None, 1:], axis=1), num_rows - 1)
    in_row = jnp.maximum(token - offsets[token_row], 0)
    of_token = (ends - per_row)[token_row] + in_row // tokens

    columns = jnp.stack(
        [jnp.zeros_like(row), num_tiles, row, first_page + 0 * row, (end_position - 1) // page_size, position, end_position],
        axis=1,
    )
    columns = jnp.where(exists[:, None], columns, 0)
    if longest_first:
        order = jnp.argsort(-num_tiles)
        columns, first_token = columns[order], first_token[order]
        of_token = jnp.zeros(max_blocks, jnp.int32).at[order].set(index)[jnp.minimum(of_token, max_blocks - 1)]
    before = jnp.cumsum(columns[:, BLOCK.num_tiles]) - columns[:, BLOCK.num_tiles]
    columns = jnp.pad(columns.at[:, BLOCK.tiles_before].set(before), ((0, 0), (0, 1)))
    return Blocks(
        columns=columns.astype(jnp.int32),
        first_token=jnp.where(exists, first_token, 0),
        of_token=jnp.minimum(of_token, max_blocks - 1),
        index_in_block=in_row % tokens,
        num_blocks=ends[-1],
    )


@pytree.dataclass
class Shares:
    """Equal shares of all tiles, cut wherever they end (stream-K; Osama et al., 2023).

    Attributes:
        workers: see `WorkerColumns`.
        first_worker, last_worker: of each block's tiles; the last is before the first for blocks that do not exist.
    """

    workers: Int[Array, "workers 8"]
    first_worker: Int[Array, "K blocks"]
    last_worker: Int[Array, "K blocks"]


def share_tiles(blocks: Blocks, *, num_kv_heads: int, num_workers: int) -> Shares:
    """Give each worker the same number of consecutive tiles, give or take one share's rounding."""
    before, num_tiles = blocks.columns[:, BLOCK.tiles_before], blocks.columns[:, BLOCK.num_tiles]
    ends = before + num_tiles
    per_head = ends[-1]
    total = num_kv_heads * per_head
    share = jnp.maximum(-(-total // num_workers), 1)
    first = jnp.minimum(jnp.arange(num_workers) * share, total)
    end = jnp.minimum(first + share, total)

    def segment_of(tile: Int[Array, " workers"]) -> Int[Array, " workers"]:
        head, within = tile // jnp.maximum(per_head, 1), tile % jnp.maximum(per_head, 1)
        return head * blocks.num_blocks + jnp.sum(within[:, None] >= ends[None, :], axis=1)

    first_segment = segment_of(first)
    num_segments = jnp.where(end > first, segment_of(end - 1) - first_segment + 1, 0)
    fixed = jnp.ones_like(first)
    rows = [first, end, first_segment, num_segments, fixed * blocks.num_blocks, fixed * per_head, 0 * fixed, 0 * fixed]
    start_of_block = jnp.arange(num_kv_heads)[:, None] * per_head + before[None, :]
    exists = (num_tiles > 0)[None, :]
    return Shares(
        workers=jnp.stack(rows, axis=1).astype(jnp.int32),
        first_worker=jnp.where(exists, start_of_block // share, 0),
        last_worker=jnp.where(exists, (start_of_block + num_tiles[None, :] - 1) // share, -1),
    )


def deal_blocks(blocks: Blocks, *, num_kv_heads: int, num_workers: int) -> Int[Array, "workers 8"]:
    """Rows of workers that take whole blocks in turns: see the kernel for whose turn it is."""
    worker = jnp.arange(num_workers)
    items = num_kv_heads * blocks.num_blocks
    rounds, rest = items // num_workers, items % num_workers
    # Odd rounds go backwards.
    place = jnp.where(rounds % 2 == 1, num_workers - 1 - worker, worker)
    num_segments = rounds + (place < rest)
    zero = jnp.zeros_like(worker)
    columns = [zero, zero, zero, num_segments, zero, zero, zero, zero]
    return lax.convert_element_type(jnp.stack(columns, axis=1), jnp.int32)
