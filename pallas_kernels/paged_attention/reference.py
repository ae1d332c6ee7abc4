"""The definition of `paged_attention`: gather every page, mask, softmax. Obvious, not fast."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num, UInt

from pallas_kernels import pytree


@pytree.dataclass
class Rows:
    """The rows as they are."""

    block_table: Int[Array, "S W"]
    row_offsets: Int[Array, "S+1"]
    lengths: Int[Array, " S"]
    window: int | None = pytree.static(default=None)


def schedule(
    block_table: Int[Array, "S W"],
    row_offsets: Int[Array, "S+1"],
    lengths: Int[Array, " S"],
    *,
    num_tokens: int,
    num_single: int,
    page_size: int,
    window: int | None = None,
) -> Rows:
    """See `pallas_kernels.paged_attention.schedule`. Nothing to lay out."""
    del num_tokens, num_single, page_size
    return Rows(block_table, row_offsets, lengths, window)


def paged_attention(
    queries: Float[Array, "T N D"],
    pages: Num[Array, "*P K B D2"],
    work: Rows,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    kv_scales: Float[Array, "K 2"] | None = None,
    first_page: UInt[Array, ""] | None = None,
) -> Float[Array, "T N D"]:
    """See `pallas_kernels.paged_attention.paged_attention`. Padding tokens give zeros."""
    pages = pages.reshape(-1, *pages.shape[-3:])
    num_tokens, num_heads, head_dim = queries.shape
    _, num_kv_heads, page_size, _ = pages.shape
    num_rows, width = work.block_table.shape

    token = jnp.arange(num_tokens)
    row = jnp.sum(token[:, None] >= work.row_offsets[None, 1:], axis=1)  # [T]
    in_row = row < num_rows
    row = jnp.minimum(row, num_rows - 1)
    real = in_row & (work.lengths[row] > 0)
    # The row's last token sits at position length - 1.
    position = work.lengths[row] - (work.row_offsets[row + 1] - token)

    ignored = jnp.arange(width)[None, :] * page_size >= work.lengths[:, None]
    table = jnp.where(ignored, 0, work.block_table)
    table = table if first_page is None else table + first_page.astype(jnp.int32)
    kv = pages[table].astype(jnp.float32)  # [S, W, K, B, 2D]
    kv = kv.transpose(0, 2, 1, 3, 4).reshape(num_rows, num_kv_heads, width * page_size, 2 * head_dim)[row]
    if kv_scales is not None:
        kv = kv * jnp.repeat(kv_scales.astype(jnp.float32), head_dim, axis=1)[None, :, None, :]
    group = num_heads // num_kv_heads
    grouped = queries.astype(jnp.float32).reshape(num_tokens, num_kv_heads, group, head_dim)
    scores = scale * jnp.einsum("tkgd,tkcd->tkgc", grouped, kv[..., :head_dim], precision="highest")
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    key_position = jnp.arange(width * page_size)[None, :]
    visible = key_position <= position[:, None]  # [T, W*B]
    if work.window is not None:
        visible &= key_position > position[:, None] - work.window
    scores = jnp.where(visible[:, None, None, :], scores, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(num_kv_heads, group, 1), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    # NaN for padding tokens, which see nothing; dropped below.
    weights = jax.nn.softmax(scores, axis=-1)[..., : width * page_size]
    values = jnp.where(visible[:, None, :, None], kv[..., head_dim:], 0.0)
    out = jnp.einsum("tkgc,tkcd->tkgd", weights, values, precision="highest")
    out = jnp.where(real[:, None, None, None], out, 0.0)
    return out.reshape(num_tokens, num_heads, head_dim).astype(queries.dtype)
