"""The Pallas kernel behind `tpu.py`: walks the work list, copies pages in, keeps a running softmax in VMEM.

Owns VMEM, copies and the order of computation; the work list and its meaning are `tpu.Work`'s.

One turn computes a block of several pages for all KV heads, while the next block's pages, be they the next item's, are
copied into the other half of the buffer: one copy a page, all heads of it at once. The softmax is the online one of Milakov
and Gimelshein (2018). An item's queries are a window of the tile's rows, of the smallest height that holds them, so that a
decode does not pay for a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Num

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.tpu import Work

MIN_ROWS = 16
"""Rows of the lowest window: a tile of bfloat16 sublanes."""
HEIGHT_STEP = 8
"""Each height of window is so many times the one before."""
BLOCK_TOKENS = 256
"""Positions a turn, or one page where that is more."""
LANES = 128
# Stands for minus infinity where a difference of two of them must not be NaN.
MASKED = -1e30


def pool_width(head_dim: int) -> int:
    """Width of a pool row: K and V side by side, padded to whole lane tiles.

    Memory holds whole lane tiles anyway; but XLA lays a pool of another width out in another order, and would turn all of it
    around before each call.
    """
    return -(-2 * head_dim // LANES) * LANES


def splits_lanes(head_dim: int) -> bool:
    """Whether K and V of a pool row begin at whole lane tiles, so that each can be read alone."""
    return head_dim % LANES == 0


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything static about a call."""

    num_kv_heads: int
    group: int
    head_dim: int
    page_size: int
    pages_per_block: int
    tile_rows: int
    scale: float
    soft_cap: float | None
    window: int | None
    dtype: np.dtype
    kv_dtype: np.dtype

    @property
    def block(self) -> int:
        """Positions a turn."""
        return self.pages_per_block * self.page_size

    @property
    def heights(self) -> tuple[int, ...]:
        """Window heights in rows, the last the whole tile."""
        heights = []
        height = max(MIN_ROWS, self.group)
        while height < self.tile_rows:
            heights.append(height)
            height *= HEIGHT_STEP
        return (*heights, self.tile_rows)

    @property
    def acc_width(self) -> int:
        """Lanes of the output before what is not V's is cut off."""
        return self.head_dim if splits_lanes(self.head_dim) else pool_width(self.head_dim)


def attend(
    rows: Float[Array, "K R Dq"],
    pages: Num[Array, "P K B D2"],
    work: Work,
    kv_scales: Float[Array, "K 2"],
    sinks: Float[Array, "K G"] | None,
    *,
    scale: float,
    soft_cap: float | None,
    group: int,
    head_dim: int,
) -> Float[Array, "K R D"]:
    """Attention of the rows, `group` of them a token; see `tpu.paged_attention`. Rows that no item owns give zeros."""
    num_kv_heads, num_rows, query_width = rows.shape
    _, _, page_size, width = pages.shape
    tile_rows = work.tile_tokens * group
    shape = Shape(
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        pages_per_block=max(1, BLOCK_TOKENS // page_size),
        tile_rows=tile_rows,
        scale=scale,
        soft_cap=soft_cap,
        window=work.window,
        dtype=np.dtype(rows.dtype),
        kv_dtype=np.dtype(pages.dtype),
    )

    def of_tile(tile: Array, *_: Any) -> tuple[Any, ...]:
        return 0, tile, 0

    in_specs = [
        pl.BlockSpec(memory_space=pltpu.SMEM),
        pl.BlockSpec((num_kv_heads, tile_rows, query_width), of_tile),
        pl.BlockSpec(memory_space=pl.ANY),
    ]
    inputs: list[Array] = [kv_scales, rows, pages]
    if sinks is not None:
        # The pattern of a tile's first rows, which repeats down the tile.
        pattern = max(group, 8)
        sinks = jnp.tile(sinks.astype(jnp.float32), (1, pattern // group))
        inputs.append(jnp.broadcast_to(sinks[:, :, None], (num_kv_heads, pattern, LANES)))
        in_specs.append(pl.BlockSpec((num_kv_heads, pattern, LANES), lambda *_: (0, 0, 0)))
    state = (num_kv_heads, tile_rows)
    scratch = [
        pltpu.VMEM((2, shape.pages_per_block, num_kv_heads, page_size, width), pages.dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.VMEM((*state, LANES), jnp.float32),
        pltpu.VMEM((*state, LANES), jnp.float32),
        pltpu.VMEM((*state, shape.acc_width), jnp.float32),
        pltpu.SMEM((1,), jnp.int32),
    ]
    lists = (
        work.items_of_tile,
        work.table_start,
        work.first_token,
        work.end_token,
        work.position,
        work.first_page,
        work.end_page,
        work.table,
    )
    return pl.pallas_call(
        partial(_kernel, shape=shape, has_sinks=sinks is not None),
        out_shape=jax.ShapeDtypeStruct((num_kv_heads, num_rows, shape.head_dim), rows.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(lists),
            grid=(num_rows // tile_rows,),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((num_kv_heads, tile_rows, shape.head_dim), of_tile),
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=48 * 2**20),
        name="paged_attention",
    )(*lists, *inputs)


def _kernel(
    items_of_tile: Any,
    table_start: Any,
    first_token: Any,
    end_token: Any,
    position: Any,
    first_page: Any,
    end_page: Any,
    table: Any,
    scales: Any,
    queries: Any,
    pool: Any,
    *refs: Any,
    shape: Shape,
    has_sinks: bool,
) -> None:
    sinks, (out, buffer, arrived, best, total, acc, turns) = (refs[0], refs[1:]) if has_sinks else (None, refs)
    tile, num_tiles = pl.program_id(0), pl.num_programs(0)
    num_items = items_of_tile[num_tiles]
    per_block = shape.pages_per_block

    def for_pages(item: Array, number: Array, do: Callable[[Array, Array], None]) -> None:
        first = first_page[item] + number * per_block
        start = table_start[item] + first

        def one(place: Array, _: None) -> None:
            do(start + place, place)

        lax.fori_loop(0, jnp.minimum(end_page[item] - first, per_block), one, None)

    def fetch(item: Array, number: Array, slot: Array) -> None:
        def start(entry: Array, place: Array) -> None:
            pltpu.make_async_copy(pool.at[table[entry]], buffer.at[slot, place], arrived.at[slot]).start()

        for_pages(item, number, start)

    def wait(item: Array, number: Array, slot: Array) -> None:
        def one(entry: Array, place: Array) -> None:
            del entry
            pltpu.make_async_copy(pool.at[0], buffer.at[slot, place], arrived.at[slot]).wait()

        for_pages(item, number, one)

    @pl.when(tile == 0)
    def _begin() -> None:
        turns[0] = 0
        # What no copy has filled is multiplied by zero, which only finite values survive.
        buffer[...] = jnp.zeros_like(buffer)

        @pl.when(num_items > 0)
        def _first() -> None:
            fetch(*[jnp.int32(0)] * 3)

    out[...] = jnp.zeros_like(out)

    def one_item(item: Array, _: None) -> None:
        first, end = first_token[item] * shape.group, end_token[item] * shape.group
        num_blocks = pl.cdiv(end_page[item] - first_page[item], per_block)
        taken = jnp.bool_(False)
        for height in shape.heights:
            # Aligned, and not over the tile's end.
            start = jnp.minimum(first // MIN_ROWS * MIN_ROWS, shape.tile_rows - height)
            start = pl.multiple_of(start, MIN_ROWS)
            fits = (end <= start + height) & jnp.logical_not(taken)
            taken = taken | (end <= start + height)
            pl.when(fits)(partial(window, item, num_blocks, start, height))

    def window(item: Array, num_blocks: Array, start: Array, height: int) -> None:
        rows = pl.ds(start, height)
        first = first_token[item]
        token = (start + lax.broadcasted_iota(jnp.int32, (height, 1), 0)) // shape.group
        positions = token - first + position[item]
        _begin_softmax(rows, height, sinks, best, total, acc, shape)

        def one_block(number: Array, _: None) -> None:
            turn = turns[0]
            turns[0] = turn + 1
            slot, other = lax.rem(turn, 2), lax.rem(turn + 1, 2)

            @pl.when(number + 1 < num_blocks)
            def _next_block() -> None:
                fetch(item, number + 1, other)

            @pl.when((number + 1 == num_blocks) & (item + 1 < num_items))
            def _next_item() -> None:
                fetch(item + 1, jnp.int32(0), other)

            wait(item, number, slot)
            start_position = (first_page[item] + number * per_block) * shape.page_size
            last = position[item] + end_token[item] - first
            pl.when(number + 1 == num_blocks)(partial(_clean, buffer, slot, last - start_position, shape))
            key_positions = start_position + lax.broadcasted_iota(jnp.int32, (1, shape.block), 1)
            visible = key_positions <= positions
            if shape.window is not None:
                visible &= key_positions > positions - shape.window

            def one_head(head: Array, _: None) -> None:
                keys, values = _keys_and_values(buffer, slot, head, shape)
                _attend_block(queries[head, rows], keys, values, visible, scales[head, 0], head, rows, best, total, acc, shape)

            lax.fori_loop(0, shape.num_kv_heads, one_head, None)

        lax.fori_loop(0, num_blocks, one_block, None)
        mine = (token >= first) & (token < end_token[item])

        def finish(head: Array, _: None) -> None:
            result = acc[head, rows] * (scales[head, 1] / total[head, rows][:, :1])
            if not splits_lanes(shape.head_dim):
                result = result[:, shape.head_dim : 2 * shape.head_dim]
            kept = out[head, rows].astype(jnp.float32)
            out[head, rows] = jnp.where(mine, result, kept).astype(out.dtype)

        lax.fori_loop(0, shape.num_kv_heads, finish, None)

    lax.fori_loop(items_of_tile[tile], items_of_tile[tile + 1], one_item, None)


def _begin_softmax(rows: Any, height: int, sinks: Any, best: Any, total: Any, acc: Any, shape: Shape) -> None:
    state = (shape.num_kv_heads, height, LANES)
    if sinks is None:
        best[:, rows] = jnp.full(state, MASKED, jnp.float32)
        total[:, rows] = jnp.zeros(state, jnp.float32)
    else:
        pattern = sinks[...]
        best[:, rows] = jnp.concatenate([pattern] * (height // pattern.shape[1]), axis=1)
        total[:, rows] = jnp.ones(state, jnp.float32)
    acc[:, rows] = jnp.zeros((shape.num_kv_heads, height, shape.acc_width), jnp.float32)


def _clean(buffer: Any, slot: Array, visible: Array, shape: Shape) -> None:
    """Zero what the block's last page holds past its `visible` positions: it may be no number."""
    if shape.kv_dtype == jnp.int8:
        return
    place, kept = visible // shape.page_size, lax.rem(visible, shape.page_size)

    @pl.when(kept > 0)
    def _partial_page() -> None:
        page = buffer[slot, place].astype(jnp.float32)
        inside = lax.broadcasted_iota(jnp.int32, page.shape, 1) < kept
        buffer[slot, place] = jnp.where(inside, page, 0.0).astype(shape.kv_dtype)


def _keys_and_values(buffer: Any, slot: Array, head: Array, shape: Shape) -> tuple[Array, Array]:
    """A head's block of K and V, [block, D] each, or of whole pool rows, in the queries' data type."""
    block = buffer[slot, :, head]  # [pages, B, 2D]
    if block.dtype != jnp.float32 and shape.page_size < 8 * 4 // block.dtype.itemsize:
        block = block.astype(jnp.float32)  # a page fills no tile of its own type, so joining pages would shuffle sublanes
    block = block.reshape(shape.block, -1).astype(shape.dtype)
    if splits_lanes(shape.head_dim):
        return block[:, : shape.head_dim], block[:, shape.head_dim :]
    return block, block


def _attend_block(
    queries: Array,
    keys: Array,
    values: Array,
    visible: Array,
    key_scale: Array,
    head: Array,
    rows: Any,
    best: Any,
    total: Any,
    acc: Any,
    shape: Shape,
) -> None:
    """Fold one head's block into the running softmax of the window's rows."""
    dot = partial(
        lax.dot_general,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if shape.dtype == jnp.float32 else None,
    )
    scores = dot(queries, keys, (((1,), (1,)), ((), ()))) * (key_scale * shape.scale)
    if shape.soft_cap is not None:
        scores = shape.soft_cap * jnp.tanh(scores / shape.soft_cap)
    scores = jnp.where(visible, scores, MASKED)
    old_best = best[head, rows][:, :1]
    new_best = jnp.maximum(old_best, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp(scores - new_best)
    shrink = jnp.exp(old_best - new_best)
    new_total = total[head, rows][:, :1] * shrink + jnp.sum(weights, axis=1, keepdims=True)
    best[head, rows] = jnp.broadcast_to(new_best, (new_best.shape[0], LANES))
    total[head, rows] = jnp.broadcast_to(new_total, (new_total.shape[0], LANES))
    acc[head, rows] = acc[head, rows] * shrink + dot(weights.astype(shape.dtype), values, (((1,), (0,)), ((), ())))
