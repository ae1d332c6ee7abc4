"""What one multiprocessor does in the attention kernel of `gpu.py`: its segments, one after the other.

A segment is a block of queries, a KV head and a range of the block's tiles of keys and values. One warpgroup copies pages
into a ring in shared memory with the bulk copy engine, and runs ahead of two warpgroups that multiply (wgmma) and keep an
online softmax (Milakov and Gimelshein, 2018) in registers.

Owns the order of copies, barriers and products. Knows neither rows nor how its share was cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_layout import BLOCK, WorkerColumns

LOG2_E = math.log2(math.e)
# Stands for minus infinity where a difference of two of them must not be NaN.
MASKED = -1e30
NUM_CONSUMERS = 2
ROWS = 64
"""Rows of a wgmma product: the queries that one consumer holds."""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
"""A thread's; of 512 for one thread of each warpgroup."""

WGMMA = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclass(frozen=True, slots=True)
class Config:
    """What a kernel is compiled for, besides its operands' shapes.

    Attributes:
        tile: KV positions of a ring slot; a multiple of the page size, or a divisor.
        stages: slots of the ring; even where tiles are not shared, so that a slot always goes to the same consumer.
        shares_tiles: whether both consumers take each tile, for 64 queries each. Otherwise they take turns, for the same 64.
        direct: whether segments are whole blocks, whose outputs are final; otherwise they give parts, for `merge`.
        ping_pong: whether one consumer's products wait for the other's, so that its softmax runs beside them (as in
            FlashAttention-3; Shah et al., 2024). Only where tiles are shared.
        group: query heads of a KV head.
        scale, soft_cap, window: see `paged_attention`.
        q_slots: buffers for queries: with two, the next segment's are copied ahead.
        interpret: an `InterpretGPUParams`; the kernel then keeps to what the interpreter knows.
    """

    tile: int
    stages: int
    q_slots: int
    shares_tiles: bool
    direct: bool
    ping_pong: bool
    group: int
    scale: float
    soft_cap: float | None
    window: int | None
    interpret: Any = None


def swizzle_bytes(columns: int, itemsize: int) -> int:
    """The widest swizzle that divides a row of a tile; 0 where none does."""
    return next((swizzle for swizzle in (128, 64, 32) if columns * itemsize % swizzle == 0), 0)


def widened_at_once(head_dim: int) -> int:
    """Columns of eight-bit pages that are converted at a time."""
    return 64 if head_dim > 128 else head_dim


class Segment(NamedTuple):
    """Tiles `first` to `end` of a block and KV head.

    `number` counts the worker's segments before it and `step` its tiles; `q_slot` is where the queries are.
    """

    head: Any
    block: Any
    first: Any
    end: Any
    number: Any
    step: Any
    q_slot: Any


@dataclass(frozen=True, slots=True)
class Worker:
    """The refs of one worker, and its warpgroups' loops over them. Refs in shared memory are None where unused."""

    config: Config
    block_rows: int
    q_ref: Any
    kv_ref: Any
    table_ref: Any
    blocks_ref: Any
    workers_ref: Any
    scales_ref: Any
    sinks_ref: Any
    out_refs: tuple[Any, ...]
    q_smem: Any
    kv_smem: Any
    q_full: Any
    q_free: Any
    kv_full: Any
    kv_free: Any
    both: Any = None
    out_smem: Any = None
    sum_smem: Any = None
    wide_smem: Any = None
    weights_smem: Any = None

    @property
    def head_dim(self) -> int:
        return self.q_smem.shape[-1]

    @property
    def page_size(self) -> int:
        return self.kv_ref.shape[2]

    def run(self) -> None:
        """Be the warpgroup that this is."""
        me = lax.axis_index("warpgroup")

        @pl.when(me == NUM_CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            self.drain(self.for_segments(self.produce))

        @pl.when(me < NUM_CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            self.for_segments(partial(self.consume, me))
            plgpu.wait_smem_to_gmem(0)

    def for_segments(self, do: Callable[[Segment], None]) -> tuple[Any, Any]:
        """Call `do` for each of the worker's segments; how many there were, and tiles in all."""
        worker = lax.axis_index("worker")
        mine = WorkerColumns(*(self.workers_ref[worker, i] for i in range(len(WorkerColumns._fields))))

        def one(number: Any, step: Any) -> Any:
            q_slot = lax.rem(number, self.config.q_slots)
            if self.config.direct:
                # Back and forth over blocks from the longest to the shortest, which levels the workers.
                num_workers, num_heads = self.workers_ref.shape[0], self.q_ref.shape[0]
                place = worker + lax.rem(number, 2) * (num_workers - 1 - 2 * worker)
                index = number * num_workers + place
                head, block = lax.rem(index, num_heads), lax.div(index, num_heads)
                first, end = jnp.int32(0), self.blocks_ref[block, BLOCK.num_tiles]
            else:
                index = mine.first_segment + number
                head, block = lax.div(index, mine.num_blocks), lax.rem(index, mine.num_blocks)
                base = head * mine.tiles_per_head + self.blocks_ref[block, BLOCK.tiles_before]
                first = jnp.maximum(mine.first_tile - base, 0)
                end = jnp.minimum(mine.end_tile - base, self.blocks_ref[block, BLOCK.num_tiles])
            do(Segment(head, block, first, end, number, step, q_slot))
            return step + end - first

        return mine.num_segments, lax.fori_loop(0, mine.num_segments, one, jnp.int32(0))

    # --- the copying warpgroup ------------------------------------------------------------------------------------------

    def produce(self, segment: Segment) -> None:
        """Copy a segment's queries and tiles, as slots come free."""
        tile, stages = self.config.tile, self.config.stages
        copied = min(tile, self.page_size)
        copies, per_page = tile // copied, self.page_size // copied
        row, first_page, last_page = (
            self.blocks_ref[segment.block, i] for i in (BLOCK.row, BLOCK.first_page, BLOCK.last_page)
        )

        @pl.when(segment.number >= self.config.q_slots)
        def _() -> None:
            plgpu.barrier_wait(self.q_free.at[segment.q_slot])

        plgpu.copy_gmem_to_smem(
            self.q_ref.at[segment.head, pl.ds(segment.block * self.block_rows, self.block_rows)],
            self.q_smem.at[segment.q_slot, pl.ds(0, self.block_rows)],
            self.q_full.at[segment.q_slot],
        )

        def one_tile(number: Any, step: Any) -> Any:
            slot = lax.rem(step, stages)
            piece = number * copies
            # Past the end the last page again: what a copy brings is never another row's.
            page_ids = [
                self.table_ref[row, jnp.minimum(first_page + lax.div(piece + i, per_page), last_page)] for i in range(copies)
            ]
            offset = lax.rem(piece, per_page) * copied

            @pl.when(step >= stages)
            def _() -> None:
                plgpu.barrier_wait(self.kv_free.at[slot])

            for i, page_id in enumerate(page_ids):
                plgpu.copy_gmem_to_smem(
                    self.kv_ref.at[page_id, segment.head, pl.ds(offset, copied)],
                    self.kv_smem.at[slot, pl.ds(i * copied, copied)],
                    self.kv_full.at[slot],
                )
            return step + 1

        lax.fori_loop(segment.first, segment.end, one_tile, segment.step)

    def drain(self, done: tuple[Any, Any]) -> None:
        """See each slot come free for the last time. Only jax 0.11's interpreter asks for it; here nobody waits for us."""
        for count, slots, free in zip(
            done, (self.config.q_slots, self.config.stages), (self.q_free, self.kv_free), strict=True
        ):

            def wait(number: Any, _: None, slots: int = slots, free: Any = free) -> None:
                plgpu.barrier_wait(free.at[lax.rem(number, slots)])

            lax.fori_loop(jnp.maximum(count - slots, 0), count, wait, None)

    # --- the multiplying warpgroups -------------------------------------------------------------------------------------

    def consume(self, me: Any, segment: Segment) -> None:
        """Attend a block's queries to a segment's tiles."""
        config = self.config
        first_page, position, end_position = (
            self.blocks_ref[segment.block, i] for i in (BLOCK.first_page, BLOCK.position, BLOCK.end_position)
        )
        origin = first_page * self.page_size
        first_row = me * ROWS if config.shares_tiles else 0
        queries = self.q_smem.at[segment.q_slot, pl.ds(first_row, ROWS)]
        scale = config.scale if self.wide_smem is None else self.scales_ref[segment.head, 0] * config.scale
        plgpu.barrier_wait(self.q_full.at[segment.q_slot])
        if config.ping_pong:
            pl.when(me == 1)(self.meet)

        def one_tile(number: Any, carry: Any) -> Any:
            best, total, acc = carry
            slot = lax.rem(segment.step + number - segment.first, config.stages)
            start = origin + number * config.tile
            plgpu.barrier_wait(self.kv_full.at[slot])
            num_seen = end_position - start
            if self.wide_smem is None:  # while few registers are in use
                values = self.values(me, slot, num_seen)

            def multiply_keys(ref: Any) -> Any:
                plgpu.wgmma(ref, queries, self.keys(me, slot).transpose((1, 0)))
                if config.ping_pong:
                    self.meet()
                return ref[...]

            scores = pl.run_scoped(multiply_keys, plgpu.ACC((ROWS, config.tile), jnp.float32))
            scores, to_base_2 = self.cap(scores, scale)
            scores = self.mask(scores, start, position, end_position, first_row)
            new_best = jnp.maximum(best, scores.max(axis=1) * to_base_2)
            shrink = jnp.exp2(best - new_best)
            weights = jnp.exp2(scores * to_base_2 - lax.broadcast_in_dim(new_best, scores.shape, [0]))
            total = total * shrink + weights.sum(axis=1)
            acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
            weights = weights.astype(self.q_smem.dtype)
            if self.wide_smem is not None:  # where the keys were
                values = self.values(me, slot, num_seen)
            if config.ping_pong:
                self.meet()
            acc = self.add_product(me, acc, weights, values)
            plgpu.barrier_arrive(self.kv_free.at[slot])
            return new_best, total, acc

        carry = (
            plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), ROW),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW),
            plgpu.layout_cast(jnp.zeros((ROWS, self.head_dim), jnp.float32), WGMMA),
        )
        if config.shares_tiles:
            carry = lax.fori_loop(segment.first, segment.end, one_tile, carry)
        else:
            first = segment.first + lax.rem(segment.step + me, 2)
            turns = lax.div(jnp.maximum(segment.end - first, 0) + 1, 2)
            carry = lax.fori_loop(0, turns, lambda turn, carry: one_tile(first + 2 * turn, carry), carry)
        if config.ping_pong:
            pl.when(me == 0)(self.meet)
        if config.direct:
            self.store_final(me, segment, first_row, *carry)
        else:
            plgpu.barrier_arrive(self.q_free.at[segment.q_slot])
            self.store_part(me, segment, *carry)

    def meet(self) -> None:
        """Wait for the other consumer to be here too."""
        plgpu.barrier_arrive(self.both)
        plgpu.barrier_wait(self.both)

    def keys(self, me: Any, slot: Any) -> Any:
        """A slot's keys as wgmma takes them."""
        narrow = self.kv_smem.at[slot, :, pl.ds(0, self.head_dim)]
        return narrow if self.wide_smem is None else self.widen(me, narrow)

    def values(self, me: Any, slot: Any, num_seen: Any) -> Any:
        """A slot's values as wgmma takes them, zero from row `num_seen` on.

        They may be no numbers there, and zero times that is none either.
        """
        tile, dim = self.config.tile, self.head_dim
        values = self.kv_smem.at[slot, :, pl.ds(dim, dim)]
        own = self.wide_smem is not None
        if own:
            values = self.widen(me, values)

        def clean() -> None:
            width = swizzle_bytes(dim, 2) // 2  # few columns at a time: registers are short
            row = plgpu.broadcasted_iota(jnp.int32, (tile, width), 0, layout=WGMMA)
            for column in range(0, dim, width):
                some = values.at[:, pl.ds(column, width)]
                found = some[...]
                some[...] = jnp.where(row < num_seen, found, jnp.zeros_like(found))
            plgpu.commit_smem()

        @pl.when(num_seen < tile)
        def _() -> None:
            if own or not self.config.shares_tiles:
                clean()
            elif self.config.ping_pong:  # the other is half a tile behind, and they meet before it multiplies
                pl.when(me == 0)(clean)
            else:
                pl.when(me == 0)(clean)
                self.meet()

        return values

    def widen(self, me: Any, narrow: Any) -> Any:
        """A copy in the queries' dtype, which lasts until the next."""
        wide = self.wide_smem.at[me]
        width = widened_at_once(self.head_dim)
        for column in range(0, self.head_dim, width):
            some = pl.ds(column, width)
            wide[:, some] = narrow[:, some].astype(wide.dtype)
        plgpu.commit_smem()
        return wide

    def cap(self, scores: Any, scale: Any) -> tuple[Any, Any]:
        """Capped scores, and the factor to powers of two that they lack."""
        cap = self.config.soft_cap
        if cap is None:
            return scores, scale * LOG2_E
        # The hardware's tanh is good to 11 bits only.
        return 1.0 - 2.0 / (jnp.exp2(scores * (scale * (2 * LOG2_E / cap))) + 1.0), cap * LOG2_E

    def mask(self, scores: Any, start: Any, position: Any, end_position: Any, first_row: Any) -> Any:
        """Hide from each query what comes after it, and what its window has left behind."""
        shape, window = scores.shape, self.config.window
        if not self.config.shares_tiles:
            keys = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA) + (start - end_position)
            seen = keys < 0 if window is None else (keys < 0) & (keys >= -window)
            return jnp.where(seen, scores, MASKED)
        group, tile = self.config.group, self.config.tile
        to_first = start - position  # from the block's first token to the tile's first key

        def hide(scores: Any) -> Any:
            row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)
            ahead = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA) + (to_first - lax.div(row + first_row, group))
            seen = ahead <= 0 if window is None else (ahead <= 0) & (ahead > -window)
            return jnp.where(seen, scores, MASKED)

        # Of all tiles but a few, each token sees all or none.
        hides = to_first + tile - 1 > lax.div(first_row, group)
        if window is not None:
            hides |= to_first <= lax.div(first_row + (ROWS - 1), group) - window
        return lax.cond(hides, hide, lambda scores: scores, scores)

    def add_product(self, me: Any, acc: Any, weights: Any, values: Any) -> Any:
        """`acc + weights @ values`."""
        if self.weights_smem is None:

            def multiply(ref: Any) -> None:
                plgpu.wgmma(ref, weights, values)

            return pl.run_state(multiply)(plgpu.ACC.init(acc))
        self.weights_smem[me] = weights
        plgpu.commit_smem()

        def multiply_anew(ref: Any) -> Any:
            plgpu.wgmma(ref, self.weights_smem.at[me], values)
            return ref[...]

        return acc + pl.run_scoped(multiply_anew, plgpu.ACC(acc.shape, jnp.float32))

    def store_part(self, me: Any, segment: Segment, best: Any, total: Any, acc: Any) -> None:
        """Write normalised outputs and the logarithm of their sum."""
        out_ref, sum_ref = self.out_refs
        total = jnp.maximum(total, 1e-30)  # zero where this consumer had no tile
        outputs = acc / lax.broadcast_in_dim(total, acc.shape, [0])
        num_blocks = self.blocks_ref.shape[0]
        part = NUM_CONSUMERS * (segment.head * num_blocks + segment.block + lax.axis_index("worker")) + me
        stored, width = out_ref.shape[1], self.out_smem.shape[2]
        for column in range(0, self.head_dim, width):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.out_smem[me] = outputs[:, column : column + width]
            if column == 0:
                self.sum_smem[me] = best + jnp.log2(total)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(self.out_smem.at[me, pl.ds(0, stored)], out_ref.at[part, :, pl.ds(column, width)])
            if column == 0:
                plgpu.copy_smem_to_gmem(self.sum_smem.at[me], sum_ref.at[part])

    def store_final(self, me: Any, segment: Segment, first_row: Any, best: Any, total: Any, acc: Any) -> None:
        """Let sinks join the sums, and write outputs where the queries lay."""
        (out_ref,) = self.out_refs
        sinks = plgpu.load(self.sinks_ref.at[segment.head, pl.ds(first_row, ROWS)], layout=ROW, optimized=False) * LOG2_E
        new_best = jnp.maximum(best, sinks)
        shrink = jnp.exp2(best - new_best)
        factor = shrink / jnp.maximum(total * shrink + jnp.exp2(sinks - new_best), 1e-30)
        if self.wide_smem is not None:
            factor = factor * self.scales_ref[segment.head, 1]
        staged = self.q_smem.at[segment.q_slot, pl.ds(first_row, ROWS)]  # only this consumer reads those queries
        staged[...] = (acc * lax.broadcast_in_dim(factor, acc.shape, [0])).astype(staged.dtype)
        plgpu.commit_smem()
        first = segment.block * self.block_rows + first_row
        plgpu.copy_smem_to_gmem(staged, out_ref.at[segment.head, pl.ds(first, ROWS)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.q_free.at[segment.q_slot])
