"""`paged_attention`: the definition against plain loops, every other implementation against the definition."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import paged_attention as package
from pallas_kernels.page_layout import from_rows
from pallas_kernels.paged_attention import IMPLEMENTATIONS, cases, cpu, paged_attention, xla
from pallas_kernels.paged_attention.cases import CASES, Case, Inputs, make_inputs, owned_pages, real_tokens
from tests.cached import CACHED

pytestmark = CACHED

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}
"""Outputs are averages of standard normal values; bfloat16 ones are rounded to 8 bits at the end."""

BY_NAME = {case.name: case for case in CASES}
QUICK = (
    "decodes_around_page_and_block_ends",
    "chunks_of_every_kind",
    "decodes_and_chunks",
    "everything_at_once",
    "int8_pages",
)
SOME_QUICK = [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case.name not in QUICK)) for case in CASES]


def plan(inputs: Inputs, impl: str) -> Any:
    """The step's work, as the package's `schedule` lays it out."""
    return cases.plan(package, inputs, impl=impl)


@partial(jax.jit, static_argnames="impl")
def _attend(inputs: Inputs, impl: str) -> jax.Array:
    pages = from_rows(inputs.pages, IMPLEMENTATIONS[impl].layout)
    laid_out = dataclasses.replace(inputs, pages=pages)
    return cases.attend(package, laid_out, plan(inputs, impl), impl=impl)


def attend(inputs: Inputs, impl: str) -> np.ndarray:
    """Outputs in float32, [T, N, D]."""
    return np.asarray(_attend(inputs, impl), np.float32)


def poisoned(inputs: Inputs) -> Inputs:
    """The same inputs with NaN in every page that no row owns."""
    nobodys = np.setdiff1d(np.arange(inputs.pages.shape[0]), owned_pages(inputs))
    assert nobodys.size
    pages = np.array(inputs.pages)
    pages[nobodys] = 127 if pages.dtype == np.int8 else np.nan
    return dataclasses.replace(inputs, pages=jnp.asarray(pages))


SHARING = [name for name, implementation in IMPLEMENTATIONS.items() if implementation.takes_first_page]


@pytest.mark.parametrize("impl", SHARING)
@pytest.mark.parametrize("name", ["decodes_and_chunks", "one_decode", "int8_pages"])
def test_layers_may_share_a_pool(impl: str, name: str) -> None:
    """A page of each of three layers side by side: the ids are those of the first layer's."""
    inputs = make_inputs(BY_NAME[name], seed=0)
    pages = from_rows(inputs.pages, IMPLEMENTATIONS[impl].layout)
    pools = [pages.at[:].set(jnp.full((), 7, pages.dtype)), pages, jnp.zeros_like(pages)]
    shared = jnp.stack(pools, axis=1).reshape(-1, *pages.shape[1:])
    of_first = dataclasses.replace(inputs, pages=pages, block_table=inputs.block_table * 3)
    options = {"scale": 0.125, "kv_scales": inputs.kv_scales, "impl": impl}
    found = paged_attention(inputs.queries, shared, plan(of_first, impl), first_page=jnp.uint32(1), **options)
    expected = paged_attention(inputs.queries, pages, plan(inputs, impl), **options)
    np.testing.assert_array_equal(found[real_tokens(inputs)], expected[real_tokens(inputs)])


def test_some_take_one_pool_a_layer_only() -> None:
    assert SHARING == ["reference", "xla", "cpu"]


def by_loops(inputs: Inputs) -> np.ndarray:
    """The same in float64, a token and a head at a time; zeros for padding."""
    pages = np.asarray(inputs.pages, np.float64)
    queries = np.asarray(inputs.queries, np.float64)
    num_heads, head_dim = queries.shape[1:]
    _, num_kv_heads, page_size, _ = pages.shape
    offsets, out = np.asarray(inputs.row_offsets), np.zeros(queries.shape)
    for row, length in enumerate(np.asarray(inputs.lengths)):
        ids = np.asarray(inputs.block_table)[row, : -(-length // page_size)]
        kv = pages[ids].transpose(1, 0, 2, 3).reshape(num_kv_heads, -1, 2 * head_dim)
        if inputs.kv_scales is not None:
            kv = kv * np.repeat(np.asarray(inputs.kv_scales, np.float64), head_dim, axis=1)[:, None]
        for token in range(offsets[row], offsets[row + 1]) if length else ():
            visible = length - (offsets[row + 1] - 1 - token)
            for head in range(num_heads):
                mine = kv[head // (num_heads // num_kv_heads), :visible]
                scores = mine[:, :head_dim] @ queries[token, head] / np.sqrt(head_dim)
                if inputs.soft_cap is not None:
                    scores = inputs.soft_cap * np.tanh(scores / inputs.soft_cap)
                if inputs.window is not None:
                    scores[: -inputs.window] = -np.inf
                sink = -np.inf if inputs.sinks is None else float(inputs.sinks[head])
                largest = max(scores.max(), sink)
                weights = np.exp(scores - largest)
                out[token, head] = weights @ mine[:, head_dim:] / (weights.sum() + np.exp(sink - largest))
    return out


@pytest.mark.parametrize(
    "name",
    [
        "decodes_and_chunks",
        "chunks_of_every_kind",
        "decodes_of_mha",
        "a_window_shorter_than_a_page",
        "everything_at_once",
        "int8_pages",
        "nothing_but_padding",
    ],
)
def test_the_definition_is_what_loops_compute(name: str) -> None:
    inputs = make_inputs(BY_NAME[name])
    np.testing.assert_allclose(attend(inputs, "reference"), by_loops(inputs), rtol=0, atol=2e-6)


@pytest.mark.parametrize("case", SOME_QUICK)
@pytest.mark.parametrize("impl", ["xla", "cpu"])
def test_implementation_agrees_with_the_definition(impl: str, case: Case) -> None:
    inputs = make_inputs(case)
    real = real_tokens(inputs)
    found = attend(inputs, impl)
    np.testing.assert_allclose(found[real], attend(inputs, "reference")[real], rtol=0, atol=TOLERANCE[case.dtype])
    assert np.isfinite(found).all(), "outputs of padding tokens must be finite"


@pytest.mark.parametrize("case", SOME_QUICK)
@pytest.mark.parametrize("impl", [pytest.param("reference", marks=pytest.mark.slow), "xla", "cpu"])
def test_pages_that_no_row_owns_do_not_matter(impl: str, case: Case) -> None:
    """Not even when what they hold is not a number: a page keeps what its last owner left."""
    for seed in range(3):  # other pages are nobody's: page 0 among them, which stands for "none" in places
        inputs = make_inputs(case, seed)
        np.testing.assert_array_equal(attend(poisoned(inputs), impl), attend(inputs, impl))


@pytest.mark.parametrize("name", ["decodes_and_chunks", "decodes_in_a_wide_table", "chunks_of_every_kind"])
@pytest.mark.parametrize("impl", ["reference", "xla", "cpu"])
@pytest.mark.parametrize("garbage", [0, -1, -(2**31), 2**31 - 1])
def test_table_entries_past_the_length_do_not_matter(impl: str, name: str, garbage: int) -> None:
    inputs = make_inputs(BY_NAME[name])
    page = jnp.arange(inputs.block_table.shape[1])[None, :]
    unused = page * inputs.pages.shape[2] >= inputs.lengths[:, None]
    changed = dataclasses.replace(inputs, block_table=jnp.where(unused, garbage, inputs.block_table))
    np.testing.assert_array_equal(attend(changed, impl), attend(inputs, impl))


@pytest.mark.parametrize("impl", ["reference", "xla", "cpu"])
def test_positions_past_the_length_do_not_matter(impl: str) -> None:
    """The rest of a row's last page holds what its last owner left."""
    inputs = make_inputs(BY_NAME["decodes_and_chunks"])
    expected, page_size = attend(inputs, impl), inputs.pages.shape[2]
    pages = np.array(inputs.pages)
    for row, length in enumerate(np.asarray(inputs.lengths)):
        if length % page_size:
            pages[np.asarray(inputs.block_table)[row, length // page_size], :, length % page_size :] = 1e4
    found = attend(dataclasses.replace(inputs, pages=jnp.asarray(pages)), impl)
    np.testing.assert_array_equal(found[real_tokens(inputs)], expected[real_tokens(inputs)])


# One shape, hence one program, for all examples of a layout.
LAYOUTS = {
    "grouped": Case(name="", num_heads=9, num_kv_heads=3, head_dim=64, page_size=16, table_width=20, num_pages=120),
    "small_pages": Case(name="", num_heads=8, num_kv_heads=2, head_dim=80, page_size=8, table_width=30, num_pages=180),
    "large_pages": Case(
        name="", num_heads=4, num_kv_heads=4, head_dim=128, page_size=64, table_width=5, num_pages=30, dtype="bfloat16"
    ),
}
NUM_SINGLES, NUM_CHUNKS, CHUNK_TOKENS, MAX_LENGTH = 3, 3, 150, 240


@st.composite
def ragged_rows(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Rows of `NUM_SINGLES` and `NUM_CHUNKS` that fit in the layouts, padding rows anywhere among them."""
    length = st.sampled_from([0, 1, 63, 64, 65]) | st.integers(0, MAX_LENGTH)
    singles = tuple(draw(st.lists(length, min_size=NUM_SINGLES, max_size=NUM_SINGLES)))
    chunks, room = [], CHUNK_TOKENS
    for _ in range(NUM_CHUNKS):
        count = draw(st.integers(0, room))
        room -= count
        before = draw(st.sampled_from([0, 1, 16]) | st.integers(0, MAX_LENGTH - count)) if count else 0
        chunks.append((count, min(before + count, MAX_LENGTH)))
    return singles, tuple(chunks)


@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.slow] * (name != "grouped")) for name in LAYOUTS])
@pytest.mark.parametrize("impl", [pytest.param("xla", marks=pytest.mark.slow), "cpu"])
@given(rows=ragged_rows(), seed=st.integers(0, 2**32 - 1))
def test_implementation_agrees_on_any_rows(
    impl: str, layout: str, rows: tuple[tuple[int, ...], tuple[tuple[int, int], ...]], seed: int
) -> None:
    singles, chunks = rows
    padding = CHUNK_TOKENS - sum(count for count, _ in chunks)
    case = dataclasses.replace(LAYOUTS[layout], singles=singles, chunks=chunks, padding_tokens=padding)
    inputs = poisoned(make_inputs(case, seed))
    real, found = real_tokens(inputs), attend(inputs, impl)
    # Relative too: over thousands of rows, some output is one value of 4 or 5.
    tolerance = TOLERANCE[case.dtype]
    np.testing.assert_allclose(found[real], attend(inputs, "reference")[real], rtol=tolerance, atol=tolerance)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("lengths", [(5_000, 0, 129, 1), (1_300,), (512, 513, 1_024, 1_025)], ids=str)
def test_parts_of_long_rows_are_joined(lengths: tuple[int, ...]) -> None:
    """`cpu` cuts long rows into parts, of which some may hold what a softmax forgets of the others."""
    case = Case(name="", num_heads=6, num_kv_heads=2, head_dim=32, page_size=16, singles=lengths, sinks=True)
    inputs = make_inputs(case)
    inputs = dataclasses.replace(inputs, queries=inputs.queries * 8)
    real = real_tokens(inputs)
    np.testing.assert_allclose(attend(inputs, "cpu")[real], attend(inputs, "reference")[real], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 8])
@pytest.mark.parametrize("name", ["decodes_and_chunks", "everything_at_once", "int8_pages", "float8_pages"])
def test_kernels_of_narrower_vectors(name: str, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As processors have that this one is not."""
    monkeypatch.setattr(cpu.foreign, "vector_lanes", lambda: lanes)
    inputs = make_inputs(BY_NAME[name])
    real, found = real_tokens(inputs), jax.jit(lambda: _attend.__wrapped__(inputs, "cpu"))()
    expected = attend(inputs, "reference")[real]
    np.testing.assert_allclose(np.asarray(found, np.float32)[real], expected, rtol=0, atol=TOLERANCE[BY_NAME[name].dtype])


@given(num_rows=st.integers(1, 4096), table_width=st.integers(1, 4096), page_size=st.sampled_from([4, 16, 64, 128, 1024]))
def test_room_for_parts_is_bounded(num_rows: int, table_width: int, page_size: int) -> None:
    """And a part is whole pages, and all parts of a row are all of its positions."""
    split = cpu._split(num_rows, table_width, page_size)
    parts = -(-table_width * page_size // split)
    assert split % page_size == 0
    assert parts * num_rows <= max(cpu.MOST_PARTS, cpu.FEWEST_PARTS * num_rows)
    assert parts * split >= table_width * page_size


def test_a_row_comes_out_the_same_in_any_company() -> None:
    """Of decodes in a program of one shape and of chunks cut anywhere, to the last bit."""
    case = Case(
        name="", num_heads=9, num_kv_heads=3, head_dim=64, page_size=16, singles=(300, 77, 1, 190, 64),
        chunks=((40, 90), (30, 400)), table_width=30, num_pages=90,
    )  # fmt: skip
    inputs = make_inputs(case)
    together = attend(inputs, "cpu")
    for row in range(5):
        alone = jnp.where(jnp.arange(7) == row, inputs.lengths, 0)
        np.testing.assert_array_equal(attend(dataclasses.replace(inputs, lengths=alone), "cpu")[row], together[row])
    for cut in (1, 16, 29):  # the last chunk's first tokens in a step of their own
        offsets, lengths = inputs.row_offsets.at[-1].add(cut - 30), inputs.lengths.at[-1].add(cut - 30)
        found = attend(dataclasses.replace(inputs, row_offsets=offsets, lengths=lengths), "cpu")
        np.testing.assert_array_equal(found[: 45 + cut], together[: 45 + cut])


# --- the work follows the real lengths --------------------------------------------------------------------------------


def positions_read(case: Case, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many positions of K the loops of `xla` read, counted as they run."""
    read: list[int] = []
    turn, gather = xla._decode_turn, xla._gather_keys

    def counting_turn(*args: Any) -> Any:
        jax.debug.callback(lambda: read.append(args[-2] * args[-1] * max(xla.BLOCK, case.page_size)))
        return turn(*args)

    def counting_gather(pages: jax.Array, page_ids: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: read.append(page_ids.size * case.page_size))
        return gather(pages, page_ids)

    monkeypatch.setattr(xla, "_decode_turn", counting_turn)
    monkeypatch.setattr(xla, "_gather_keys", counting_gather)
    inputs = make_inputs(case)
    attended = jax.jit(lambda: paged_attention(inputs.queries, inputs.pages, plan(inputs, "xla"), scale=1.0, impl="xla"))()
    attended.block_until_ready()
    jax.effects_barrier()
    return sum(read)


@pytest.mark.parametrize(
    ("lengths", "blocks"),
    [
        ((1, 1, 1, 1), 4),
        # A block of every row, and eight of the row with a second.
        ((64, 65, 0, 1), 4 + 8),
        ((1000, 0, 0, 3), 4 + 16),
        # Fifteen of every row, since two rows have as many, and eight of the row with a sixteenth.
        ((700, 800, 900, 1024), 15 * 4 + 8),
        ((1024,), 16),
        ((0, 0, 0, 0), 0),
    ],
    ids=str,
)
def test_decodes_read_what_is_there(lengths: tuple[int, ...], blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(name="", num_heads=2, num_kv_heads=1, head_dim=8, page_size=16, singles=lengths, table_width=64, num_pages=260)
    assert positions_read(case, monkeypatch) == blocks * xla.BLOCK


_schedule_forty = jax.jit(partial(xla.schedule, num_tokens=40, num_single=40, page_size=16))


@given(lengths=st.lists(st.integers(0, 1024) | st.sampled_from([0, 40, 1024]), min_size=40, max_size=40))
def test_decodes_never_read_much_more_than_is_there(lengths: list[int]) -> None:
    """The first loop at most twice what there is; and it leaves the second no block that half a turn's rows have."""
    work = _schedule_forty(jnp.zeros((40, 64), jnp.int32), jnp.arange(41), jnp.array(lengths)).decode
    needed = [-(-length // xla.BLOCK) for length in lengths]
    levels, active = int(work.num_levels), np.asarray(work.active)
    assert active.tolist() == [sum(blocks > level for blocks in needed) for level in range(active.size)]
    taken = -(-active[:levels] // work.rows_per_turn) * work.rows_per_turn
    assert sum(taken) <= 2 * sum(min(blocks, levels) for blocks in needed)
    assert 2 * active[levels] < work.rows_per_turn


@pytest.mark.parametrize(
    "chunks", [((1, 1),), ((128, 128), (129, 129)), ((5, 1000), (2, 2), (0, 0)), ((300, 1024),), ((0, 0), (0, 0))], ids=str
)
def test_chunks_read_what_is_there(chunks: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch) -> None:
    padding = 512 - sum(count for count, _ in chunks)
    case = Case(
        name="", num_heads=2, num_kv_heads=1, head_dim=8, page_size=16, chunks=chunks, padding_tokens=padding,
        table_width=64, num_pages=260,
    )  # fmt: skip
    tile, block = xla.CHUNK_TILE, xla.CHUNK_BLOCK
    # Each tile sees up to its own last position and no further.
    tiles = [min(length - count + end, length) for count, length in chunks for end in range(tile, count + tile, tile)]
    assert plan(make_inputs(case), "xla").chunks.num_tiles == len(tiles)
    assert positions_read(case, monkeypatch) == sum(-(-last // block) for last in tiles) * block


def test_what_a_window_hides_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(
        name="", num_heads=2, num_kv_heads=1, head_dim=8, page_size=16, singles=(1000,), chunks=((100, 1000),),
        table_width=64, num_pages=260, window=64,
    )  # fmt: skip
    assert plan(make_inputs(case), "xla").decode.active[:3].tolist() == [1, 1, 0]
    singles, chunk_block = 2 * xla.BLOCK, xla.CHUNK_BLOCK
    # The chunk's first token is at 900 and sees from 837 on.
    chunks = (-(-1000 // chunk_block) - 837 // chunk_block) * chunk_block
    assert positions_read(case, monkeypatch) == singles + chunks
