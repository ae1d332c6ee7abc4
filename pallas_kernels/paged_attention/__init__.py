"""Ragged causal attention of a step's tokens over a paged KV pool.

Owns the signature and the choice of implementation; the definition is `reference.py`.

A step holds rows, one per sequence. Row `s` owns the tokens `[row_offsets[s], row_offsets[s + 1])`, the newest of its
`lengths[s]` tokens, whose K and V are already in the pool; a row of length 0 is padding, and so are its tokens. A prefill
chunk and a decode are rows with another count. Each of the first `num_single` rows owns one token or none, row `s` token `s`
up to the first that owns none: a static promise that lets an implementation treat decodes apart from chunks.

What depends on the rows and the window alone is computed once a step, by `schedule`, and serves all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Float, Int, Num, UInt

from pallas_kernels.late import late
from pallas_kernels.page_layout import Layout
from pallas_kernels.paged_attention import reference, xla


@dataclass(frozen=True, slots=True)
class Implementation:
    """A `schedule` and the `paged_attention` that reads it, with the signatures of this module less `impl`.

    Attributes:
        layout: of the pages that it reads, for `kv_update` to write.
        kv_update: which implementation of `kv_update` writes them.
        options: sizes that `schedule` takes by these names, to be tuned for a kind of device.
        takes_first_page: whether several layers may share a pool.
    """

    schedule: Callable[..., Any]
    paged_attention: Callable[..., Any]
    layout: Layout = "rows"
    kv_update: str = "xla"
    options: tuple[str, ...] = ()
    takes_first_page: bool = False


def _kernel(name: str, *options: str, **attributes: Any) -> Implementation:
    schedule, attend = (late(f"{__name__}.{name}", function) for function in ("schedule", "paged_attention"))
    return Implementation(schedule, attend, options=options, **attributes)


IMPLEMENTATIONS = {
    "reference": Implementation(reference.schedule, reference.paged_attention, takes_first_page=True),
    "xla": Implementation(
        xla.schedule,
        xla.paged_attention,
        layout="halves",
        options=("rows_per_turn", "chunk_tile", "chunk_block"),
        takes_first_page=True,
    ),
    "cpu": _kernel("cpu", kv_update="cpu", takes_first_page=True),
    "tpu": _kernel("tpu", "tile_tokens", "block_tokens", kv_update="tpu"),
    "gpu": _kernel("gpu", "decode_tile", "decode_stages", "chunk_tile", "chunk_stages"),
}
"""By name. An experiment adds its own in one line; "reference" is the definition, "xla" the fast path without a kernel."""


def schedule(
    block_table: Int[Array, "S W"],
    row_offsets: Int[Array, "S+1"],
    lengths: Int[Array, " S"],
    *,
    num_tokens: int,
    num_single: int,
    page_size: int,
    window: int | None = None,
    impl: str,
    options: Mapping[str, int] | None = None,
) -> Any:
    """Lay out a step's work for `paged_attention`.

    Args:
        block_table: page ids of each row in position order; entries past `ceil(length / B)` are ignored.
        row_offsets: non-decreasing; `min(s, n)` for the rows `s <= num_single`, of which `n` own a token. Tokens at or past
            the last offset are padding.
        lengths: tokens of the sequence, this step's included, so at least the row's token count; 0 for padding rows.
        num_tokens: `T`.
        num_single: leading rows that own one token each at most.
        page_size: `B`.
        window: the newest positions that a token sees, its own among them; all of them where None.
        impl: a key of `IMPLEMENTATIONS`.
        options: of the implementation's `options`, those that are not to be as its module has them.

    Returns:
        A pytree that only the same `impl` reads.
    """
    if window is not None and window < 1:
        raise ValueError(f"window: expected at least 1, the token itself, or None for no window; found {window}")
    return IMPLEMENTATIONS[impl].schedule(
        block_table,
        row_offsets,
        lengths,
        num_tokens=num_tokens,
        num_single=num_single,
        page_size=page_size,
        window=window,
        **(options or {}),
    )


def paged_attention(
    queries: Float[Array, "T N D"],
    pages: Num[Array, "*P K B width"],
    work: Any,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    kv_scales: Float[Array, "K 2"] | None = None,
    first_page: UInt[Array, ""] | None = None,
    impl: str,
) -> Float[Array, "T N D"]:
    """Attend each token to its sequence's positions up to and including its own, or to the window's newest of them.

    Args:
        queries: rotated queries; query head `n` reads KV head `n // (N // K)`.
        pages: one layer's pool or one that layers share, in the layout of `impl` and of width `choose.pool_width`, which is
            `2 * D` but for some head dims on TPU.
        work: what `schedule` made of the step's rows for the same `impl`.
        scale: multiplies the scores.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)` before they are masked.
        sinks: a score of each query head that joins the softmax and has no value.
        kv_scales: of pages in int8 or float8: what is stored times `kv_scales[k, 0]` is K of head `k`, and times
            `kv_scales[k, 1]` V.
        first_page: added to each id in `work`'s block table, for a pool that layers share. For an `impl` that
            `takes_first_page`, and so takes pages of two dimensions, whose ids count through both.

    Returns:
        Attention outputs in the dtype of `queries`. Outputs of padding tokens are finite and otherwise unspecified.
    """
    which = {} if first_page is None else {"first_page": first_page}
    return IMPLEMENTATIONS[impl].paged_attention(
        queries, pages, work, scale=scale, soft_cap=soft_cap, sinks=sinks, kv_scales=kv_scales, **which
    )
