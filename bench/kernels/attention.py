"""`paged_attention` in the lab: decodes of one length. Registers itself; knows no clock and no report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.kernels.registry import Cost, Subject, add, variant
from bench.kernels.subjects import ROUNDING, largest_difference, size_of
from pallas_kernels import paged_attention
from pallas_kernels.page_layout import from_rows
from pallas_kernels.paged_attention.cases import Case, make_inputs
from pallas_kernels.paged_attention.xla import ROWS_PER_TURN


@dataclass(frozen=True, slots=True)
class Decodes:
    """`batch` sequences of `context` tokens, one new token each."""

    batch: int
    context: int
    heads: int
    kv_heads: int
    dim: int
    page: int = 16
    dtype: str = "float32"


def _make(shape: Decodes, seed: int) -> tuple[Any, ...]:
    case = Case(
        name="", num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=shape.dim, page_size=shape.page,
        singles=(shape.context,) * shape.batch, dtype=shape.dtype,
    )  # fmt: skip
    inputs = make_inputs(case, seed)
    return inputs.queries, inputs.pages, inputs.block_table, inputs.row_offsets, inputs.lengths


def _attend(impl: str, queries: Any, pages: Any, table: Any, offsets: Any, lengths: Any, **options: int) -> Any:
    num_tokens = queries.shape[0]
    work = paged_attention.schedule(
        table,
        offsets,
        lengths,
        num_tokens=num_tokens,
        num_single=num_tokens,
        page_size=pages.shape[2],
        impl=impl,
        options=options,
    )
    return paged_attention.paged_attention(queries, pages, work, scale=queries.shape[-1] ** -0.5, impl=impl)


def _cost(shape: Decodes) -> Cost:
    positions = shape.batch * shape.context
    pages = 2 * positions * shape.kv_heads * shape.dim
    tokens = 2 * shape.batch * shape.heads * shape.dim
    return Cost((pages + tokens) * size_of(shape.dtype), 4 * positions * shape.heads * shape.dim)


add(
    Subject(
        name="paged_attention",
        shapes={
            "demo": Decodes(32, 1024, 9, 3, 64),
            "one": Decodes(1, 1024, 9, 3, 64),
            "8b": Decodes(16, 8192, 32, 8, 128, page=32, dtype="bfloat16"),
        },
        make=_make,
        define=lambda *arguments: _attend("reference", *arguments),
        cost=_cost,
        error=largest_difference,
        tolerance=lambda shape: ROUNDING[shape.dtype],
    )
)


def _in_layout_of(impl: str) -> Any:
    layout = paged_attention.IMPLEMENTATIONS[impl].layout
    return lambda queries, pages, *rows: (queries, from_rows(pages, layout), *rows)


@variant("paged_attention", prepare=_in_layout_of("xla"))
def xla(*arguments: Any, rows_per_turn: int = ROWS_PER_TURN) -> Any:
    return _attend("xla", *arguments, rows_per_turn=rows_per_turn)


@variant("paged_attention", platforms=("cpu",), prepare=_in_layout_of("cpu"))
def cpu(*arguments: Any) -> Any:
    return _attend("cpu", *arguments)


@variant("paged_attention", platforms=("tpu",), prepare=_in_layout_of("tpu"))
def tpu(*arguments: Any, tile_tokens: int = 128, block_tokens: int = 0) -> Any:
    """`block_tokens` of 0 takes what fits."""
    return _attend("tpu", *arguments, tile_tokens=tile_tokens, block_tokens=block_tokens)


@variant("paged_attention", platforms=("gpu",), prepare=_in_layout_of("gpu"))
def gpu(*arguments: Any, decode_tile: int = 0, decode_stages: int = 0) -> Any:
    """Sizes of 0 take what fits."""
    return _attend("gpu", *arguments, decode_tile=decode_tile, decode_stages=decode_stages)
