"""`paged_attention` in plain XLA, fast on CPU: the work follows the real lengths, not the padded table.

Decodes: every (row, block of `DECODE_BLOCK` positions) that exists is one item of a flat list. A loop of as many turns as
the list is long takes some items a turn, gathers their pages and folds their partial softmax into the rows' running
maximum, sum and output (the online softmax of Milakov and Gimelshein, 2018; split over the KV length as in
flash-decoding). Rows of any length mix without padding each other.

Chunks: a loop over tiles of `CHUNK_TILE` queries of one row, and inside it a loop over the row's blocks of
`CHUNK_BLOCK` positions up to the tile's last position.

Measured on 2 AVX512 cores: a gather of pages into the L2 cache followed by small batched products beats fused
multiply-and-reduce loops over the pool by two to three times; scores against the whole 2*D row, with zeros where V lies,
beat slicing K out of the row.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int, Num

DECODE_BLOCK = 64
CHUNK_TILE = 128
# Rows up to which decode's products run one query head at a time.
FEW_ROWS = 2
# Items of a decode turn: as many as rows, but no fewer than the first and no more than the second.
ITEMS_PER_TURN = (16, 64)
ITEMS_PER_TURN_OF_FEW = 4
CHUNK_BLOCK = 128
# Stands for minus infinity where a difference of two of them must not be NaN.
MASKED = -1e30


@struct.dataclass
class DecodeWork:
    """The flat list of items, padded to whole turns.

    Attributes:
        num_items: how many are real.
        row: each item's row; `S` past the end.
        visible: positions of the block that the row may see: those before this one ...
        hidden: ... less these first ones, which a window hides; absent without a window.
        page_ids: pages of the block, the row's first in place of those past its length.
    """

    num_items: Int[Array, ""]
    row: Int[Array, " I"]
    visible: Int[Array, " I"]
    hidden: Int[Array, " I"] | None
    page_ids: Int[Array, "I pages_per_block"]
    num_rows: int = struct.field(pytree_node=False)
    items_per_turn: int = struct.field(pytree_node=False)


@struct.dataclass
class ChunkWork:
    """The list of query tiles, padded.

    Attributes:
        num_tiles: how many are real.
        row: each tile's row.
        first: its first token among the chunk tokens.
        position: that token's position.
        length: the row's length.
        page_ids: each row's block table in blocks of pages.
    """

    num_tiles: Int[Array, ""]
    row: Int[Array, " tiles"]
    first: Int[Array, " tiles"]
    position: Int[Array, " tiles"]
    length: Int[Array, " tiles"]
    page_ids: Int[Array, "S blocks pages_per_block"]
    tile: int = struct.field(pytree_node=False)
    window: int | None = struct.field(pytree_node=False)


@struct.dataclass
class Work:
    """A step's decodes and chunks; either may be absent."""

    decode: DecodeWork | None
    chunks: ChunkWork | None


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
    page = jnp.arange(block_table.shape[1])[None, :]
    # Ids past a row's length are never trusted. What is read in their place is masked, but a NaN would come through: so it
    # is the row's own first page, and never one that nobody owns.
    first = jnp.where(lengths > 0, block_table[:, 0], 0)
    table = jnp.where(page * page_size < lengths[:, None], block_table, first[:, None])
    decode = chunks = None
    if num_single:
        decode = _schedule_decode(table[:num_single], lengths[:num_single], page_size, window)
    if num_tokens > num_single:
        offsets = row_offsets[num_single:] - num_single
        num_tokens -= num_single
        chunks = _schedule_chunks(table[num_single:], offsets, lengths[num_single:], num_tokens, page_size, window)
    return Work(decode=decode, chunks=chunks)


def paged_attention(
    queries: Float[Array, "T N D"],
    pages: Num[Array, "P K B D2"],
    work: Work,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    kv_scales: Float[Array, "K 2"] | None = None,
) -> Float[Array, "T N D"]:
    """See `pallas_kernels.paged_attention.paged_attention`."""
    num_tokens, num_heads, head_dim = queries.shape
    num_kv_heads = pages.shape[1]
    group = num_heads // num_kv_heads
    grouped = (queries.astype(jnp.float32) * scale).reshape(num_tokens, num_kv_heads, group, head_dim)
    if kv_scales is not None:
        grouped = grouped * kv_scales[:, :1, None]
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(num_kv_heads, group)
    outputs = []
    num_single = work.decode.num_rows if work.decode is not None else 0
    if work.decode is not None:
        outputs.append(_decode(grouped[:num_single], pages, work.decode, soft_cap, sinks))
    if work.chunks is not None:
        outputs.append(_chunks(grouped[num_single:], pages, work.chunks, soft_cap, sinks))
    out = jnp.concatenate(outputs) if len(outputs) > 1 else outputs[0]
    if kv_scales is not None:
        out = out * kv_scales[:, 1:, None]
    return out.reshape(num_tokens, num_heads, head_dim).astype(queries.dtype)


def _blocked_table(table: Int[Array, "S W"], per_block: int) -> Int[Array, "S blocks pages_per_block"]:
    num_rows, width = table.shape
    blocks = -(-width // per_block)
    return jnp.pad(table, ((0, 0), (0, blocks * per_block - width)), mode="edge").reshape(num_rows, blocks, per_block)


def _gather_blocks(pages: Num[Array, "P K B D2"], page_ids: Int[Array, "I pages_per_block"]) -> Float[Array, "I K block D2"]:
    """The pages of each item side by side, in float32."""
    num_items, per_block = page_ids.shape
    _, num_kv_heads, page_size, width = pages.shape
    blocks = pages.at[page_ids].get(mode="promise_in_bounds").transpose(0, 2, 1, 3, 4)
    blocks = blocks.reshape(num_items, num_kv_heads, per_block * page_size, width)
    # Without the barrier XLA fuses the gather into both products' operands and gathers twice.
    return lax.optimization_barrier(blocks).astype(jnp.float32)


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


def _schedule_decode(table: Int[Array, "S W"], lengths: Int[Array, " S"], page_size: int, window: int | None) -> DecodeWork:
    num_rows = table.shape[0]
    per_block = max(1, DECODE_BLOCK // page_size)
    block = per_block * page_size
    blocked = _blocked_table(table, per_block)
    fewest, most = ITEMS_PER_TURN
    per_turn = ITEMS_PER_TURN_OF_FEW if num_rows <= FEW_ROWS else min(max(num_rows, fewest), most)
    max_items = -(-num_rows * blocked.shape[1] // per_turn) * per_turn

    first_block = jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0) // block
    num_blocks = -(-lengths // block) - first_block
    ends = jnp.cumsum(num_blocks)
    item = jnp.arange(max_items)
    row = jnp.sum(item[:, None] >= ends[None, :], axis=1)  # [I]; S past the end
    last_row = jnp.max(jnp.where(lengths > 0, jnp.arange(num_rows), 0))
    safe_row = jnp.where(row < num_rows, row, last_row)  # what fills up the last turn reads pages that someone owns
    index = jnp.where(row < num_rows, item - (ends - num_blocks - first_block)[safe_row], 0)
    return DecodeWork(
        num_items=ends[-1],
        row=row,
        visible=jnp.where(row < num_rows, lengths[safe_row] - index * block, 0),
        hidden=None if window is None else lengths[safe_row] - index * block - window,
        page_ids=blocked[safe_row, index],
        num_rows=num_rows,
        items_per_turn=per_turn,
    )


def _decode(
    queries: Float[Array, "S K G D"],
    pages: Num[Array, "P K B D2"],
    work: DecodeWork,
    soft_cap: float | None,
    sinks: Float[Array, "K G"] | None,
) -> Float[Array, "S K G D"]:
    """One query a row; rows of length 0 give zeros."""
    num_rows, num_kv_heads, group, head_dim = queries.shape
    few = num_rows <= FEW_ROWS
    scores_of, mix, add_up = (_scores_by_head, _mix_by_head, _add_up_plainly) if few else (_scores, _mix, _add_up)
    per_turn = work.items_per_turn
    block = work.page_ids.shape[1] * pages.shape[2]
    queries = jnp.pad(queries, ((0, 1), (0, 0), (0, 0), (0, head_dim)))  # zeros for row S and where V lies

    def turn(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        item, best, total, out = carry
        row = lax.dynamic_slice_in_dim(work.row, item, per_turn)
        visible = lax.dynamic_slice_in_dim(work.visible, item, per_turn)
        blocks = _gather_blocks(pages, lax.dynamic_slice_in_dim(work.page_ids, item, per_turn))  # [I, K, block, 2D]
        picked = queries.at[row].get(mode="promise_in_bounds")
        scores = _capped(scores_of(picked, blocks), soft_cap)
        seen = jnp.arange(block)[None, :] < visible[:, None]  # [I, block]
        if work.hidden is not None:
            seen &= jnp.arange(block)[None, :] >= lax.dynamic_slice_in_dim(work.hidden, item, per_turn)[:, None]
        scores = jnp.where(seen[:, None, None, :], scores, MASKED)

        owns = jnp.arange(num_rows + 1)[:, None] == row[None, :]  # [S+1, I]
        item_best = scores.max(axis=-1)  # [I, K, G]
        new_best = jnp.maximum(best, jnp.max(jnp.where(owns[:, :, None, None], item_best[None], MASKED), axis=1))
        # Against the row's own maximum, so that items of one row simply add up.
        weights = jnp.exp(scores - new_best.at[row].get(mode="promise_in_bounds")[..., None])
        values = mix(weights, blocks)[..., head_dim:]
        share = owns.astype(jnp.float32)
        shrink = jnp.exp(best - new_best)
        total = total * shrink + add_up(share, weights.sum(axis=-1))
        out = out * shrink[..., None] + add_up(share, values)
        return item + per_turn, new_best, total, out

    # Row S takes what items past the list's end give.
    state = (num_rows + 1, num_kv_heads, group)
    start = (
        jnp.int32(0),
        jnp.full(state, MASKED, jnp.float32),
        jnp.zeros(state, jnp.float32),
        jnp.zeros((*state, head_dim), jnp.float32),
    )
    _, best, total, out = lax.while_loop(lambda carry: carry[0] < work.num_items, turn, start)
    return _finished(best, total, out, sinks)[:num_rows]


def _scores(queries: Float[Array, "I K G D2"], blocks: Float[Array, "I K block D2"]) -> Float[Array, "I K G block"]:
    return jnp.einsum("ikgd,ikcd->ikgc", queries, blocks, precision="highest")


def _mix(weights: Float[Array, "I K G block"], blocks: Float[Array, "I K block D2"]) -> Float[Array, "I K G D2"]:
    return jnp.einsum("ikgc,ikcd->ikgd", weights, blocks, precision="highest")


def _add_up(share: Float[Array, "S I"], of_items: Float[Array, "I *rest"]) -> Float[Array, "S *rest"]:
    return jnp.tensordot(share, of_items, 1, precision="highest")


# For few rows the products are so small that waking a second thread for them costs more than they do. One head at a time
# they are matrix-vector products, which XLA compiles into one loop on the spot with everything else of the turn.


def _scores_by_head(queries: Float[Array, "I K G D2"], blocks: Float[Array, "I K block D2"]) -> Float[Array, "I K G block"]:
    heads = range(queries.shape[2])
    return jnp.stack([jnp.einsum("ikd,ikcd->ikc", queries[:, :, g], blocks, precision="highest") for g in heads], axis=2)


def _mix_by_head(weights: Float[Array, "I K G block"], blocks: Float[Array, "I K block D2"]) -> Float[Array, "I K G D2"]:
    heads = range(weights.shape[2])
    return jnp.stack([jnp.einsum("ikc,ikcd->ikd", weights[:, :, g], blocks, precision="highest") for g in heads], axis=2)


def _add_up_plainly(share: Float[Array, "S I"], of_items: Float[Array, "I *rest"]) -> Float[Array, "S *rest"]:
    share = share.reshape(*share.shape, *[1] * (of_items.ndim - 1))
    return sum((share[:, i] * of_items[i] for i in range(1, of_items.shape[0])), share[:, 0] * of_items[0])


def _schedule_chunks(
    table: Int[Array, "S W"],
    offsets: Int[Array, "S+1"],
    lengths: Int[Array, " S"],
    num_tokens: int,
    page_size: int,
    window: int | None,
) -> ChunkWork:
    num_rows = table.shape[0]
    tile = min(CHUNK_TILE, num_tokens)
    max_tiles = num_tokens // tile + num_rows
    num_tiles = -(-(offsets[1:] - offsets[:-1]) // tile)
    ends = jnp.cumsum(num_tiles)
    index = jnp.arange(max_tiles)
    row = jnp.minimum(jnp.sum(index[:, None] >= ends[None, :], axis=1), num_rows - 1)
    first = offsets[row] + (index - (ends - num_tiles)[row]) * tile
    return ChunkWork(
        num_tiles=ends[-1],
        row=row,
        first=first,
        position=lengths[row] - (offsets[row + 1] - first),
        length=lengths[row],
        page_ids=_blocked_table(table, max(1, CHUNK_BLOCK // page_size)),
        tile=tile,
        window=window,
    )


def _chunks(
    queries: Float[Array, "T K G D"],
    pages: Num[Array, "P K B D2"],
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
        row, first, position, length = work.row[index], work.first[index], work.position[index], work.length[index]
        # Tokens past the row's end belong to later tiles, which overwrite what this one gives them.
        last = jnp.minimum(position + tile, length)
        tile_queries = lax.dynamic_slice_in_dim(queries, first, tile, axis=3).transpose(0, 1, 3, 2)
        tile_queries = tile_queries.reshape(num_kv_heads, group * tile, head_dim)
        positions = jnp.tile(position + jnp.arange(tile), group)  # [G*tile]

        def one_block(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            best, total, acc = carry
            kv = _gather_blocks(pages, work.page_ids[row, number][None])[0]  # [K, block, 2D]
            scores = jnp.einsum("kqd,kcd->kqc", tile_queries, kv[..., :head_dim], precision="highest")
            key_positions = number * block + jnp.arange(block)[None, :]
            visible = key_positions <= positions[:, None]
            if work.window is not None:
                visible &= key_positions > positions[:, None] - work.window
            scores = jnp.where(visible[None], _capped(scores, soft_cap), MASKED)
            new_best = jnp.maximum(best, scores.max(axis=-1))
            weights = jnp.exp(scores - new_best[..., None])
            shrink = jnp.exp(best - new_best)
            total = total * shrink + weights.sum(axis=-1)
            acc = acc * shrink[..., None] + jnp.einsum("kqc,kcd->kqd", weights, kv[..., head_dim:], precision="highest")
            return new_best, total, acc

        state = (num_kv_heads, group * tile)
        start = (
            jnp.full(state, MASKED, jnp.float32),
            jnp.zeros(state, jnp.float32),
            jnp.zeros((*state, head_dim), jnp.float32),
        )
        first_block = 0 if work.window is None else jnp.maximum(position - work.window + 1, 0) // block
        best, total, acc = lax.fori_loop(first_block, -(-last // block), one_block, start)
        tile_sinks = None if sinks is None else jnp.repeat(sinks, tile, axis=1)
        tile_out = _finished(best, total, acc, tile_sinks)
        tile_out = tile_out.reshape(num_kv_heads, group, tile, head_dim).transpose(2, 0, 1, 3)
        return lax.dynamic_update_slice_in_dim(out, tile_out.reshape(tile, -1), first, axis=0)

    # Two dimensions, so that the result has tokens outermost: with four the compiler leaves them inside and copies it all.
    # Zero or one, whatever: a constant would be shared by all layers and copied for each, which costs more than to write it.
    whatever = (queries[0, 0, 0, 0] > 0).astype(jnp.float32)
    start = jnp.broadcast_to(whatever, (num_tokens + tile, num_kv_heads * group * head_dim))
    out = lax.fori_loop(0, work.num_tiles, one_tile, start)
    return out[:num_tokens].reshape(num_tokens, num_kv_heads, group, head_dim)
