"""`paged_attention` on CPUs, by kernels of our own: one for decodes, `cpu_kernel.py`, and one for chunks, `cpu_chunks.py`.

Each row is computed alone, so what comes of it does not depend on the others. Pages are read once for all query heads that
share a KV head, by as many threads as XLA's pool has. Knows which shapes the kernels take.

Measured on 2 AVX512 cores with 31 GB/s between them, attention of a layer of 9 query and 3 KV heads of 64, against `xla.py`:
13, 56 and 370 us at 1, 8 and 32 decodes of 160 positions (40, 173 and 790), 540 at 8 of 1,040 (1,021), 319 at one of 4,000
(820).
"""

from __future__ import annotations

import math
import os
import sys

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num, UInt

from pallas_kernels import pytree
from pallas_kernels.native import foreign
from pallas_kernels.paged_attention.cpu_chunks import chunk_kernel, chunk_kernel_name, scratch_floats
from pallas_kernels.paged_attention.cpu_kernel import ELEMENTS, MASKED, Shape, decode_kernel
from pallas_kernels.paged_attention.places import joined

# Positions of a piece of work: few pieces to start and to join, and enough of them for all threads.
SPLIT = 512
# The same for steps of few rows.
SPLIT_OF_FEW = 128
FEW_ROWS = 4
# Parts of all rows of a step, for which there is room though most rows have one; and of each row, if there are many.
MOST_PARTS = 512
FEWEST_PARTS = 4
# A thread's rows from which on a piece takes all heads of one: 0.96 of the time, and still enough pieces for all threads.
ROWS_PER_THREAD = 4
# Stands for no window.
NO_WINDOW = 2**30
# Query heads of a KV head, over which the decode kernel's code is unrolled: 2.4 s to compile at most.
LARGEST_GROUP = 32
# Floats that a thread keeps on its stack: 1 MiB of the 8 that it has.
LARGEST_SCRATCH = 2**18


@pytree.dataclass
class DecodeWork:
    """Rows of one token as they came.

    Attributes:
        table: page ids; those past a row's end are not looked at.
        starts: first position that each row sees.
        lengths: 0 for rows without a token.
    """

    table: Int[Array, "S W"]
    starts: Int[Array, " S"]
    lengths: Int[Array, " S"]


@pytree.dataclass
class ChunkWork:
    """Rows of any count.

    Attributes:
        table: page ids; those past a row's end are not looked at.
        offsets: first token of each row, and the end.
        lengths: 0 for rows without a token.
        window: positions that a token sees.
    """

    table: Int[Array, "S W"]
    offsets: Int[Array, "S+1"]
    lengths: Int[Array, " S"]
    window: int = pytree.static()


@pytree.dataclass
class Work:
    """A step's decodes and chunks; either may be absent.

    Attributes:
        num_decodes: tokens before those of chunks.
    """

    decode: DecodeWork | None
    chunks: ChunkWork | None
    num_decodes: Int[Array, ""]


def check(group: int, head_dim: int, page_size: int, stored: str) -> None:
    """Whether the kernels take a model here.

    Args:
        group: query heads of a KV head.
        stored: data type of the pool, as `choose.pool_dtype` has it.

    Raises:
        ValueError: it does not, and why.
    """
    if sys.platform == "win32":
        raise ValueError("they have not been built for Windows, whose system library has other names")
    if stored not in ELEMENTS:
        raise ValueError(f"pages in {stored}; it reads {', '.join(ELEMENTS)}")
    if _lanes(head_dim, page_size) < 4:
        raise ValueError(f"head dim {head_dim} and pages of {page_size} positions; it takes multiples of 4")
    if group > LARGEST_GROUP:
        raise ValueError(f"{group} query heads for a KV head; it takes {LARGEST_GROUP}")
    if scratch_floats(group, head_dim, page_size) > LARGEST_SCRATCH:
        raise ValueError(f"{group} query heads of {head_dim} for a KV head and pages of {page_size} positions are too large")


def schedule(
    block_table: Int[Array, "S W"],
    row_offsets: Int[Array, "S+1"],
    lengths: Int[Array, " S"],
    *,
    num_tokens: int,
    num_single: int,
    page_size: int,
    window: int | None = None,
) -> Work:
    """See `pallas_kernels.paged_attention.schedule`."""
    del num_tokens, page_size
    decode = chunks = None
    if num_single:
        mine = lengths[:num_single]
        starts = jnp.zeros_like(mine) if window is None else jnp.maximum(mine - window, 0)
        decode = DecodeWork(table=block_table[:num_single], starts=starts, lengths=mine)
    if num_single < len(lengths):
        rest = block_table[num_single:], row_offsets[num_single:], lengths[num_single:]
        chunks = ChunkWork(*rest, window=NO_WINDOW if window is None else window)
    return Work(decode=decode, chunks=chunks, num_decodes=row_offsets[num_single])


def paged_attention(
    queries: Float[Array, "T N D"],
    pages: Num[Array, "*P K B D2"],
    work: Work,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    kv_scales: Float[Array, "K 2"] | None = None,
    first_page: UInt[Array, ""] | None = None,
) -> Float[Array, "T N D"]:
    """See `pallas_kernels.paged_attention.paged_attention`."""
    (num_tokens, num_heads, head_dim), dtype = queries.shape, queries.dtype
    num_kv_heads = pages.shape[-3]
    scaled = (queries.astype(jnp.float32) * scale).reshape(num_tokens, num_kv_heads, -1, head_dim)
    if kv_scales is not None:
        scaled = scaled * kv_scales[:, :1, None]
    scaled = scaled.reshape(num_tokens, num_heads, head_dim)
    common = (
        (jnp.uint32(0) if first_page is None else first_page).astype(jnp.int32).reshape(1),
        jnp.full(1, 0.0 if soft_cap is None else soft_cap, jnp.float32),
        jnp.full(num_heads, MASKED, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
    )
    has_cap = soft_cap is not None
    decoded = None if work.decode is None else _decode(scaled, pages, work.decode, has_cap, common)
    chunked = None if work.chunks is None else _chunks(scaled, pages, work.chunks, has_cap, common)
    out = joined(decoded, chunked, work.num_decodes).reshape(num_tokens, num_kv_heads, -1, head_dim)
    if kv_scales is not None:
        out = out * kv_scales[:, 1:, None]
    return out.reshape(num_tokens, num_heads, head_dim).astype(dtype)


def _lanes(head_dim: int, page_size: int) -> int:
    """Floats in a vector: what the processor has, of which a head and a page hold whole ones."""
    return math.gcd(head_dim, page_size, foreign.vector_lanes())


def _shape(queries: Float[Array, "T N D"], pages: Num[Array, "*P K B D2"], has_cap: bool) -> Shape:
    num_heads, head_dim = queries.shape[1:]
    num_kv_heads, page_size = pages.shape[-3:-1]
    stored = str(pages.dtype)
    check(num_heads // num_kv_heads, head_dim, page_size, stored)
    return Shape(
        group=num_heads // num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        stored=stored,
        rank=pages.ndim,
        capped=has_cap,
        lanes=_lanes(head_dim, page_size),
    )


Common = tuple[Int[Array, "1"], Float[Array, "1"], Float[Array, " N"]]
"""What both kernels take last: the first page's id, the soft cap and the sinks."""


def _split(num_rows: int, table_width: int, page_size: int) -> int:
    """Positions of a part of a row, in whole pages, for a step of so many rows."""
    longest = max(FEWEST_PARTS, MOST_PARTS // num_rows)
    positions = max(SPLIT_OF_FEW if num_rows <= FEW_ROWS else SPLIT, -(-table_width * page_size // longest))
    return -(-positions // page_size) * page_size


def _decode(
    queries: Float[Array, "T N D"], pages: Num[Array, "*P K B D2"], work: DecodeWork, has_cap: bool, common: Common
) -> Float[Array, "S N D"]:
    """Of the first `S` tokens."""
    num_rows, (_, num_heads, head_dim) = work.lengths.shape[0], queries.shape
    shape = _shape(queries, pages, has_cap)
    foreign.register(shape.name, lambda: decode_kernel(shape))
    split = _split(num_rows, work.table.shape[1], shape.page_size)
    num_parts = -(-work.table.shape[1] * shape.page_size // split)
    heads = pages.shape[-3] if num_rows >= ROWS_PER_THREAD * (os.cpu_count() or 1) else 1
    out, _ = jax.ffi.ffi_call(
        shape.name,
        (
            jax.ShapeDtypeStruct((num_rows, num_heads, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_parts, num_rows, num_heads, head_dim + 2), jnp.float32),
        ),
        input_layouts=[foreign.TOKENS_LAST, *[None] * 8],
    )(queries, pages, work.table, work.starts, work.lengths, jnp.array([split, heads], jnp.int32), *common)
    return out


def _chunks(
    queries: Float[Array, "T N D"], pages: Num[Array, "*P K B D2"], work: ChunkWork, has_cap: bool, common: Common
) -> Float[Array, "T N D"]:
    """Of all tokens; zeros for those that rows of one token own."""
    shape = _shape(queries, pages, has_cap)
    name = chunk_kernel_name(shape)
    foreign.register(name, lambda: chunk_kernel(shape, name))
    return jax.ffi.ffi_call(
        name,
        jax.ShapeDtypeStruct(queries.shape, jnp.float32),
        input_layouts=[foreign.TOKENS_LAST, *[None] * 8],
    )(queries, pages, work.table, work.offsets, work.lengths, jnp.full(1, work.window, jnp.int32), *common)
