"""Shapes that every implementation of `paged_attention` is tested on, and inputs for them. Benchmarks take them too.

Owns what makes an input hard: rows of every kind in one step, tables whose unused entries are no pages, stale positions
past a row's end, pages in no order. Knows no implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import pytree

NO_PAGE = 10**9
"""Fills the block table past a row's length: far outside any pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step's shape.

    Attributes:
        singles: length of each leading row of one token; 0 for padding.
        tokenless: rows after those that own no token, in place of decodes that there are not.
        chunks: (tokens of this step, length) of each further row; (0, 0) for padding.
        padding_tokens: tokens past the last row's end.
        table_width: `W`; 0 for as many pages as the longest row has.
        num_pages: `P`; 0 for some more than the rows own.
        dtype: of queries, and of the pool where `kv_dtype` is empty.
        kv_dtype: of the pool where it is stored in fewer bits, with a scale of each KV head for K and for V.
        window: positions that a token sees; all where None.
        soft_cap: of the scores.
        sinks: whether each query head has a sink.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    singles: tuple[int, ...] = ()
    tokenless: int = 0
    chunks: tuple[tuple[int, int], ...] = ()
    padding_tokens: int = 0
    table_width: int = 0
    num_pages: int = 0
    dtype: str = "float32"
    kv_dtype: str = ""
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def lengths(self) -> list[int]:
        """Length of each row."""
        return [*self.singles, *(0 for _ in range(self.tokenless)), *(length for _, length in self.chunks)]

    @property
    def counts(self) -> list[int]:
        """Tokens of each row, padding rows of one token included."""
        return [*(1 for _ in self.singles), *(0 for _ in range(self.tokenless)), *(count for count, _ in self.chunks)]


CASES = (
    Case(name="one_decode", num_heads=9, num_kv_heads=3, head_dim=64, page_size=16, singles=(300,)),
    Case(name="two_decodes", num_heads=4, num_kv_heads=4, head_dim=80, page_size=8, singles=(65, 0), table_width=40),
    Case(
        name="decodes_around_page_and_block_ends", num_heads=9, num_kv_heads=3, head_dim=64, page_size=16,
        singles=(1, 15, 16, 17, 0, 63, 64, 65, 127, 128, 129, 200),
    ),
    Case(name="decodes_in_a_wide_table", num_heads=8, num_kv_heads=2, head_dim=64, page_size=8, singles=(3, 40, 9),
         table_width=256),
    Case(name="decodes_of_large_pages", num_heads=8, num_kv_heads=1, head_dim=128, page_size=128, singles=(1, 128, 129, 400)),
    Case(name="decodes_of_mha", num_heads=4, num_kv_heads=4, head_dim=128, page_size=64, singles=(64, 1, 190, 0, 0)),
    Case(
        name="chunks_around_tile_ends", num_heads=9, num_kv_heads=3, head_dim=64, page_size=16,
        chunks=((127, 127), (128, 128), (129, 129), (2, 130)),
    ),
    Case(
        name="chunks_of_every_kind", num_heads=8, num_kv_heads=2, head_dim=80, page_size=8,
        chunks=((1, 1), (7, 7), (0, 0), (16, 40), (1, 33), (0, 0), (30, 31)), padding_tokens=9,
    ),
    Case(name="a_late_chunk_of_large_pages", num_heads=8, num_kv_heads=1, head_dim=64, page_size=128, chunks=((40, 500),)),
    Case(name="a_chunk_of_mha", num_heads=4, num_kv_heads=4, head_dim=80, page_size=64, chunks=((150, 350),)),
    Case(
        name="decodes_and_chunks", num_heads=9, num_kv_heads=3, head_dim=64, page_size=16,
        singles=(1, 77, 0, 64, 129), chunks=((5, 5), (20, 90), (0, 0)), padding_tokens=7,
    ),
    Case(
        name="fewer_decodes_than_places", num_heads=9, num_kv_heads=3, head_dim=64, page_size=16,
        singles=(77, 1), tokenless=5, chunks=((20, 90), (5, 5), (0, 0)), padding_tokens=3,
    ),
    Case(name="no_decode_in_as_many_places_as_tokens", num_heads=8, num_kv_heads=2, head_dim=128, page_size=64,
         tokenless=24, chunks=((7, 70), (16, 16)), padding_tokens=1),
    Case(name="a_decode_and_a_chunk", num_heads=8, num_kv_heads=2, head_dim=128, page_size=64, singles=(70,),
         chunks=((70, 135),)),
    Case(name="bfloat16_decodes_and_chunks", num_heads=9, num_kv_heads=3, head_dim=64, page_size=16, dtype="bfloat16",
         singles=(1, 77, 0, 64), chunks=((20, 90), (0, 0)), padding_tokens=3),
    Case(name="bfloat16_decodes", num_heads=8, num_kv_heads=2, head_dim=128, page_size=64, dtype="bfloat16",
         singles=(300, 5)),
    Case(name="a_window_shorter_than_a_page", num_heads=9, num_kv_heads=3, head_dim=64, page_size=16, window=5,
         singles=(1, 5, 77, 0, 129), chunks=((5, 5), (20, 90)), padding_tokens=7),
    Case(name="a_window_of_several_blocks", num_heads=4, num_kv_heads=2, head_dim=64, page_size=16, window=150,
         singles=(149, 150, 151, 500), chunks=((160, 400), (3, 330))),
    Case(name="soft_capped", num_heads=4, num_kv_heads=2, head_dim=96, page_size=32, soft_cap=1.5,
         singles=(70, 3), chunks=((20, 90),)),
    Case(name="with_sinks", num_heads=8, num_kv_heads=2, head_dim=64, page_size=16, sinks=True,
         singles=(1, 77, 0, 64), chunks=((5, 5), (20, 90), (0, 0)), padding_tokens=2),
    Case(name="everything_at_once", num_heads=6, num_kv_heads=2, head_dim=256, page_size=8, window=40, soft_cap=2.0,
         sinks=True, singles=(1, 77, 0), chunks=((20, 90),)),
    Case(name="int8_pages", num_heads=9, num_kv_heads=3, head_dim=64, page_size=32, kv_dtype="int8",
         singles=(1, 77, 0, 64), chunks=((20, 90), (0, 0)), padding_tokens=3),
    Case(name="float8_pages", num_heads=8, num_kv_heads=2, head_dim=128, page_size=64, dtype="bfloat16",
         kv_dtype="float8_e4m3fn", singles=(300, 5), chunks=((20, 90),)),
    Case(name="nothing_but_padding", num_heads=4, num_kv_heads=4, head_dim=64, page_size=16, singles=(0, 0, 0),
         chunks=((0, 0), (0, 0)), padding_tokens=5, table_width=4),
)  # fmt: skip


@pytree.dataclass
class Inputs:
    """Arguments of `schedule` and `paged_attention`."""

    queries: Float[Array, "T N D"]
    pages: Num[Array, "P K B 2*D"]
    block_table: Int[Array, "S W"]
    row_offsets: Int[Array, "S+1"]
    lengths: Int[Array, " S"]
    sinks: Float[Array, " N"] | None
    kv_scales: Float[Array, "K 2"] | None
    num_single: int = pytree.static()
    window: int | None = pytree.static()
    soft_cap: float | None = pytree.static()


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Random inputs: normal queries, keys and values in every page, whoever owns it, and page ids in random order."""
    rng = np.random.default_rng(seed)
    widths = [-(-length // case.page_size) for length in case.lengths]
    order = rng.permutation(case.num_pages or sum(widths) + 3)
    block_table = np.full((len(widths), case.table_width or max(widths)), NO_PAGE, np.int32)
    for row, (width, end) in enumerate(zip(widths, np.cumsum(widths), strict=True)):
        block_table[row, :width] = order[end - width : end]
    row_offsets = np.concatenate([[0], np.cumsum(case.counts)]).astype(np.int32)
    num_tokens = sum(case.counts) + case.padding_tokens

    def normal(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), case.dtype)

    pages, kv_scales = normal(len(order), case.num_kv_heads, case.page_size, 2 * case.head_dim), None
    if case.kv_dtype:
        pages, kv_scales = _stored(pages, case.kv_dtype)
    return Inputs(
        queries=normal(num_tokens, case.num_heads, case.head_dim),
        pages=pages,
        block_table=jnp.asarray(block_table),
        row_offsets=jnp.asarray(row_offsets),
        lengths=jnp.asarray(case.lengths, jnp.int32),
        sinks=normal(case.num_heads) if case.sinks else None,
        kv_scales=kv_scales,
        num_single=len(case.singles) + case.tokenless,
        window=case.window,
        soft_cap=case.soft_cap,
    )


def _stored(pages: Float[Array, "P K B D2"], dtype: str) -> tuple[Num[Array, "P K B D2"], Float[Array, "K 2"]]:
    """The pages in few bits, and the scales that give back about what they were."""
    _, num_kv_heads, _, width = pages.shape
    largest = jnp.abs(pages.astype(jnp.float32).reshape(-1, num_kv_heads, pages.shape[2], 2, width // 2)).max(axis=(0, 2, 4))
    integer = jnp.issubdtype(dtype, jnp.integer)
    scales = largest / float(jnp.iinfo(dtype).max if integer else jnp.finfo(dtype).max)
    stored = pages.astype(jnp.float32) / jnp.repeat(scales, width // 2, axis=1)[None, :, None, :]
    return (jnp.round(stored) if integer else stored).astype(dtype), scales


def owned_pages(inputs: Inputs) -> np.ndarray:
    """Ids of the pages that some row reads."""
    page_size = inputs.pages.shape[2]
    used = np.arange(inputs.block_table.shape[1])[None, :] * page_size < np.asarray(inputs.lengths)[:, None]
    return np.asarray(inputs.block_table)[used]


def real_tokens(inputs: Inputs) -> np.ndarray:
    """Whether each token belongs to a row that is no padding; shape [T]."""
    real = np.zeros(inputs.queries.shape[0], bool)
    offsets, lengths = np.asarray(inputs.row_offsets), np.asarray(inputs.lengths)
    for row, length in enumerate(lengths):
        real[offsets[row] : offsets[row + 1]] = length > 0
    return real


def plan(implementation: Any, inputs: Inputs, **options: Any) -> Any:
    """The step's work, as `implementation.schedule` lays it out: a module's or an `Implementation`'s."""
    return implementation.schedule(
        inputs.block_table,
        inputs.row_offsets,
        inputs.lengths,
        num_tokens=inputs.queries.shape[0],
        num_single=inputs.num_single,
        page_size=inputs.pages.shape[2],
        window=inputs.window,
        **options,
    )


def attend(implementation: Any, inputs: Inputs, work: Any, **options: Any) -> Float[Array, "T N D"]:
    """Outputs of `implementation.paged_attention`, for inputs whose pages are in its layout and for their `work`."""
    return implementation.paged_attention(
        inputs.queries,
        inputs.pages,
        work,
        scale=inputs.queries.shape[-1] ** -0.5,
        soft_cap=inputs.soft_cap,
        sinks=inputs.sinks,
        kv_scales=inputs.kv_scales,
        **options,
    )
