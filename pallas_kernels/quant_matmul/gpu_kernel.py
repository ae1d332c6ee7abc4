"""The kernel of `gpu.py` for Hopper: tiles of quantised weights against tiles of tokens, in Mosaic GPU.

One warpgroup copies tiles into a ring in shared memory with the bulk copy engine, and runs ahead of two that multiply
(wgmma), each for its half of a tile's rows. Weights go from shared memory to registers as they are, are put in the order that
the tensor cores want while they are small, widened there, and multiplied out of registers: what is dequantised is written
nowhere. Integers of 8 bits are exact in bfloat16, and a group's scale multiplies its sums, so nothing is rounded before the
end.

Owns the order of copies, barriers and products, and the shared memory. Does not know how sizes were chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Num

STRETCH = 128
"""Inputs of a tile."""
NUM_CONSUMERS = 2
BLOCK = 64
"""Rows of a wgmma product."""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 32
"""A thread's, where there are many sums; of 512 for one thread of each warpgroup."""
FEW_SUMS, MANY_SUMS = 16, 96
"""A thread's. Up to the first, two workers fit on a multiprocessor. From past the second, a third of its registers is too few
for a warpgroup that multiplies; before it, what is left is too few for the one that copies."""
TOKEN_TILES_AT_ONCE = 8
"""How many token tiles a tile of rows goes with before the next rows come: what is read together stays in the L2 cache."""
MAX_STORED_COLUMNS = 64
BARRIER_BYTES = 1024
"""More than all barriers and paddings take."""

WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)
COLUMN = WGMMA.reduce(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What a kernel is compiled for, besides its operands' shapes.

    Attributes:
        group: inputs that share a scale, at most `STRETCH`; 0 for all of a row.
        blocks: wgmma products, of 64 rows, that a consumer does for each tile.
        tokens: of a tile; a multiple of 8.
        tokens_last: whether activations are `[in, T]`, as they come, and not `[T, in]`: in bfloat16, and where the tokens of
            a tile fill rows of the swizzle.
        splits: parts that the inputs are cut into, each of which gives its own sums.
        stages: slots of the ring.
        num_workers: how many share the tiles.
        interpret: an `InterpretGPUParams`; products then take their operands from shared memory, as the interpreter wants.
    """

    group: int
    blocks: int
    tokens: int
    tokens_last: bool
    splits: int
    stages: int
    num_workers: int
    interpret: Any = None

    @property
    def rows(self) -> int:
        return NUM_CONSUMERS * self.rows_of_consumer

    @property
    def rows_of_consumer(self) -> int:
        return BLOCK * self.blocks

    @property
    def groups(self) -> int:
        """Of a tile; 0 where a row has one."""
        return STRETCH // self.group if self.group else 0

    @property
    def sums(self) -> int:
        """A thread's in the end, and a group's beside them."""
        return self.tokens // 2 * (self.blocks + (1 if self.group else 0))


def product(
    x: Num[Array, "_ _"],
    values: Num[Array, "out in"],
    scales: Float[Array, "G out"],
    token_scales: Float[Array, " T"] | None,
    *,
    dtype: Any,
    config: Config,
) -> Float[Array, "splits out T"]:
    """Sums of each split; added up they are the product with `scales * values`, times a token's scale where there are any.

    Args:
        x: `[T, in]`, or `[in, T]` where `config.tokens_last`, in whole tiles; bfloat16, or int8 where `values` are too and a
            row has one scale.
        values: int8 or int4; whole tiles.
        dtype: of the sums.
    """
    num_out, num_in = values.shape
    num_tokens = x.shape[1 if config.tokens_last else 0]
    tiles = _Tiles(num_out // config.rows, num_tokens // config.tokens, num_in // STRETCH, config.splits)
    buffers = _buffers(config, x.dtype, values.dtype, scales.dtype, dtype)
    names = tuple(buffers)
    scratch = [buffer.scratch() for buffer in buffers.values()]
    scratch.append(plgpu.Barrier(num_barriers=config.stages, num_arrivals=3 if config.group else 2))
    scratch.append(plgpu.Barrier(num_barriers=config.stages, num_arrivals=NUM_CONSUMERS))

    def body(x_ref: Any, values_ref: Any, scales_ref: Any, *refs: Any) -> None:
        tokens_ref, out_ref = refs if token_scales is not None else (None, *refs)

        def with_scratch(*scoped: Any) -> None:
            operands = (x_ref, values_ref, scales_ref, tokens_ref, out_ref)
            _Worker(config, tiles, *operands, dict(zip(names, scoped, strict=False)), *scoped[-2:]).run()

        pl.run_scoped(with_scratch, *scratch, collective_axes="warpgroup")

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((config.splits, num_out, num_tokens), dtype),
        grid=(min(config.num_workers, tiles.total),),
        grid_names=("worker",),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=f"quant_matmul_w{jnp.iinfo(values.dtype).bits}",
        interpret=config.interpret,
    )(x, values, scales, *(() if token_scales is None else (token_scales,)))


@dataclass(frozen=True, slots=True)
class _Buffer:
    shape: tuple[int, ...]
    dtype: Any
    swizzle: int = 0
    """Bytes of a row of the tiles that the tensor cores read; 0 for a plain array."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _bits(self.dtype) // 8

    def scratch(self) -> Any:
        make: Any = plgpu  # whose transforms look abstract to a type checker
        columns = self.swizzle * 8 // _bits(self.dtype)
        transforms = (make.TilingTransform((8, columns)), make.SwizzleTransform(self.swizzle)) if self.swizzle else ()
        return plgpu.SMEM(self.shape, self.dtype, transforms=transforms)


def _bits(dtype: Any) -> int:
    return (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits


def _buffers(config: Config, x_dtype: Any, values_dtype: Any, scales_dtype: Any, out_dtype: Any) -> dict[str, _Buffer]:
    """Shared memory by the names that `_Worker` has for it."""
    stored = _stored_columns(config.tokens)
    out_swizzle = next((swizzle for swizzle in (128, 64, 32) if stored * _bits(out_dtype) // 8 % swizzle == 0), 0)
    buffers = {
        "x": _Buffer(
            (config.stages, *((STRETCH, config.tokens) if config.tokens_last else (config.tokens, STRETCH))),
            x_dtype,
            swizzle_bytes(config.group, _bits(x_dtype) // 8),
        ),
        "values": _Buffer((config.stages, config.rows, STRETCH), values_dtype, STRETCH * _bits(values_dtype) // 8),
        "out": _Buffer((NUM_CONSUMERS, BLOCK, stored), out_dtype, out_swizzle),
    }
    if config.group:
        buffers["scales"] = _Buffer((config.stages, config.groups, config.rows), scales_dtype)
    if config.interpret is not None:
        buffers["wide"] = _Buffer((NUM_CONSUMERS, config.rows_of_consumer, STRETCH), x_dtype)
    return buffers


def swizzle_bytes(group: int, itemsize: int) -> int:
    """Of the activations in shared memory: a product takes as many inputs at once as a row of the swizzle holds."""
    return min(128, itemsize * (group or STRETCH))


def _stored_columns(tokens: int) -> int:
    return max(width for width in range(8, MAX_STORED_COLUMNS + 1, 8) if tokens % width == 0)


def shared_memory_bytes(config: Config, x_dtype: Any, values_dtype: Any, scales_dtype: Any, out_dtype: Any) -> int:
    """A little more than `product` asks for."""
    buffers = _buffers(config, x_dtype, values_dtype, scales_dtype, out_dtype)
    return sum(buffer.num_bytes for buffer in buffers.values()) + BARRIER_BYTES


@dataclass(frozen=True, slots=True)
class _Tiles:
    """How many tiles there are along each side, and their order."""

    rows: int
    tokens: int
    inputs: int
    splits: int

    @property
    def total(self) -> int:
        return self.rows * self.tokens * self.splits

    def place(self, index: Any) -> _Place:
        """Where the worker's tile number `index` is."""
        split, index = lax.div(index, self.rows * self.tokens), lax.rem(index, self.rows * self.tokens)
        of_strip = TOKEN_TILES_AT_ONCE * self.rows
        strip, index = lax.div(index, of_strip), lax.rem(index, of_strip)
        first_token = strip * TOKEN_TILES_AT_ONCE
        width = jnp.minimum(self.tokens - first_token, TOKEN_TILES_AT_ONCE)
        ends = [lax.div((split + i) * self.inputs, self.splits) for i in (0, 1)]
        return _Place(split, lax.div(index, width), first_token + lax.rem(index, width), ends[0], ends[1])


@dataclass(frozen=True, slots=True)
class _Place:
    """One tile of outputs, of the inputs' tiles `first` to `end`."""

    split: Any
    row: Any
    token: Any
    first: Any
    end: Any


@dataclass(frozen=True, slots=True)
class _Worker:
    """The refs of one worker, and its warpgroups' loops over them."""

    config: Config
    tiles: _Tiles
    x_ref: Any
    values_ref: Any
    scales_ref: Any
    token_scales_ref: Any
    out_ref: Any
    smem: dict[str, Any]
    full: Any
    free: Any

    def run(self) -> None:
        """Be the warpgroup that this is."""
        me = lax.axis_index("warpgroup")

        @pl.when(me == NUM_CONSUMERS)
        def _() -> None:
            if self.config.sums > MANY_SUMS:
                plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            self.drain(self.for_tiles(self.produce))

        @pl.when(me < NUM_CONSUMERS)
        def _() -> None:
            if self.config.sums > MANY_SUMS:
                plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            self.for_tiles(partial(self.consume, me))
            plgpu.wait_smem_to_gmem(0)

    def for_tiles(self, do: Callable[[_Place, Any], None]) -> Any:
        """Call `do` for each of the worker's tiles, and with the steps before it; how many steps there were."""
        worker, num_workers = lax.axis_index("worker"), min(self.config.num_workers, self.tiles.total)

        def one(number: Any, step: Any) -> Any:
            place = self.tiles.place(worker + number * num_workers)
            do(place, step)
            return step + place.end - place.first

        count = lax.div(self.tiles.total - worker + (num_workers - 1), num_workers)
        return lax.fori_loop(0, count, one, jnp.int32(0))

    # --- the copying warpgroup ------------------------------------------------------------------------------------------

    def produce(self, place: _Place, step: Any) -> None:
        """Copy weights and activations, as slots come free."""
        config = self.config
        rows = pl.ds(place.row * config.rows, config.rows)
        tokens = pl.ds(place.token * config.tokens, config.tokens)

        def copy(number: Any, step: Any) -> Any:
            slot = lax.rem(step, config.stages)
            inputs = pl.ds(number * STRETCH, STRETCH)

            @pl.when(step >= config.stages)
            def _() -> None:
                plgpu.barrier_wait(self.free.at[slot])

            full = self.full.at[slot]
            plgpu.copy_gmem_to_smem(self.values_ref.at[rows, inputs], self.smem["values"].at[slot], full)
            x_ref = self.x_ref.at[inputs, tokens] if config.tokens_last else self.x_ref.at[tokens, inputs]
            plgpu.copy_gmem_to_smem(x_ref, self.smem["x"].at[slot], full)
            if config.group:
                groups = pl.ds(number * config.groups, config.groups)
                plgpu.copy_gmem_to_smem(self.scales_ref.at[groups, rows], self.smem["scales"].at[slot], full)
            return step + 1

        lax.fori_loop(place.first, place.end, copy, step)

    def drain(self, steps: Any) -> None:
        """See each slot come free for the last time. Only jax 0.11's interpreter asks for it; here nobody waits for us."""
        stages = self.config.stages

        def wait(number: Any, _: None) -> None:
            plgpu.barrier_wait(self.free.at[lax.rem(number, stages)])

        lax.fori_loop(jnp.maximum(steps - stages, 0), steps, wait, None)

    # --- the multiplying warpgroups -------------------------------------------------------------------------------------

    def consume(self, me: Any, place: _Place, step: Any) -> None:
        """One tile of outputs."""
        config = self.config
        first_row = me * config.rows_of_consumer

        def for_inputs(multiply: Callable[[Any, Any], Any], carry: Any) -> Any:
            def one(number: Any, carry: Any) -> Any:
                slot = lax.rem(step + number, config.stages)
                plgpu.barrier_wait(self.full.at[slot])
                carry = multiply(slot, carry)
                if config.interpret is not None:  # which has the barrier order no reads before a copy
                    plgpu.commit_smem()
                plgpu.barrier_arrive(self.free.at[slot])
                return carry

            return lax.fori_loop(0, place.end - place.first, one, carry)

        if config.group:
            nothing = plgpu.layout_cast(jnp.zeros((BLOCK, config.tokens), jnp.float32), WGMMA)
            blocks = for_inputs(partial(self.add_groups, me), [nothing] * config.blocks)
        else:
            exact = self.smem["x"].dtype == jnp.int8

            def multiply_all(acc: Any) -> Any:
                for_inputs(partial(self.add_integers if exact else self.add_stretch, me, acc), None)
                return acc[...]

            dtype = jnp.int32 if exact else jnp.float32
            sums = pl.run_scoped(multiply_all, plgpu.ACC((config.rows_of_consumer, config.tokens), dtype))
            blocks = [sums[block * BLOCK : (block + 1) * BLOCK].astype(jnp.float32) for block in range(config.blocks)]
        for block, sums in enumerate(blocks):
            self.store(me, place, place.row * config.rows + first_row + block * BLOCK, sums)

    def values(self, slot: Any, rows: Any) -> Any:
        """A slot's values as they are, in registers as the tensor cores want wide ones."""
        values = self.smem["values"].at[slot, rows]
        narrow = plgpu.Layout.WGMMA_UPCAST_4X if values.dtype == jnp.int4 else plgpu.Layout.WGMMA_UPCAST_2X
        return plgpu.layout_cast(plgpu.load(values, layout=narrow), WGMMA)

    def inputs(self, slot: Any, first: int, count: int) -> Any:
        """A slot's activations of some inputs, `[in, T]`."""
        if self.config.tokens_last:
            return self.smem["x"].at[slot, pl.ds(first, count)]
        return self.smem["x"].at[slot, :, pl.ds(first, count)].transpose((1, 0))

    def operand(self, me: Any, values: Any, first: int) -> Any:
        """Values from input `first` on, widened, as a product takes them."""
        wide = values.astype(jnp.bfloat16)
        if "wide" not in self.smem:
            return wide
        staged = self.smem["wide"].at[me, pl.ds(0, values.shape[0]), pl.ds(first, values.shape[1])]
        staged[...] = wide
        plgpu.commit_smem()
        return staged

    def add_stretch(self, me: Any, acc: Any, slot: Any, _: None) -> None:
        """A slot's products in bfloat16."""
        rows = pl.ds(me * self.config.rows_of_consumer, self.config.rows_of_consumer)
        plgpu.wgmma(acc, self.operand(me, self.values(slot, rows), 0), self.inputs(slot, 0, STRETCH))
        plgpu.wgmma_wait(0)

    def add_integers(self, me: Any, acc: Any, slot: Any, _: None) -> None:
        """A slot's products in integers, both operands as they lie."""
        values = self.smem["values"].at[slot, pl.ds(me * self.config.rows_of_consumer, self.config.rows_of_consumer)]
        plgpu.wgmma(acc, values, self.inputs(slot, 0, STRETCH))
        plgpu.wgmma_wait(0)

    def add_groups(self, me: Any, slot: Any, sums: list[Any]) -> list[Any]:
        """A slot's groups, each with its scale; block by block, as few sums at a time as that gives."""
        config = self.config
        sums = list(sums)
        for block in range(config.blocks):
            rows = pl.ds(me * config.rows_of_consumer + block * BLOCK, BLOCK)
            values = self.values(slot, rows)
            for number in range(config.groups):
                first = number * config.group
                inputs = self.inputs(slot, first, config.group)
                operand = self.operand(me, values[:, first : first + config.group], first)

                def multiply(acc: Any, operand: Any = operand, inputs: Any = inputs) -> Any:
                    plgpu.wgmma(acc, operand, inputs)
                    return acc[...]

                part = pl.run_scoped(multiply, plgpu.ACC((BLOCK, config.tokens), jnp.float32))
                scales = plgpu.load(self.smem["scales"].at[slot, number, rows], layout=ROW, optimized=False)
                sums[block] = sums[block] + part * lax.broadcast_in_dim(scales.astype(jnp.float32), part.shape, [0])
        return sums

    def store(self, me: Any, place: _Place, first_row: Any, sums: Any) -> None:
        """Scale a block's sums, unless that is done, and write them by way of shared memory."""
        config = self.config
        rows, first_token = pl.ds(first_row, BLOCK), place.token * config.tokens
        if not config.group:
            scales = plgpu.load(self.scales_ref.at[0, rows], layout=ROW, optimized=False)
            sums = sums * lax.broadcast_in_dim(scales.astype(jnp.float32), sums.shape, [0])
        if self.token_scales_ref is not None:
            scales = plgpu.load(self.token_scales_ref.at[pl.ds(first_token, config.tokens)], layout=COLUMN, optimized=False)
            sums = sums * lax.broadcast_in_dim(scales, sums.shape, [1])
        staged = self.smem["out"].at[me]
        width = staged.shape[1]
        for column in range(0, config.tokens, width):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged[...] = sums[:, column : column + width].astype(staged.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged, self.out_ref.at[place.split, rows, pl.ds(first_token + column, width)])
