"""`paged_attention` in plain XLA, fast on CPU: the work follows the real lengths, not the padded table.

Decodes, in two loops over the rows sorted by length, both of which fold partial softmaxes into the rows' running maximum,
sum and output (the online softmax of Milakov and Gimelshein, 2018; split over the KV length as in flash-decoding). A turn
of the first takes the same block of `BLOCK` positions of many rows, while at least half of a turn's rows have one; a turn
of the second takes `BLOCKS_PER_TURN` blocks of one row, for what is left of the longest. Rows of any length mix: the first
loop never takes more than twice what there is, the second fewer than a turn more for each row that it takes. The state of a
turn's rows is a slice, not a gather. Beside chunks, which take longer anyway, there is the first loop only, down to the last
row: a second would make their programs half as large again.

Chunks: a loop over tiles of `CHUNK_TILE` queries of one row, and inside it a loop over the row's blocks of
`CHUNK_BLOCK` positions up to the tile's last position.

Measured on 2 AVX512 cores, attention of a layer at 1, 8 and 32 decodes of 160 positions: 41, 216 and 680 us for a gather of
pages in "rows" and small batched products, 41, 108 and 480 us with K transposed in the page, and 20, 71 and 395 us for sums
straight from the pool, which is near the speed at which one thread reads memory.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num, UInt

from pallas_kernels import pytree
from pallas_kernels.page_layout import keys_of, values_of
from pallas_kernels.paged_attention.places import joined

# Positions of a decode's block.
BLOCK = 64
# Rows of a turn of decode's first loop, at most.
ROWS_PER_TURN = 16
# Blocks of a turn of its second. A loop of turns as small as one block runs as fast, since XLA makes one function of it, but
# one for each layer, which costs seconds of compiling: that is for a single row, where it is all there is.
BLOCKS_PER_TURN = 8
# Query heads whose sums are taken in one pass over K or V, so that each is read once, and that registers hold.
HEADS_PER_PASS = 4
CHUNK_TILE = 128
CHUNK_BLOCK = 128
# Stands for minus infinity where a difference of two of them must not be NaN.
MASKED = -1e30


@pytree.dataclass
class DecodeWork:
    """Rows by falling length, padded with rows of length 0 to whole turns: `n` of them.

    Indices are unsigned, since each use of a signed one compiles to code for the case that it counts from the end: a tenth
    of a program of many layers.

    Attributes:
        order: the row that comes there.
        place: where each row went.
        visible: positions that each may see, counted from the start of the first block with one.
        hidden: the first of these that a window hides after all; absent without a window.
        page_ids: from that block on; past a row's end, a page that someone owns.
        active: rows that have a block of that number, counted from their first; the last entry is 0.
        num_levels: blocks that the first loop takes of each row; the second takes the rest.
        alone: whether the step has no chunks, and so the second loop.
    """

    order: UInt[Array, " n"]
    place: UInt[Array, " S"]
    visible: Int[Array, " n"]
    hidden: Int[Array, " n"] | None
    page_ids: UInt[Array, "n pages"]
    active: UInt[Array, " blocks"]
    num_levels: UInt[Array, ""]
    rows_per_turn: int = pytree.static()
    alone: bool = pytree.static()


@pytree.dataclass
class ChunkWork:
    """The list of query tiles, padded. Indices are unsigned, as in `DecodeWork`.

    Attributes:
        num_tiles: how many are real.
        row: each tile's row.
        first: its first token among the chunk tokens.
        position: that token's position.
        start_block, end_block: the row's blocks that its tokens see, the end excluded.
        page_ids: each row's block table in blocks of pages.
    """

    num_tiles: UInt[Array, ""]
    row: UInt[Array, " tiles"]
    first: UInt[Array, " tiles"]
    position: Int[Array, " tiles"]
    start_block: UInt[Array, " tiles"]
    end_block: UInt[Array, " tiles"]
    page_ids: UInt[Array, "S blocks pages_per_block"]
    tile: int = pytree.static()
    window: int | None = pytree.static()


@pytree.dataclass
class Work:
    """A step's decodes and chunks; either may be absent.

    Attributes:
        num_decodes: tokens before those of chunks.
    """

    decode: DecodeWork | None
    chunks: ChunkWork | None
    num_decodes: Int[Array, ""]


def schedule(
    block_table: Int[Array, "S W"],
    row_offsets: Int[Array, "S+1"],
    lengths: Int[Array, " S"],
    *,
    num_tokens: int,
    num_single: int,
    page_size: int,
    window: int | None = None,
    rows_per_turn: int = ROWS_PER_TURN,
    chunk_tile: int = CHUNK_TILE,
    chunk_block: int = CHUNK_BLOCK,
) -> Work:
    """See `pallas_kernels.paged_attention.schedule`."""
    page = jnp.arange(block_table.shape[1])[None, :]
    # Ids past a row's length are never trusted. What is read in their place is masked, but a NaN would come through: so it
    # is the row's own first page, and never one that nobody owns.
    first = jnp.where(lengths > 0, block_table[:, 0], 0)
    table = jnp.where(page * page_size < lengths[:, None], block_table, first[:, None])
    decode = chunks = None
    alone = num_single == len(lengths)
    if num_single:
        rows_per_turn = min(num_single, rows_per_turn)
        decode = _schedule_decode(table[:num_single], lengths[:num_single], page_size, window, alone, rows_per_turn)
    if not alone:
        sizes = min(chunk_tile, num_tokens), max(1, chunk_block // page_size)
        rows = table[num_single:], row_offsets[num_single:], lengths[num_single:]
        chunks = _schedule_chunks(*rows, num_tokens, page_size, window, *sizes)
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
    pages = pages.reshape(-1, *pages.shape[-3:])
    first_page = jnp.uint32(0) if first_page is None else first_page
    num_tokens, num_heads, head_dim = queries.shape
    num_kv_heads = pages.shape[1]
    group = num_heads // num_kv_heads
    grouped = (queries.astype(jnp.float32) * scale).reshape(num_tokens, num_kv_heads, group, head_dim)
    if kv_scales is not None:
        grouped = grouped * kv_scales[:, :1, None]
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(num_kv_heads, group)
    decoded = chunked = None
    if work.decode is not None:
        num_single = work.decode.place.shape[0]
        decoded = _decode(grouped[:num_single], pages, first_page, work.decode, soft_cap, sinks)
    if work.chunks is not None:
        chunked = _chunks(grouped, pages, first_page, work.chunks, soft_cap, sinks)
    out = joined(decoded, chunked, work.num_decodes)
    if kv_scales is not None:
        out = out * kv_scales[:, 1:, None]
    return out.reshape(num_tokens, num_heads, head_dim).astype(queries.dtype)


def _blocked_table(table: Int[Array, "S W"], per_block: int) -> Int[Array, "S blocks pages_per_block"]:
    num_rows, width = table.shape
    blocks = -(-width // per_block)
    return jnp.pad(table, ((0, 0), (0, blocks * per_block - width)), mode="edge").reshape(num_rows, blocks, per_block)


def _gather_keys(pages: Num[Array, "P K B D2"], page_ids: UInt[Array, " pages_per_block"]) -> Float[Array, "K block D"]:
    """K of a block's pages one after another, in float32."""
    keys = keys_of(pages).at[2 * page_ids].get(mode="promise_in_bounds").swapaxes(0, 1)  # [K, pages, B, D]
    # Without the barrier XLA fuses the gather into the product.
    return _floats(lax.optimization_barrier(keys.reshape(keys.shape[0], -1, keys.shape[3])))


def _gather_values(pages: Num[Array, "P K B D2"], page_ids: UInt[Array, " pages_per_block"]) -> Float[Array, "K D block"]:
    """V of a block's pages side by side, in float32."""
    values = values_of(pages).at[2 * page_ids + 1].get(mode="promise_in_bounds").transpose(1, 2, 0, 3)  # [K, D, pages, B]
    return _floats(lax.optimization_barrier(values.reshape(*values.shape[:2], -1)))


def _floats(stored: Num[Array, "..."]) -> Float[Array, "..."]:
    """What pages hold, in float32; what is uint8 are the bits of float8, as `choose.pool_dtype` has it."""
    if stored.dtype == jnp.uint8:
        stored = lax.bitcast_convert_type(stored, jnp.float8_e4m3fn)
    return stored.astype(jnp.float32)


def _capped(scores: Array, soft_cap: float | None) -> Array:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _finished(
    best: Float[Array, "..."], total: Float[Array, "..."], out: Float[Array, "... D"], sinks: Float[Array, "..."] | None
) -> Float[Array, "... D"]:
    """The softmax's average from its running maximum, sum and output; zeros where there was nothing to see."""
    if sinks is not None:
        new_best = jnp.maximum(best, sinks)
        shrink = jnp.exp(best - new_best)
        total, out = total * shrink + jnp.exp(sinks - new_best), out * shrink[..., None]
    return out / jnp.where(total > 0, total, 1.0)[..., None]


def _schedule_decode(
    table: Int[Array, "S W"], lengths: Int[Array, " S"], page_size: int, window: int | None, alone: bool, rows_per_turn: int
) -> DecodeWork:
    num_rows = table.shape[0]
    per_block = max(1, BLOCK // page_size)
    block = per_block * page_size
    padded = jnp.pad(lengths, (0, -num_rows % rows_per_turn))
    index = jnp.arange(padded.shape[0])
    longer = (padded[None, :] > padded[:, None]) | ((padded[None, :] == padded[:, None]) & (index[None, :] < index[:, None]))
    place = jnp.sum(longer, axis=1)
    order = jnp.minimum(jnp.zeros_like(place).at[place].set(index), num_rows - 1)
    by_length = jnp.zeros_like(padded).at[place].set(padded)

    first = jnp.zeros_like(by_length) if window is None else jnp.maximum(by_length - window, 0) // block
    visible = by_length - first * block
    # Room for a slice past the end, which must not be moved to fit.
    num_blocks = -(-table.shape[1] // per_block) + BLOCKS_PER_TURN
    active = jnp.sum(visible[None, :] > jnp.arange(num_blocks)[:, None] * block, axis=1)
    page = jnp.arange(num_blocks * per_block)
    # The longest row's first page stands for those of rows without any.
    source = jnp.where(by_length > 0, order, order[0])[:, None]
    number = jnp.where(page * page_size < visible[:, None], first[:, None] * per_block + page, 0)
    num_levels = jnp.sum(2 * active >= rows_per_turn if alone else active > 0) if num_rows > 1 else jnp.zeros((), jnp.int32)
    return DecodeWork(
        order=order.astype(jnp.uint32),
        place=place[:num_rows].astype(jnp.uint32),
        visible=visible,
        hidden=None if window is None else visible - window,
        page_ids=table.at[source, number].get(mode="promise_in_bounds").astype(jnp.uint32),
        active=active.astype(jnp.uint32),
        num_levels=num_levels.astype(jnp.uint32),
        rows_per_turn=rows_per_turn,
        alone=alone,
    )


DecodeState = tuple[Float[Array, "n K G"], Float[Array, "n K G"], Float[Array, "n K G D"]]
"""Each row's running maximum of scores, sum of weights and sum of weighted values."""


def _decode(
    queries: Float[Array, "S K G D"],
    pages: Num[Array, "P K B D2"],
    first_page: UInt[Array, ""],
    work: DecodeWork,
    soft_cap: float | None,
    sinks: Float[Array, "K G"] | None,
) -> Float[Array, "S K G D"]:
    """One query a row; those of rows of length 0 give anything finite."""
    queries = queries.at[work.order].get(mode="promise_in_bounds")
    num_rows, *rest, _ = queries.shape
    # Zeros, of what differs by layer: a constant would be shared by all layers and copied for each, which costs more.
    zero = (queries.ravel()[0] > jnp.inf).astype(jnp.float32)
    start = jnp.full((num_rows, *rest), MASKED), jnp.zeros((num_rows, *rest)), jnp.broadcast_to(zero, queries.shape)
    turn = partial(_decode_turn, queries, pages, first_page, work, soft_cap)

    def many_rows(carry: tuple[Array, Array, DecodeState]) -> tuple[Array, Array, DecodeState]:
        block, row, state = carry
        state = turn(state, row, block, work.rows_per_turn, 1)
        row = row + work.rows_per_turn
        more = row < work.active[block]
        return jnp.where(more, block, block + 1), jnp.where(more, row, jnp.zeros_like(row)), state

    def one_row(carry: tuple[Array, Array, DecodeState]) -> tuple[Array, Array, DecodeState]:
        block, row, state = carry
        state = turn(state, row, block, 1, blocks_per_turn)
        block = block + blocks_per_turn
        more = row < work.active[block]
        return jnp.where(more, block, work.num_levels), jnp.where(more, row, row + 1), state

    state, zero_index = start, jnp.uint32(0)
    blocks_per_turn = BLOCKS_PER_TURN if num_rows > 1 else 1
    if num_rows > 1:
        *_, state = lax.while_loop(lambda carry: carry[0] < work.num_levels, many_rows, (zero_index, zero_index, state))
    if num_rows == 1 or work.alone:
        num_left = work.active[work.num_levels]
        *_, state = lax.while_loop(lambda carry: carry[1] < num_left, one_row, (work.num_levels, zero_index, state))
    return _finished(*state, sinks).at[work.place].get(mode="promise_in_bounds")


def _decode_turn(
    queries: Float[Array, "n K G D"],
    pages: Num[Array, "P K B D2"],
    first_page: UInt[Array, ""],
    work: DecodeWork,
    soft_cap: float | None,
    state: DecodeState,
    row: UInt[Array, ""],
    block: UInt[Array, ""],
    rows: int,
    blocks: int,
) -> DecodeState:
    """Fold `blocks` blocks from `block` on of each of `rows` rows from `row` on into their state."""
    page_size = pages.shape[2]
    per_block = max(1, BLOCK // page_size)
    num_pages = blocks * per_block
    mine = partial(lax.dynamic_slice_in_dim, start_index=row, slice_size=rows)
    page_ids = first_page + lax.dynamic_slice(work.page_ids, (row, block * per_block), (rows, num_pages))
    keys = keys_of(pages).at[2 * page_ids].get(mode="promise_in_bounds")  # [rows, pages, K, B, D]
    scores = _capped(lax.platform_dependent(mine(queries), keys, cpu=_scores_by_sums, default=_scores_by_product), soft_cap)
    position = block.astype(jnp.int32) * (per_block * page_size) + jnp.arange(num_pages * page_size).reshape(num_pages, -1)
    seen = position < mine(work.visible)[:, None, None]
    if work.hidden is not None:
        seen &= position >= mine(work.hidden)[:, None, None]
    scores = jnp.where(seen[:, :, None, None, :], scores, MASKED)  # [rows, pages, K, G, B]

    best, total, out = (mine(part) for part in state)
    new_best = jnp.maximum(best, scores.max(axis=(1, 4)))
    # Without the barrier XLA computes the exponentials again for each of the sums over them.
    weights = lax.optimization_barrier(jnp.exp(scores - new_best[:, None, :, :, None]))
    values = values_of(pages).at[2 * page_ids + 1].get(mode="promise_in_bounds")  # [rows, pages, K, D, B]
    mixed = lax.platform_dependent(weights, values, cpu=_mix_by_sums, default=_mix_by_product)
    shrink = jnp.exp(best - new_best)
    total = total * shrink + weights.sum(axis=(1, 4))
    out = out * shrink[..., None] + mixed
    put = partial(lax.dynamic_update_slice_in_dim, start_index=row, axis=0)
    return put(state[0], new_best), put(state[1], total), put(state[2], out)


def _scores_by_product(
    queries: Float[Array, "rows K G D"], keys: Num[Array, "rows pages K B D"]
) -> Float[Array, "rows pages K G B"]:
    return jnp.einsum("ikgd,ipkbd->ipkgb", queries, _floats(keys), precision="highest")


def _mix_by_product(
    weights: Float[Array, "rows pages K G B"], values: Num[Array, "rows pages K D B"]
) -> Float[Array, "rows K G D"]:
    return jnp.einsum("ipkgb,ipkdb->ikgd", weights, _floats(values), precision="highest")


# On CPU the gather fuses into a sum over several operands, one for each query head, so that nothing is gathered and every K
# and V is read once for all heads. LLVM vectorises it if it may reorder the sum: see the options of the step's compiler.


def _scores_by_sums(
    queries: Float[Array, "rows K G D"], keys: Num[Array, "rows pages K B D"]
) -> Float[Array, "rows pages K G B"]:
    return _sums(queries[:, None, :, :, None, :], _floats(keys), (4,))


def _mix_by_sums(
    weights: Float[Array, "rows pages K G B"], values: Num[Array, "rows pages K D B"]
) -> Float[Array, "rows K G D"]:
    return _sums(weights[:, :, :, :, None, :], _floats(values), (1, 4))


def _sums(left: Float[Array, "rows _ K G _ _"], right: Float[Array, "rows pages K M N"], axes: tuple[int, ...]) -> Array:
    """Sums of `left[:, :, :, g] * right` over `axes`, `g` the last axis but one of the result."""
    group = left.shape[3]
    sums: list[Array] = []
    for first in range(0, group, HEADS_PER_PASS):
        products = [left[:, :, :, head] * right for head in range(first, min(first + HEADS_PER_PASS, group))]
        sums += lax.reduce(
            products, [jnp.float32(0)] * len(products), lambda a, b: [x + y for x, y in zip(a, b, strict=True)], axes
        )
    return jnp.stack(sums, axis=-2)


def _schedule_chunks(
    table: Int[Array, "S W"],
    offsets: Int[Array, "S+1"],
    lengths: Int[Array, " S"],
    num_tokens: int,
    page_size: int,
    window: int | None,
    tile: int,
    pages_per_block: int,
) -> ChunkWork:
    num_rows = table.shape[0]
    max_tiles = num_tokens // tile + num_rows
    num_tiles = -(-(offsets[1:] - offsets[:-1]) // tile)
    ends = jnp.cumsum(num_tiles)
    index = jnp.arange(max_tiles)
    row = jnp.minimum(jnp.sum(index[:, None] >= ends[None, :], axis=1), num_rows - 1)
    first = offsets[row] + (index - (ends - num_tiles)[row]) * tile
    position = lengths[row] - (offsets[row + 1] - first)
    page_ids = _blocked_table(table, pages_per_block)
    block = pages_per_block * page_size
    start_block = jnp.zeros_like(position) if window is None else jnp.maximum(position - window + 1, 0) // block
    # Tokens past the row's end belong to later tiles, which overwrite what this one gives them.
    end_block = -(-jnp.minimum(position + tile, lengths[row]) // block)
    return ChunkWork(
        num_tiles=ends[-1].astype(jnp.uint32),
        row=row.astype(jnp.uint32),
        first=first.astype(jnp.uint32),
        position=position,
        start_block=start_block.astype(jnp.uint32),
        end_block=end_block.astype(jnp.uint32),
        page_ids=page_ids.astype(jnp.uint32),
        tile=tile,
        window=window,
    )


def _chunks(
    queries: Float[Array, "T K G D"],
    pages: Num[Array, "P K B D2"],
    first_page: UInt[Array, ""],
    work: ChunkWork,
    soft_cap: float | None,
    sinks: Float[Array, "K G"] | None,
) -> Float[Array, "T K G D"]:
    """Rows of any count."""
    num_tokens, num_kv_heads, group, head_dim = queries.shape
    tile = work.tile
    block = work.page_ids.shape[2] * pages.shape[2]
    # [K, G, D, T], as the model's product left them, with room for the last tile to run over: what it writes is cut off.
    queries = jnp.pad(queries.transpose(1, 2, 3, 0), ((0, 0), (0, 0), (0, 0), (0, tile)))

    def one_tile(index: Array, out: Array) -> Array:
        row, first, position, start_block, end_block = (
            part.at[index].get(mode="promise_in_bounds")
            for part in (work.row, work.first, work.position, work.start_block, work.end_block)
        )
        tile_queries = lax.dynamic_slice_in_dim(queries, first, tile, axis=3).transpose(0, 1, 3, 2)
        tile_queries = tile_queries.reshape(num_kv_heads, group * tile, head_dim)
        positions = jnp.tile(position + jnp.arange(tile), group)  # [G*tile]

        def one_block(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            best, total, acc = carry
            page_ids = first_page + work.page_ids.at[row, number].get(mode="promise_in_bounds")
            keys, values = _gather_keys(pages, page_ids), _gather_values(pages, page_ids)
            scores = jnp.einsum("kqd,kcd->kqc", tile_queries, keys, precision="highest")
            key_positions = number.astype(jnp.int32) * block + jnp.arange(block)[None, :]
            visible = key_positions <= positions[:, None]
            if work.window is not None:
                visible &= key_positions > positions[:, None] - work.window
            scores = jnp.where(visible[None], _capped(scores, soft_cap), MASKED)
            new_best = jnp.maximum(best, scores.max(axis=-1))
            weights = jnp.exp(scores - new_best[..., None])
            shrink = jnp.exp(best - new_best)
            total = total * shrink + weights.sum(axis=-1)
            acc = acc * shrink[..., None] + jnp.einsum("kqc,kdc->kqd", weights, values, precision="highest")
            return new_best, total, acc

        state = (num_kv_heads, group * tile)
        start = (
            jnp.full(state, MASKED, jnp.float32),
            jnp.zeros(state, jnp.float32),
            jnp.zeros((*state, head_dim), jnp.float32),
        )
        best, total, acc = lax.fori_loop(start_block, end_block, one_block, start)
        tile_sinks = None if sinks is None else jnp.repeat(sinks, tile, axis=1)
        tile_out = _finished(best, total, acc, tile_sinks)
        tile_out = tile_out.reshape(num_kv_heads, group, tile, head_dim).transpose(2, 0, 1, 3)
        return lax.dynamic_update_slice_in_dim(out, tile_out.reshape(tile, -1), first, axis=0)

    # Two dimensions, so that the result has tokens outermost: with four the compiler leaves them inside and copies it all.
    # Zero or one, whatever: a constant would be shared by all layers and copied for each, which costs more than to write it.
    whatever = (queries[0, 0, 0, 0] > 0).astype(jnp.float32)
    start = jnp.broadcast_to(whatever, (num_tokens + tile, num_kv_heads * group * head_dim))
    out = lax.fori_loop(jnp.uint32(0), work.num_tiles, one_tile, start)
    return out[:num_tokens].reshape(num_tokens, num_kv_heads, group, head_dim)
