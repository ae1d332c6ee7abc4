"""How rows are cut for the GPU's multiprocessors: every tile of every block to one worker, in equal shares."""

from __future__ import annotations

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.paged_attention.gpu_layout import (
    BLOCK,
    Blocks,
    Shares,
    WorkerColumns,
    cut_blocks,
    deal_blocks,
    share_tiles,
)
from tests.cached import CACHED

pytestmark = CACHED

NUM_ROWS, NUM_TOKENS, MAX_LENGTH, PAGE_SIZE, TILE = 4, 40, 700, 16, 64
HEADS, WORKERS = 3, 7
COLUMN = WorkerColumns()


@st.composite
def rows_of_tokens(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and lengths; padding rows and padding tokens among them."""
    room, counts, lengths = NUM_TOKENS, [], []
    for _ in range(NUM_ROWS):
        count = draw(st.integers(0, room))
        room -= count
        counts.append(count)
        lengths.append(count and draw(st.sampled_from([0, count]) | st.integers(count, MAX_LENGTH)))
    return np.cumsum([0, *counts]).astype(np.int32), np.asarray(lengths, np.int32)


@partial(jax.jit, static_argnames=("tokens", "window", "longest_first"))
def cut(offsets: jax.Array, lengths: jax.Array, tokens: int, window: int | None, longest_first: bool) -> tuple:
    blocks = cut_blocks(
        lengths,
        offsets,
        num_tokens=NUM_TOKENS,
        tokens=tokens,
        tile=TILE,
        page_size=PAGE_SIZE,
        window=window,
        longest_first=longest_first,
    )
    shares = share_tiles(blocks, num_kv_heads=HEADS, num_workers=WORKERS)
    return blocks, shares, deal_blocks(blocks, num_kv_heads=HEADS, num_workers=WORKERS)


def check_blocks(blocks: Blocks, offsets: np.ndarray, lengths: np.ndarray, tokens: int, window: int | None) -> None:
    """Each real token is in the block that says so, and the block's pages are those that its tokens see."""
    columns, first_token = np.asarray(blocks.columns), np.asarray(blocks.first_token)
    expected = sum(-(-(b - a) // tokens) for a, b, n in zip(offsets, offsets[1:], lengths, strict=False) if n)
    assert blocks.num_blocks == expected
    assert (columns[:expected, BLOCK.num_tiles] > 0).all()
    assert not columns[expected:, BLOCK.num_tiles :].any()
    before = np.cumsum(columns[:, BLOCK.num_tiles]) - columns[:, BLOCK.num_tiles]
    np.testing.assert_array_equal(columns[:expected, BLOCK.tiles_before], before[:expected])
    for row, length in enumerate(lengths):
        for token in range(offsets[row], offsets[row + 1]) if length else ():
            block, place = int(blocks.of_token[token]), int(blocks.index_in_block[token])
            _, tiles, of_row, first_page, last_page, position, end_position, _ = columns[block]
            assert (of_row, first_token[block] + place) == (row, token)
            assert place < tokens
            own = length - (offsets[row + 1] - token)
            assert position + place == own < end_position
            first_seen = 0 if window is None else max(0, position - window + 1)
            assert first_page == first_seen // PAGE_SIZE
            assert last_page == (end_position - 1) // PAGE_SIZE
            assert tiles == -(-(end_position - first_page * PAGE_SIZE) // TILE)


def check_shares(shares: Shares, blocks: Blocks) -> None:
    """Walk each worker's segments as the kernel does: all tiles once, shares level, parts where the merge looks."""
    columns, num_blocks = np.asarray(blocks.columns), int(blocks.num_blocks)
    done: Counter[tuple[int, int, int]] = Counter()
    workers_of: dict[tuple[int, int], list[int]] = {}
    for worker, row in enumerate(np.asarray(shares.workers)):
        for number in range(row[COLUMN.num_segments]):
            head, block = divmod(int(row[COLUMN.first_segment]) + number, num_blocks)
            base = head * row[COLUMN.tiles_per_head] + columns[block, BLOCK.tiles_before]
            first = max(int(row[COLUMN.first_tile] - base), 0)
            end = min(int(row[COLUMN.end_tile] - base), columns[block, BLOCK.num_tiles])
            assert first < end, "a segment without tiles"
            done.update((head, block, tile) for tile in range(first, end))
            workers_of.setdefault((head, block), []).append(worker)
    tiles = [(head, b, t) for head in range(HEADS) for b in range(num_blocks) for t in range(columns[b, BLOCK.num_tiles])]
    assert done == Counter(tiles)
    most = -(-len(tiles) // WORKERS)
    assert all(row[COLUMN.end_tile] - row[COLUMN.first_tile] <= most for row in np.asarray(shares.workers))
    for (head, block), workers in workers_of.items():
        assert workers == list(range(shares.first_worker[head, block], shares.last_worker[head, block] + 1))
    absent = np.ones(shares.first_worker.shape, bool)
    absent[:, :num_blocks] = False
    assert (np.asarray(shares.last_worker) < np.asarray(shares.first_worker))[absent].all()


def check_deal(workers: np.ndarray, blocks: Blocks) -> None:
    """Each (block, head) to one worker, by the kernel's own rule."""
    dealt = [
        number * WORKERS + (WORKERS - 1 - worker if number % 2 else worker)
        for worker in range(WORKERS)
        for number in range(workers[worker, COLUMN.num_segments])
    ]
    assert sorted(dealt) == list(range(HEADS * int(blocks.num_blocks)))


@pytest.mark.parametrize("tokens", [1, pytest.param(5, marks=pytest.mark.slow), pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("window", [None, 100])
@given(rows=rows_of_tokens(), longest_first=st.booleans())
def test_every_tile_has_one_worker(
    tokens: int, window: int | None, rows: tuple[np.ndarray, np.ndarray], longest_first: bool
) -> None:
    offsets, lengths = rows
    blocks, shares, dealt = cut(jnp.asarray(offsets), jnp.asarray(lengths), tokens, window, longest_first)
    check_blocks(blocks, offsets, lengths, tokens, window)
    check_shares(shares, blocks)
    check_deal(np.asarray(dealt), blocks)
    if longest_first:
        assert (np.diff(np.asarray(blocks.columns)[:, BLOCK.num_tiles]) <= 0).all()


def test_nothing_to_do() -> None:
    zeros = jnp.zeros(NUM_ROWS, jnp.int32)
    blocks, shares, dealt = cut(jnp.zeros(NUM_ROWS + 1, jnp.int32), zeros, 5, None, False)
    assert blocks.num_blocks == 0
    assert not np.asarray(shares.workers)[:, COLUMN.num_segments].any()
    assert not np.asarray(dealt)[:, COLUMN.num_segments].any()
