"""`paged_attention` on NVIDIA Hopper GPUs: cuts a step into blocks, runs the kernels, puts outputs back in their places.

Decodes: blocks of one token; all their tiles are shared out equally among the multiprocessors, whatever the lengths, and a
second, small kernel adds the parts up. Chunks: blocks that fill 128 rows. Where there are enough of those, workers take
whole blocks and what they write is final; otherwise (drafts, short chunks) they too are shared out by tiles.

Queries are bfloat16. Pages in eight bits are widened in the kernel: int8 to bfloat16, float8 to float16.

Owns the choice of sizes, and what is refused. `gpu_layout.py` has the arithmetic, `gpu_kernel.py` and `gpu_merge.py` what
runs on a multiprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels import pytree
from pallas_kernels.paged_attention.gpu_kernel import Parts, attend, shared_memory_bytes
from pallas_kernels.paged_attention.gpu_layout import Blocks, Shares, cut_blocks, deal_blocks, share_tiles
from pallas_kernels.paged_attention.gpu_merge import merge
from pallas_kernels.paged_attention.gpu_worker import NUM_CONSUMERS, ROWS, Config
from pallas_kernels.paged_attention.places import joined

NUM_WORKERS = 132
"""Multiprocessors of an H100 or H200, each of which holds one worker."""
HOPPER = ("H100", "H200", "H800", "H20", "GH200")
"""What device kinds with wgmma have in their names."""
SHARED_MEMORY = 232_448
"""Bytes that a block may use on Hopper."""
MAX_STAGES = 8
PAGE_SIZES = (8, 16, 32, 64, 128)
HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_GROUP = NUM_CONSUMERS * ROWS
NARROW = {np.dtype(jnp.int8): jnp.bfloat16, np.dtype(jnp.float8_e4m3fn): jnp.float16}
"""Pages in eight bits, and what they are multiplied in: each value is exact there."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes to try in place of those chosen (0): KV positions of a tile, slots of the ring, slots of queries.

    `ping_pong` as in `Config`; the choice where None.
    """

    tile: int = 0
    stages: int = 0
    q_slots: int = 0
    ping_pong: bool | None = None


@pytree.dataclass
class Work:
    """The rows as they are, and sizes for decodes and for chunks."""

    block_table: Int[Array, "S W"]
    row_offsets: Int[Array, "S+1"]
    lengths: Int[Array, " S"]
    num_single: int = pytree.static()
    window: int | None = pytree.static()
    decode_tuning: Tuning = pytree.static()
    chunk_tuning: Tuning = pytree.static()


def schedule(
    block_table: Int[Array, "S W"],
    row_offsets: Int[Array, "S+1"],
    lengths: Int[Array, " S"],
    *,
    num_tokens: int,
    num_single: int,
    page_size: int,
    window: int | None = None,
    decode_tile: int = 0,
    decode_stages: int = 0,
    chunk_tile: int = 0,
    chunk_stages: int = 0,
) -> Work:
    """See `pallas_kernels.paged_attention.schedule`.

    How rows are cut depends on the heads and waits for `paged_attention`; the compiler merges the layers' equal cuts.

    Args:
        decode_tile, decode_stages, chunk_tile, chunk_stages: as in `Tuning`.
    """
    del num_tokens, page_size
    decode_tuning, chunk_tuning = Tuning(decode_tile, decode_stages), Tuning(chunk_tile, chunk_stages)
    return Work(block_table, row_offsets, lengths, num_single, window, decode_tuning, chunk_tuning)


def check(
    *, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: Any, kv_dtype: Any, has_scales: bool
) -> None:
    """Raise ValueError that says what of a model or its pool the kernels cannot do."""
    dtype, kv_dtype = np.dtype(dtype), np.dtype(kv_dtype)
    use = 'use impl "xla"'
    if dtype != jnp.bfloat16:
        raise ValueError(f"GPU attention: expected bfloat16 queries, found {dtype}; cast them, or {use}")
    if kv_dtype != dtype and kv_dtype not in NARROW:
        raise ValueError(f"GPU attention: expected pages of bfloat16, int8 or float8_e4m3fn, found {kv_dtype}; {use}")
    if has_scales != (kv_dtype in NARROW):
        raise ValueError(f"GPU attention: kv_scales go with pages in eight bits and only with them; pages are {kv_dtype}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"GPU attention: expected a head dim of {HEAD_DIMS}, found {head_dim}; {use}")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"GPU attention: expected a page size of {PAGE_SIZES}, found {page_size}; choose another, or {use}")
    if num_heads % num_kv_heads or num_heads // num_kv_heads > MAX_GROUP:
        raise ValueError(
            f"GPU attention: expected query heads in groups of at most {MAX_GROUP} to a KV head, "
            f"found {num_heads} for {num_kv_heads}; {use}"
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
    num_workers: int = NUM_WORKERS,
    decode_tuning: Tuning | None = None,
    chunk_tuning: Tuning | None = None,
    interpret: Any = None,
) -> Float[Array, "T N D"]:
    """See `pallas_kernels.paged_attention.paged_attention`. Padding tokens give zeros.

    Args:
        num_workers: multiprocessors to fill.
        decode_tuning, chunk_tuning: sizes in place of those that `work` has.
        interpret: `InterpretGPUParams` for a machine without a GPU.

    Raises:
        ValueError: for what `check` refuses.
    """
    _, num_heads, head_dim = queries.shape
    _, num_kv_heads, page_size, _ = pages.shape
    check(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=queries.dtype,
        kv_dtype=pages.dtype,
        has_scales=kv_scales is not None,
    )
    attention = _Attention(
        pages=pages,
        kv_scales=jnp.ones((num_kv_heads, 2), jnp.float32) if kv_scales is None else kv_scales.astype(jnp.float32),
        sinks=jnp.full(num_heads, -jnp.inf, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        group=num_heads // num_kv_heads,
        num_workers=num_workers,
        config=Config(
            tile=0,
            stages=0,
            q_slots=0,
            shares_tiles=False,
            direct=False,
            ping_pong=False,
            group=num_heads // num_kv_heads,
            scale=scale,
            soft_cap=soft_cap,
            window=work.window,
            interpret=interpret,
        ),
    )
    single = work.num_single
    decoded = chunked = None
    if single:
        rows = _Rows(work.block_table[:single], work.row_offsets[: single + 1], work.lengths[:single])
        decoded = attention.decode(queries[:single], rows, decode_tuning or work.decode_tuning)
    if len(work.lengths) > single:
        rows = _Rows(work.block_table[single:], work.row_offsets[single:], work.lengths[single:])
        chunked = attention.chunks(queries, rows, chunk_tuning or work.chunk_tuning)
    return joined(decoded, chunked, work.row_offsets[single])


@dataclass(frozen=True, slots=True)
class _Rows:
    block_table: Int[Array, "S W"]
    offsets: Int[Array, "S+1"]
    lengths: Int[Array, " S"]

    def own(self, num_tokens: int) -> Bool[Array, " T"]:
        """Whether each token belongs to a row that is no padding."""
        token = jnp.arange(num_tokens)
        row = jnp.sum(token[:, None] >= self.offsets[None, 1:], axis=1)
        return (
            (token >= self.offsets[0])
            & (token < self.offsets[-1])
            & (self.lengths[jnp.minimum(row, self.lengths.shape[0] - 1)] > 0)
        )


@dataclass(frozen=True, slots=True)
class _Attention:
    """One layer's pool and options, for rows of one token or of many."""

    pages: Num[Array, "P K B D2"]
    kv_scales: Float[Array, "K 2"]
    sinks: Float[Array, " N"]
    group: int
    num_workers: int
    config: Config

    def decode(self, queries: Float[Array, "S N D"], rows: _Rows, tuning: Tuning) -> Float[Array, "S N D"]:
        if self.group > ROWS:
            return self.chunks(queries, rows, tuning)
        config = self._sized(queries, tuning, self.config)
        block_rows = -(-self.group // 8) * 8
        return self._by_shares(queries, rows, config, tokens=1, block_rows=block_rows)

    def chunks(self, queries: Float[Array, "T N D"], rows: _Rows, tuning: Tuning) -> Float[Array, "T N D"]:
        block_rows = NUM_CONSUMERS * ROWS
        tokens = min(block_rows // self.group, queries.shape[0])
        num_blocks = self.pages.shape[1] * (queries.shape[0] // tokens)
        direct = num_blocks >= 2 * self.num_workers
        config = self._sized(queries, tuning, replace(self.config, shares_tiles=True, direct=direct))
        if not direct:
            return self._by_shares(queries, rows, config, tokens=tokens, block_rows=block_rows)
        blocks = self._cut(queries, rows, config, tokens)
        workers = deal_blocks(blocks, num_kv_heads=self.pages.shape[1], num_workers=self.num_workers)
        out = self._attend(queries, rows, blocks, workers, config, tokens, block_rows)
        assert not isinstance(out, Parts)
        out = out.reshape(out.shape[0], -1, block_rows, out.shape[2])
        return _unpack(out, blocks, rows.own(queries.shape[0]), self.group, queries)

    def _sized(self, queries: Float[Array, "T N D"], tuning: Tuning, config: Config) -> Config:
        """The largest tile that leaves room for two of it, and as many stages as fit."""
        head_dim = queries.shape[2]
        q_slots = tuning.q_slots or (1 if config.shares_tiles else 2)
        ping_pong = config.direct if tuning.ping_pong is None else tuning.ping_pong and config.shares_tiles
        dtype = NARROW.get(np.dtype(self.pages.dtype), queries.dtype)
        size = partial(shared_memory_bytes, head_dim=head_dim, dtype=dtype, kv_dtype=self.pages.dtype)
        wide = config.shares_tiles and np.dtype(self.pages.dtype) not in NARROW
        tiles = (tuning.tile,) if tuning.tile else (128, 64) if wide else (64,)
        for tile in tiles:
            for stages in (tuning.stages,) if tuning.stages else range(MAX_STAGES, 1, -1):
                candidate = replace(config, tile=tile, stages=stages, q_slots=q_slots, ping_pong=ping_pong)
                takes_turns = not config.shares_tiles
                if size(replace(candidate, interpret=None)) <= SHARED_MEMORY and not (takes_turns and stages % 2):
                    return candidate
        raise ValueError(f"GPU attention: no tile of {tiles} positions fits in shared memory with {tuning}")

    def _cut(self, queries: Float[Array, "T N D"], rows: _Rows, config: Config, tokens: int) -> Blocks:
        return cut_blocks(
            rows.lengths,
            rows.offsets,
            num_tokens=queries.shape[0],
            tokens=tokens,
            tile=config.tile,
            page_size=self.pages.shape[2],
            window=config.window,
            longest_first=config.direct,
        )

    def _attend(
        self,
        queries: Float[Array, "T N D"],
        rows: _Rows,
        blocks: Blocks,
        workers: Int[Array, "workers 8"],
        config: Config,
        tokens: int,
        block_rows: int,
    ) -> Any:
        packed = _pack(queries, blocks, tokens, self.pages.shape[1], block_rows)
        packed = packed.astype(NARROW.get(np.dtype(self.pages.dtype), queries.dtype))
        return attend(
            packed,
            self.pages,
            rows.block_table,
            blocks.columns,
            workers,
            self.kv_scales,
            self.sinks.reshape(-1, self.group)[:, jnp.arange(block_rows) % self.group],
            config=config,
            block_rows=block_rows,
        )

    def _by_shares(
        self, queries: Float[Array, "T N D"], rows: _Rows, config: Config, *, tokens: int, block_rows: int
    ) -> Float[Array, "T N D"]:
        """Cut by tiles, then merge."""
        blocks = self._cut(queries, rows, config, tokens)
        shares = share_tiles(blocks, num_kv_heads=self.pages.shape[1], num_workers=self.num_workers)
        parts = self._attend(queries, rows, blocks, shares.workers, config, tokens, block_rows)
        first, count = _parts_of_blocks(shares)
        merged = merge(
            parts,
            first,
            count,
            self.kv_scales[:, 1],
            self.sinks,
            shares_tiles=config.shares_tiles,
            group=self.group,
            used_rows=tokens * self.group,
            out_dtype=queries.dtype,
            interpret=config.interpret,
        )
        return _unpack(merged, blocks, rows.own(queries.shape[0]), self.group, queries)


def _parts_of_blocks(shares: Shares) -> tuple[Int[Array, "K blocks"], Int[Array, "K blocks"]]:
    """The first part of each block and how many there are; see `attend` for their numbers."""
    num_kv_heads, num_blocks = shares.first_worker.shape
    number = jnp.arange(num_kv_heads * num_blocks).reshape(num_kv_heads, num_blocks)
    first = NUM_CONSUMERS * (number + shares.first_worker)
    return first, NUM_CONSUMERS * (shares.last_worker - shares.first_worker + 1)


def _pack(
    queries: Num[Array, "T N D"], blocks: Blocks, tokens: int, num_kv_heads: int, block_rows: int
) -> Num[Array, "K rows D"]:
    """Queries of each block side by side, token by token."""
    num_tokens, num_heads, head_dim = queries.shape
    index = jnp.minimum(blocks.first_token[:, None] + jnp.arange(tokens)[None, :], num_tokens - 1)
    packed = queries.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    packed = packed.at[index].get(mode="promise_in_bounds")  # [blocks, tokens, K, G, D]
    packed = packed.transpose(2, 0, 1, 3, 4).reshape(num_kv_heads, index.shape[0], -1, head_dim)
    packed = jnp.pad(packed, ((0, 0), (0, 0), (0, block_rows - packed.shape[2]), (0, 0)))
    return packed.reshape(num_kv_heads, -1, head_dim)


def _unpack(
    outputs: Num[Array, "K blocks rows width"],
    blocks: Blocks,
    real: Bool[Array, " T"],
    group: int,
    queries: Float[Array, "T N D"],
) -> Float[Array, "T N D"]:
    """Outputs token by token; zeros for padding."""
    rows = blocks.index_in_block[:, None] * group + jnp.arange(group)[None, :]  # [T, G]
    out = outputs.at[:, blocks.of_token[:, None], rows].get(mode="promise_in_bounds")[..., : queries.shape[2]]
    out = jnp.where(real[None, :, None, None], out, 0)  # [K, T, G, D]
    return out.transpose(1, 0, 2, 3).reshape(queries.shape).astype(queries.dtype)
