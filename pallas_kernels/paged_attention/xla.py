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
from jax import lax
from jaxtyping import Array, Float, Int

DECODE_BLOCK = 64
CHUNK_TILE = 128
CHUNK_BLOCK = 128
# Stands for minus infinity where a difference of two of them must not be NaN.
MASKED = -1e30


def paged_attention(
    queries: Float[Array, "T N D"],
    pages: Float[Array, "P K B 2*D"],
    block_table: Int[Array, "S W"],
    row_offsets: Int[Array, "S+1"],
    lengths: Int[Array, " S"],
    *,
    scale: float,
    num_single: int,
) -> Float[Array, "T N D"]:
    """See `pallas_kernels.paged_attention.paged_attention`."""
    num_tokens, num_heads, head_dim = queries.shape
    num_kv_heads = pages.shape[1]
    grouped = (queries.astype(jnp.float32) * scale).reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    outputs = []
    if num_single:
        outputs.append(_decode(grouped[:num_single], pages, block_table[:num_single], lengths[:num_single]))
    if num_tokens > num_single:
        chunks = grouped[num_single:]
        offsets = row_offsets[num_single:] - num_single
        outputs.append(_chunks(chunks, pages, block_table[num_single:], offsets, lengths[num_single:]))
    out = jnp.concatenate(outputs) if len(outputs) > 1 else outputs[0]
    return out.reshape(num_tokens, num_heads, head_dim).astype(queries.dtype)


def _gather_blocks(pages: Float[Array, "P K B D2"], page_ids: Int[Array, "I pages_per_block"]) -> Float[Array, "I K block D2"]:
    """The pages of each item side by side, in float32."""
    num_items, per_block = page_ids.shape
    _, num_kv_heads, page_size, width = pages.shape
    blocks = pages.at[page_ids].get(mode="promise_in_bounds").transpose(0, 2, 1, 3, 4)
    blocks = blocks.reshape(num_items, num_kv_heads, per_block * page_size, width)
    # Without the barrier XLA fuses the gather into both products' operands and gathers twice.
    return lax.optimization_barrier(blocks).astype(jnp.float32)


def _padded_table(block_table: Int[Array, "S W"], per_block: int) -> Int[Array, "S blocks pages_per_block"]:
    """The table in blocks of `per_block` pages. Ids past a row's length are never trusted: they read page 0, masked."""
    num_rows, width = block_table.shape
    blocks = -(-width // per_block)
    return jnp.pad(block_table, ((0, 0), (0, blocks * per_block - width))).reshape(num_rows, blocks, per_block)


def _trusted_ids(page_ids: Int[Array, "I n"], first: Int[Array, " I"], length: Int[Array, " I"], page_size: int) -> Array:
    """Page ids of blocks that start at page `first`, with 0 in place of pages past `length` positions."""
    index = first[:, None] + jnp.arange(page_ids.shape[1])
    return jnp.where(index * page_size < length[:, None], page_ids, 0)


def _decode(
    queries: Float[Array, "S K G D"],
    pages: Float[Array, "P K B D2"],
    block_table: Int[Array, "S W"],
    lengths: Int[Array, " S"],
) -> Float[Array, "S K G D"]:
    """One query a row; rows of length 0 give zeros."""
    num_rows, num_kv_heads, group, head_dim = queries.shape
    page_size = pages.shape[2]
    per_block = max(1, DECODE_BLOCK // page_size)
    block = per_block * page_size
    table = _padded_table(block_table, per_block)
    queries = jnp.concatenate([queries, jnp.zeros_like(queries)], axis=-1)

    num_blocks = -(-lengths // block)  # [S]
    ends = jnp.cumsum(num_blocks)
    num_items = ends[-1]
    per_turn = min(16, max(4, num_rows))

    def turn(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        first_item, best, total, out = carry
        item = first_item + jnp.arange(per_turn)
        row = jnp.sum(item[:, None] >= ends[None, :], axis=1)  # [I]; num_rows where the list is over
        real = row < num_rows
        row = jnp.minimum(row, num_rows - 1)
        index = jnp.where(real, item - (ends[row] - num_blocks[row]), 0)
        length = jnp.where(real, lengths[row], 0)

        page_ids = _trusted_ids(table[row, index], index * per_block, length, page_size)
        blocks = _gather_blocks(pages, page_ids)  # [I, K, block, 2D]
        scores = jnp.einsum("ikgd,ikcd->ikgc", queries[row], blocks, precision="highest")
        visible = index[:, None] * block + jnp.arange(block) < length[:, None]  # [I, block]
        scores = jnp.where(visible[:, None, None, :], scores, MASKED)

        owns = (jnp.arange(num_rows)[:, None] == row[None, :]) & real[None, :]  # [S, I]
        item_best = scores.max(axis=-1)  # [I, K, G]
        new_best = jnp.maximum(best, jnp.max(jnp.where(owns[:, :, None, None], item_best[None], MASKED), axis=1))
        # Against the row's own maximum, so that items of one row simply add up. A masked score is then exp(-1e30) = 0,
        # but for an item past the list's end, which no row owns.
        weights = jnp.exp(scores - new_best[row][..., None])
        values = jnp.einsum("ikgc,ikcd->ikgd", weights, blocks, precision="highest")[..., head_dim:]
        share = owns.astype(jnp.float32)
        shrink = jnp.exp(best - new_best)
        total = total * shrink + jnp.tensordot(share, weights.sum(axis=-1), 1, precision="highest")
        out = out * shrink[..., None] + jnp.tensordot(share, values, 1, precision="highest")
        return first_item + per_turn, new_best, total, out

    state = (num_rows, num_kv_heads, group)
    start = (
        jnp.int32(0),
        jnp.full(state, MASKED, jnp.float32),
        jnp.zeros(state, jnp.float32),
        jnp.zeros((*state, head_dim), jnp.float32),
    )
    _, _, total, out = lax.while_loop(lambda carry: carry[0] < num_items, turn, start)
    return out / jnp.where(total > 0, total, 1.0)[..., None]


def _chunks(
    queries: Float[Array, "T K G D"],
    pages: Float[Array, "P K B D2"],
    block_table: Int[Array, "S W"],
    row_offsets: Int[Array, "S+1"],
    lengths: Int[Array, " S"],
) -> Float[Array, "T K G D"]:
    """Rows of any count."""
    num_tokens, num_kv_heads, group, head_dim = queries.shape
    num_rows = block_table.shape[0]
    page_size = pages.shape[2]
    tile = min(CHUNK_TILE, num_tokens)
    per_block = max(1, CHUNK_BLOCK // page_size)
    block = per_block * page_size
    table = _padded_table(block_table, per_block)

    counts = row_offsets[1:] - row_offsets[:-1]
    num_tiles = -(-counts // tile)
    ends = jnp.cumsum(num_tiles)
    # [K, T, G, D], with room for the last tile to run over: what it writes there is cut off.
    queries = jnp.pad(queries, ((0, tile), (0, 0), (0, 0), (0, 0))).transpose(1, 0, 2, 3)

    def one_tile(index: Array, out: Array) -> Array:
        row = jnp.minimum(jnp.sum(index >= ends), num_rows - 1)
        first = row_offsets[row] + (index - (ends[row] - num_tiles[row])) * tile
        # Position of the tile's first token; tokens past the row's end belong to later tiles, which overwrite them.
        position = lengths[row] - (row_offsets[row + 1] - first)
        last = jnp.minimum(position + tile, lengths[row])
        tile_queries = lax.dynamic_slice_in_dim(queries, first, tile, axis=1)
        tile_queries = tile_queries.reshape(num_kv_heads, tile * group, head_dim)
        positions = position + jnp.arange(tile * group) // group  # [tile*G]

        def one_block(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            best, total, acc = carry
            page_ids = _trusted_ids(table[row, number][None], (number * per_block)[None], lengths[row][None], page_size)
            kv = _gather_blocks(pages, page_ids)[0]  # [K, block, 2D]
            scores = jnp.einsum("kqd,kcd->kqc", tile_queries, kv[..., :head_dim], precision="highest")
            visible = number * block + jnp.arange(block)[None, :] <= positions[:, None]
            scores = jnp.where(visible[None], scores, MASKED)
            new_best = jnp.maximum(best, scores.max(axis=-1))
            weights = jnp.exp(scores - new_best[..., None])
            shrink = jnp.exp(best - new_best)
            total = total * shrink + weights.sum(axis=-1)
            acc = acc * shrink[..., None] + jnp.einsum("kqc,kcd->kqd", weights, kv[..., head_dim:], precision="highest")
            return new_best, total, acc

        state = (num_kv_heads, tile * group)
        start = (
            jnp.full(state, MASKED, jnp.float32),
            jnp.zeros(state, jnp.float32),
            jnp.zeros((*state, head_dim), jnp.float32),
        )
        _, total, acc = lax.fori_loop(0, -(-last // block), one_block, start)
        tile_out = (acc / total[..., None]).reshape(num_kv_heads, tile, group, head_dim)
        return lax.dynamic_update_slice_in_dim(out, tile_out, first, axis=1)

    out = lax.fori_loop(0, ends[-1], one_tile, jnp.zeros_like(queries))
    return out[:, :num_tokens].transpose(1, 0, 2, 3)
