"""The attention kernel of `gpu.py` for Hopper: blocks of queries against tiles of paged keys and values, in Mosaic GPU.

Owns the kernel's operands, its shared memory and its launch. What a multiprocessor does is in `gpu_worker.py`; rows and
steps were cut into blocks and shares in `gpu_layout.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.paged_attention.gpu_worker import NUM_CONSUMERS, ROWS, Config, Worker, swizzle_bytes, widened_at_once

LANES = 128
"""Columns of parts come in multiples of this: a warpgroup reads a row of one with a column or more to each thread."""
REDUCTION_BYTES = 512
BARRIER_BYTES = 512
"""More than all barriers and paddings take."""


INPUT_REFS = ("q_ref", "kv_ref", "table_ref", "blocks_ref", "workers_ref", "scales_ref", "sinks_ref")
"""`Worker`'s names for the kernel's operands, in order."""


class Parts(NamedTuple):
    """Attention over some of a block's tiles: normalised outputs, and the base-2 logarithm of what they were divided by."""

    outputs: Float[Array, "parts rows width"]
    log_sums: Float[Array, "parts 64"]


def attend(
    queries: Num[Array, "K rows D"],
    pages: Num[Array, "P K B 2*D"],
    table: Int[Array, "S W"],
    blocks: Int[Array, "blocks 8"],
    workers: Int[Array, "workers 8"],
    kv_scales: Float[Array, "K 2"],
    sinks: Float[Array, "K block_rows"],
    *,
    config: Config,
    block_rows: int,
) -> Parts | Num[Array, "K rows D"]:
    """Do all segments.

    Args:
        queries: `block_rows` packed queries of each block, one block after the other; of the dtype to multiply in.
        table: page ids; none past a row's last page is looked at.
        blocks, workers: see `gpu_layout`.
        sinks: scores that join the sums of final outputs, for each row of a block; minus infinity for none.

    Returns:
        Final outputs in place of the queries, undefined for blocks that do not exist, where `config.direct`. Else parts:
        number `NUM_CONSUMERS * (head * blocks + block + worker) + consumer` for each block that a worker has a segment of.
    """
    num_kv_heads, _, head_dim = queries.shape
    scratch = _scratch(config, head_dim, queries.dtype, pages.dtype, pages.shape[2])
    names = tuple(scratch)

    def body(*refs: Any) -> None:
        # Not by `scratch_types`: the names of what a kernel does without would be missing there.
        def with_scratch(*scoped: Any) -> None:
            inputs = dict(zip(INPUT_REFS, refs, strict=False))
            scratch_refs = dict(zip(names, scoped, strict=True))
            Worker(config=config, block_rows=block_rows, out_refs=refs[len(INPUT_REFS) :], **inputs, **scratch_refs).run()

        pl.run_scoped(with_scratch, *scratch.values(), collective_axes="warpgroup")

    num_parts = NUM_CONSUMERS * (num_kv_heads * blocks.shape[0] + workers.shape[0])
    stored_rows = ROWS if config.shares_tiles else block_rows
    parts = (
        jax.ShapeDtypeStruct((num_parts, stored_rows, -(-head_dim // LANES) * LANES), jnp.float32),
        jax.ShapeDtypeStruct((num_parts, ROWS), jnp.float32),
    )
    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(queries.shape, queries.dtype) if config.direct else parts,
        grid=(workers.shape[0],),
        grid_names=("worker",),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=REDUCTION_BYTES),
        kernel_name="paged_attention",
        interpret=config.interpret,
    )(queries, pages, table, blocks, workers, kv_scales, sinks)
    return out if config.direct else Parts(*out)


@dataclass(frozen=True, slots=True)
class _Buffer:
    shape: tuple[int, ...]
    dtype: Any
    swizzle: int = 0
    """Bytes of a row of the tiles that wgmma reads; 0 for a plain array."""

    @property
    def num_bytes(self) -> int:
        size = jnp.dtype(self.dtype).itemsize
        for extent in self.shape:
            size *= extent
        return size

    def scratch(self) -> Any:
        columns = self.swizzle // jnp.dtype(self.dtype).itemsize
        make: Any = plgpu  # whose transforms look abstract to a type checker
        transforms = (make.TilingTransform((8, columns)), make.SwizzleTransform(self.swizzle)) if self.swizzle else ()
        return plgpu.SMEM(self.shape, self.dtype, transforms=transforms)


def _buffers(config: Config, head_dim: int, dtype: Any, kv_dtype: Any) -> dict[str, _Buffer]:
    """Shared memory by the names that `Worker` has for it."""
    q_rows = ROWS * NUM_CONSUMERS if config.shares_tiles else ROWS
    wide_swizzle = swizzle_bytes(head_dim, jnp.dtype(dtype).itemsize)
    narrow = kv_dtype != dtype
    # Pages in eight bits are not multiplied as they are, and come in the pieces that they are widened in.
    kv_swizzle = swizzle_bytes(widened_at_once(head_dim), 1) if narrow else wide_swizzle
    buffers = {
        "q_smem": _Buffer((config.q_slots, q_rows, head_dim), dtype, wide_swizzle),
        "kv_smem": _Buffer((config.stages, config.tile, 2 * head_dim), kv_dtype, kv_swizzle),
    }
    if not config.direct:
        buffers["out_smem"] = _Buffer((NUM_CONSUMERS, ROWS, wide_swizzle // jnp.dtype(dtype).itemsize), jnp.float32)
        buffers["sum_smem"] = _Buffer((NUM_CONSUMERS, ROWS), jnp.float32)
    if narrow:
        buffers["wide_smem"] = _Buffer((NUM_CONSUMERS, config.tile, head_dim), dtype, wide_swizzle)
    if config.interpret is not None:
        buffers["weights_smem"] = _Buffer((NUM_CONSUMERS, ROWS, config.tile), dtype)
    return buffers


def shared_memory_bytes(config: Config, *, head_dim: int, dtype: Any, kv_dtype: Any) -> int:
    """A little more than `attend` asks for."""
    buffers = _buffers(config, head_dim, dtype, kv_dtype)
    return sum(buffer.num_bytes for buffer in buffers.values()) + REDUCTION_BYTES + BARRIER_BYTES


def _scratch(config: Config, head_dim: int, dtype: Any, kv_dtype: Any, page_size: int) -> dict[str, Any]:
    scratch = {name: buffer.scratch() for name, buffer in _buffers(config, head_dim, dtype, kv_dtype).items()}
    copies = max(1, config.tile // page_size)
    scratch |= {
        "q_full": plgpu.Barrier(num_barriers=config.q_slots),
        "q_free": plgpu.Barrier(num_barriers=config.q_slots, num_arrivals=NUM_CONSUMERS),
        "kv_full": plgpu.Barrier(num_barriers=config.stages, num_arrivals=copies),
        "kv_free": plgpu.Barrier(num_barriers=config.stages, num_arrivals=NUM_CONSUMERS if config.shares_tiles else 1),
    }
    if config.shares_tiles:
        scratch["both"] = plgpu.Barrier(num_arrivals=NUM_CONSUMERS)
    return scratch
