"""`kv_update` on TPU, in place: reads the tiles of sublanes that new rows fall into, puts the rows in and writes them back.

Memory is only reached in whole tiles of sublanes (`group_rows` positions of a page), so a token cannot be written alone.
Tokens that follow each other in one tile are one run, which reads and writes it once: a chunk costs a run for each tile, a
decode one for its token. A product with a matrix of zeros and ones moves a run's rows to their places, exactly.

Two runs are read ahead while one is computed and two are written. A run that finds its tile among the three runs before it
waits for them; in an engine, where no two sequences write one page, none does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, Num

TOKENS_PER_CALL = 512
"""Rows that wait in VMEM together."""
SLOTS = 4
AHEAD = 2
ALIGNMENT = 16
"""Sublanes that loads of rows begin at multiples of: a tile of bfloat16."""


def group_rows(dtype: Any, page_size: int) -> int:
    """Positions of a page that are read and written together: a tile of sublanes, or the page where that is smaller."""
    return min(32 // jnp.dtype(dtype).itemsize, page_size)


def update(
    pages: Num[Array, "P K B width"],
    rows: Num[Array, "T K width"],
    page_ids: Int[Array, " T"],
    page_offsets: Int[Array, " T"],
) -> Num[Array, "P K B width"]:
    """Store `rows`, which are in the pool's data type; see `kv_update`. Aliases `pages`."""
    # Eight bits are exact in bfloat16, and what multiplies them is zero or one.
    rows = rows.astype(jnp.float32 if pages.dtype == jnp.float32 else jnp.bfloat16)
    for start in range(0, rows.shape[0], TOKENS_PER_CALL):
        some = slice(start, start + TOKENS_PER_CALL)
        pages = _update_some(pages, rows[some], page_ids[some], page_offsets[some])
    return pages


def _update_some(pages: Array, rows: Array, page_ids: Array, page_offsets: Array) -> Array:
    num_pages, num_kv_heads, page_size, width = pages.shape
    group = group_rows(pages.dtype, page_size)
    window = group + ALIGNMENT
    padded = -(-(rows.shape[0] + window) // ALIGNMENT) * ALIGNMENT
    rows = jnp.pad(rows, ((0, padded - rows.shape[0]), (0, 0), (0, 0))).transpose(1, 0, 2)  # [K, T, width]
    runs = _find_runs(page_ids, page_offsets, num_pages, page_size, group)
    return pl.pallas_call(
        partial(_kernel, group=group, window=window),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(runs),
            grid=(1,),
            in_specs=[
                pl.BlockSpec((num_kv_heads, padded, width), lambda *_: (0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((SLOTS, num_kv_heads, group, width), pages.dtype),
                pltpu.SemaphoreType.DMA((SLOTS,)),
                pltpu.SemaphoreType.DMA((SLOTS,)),
            ],
        ),
        input_output_aliases={len(runs) + 1: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=48 * 2**20),
        name="kv_update",
    )(*runs, rows, pages)


def _find_runs(
    page_ids: Int[Array, " T"], page_offsets: Int[Array, " T"], num_pages: int, page_size: int, group: int
) -> tuple[Array, ...]:
    """How many runs there are, and of each its first token, its tokens, its page, its first position, and whether it waits.

    The lists are as long as there are tokens.
    """
    num_tokens = page_ids.shape[0]
    real = page_ids < num_pages
    follows = (page_ids[1:] == page_ids[:-1]) & (page_offsets[1:] == page_offsets[:-1] + 1) & (page_offsets[1:] % group != 0)
    starts = real & ~jnp.pad(follows, (1, 0))
    number = jnp.cumsum(starts) - 1  # of the run that each token belongs to
    index = jnp.arange(num_tokens)
    first = jnp.minimum(jnp.sum(number[None, :] < index[:, None], axis=1), num_tokens - 1)
    mine = real[None, :] & (number[None, :] == index[:, None])
    page, offset = page_ids[first], page_offsets[first]
    tile = page * (page_size // group) + offset // group
    waits = jnp.zeros(num_tokens, bool)
    for distance in range(1, SLOTS):
        waits |= jnp.pad(tile[distance:] == tile[:-distance], (distance, 0)) if num_tokens > distance else False
    lists = (jnp.sum(starts)[None], first, jnp.sum(mine, axis=1), page, offset, waits)
    return tuple(part.astype(jnp.int32) for part in lists)


def _kernel(
    num_runs: Any,
    first: Any,
    count: Any,
    page: Any,
    offset: Any,
    waits: Any,
    rows: Any,
    pool: Any,
    out: Any,
    tiles: Any,
    read: Any,
    written: Any,
    *,
    group: int,
    window: int,
) -> None:
    del pool  # the same memory as `out`
    total = num_runs[0]

    def place(run: Array) -> Any:
        start = pl.multiple_of(offset[run] // group * group, group)
        return out.at[page[run], :, pl.ds(start, group)]

    def reading(run: Array) -> Any:
        slot = lax.rem(run, SLOTS)
        return pltpu.make_async_copy(place(run), tiles.at[slot], read.at[slot])

    def writing(run: Array) -> Any:
        slot = lax.rem(run, SLOTS)
        return pltpu.make_async_copy(tiles.at[slot], place(run), written.at[slot])

    def read_ahead(run: Array) -> None:
        pl.when((run < total) & (waits[jnp.minimum(run, total - 1)] == 0))(lambda: reading(run).start())

    for run in range(AHEAD):
        read_ahead(jnp.int32(run))

    def one_run(run: Array, _: None) -> None:
        late = waits[run] != 0
        # What was written two runs ago leaves its slot; a late run before this one has waited for it already.
        pl.when((run >= 2) & (waits[jnp.maximum(run - 1, 0)] == 0))(lambda: writing(run - 2).wait())
        read_ahead(run + AHEAD)

        @pl.when(late)
        def _after_the_last() -> None:
            writing(run - 1).wait()
            reading(run).start()

        reading(run).wait()
        _put_rows(rows, tiles, lax.rem(run, SLOTS), first[run], count[run], lax.rem(offset[run], group), group, window)
        writing(run).start()

    lax.fori_loop(0, total, one_run, None)
    last = jnp.maximum(total - 1, 0)
    pl.when((total >= 2) & (waits[last] == 0))(lambda: writing(last - 1).wait())
    pl.when(total >= 1)(lambda: writing(last).wait())


def _put_rows(rows: Any, tiles: Any, slot: Array, first: Array, count: Array, to: Array, group: int, window: int) -> None:
    """Rows of the tokens `first` and on go to the tile's positions `to` and on, in all heads."""
    start = pl.multiple_of(first // ALIGNMENT * ALIGNMENT, ALIGNMENT)
    position = lax.broadcasted_iota(jnp.int32, (group, window), 0) - to
    token = lax.broadcasted_iota(jnp.int32, (group, window), 1) + (start - first)
    moves = ((position == token) & (token >= 0) & (token < count)).astype(jnp.float32).astype(rows.dtype)
    position = lax.broadcasted_iota(jnp.int32, (group, 1), 0) - to
    new = (position >= 0) & (position < count)
    token = lax.broadcasted_iota(jnp.int32, (window, 1), 0) + (start - first)
    mine = (token >= 0) & (token < count)
    precision = lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None

    def one_head(head: Array, _: None) -> None:
        # Zeros for other sequences' tokens: what is no number there would come through the product.
        moving = jnp.where(mine, rows[head, pl.ds(start, window)].astype(jnp.float32), 0.0).astype(rows.dtype)
        moved = jnp.dot(moves, moving, precision=precision, preferred_element_type=jnp.float32)
        old = tiles[slot, head].astype(jnp.float32)
        tiles[slot, head] = jnp.where(new, moved, old).astype(tiles.dtype)

    lax.fori_loop(0, tiles.shape[1], one_head, None)
