"""The Pallas kernel behind `tpu.py`: walks the work list, copies pages in, keeps a running softmax in VMEM.

Owns VMEM, copies and the order of computation; the work list and its meaning are `tpu.Work`'s.

One turn computes a block of several pages for all KV heads, while the next block's pages, be they the next item's, are
copied into the other half of the buffer: one copy a page, all heads of it at once. The softmax is the online one of Milakov
and Gimelshein (2018). An item's queries are a window of the tile's rows, of the smallest height that holds them, so that a
decode does not pay for a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.tpu import Work

MIN_ROWS = 16
"""Rows of the lowest window: a tile of bfloat16 sublanes."""
HEIGHT_STEP = 8
"""Each height of window is so many times the one before."""
VMEM_LIMIT_BYTES = 48 * 2**20
"""No more than the 64 MiB of the smallest supported TPU."""
BLOCK_TOKENS = 512
"""Positions a turn, while their pages for all heads take no more than:"""
BLOCK_BYTES = 4 * 2**20
"""By the compiler's schedules for v5e and v6e, 512 positions a turn take 0.72 and 0.61 of the bundles that two turns of 256
take, since there is more to do while a product or a reduction is under way."""
MIN_BLOCK_TOKENS = 128
LANES = 128
LOG2_E = math.log2(math.e)
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
    def vmem_bytes(self) -> int:
        """What the kernel allocates, the pipeline's second copies of queries and outputs included."""
        rows = self.num_kv_heads * self.tile_rows
        width = pool_width(self.head_dim)
        buffer = 2 * self.block * self.num_kv_heads * width * self.kv_dtype.itemsize
        query_width = self.head_dim if splits_lanes(self.head_dim) else width
        queries_and_outputs = 2 * (query_width + -(-self.head_dim // LANES) * LANES) * self.dtype.itemsize
        return buffer + rows * (queries_and_outputs + 4 * (2 * LANES + self.acc_width))

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
        pages_per_block=(work.block_tokens or _block_tokens(num_kv_heads * width * pages.dtype.itemsize)) // page_size,
        tile_rows=tile_rows,
        scale=scale,
        soft_cap=soft_cap,
        window=work.window,
        dtype=np.dtype(rows.dtype),
        kv_dtype=np.dtype(pages.dtype),
    )

    if shape.vmem_bytes > VMEM_LIMIT_BYTES:
        raise ValueError(
            f"paged_attention: {num_kv_heads} KV heads of {group} query heads of {shape.head_dim} on one device take "
            f"{shape.vmem_bytes >> 20} MiB of VMEM and the kernel has {VMEM_LIMIT_BYTES >> 20}; split them over more devices"
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
        sinks = jnp.tile(LOG2_E * sinks.astype(jnp.float32), (1, pattern // group))
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
    lists = [getattr(work, field.name) for field in fields(_Lists)]
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
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT_BYTES),
        name="paged_attention",
    )(*lists, *inputs)


def _block_tokens(bytes_per_token: int) -> int:
    tokens = BLOCK_TOKENS
    while tokens > MIN_BLOCK_TOKENS and tokens * bytes_per_token > BLOCK_BYTES:
        tokens //= 2
    return tokens


@dataclass(frozen=True, slots=True)
class _Lists:
    """The work list in scalar memory; see `tpu.Work`."""

    items_of_tile: Any
    table_start: Any
    first_token: Any
    end_token: Any
    position: Any
    first_page: Any
    end_page: Any
    table: Any


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What the kernel keeps from turn to turn.

    Attributes:
        buffer: two blocks of pages, [2, pages, K, B, 2D].
        arrived: a semaphore for each.
        best: the rows' running maxima in base 2, [K, R, LANES], all lanes alike.
        total: their sums of weights, [K, R, LANES], to be summed over the lanes.
        acc: their weighted sums of values, [K, R, acc_width].
        turns: how many blocks have been computed, which tells the half of the buffer that is next.
    """

    buffer: Any
    arrived: Any
    best: Any
    total: Any
    acc: Any
    turns: Any


def _kernel(*refs: Any, shape: Shape, has_sinks: bool) -> None:
    """One tile: all items that own tokens of it."""
    num_lists, num_scratch = len(fields(_Lists)), len(fields(_Scratch))
    work, scratch = _Lists(*refs[:num_lists]), _Scratch(*refs[-num_scratch:])
    scales, queries, pool, *rest = refs[num_lists:-num_scratch]
    sinks, out = rest if has_sinks else (None, *rest)
    tile = pl.program_id(0)
    num_items = work.items_of_tile[pl.num_programs(0)]

    @pl.when(tile == 0)
    def _begin() -> None:
        scratch.turns[0] = 0
        # What no copy has filled is multiplied by zero, which only finite values survive.
        scratch.buffer[...] = jnp.zeros_like(scratch.buffer)
        zero = jnp.int32(0)
        pl.when(num_items > 0)(partial(_fetch, zero, zero, zero, work, pool, scratch, shape))

    out[...] = jnp.zeros_like(out)

    def one_item(item: Array, _: None) -> None:
        first, end = work.first_token[item] * shape.group, work.end_token[item] * shape.group
        taken = jnp.bool_(False)
        for height in shape.heights:
            # Aligned, and not over the tile's end.
            start = jnp.minimum(first // MIN_ROWS * MIN_ROWS, shape.tile_rows - height)
            window = Window(item, pl.multiple_of(start, MIN_ROWS), height)
            fits = end <= start + height
            attend_window = partial(_attend_window, window, num_items, work, scales, queries, pool, sinks, out, scratch, shape)
            pl.when(fits & jnp.logical_not(taken))(attend_window)
            taken = taken | fits

    lax.fori_loop(work.items_of_tile[tile], work.items_of_tile[tile + 1], one_item, None)


@dataclass(frozen=True, slots=True)
class Window:
    """The rows of a tile that an item's computation covers: its own and whatever else makes the height."""

    item: Array
    start: Array
    height: int

    @property
    def rows(self) -> Any:
        return pl.ds(self.start, self.height)

    def tokens(self, group: int) -> Int[Array, "R 1"]:
        """Each row's token, counted in the tile."""
        return (self.start + lax.broadcasted_iota(jnp.int32, (self.height, 1), 0)) // group


def _for_pages(item: Array, number: Array, do: Callable[[Array, Array], None], work: _Lists, shape: Shape) -> None:
    """Call `do` with the table entry and the place in the buffer of each page of the item's block `number`."""
    first = work.first_page[item] + number * shape.pages_per_block
    entry = work.table_start[item] + first

    def one(place: Array, _: None) -> None:
        do(entry + place, place)

    lax.fori_loop(0, jnp.minimum(work.end_page[item] - first, shape.pages_per_block), one, None)


def _fetch(item: Array, number: Array, slot: Array, work: _Lists, pool: Any, scratch: _Scratch, shape: Shape) -> None:
    """Start copying the item's block `number`."""

    def one(entry: Array, place: Array) -> None:
        page = pool.at[work.table[entry]]
        pltpu.make_async_copy(page, scratch.buffer.at[slot, place], scratch.arrived.at[slot]).start()

    _for_pages(item, number, one, work, shape)


def _wait(item: Array, number: Array, slot: Array, work: _Lists, pool: Any, scratch: _Scratch, shape: Shape) -> None:
    """Wait for what `_fetch` started."""

    def one(entry: Array, place: Array) -> None:
        del entry  # any page: what is waited for are its bytes
        pltpu.make_async_copy(pool.at[0], scratch.buffer.at[slot, place], scratch.arrived.at[slot]).wait()

    _for_pages(item, number, one, work, shape)


def _attend_window(
    window: Window,
    num_items: Array,
    work: _Lists,
    scales: Any,
    queries: Any,
    pool: Any,
    sinks: Any,
    out: Any,
    scratch: _Scratch,
    shape: Shape,
) -> None:
    """One item: its blocks of pages, one after another, then its outputs."""
    item = window.item
    first_token, position = work.first_token[item], work.position[item]
    end_position = position + work.end_token[item] - first_token
    num_blocks = pl.cdiv(work.end_page[item] - work.first_page[item], shape.pages_per_block)
    _begin_softmax(window, sinks, scratch, shape)

    def one_block(number: Array, _: None) -> None:
        turn = scratch.turns[0]
        scratch.turns[0] = turn + 1
        slot, other = lax.rem(turn, 2), lax.rem(turn + 1, 2)
        is_last = number + 1 == num_blocks
        fetch = partial(_fetch, slot=other, work=work, pool=pool, scratch=scratch, shape=shape)
        pl.when(jnp.logical_not(is_last))(partial(fetch, item, number + 1))
        pl.when(is_last & (item + 1 < num_items))(partial(fetch, item + 1, jnp.int32(0)))
        _wait(item, number, slot, work, pool, scratch, shape)

        start = (work.first_page[item] + number * shape.pages_per_block) * shape.page_size
        pl.when(is_last)(partial(_clean, end_position - start, slot, scratch, shape))
        compute = partial(_attend_block, window, start, first_token, position, slot, scales, queries, scratch, shape)
        if window.height == shape.heights[0]:
            compute(masked=True)
            return
        all_visible = start + shape.block <= position + 1
        if shape.window is not None:
            all_visible &= start > end_position - 1 - shape.window
        pl.when(all_visible)(partial(compute, masked=False))
        pl.when(jnp.logical_not(all_visible))(partial(compute, masked=True))

    lax.fori_loop(0, num_blocks, one_block, None)
    _finish(window, work, scales, out, scratch, shape)


def _begin_softmax(window: Window, sinks: Any, scratch: _Scratch, shape: Shape) -> None:
    state = (shape.num_kv_heads, window.height, LANES)
    if sinks is None:
        scratch.best[:, window.rows] = jnp.full(state, MASKED, jnp.float32)
        scratch.total[:, window.rows] = jnp.zeros(state, jnp.float32)
    else:
        pattern = sinks[...]
        scratch.best[:, window.rows] = jnp.concatenate([pattern] * (window.height // pattern.shape[1]), axis=1)
        scratch.total[:, window.rows] = jnp.full(state, 1 / LANES, jnp.float32)
    scratch.acc[:, window.rows] = jnp.zeros((shape.num_kv_heads, window.height, shape.acc_width), jnp.float32)


def _clean(visible: Array, slot: Array, scratch: _Scratch, shape: Shape) -> None:
    """Zero what the block's last page holds past its `visible` positions: it may be no number."""
    if shape.kv_dtype == jnp.int8:
        return
    place, kept = visible // shape.page_size, lax.rem(visible, shape.page_size)

    @pl.when(kept > 0)
    def _partial_page() -> None:
        page = scratch.buffer[slot, place].astype(jnp.float32)
        inside = lax.broadcasted_iota(jnp.int32, page.shape, 1) < kept
        scratch.buffer[slot, place] = jnp.where(inside, page, 0.0).astype(shape.kv_dtype)


def _attend_block(
    window: Window,
    start: Array,
    first_token: Array,
    position: Array,
    slot: Array,
    scales: Any,
    queries: Any,
    scratch: _Scratch,
    shape: Shape,
    *,
    masked: bool,
) -> None:
    """Fold one block, whose first position is `start`, into the running softmax of the window's rows, head by head."""

    def one_head(head: Array, _: None) -> None:
        keys, values = _keys_and_values(slot, head, scratch, shape)
        scores = _dot(queries[head, window.rows], keys, 1, shape) * (scales[head, 0] * _score_factor(shape))
        if shape.soft_cap is not None:
            scores = (shape.soft_cap * LOG2_E) * jnp.tanh(scores)
        if masked:
            last_seen = window.tokens(shape.group) + (position - first_token - start)
            key = lax.broadcasted_iota(jnp.int32, (1, shape.block), 1)
            visible = key <= last_seen
            if shape.window is not None:
                visible &= key > last_seen - shape.window
            scores = jnp.where(visible, scores, MASKED)
        _update_softmax(scores, values, head, window.rows, scratch, shape)

    lax.fori_loop(0, shape.num_kv_heads, one_head, None)


def _score_factor(shape: Shape) -> float:
    """What makes scores of products: to base 2, or to soft caps."""
    return shape.scale * LOG2_E if shape.soft_cap is None else shape.scale / shape.soft_cap


def _keys_and_values(slot: Array, head: Array, scratch: _Scratch, shape: Shape) -> tuple[Array, Array]:
    """A head's block of K and V, [block, D] each, or of whole pool rows, in the queries' data type."""
    block = scratch.buffer[slot, :, head]  # [pages, B, 2D]
    if block.dtype != jnp.float32 and shape.page_size < 8 * 4 // block.dtype.itemsize:
        block = block.astype(jnp.float32)  # a page fills no tile of its own type, so joining pages would shuffle sublanes
    block = block.reshape(shape.block, -1).astype(shape.dtype)
    if splits_lanes(shape.head_dim):
        return block[:, : shape.head_dim], block[:, shape.head_dim :]
    return block, block


def _dot(left: Array, right: Array, right_axis: int, shape: Shape) -> Array:
    """Product over `left`'s columns in float32."""
    precision = lax.Precision.HIGHEST if shape.dtype == jnp.float32 else None
    return lax.dot_general(
        left, right, (((1,), (right_axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _update_softmax(
    scores: Float[Array, "R block"],
    values: Float[Array, "block width"],
    head: Array,
    rows: Any,
    scratch: _Scratch,
    shape: Shape,
) -> None:
    best, total, acc = scratch.best, scratch.total, scratch.acc
    old_best = best[head, rows]
    new_best = jnp.maximum(old_best, jnp.max(scores, axis=1, keepdims=True))  # [R, LANES], all lanes alike
    weights = jnp.exp2(scores - _widen(new_best, shape.block))
    shrink = jnp.exp2(old_best - new_best)
    best[head, rows] = new_best
    total[head, rows] = total[head, rows] * shrink + _fold(weights)
    added = _dot(weights.astype(shape.dtype), values, 0, shape)
    acc[head, rows] = acc[head, rows] * _widen(shrink, shape.acc_width) + added


def _widen(column: Float[Array, "R lanes"], width: int) -> Float[Array, "R width"]:
    """A column that all lanes hold, in `width` lanes: the same registers over and over, where a broadcast would shuffle."""
    copies = -(-width // LANES)
    wide = jnp.concatenate([column] * copies, axis=1) if copies > 1 else column
    return wide[:, :width]


def _fold(weights: Float[Array, "R block"]) -> Float[Array, "R lanes"]:
    """Sums over every `LANES`th column: what is left to sum waits for the item's end."""
    parts = [weights[:, start : start + LANES] for start in range(0, weights.shape[1], LANES)]
    return sum(parts[1:], parts[0])


def _finish(window: Window, work: _Lists, scales: Any, out: Any, scratch: _Scratch, shape: Shape) -> None:
    """Write the outputs of the item's own rows; the window's others keep what they have."""
    item, rows = window.item, window.rows
    tokens = window.tokens(shape.group)
    mine = (tokens >= work.first_token[item]) & (tokens < work.end_token[item])

    def one_head(head: Array, _: None) -> None:
        total = jnp.sum(scratch.total[head, rows], axis=1, keepdims=True)
        result = scratch.acc[head, rows] * (scales[head, 1] / total)
        if not splits_lanes(shape.head_dim):
            result = result[:, shape.head_dim : 2 * shape.head_dim]
        kept = out[head, rows].astype(jnp.float32)
        out[head, rows] = jnp.where(mine, result, kept).astype(out.dtype)

    lax.fori_loop(0, shape.num_kv_heads, one_head, None)
