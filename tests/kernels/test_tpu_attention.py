"""`paged_attention` for TPU against the definition, interpreted: numbers, races, and memory that nobody wrote."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels import paged_attention as package
from pallas_kernels.paged_attention import cases, paged_attention, tpu_kernel
from pallas_kernels.paged_attention.cases import CASES, Case, Inputs, make_inputs, owned_pages, real_tokens
from pallas_kernels.paged_attention.tpu_kernel import pool_width
from tests.kernels.ladder.interpret import DMA_MODES, run_interpreted

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}
"""As for every implementation: outputs are averages of standard normal values, rounded to the data type at the end."""

BY_NAME = {case.name: case for case in CASES}

QUICK = ("bfloat16_decodes_and_chunks", "everything_at_once")


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of pages for rows that an interpreter reads in the time we have."""
    monkeypatch.setattr(tpu_kernel, "BLOCK_TOKENS", tpu_kernel.MIN_BLOCK_TOKENS)


def plan(inputs: Inputs, impl: str) -> Any:
    """The step's work, as the package's `schedule` lays it out."""
    return cases.plan(package, inputs, impl=impl)


def attend(inputs: Inputs, impl: str) -> jax.Array:
    """Outputs in float32, [T, N, D]."""
    work = plan(inputs, impl)
    if impl == "tpu":  # lanes past K and V are nobody's, and may hold anything
        pages, nobodys = inputs.pages, pool_width(inputs.queries.shape[2]) - inputs.pages.shape[3]
        pages = jnp.concatenate([pages, jnp.full((*pages.shape[:3], nobodys), 7, pages.dtype)], axis=3)
        inputs = dataclasses.replace(inputs, pages=pages)
    return cases.attend(package, inputs, work, impl=impl).astype(jnp.float32)


expected_of = jax.jit(partial(attend, impl="reference"))


@cache
def kernel_in(dma_mode: str) -> Any:
    """The kernel, jitted for one mode of the interpreter, so that examples of a shape share a program."""
    del dma_mode
    return jax.jit(partial(attend, impl="tpu"))


def found_of(inputs: Inputs, dma_mode: str) -> np.ndarray:
    """The kernel's outputs, interpreted."""
    return np.asarray(run_interpreted(kernel_in(dma_mode), inputs, dma_mode=dma_mode))


def poisoned(inputs: Inputs) -> Inputs:
    """The same with table entries past each row's length far outside the pool, and no number wherever no row reads."""
    pages = np.array(inputs.pages)
    if np.issubdtype(pages.dtype, np.integer):
        return inputs
    page_size = pages.shape[2]
    pages[np.setdiff1d(np.arange(pages.shape[0]), owned_pages(inputs))] = np.nan
    for row, length in enumerate(np.asarray(inputs.lengths)):
        if length % page_size:
            pages[np.asarray(inputs.block_table)[row, length // page_size], :, length % page_size :] = np.nan
    return dataclasses.replace(inputs, pages=jnp.asarray(pages))


def assert_agrees(inputs: Inputs, case: Case, dma_mode: str) -> None:
    """The kernel on poisoned inputs gives what the definition gives on clean ones, and writes every element."""
    found, expected, real = found_of(poisoned(inputs), dma_mode), np.asarray(expected_of(inputs)), real_tokens(inputs)
    tolerance = TOLERANCE[case.dtype]
    np.testing.assert_allclose(found[real], expected[real], rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(found[~real], 0)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name, marks=[pytest.mark.slow] * (c.name not in QUICK)) for c in CASES])
@pytest.mark.parametrize("dma_mode", DMA_MODES)
def test_kernel_agrees_with_the_definition(case: Case, dma_mode: str) -> None:
    assert_agrees(make_inputs(case), case, dma_mode)


@pytest.mark.slow
def test_kernel_agrees_with_blocks_of_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert tpu_kernel.BLOCK_TOKENS > tpu_kernel.MIN_BLOCK_TOKENS
    case = Case(name="", num_heads=4, num_kv_heads=2, head_dim=128, page_size=32, singles=(513, 1100), chunks=((140, 1200),))
    inputs = poisoned(make_inputs(case))
    found = run_interpreted(jax.jit(lambda inputs: attend(inputs, "tpu")), inputs, dma_mode="on_wait")
    np.testing.assert_allclose(found, expected_of(make_inputs(case)), rtol=2e-6, atol=2e-6)


# --- any rows ---------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "grouped": Case(name="", num_heads=9, num_kv_heads=3, head_dim=64, page_size=16, table_width=20, num_pages=120),
    "wide_rows": Case(name="", num_heads=4, num_kv_heads=2, head_dim=80, page_size=8, table_width=40, num_pages=240,
                      dtype="bfloat16", window=70, sinks=True),
    "bytes": Case(name="", num_heads=8, num_kv_heads=1, head_dim=128, page_size=32, table_width=10, num_pages=60,
                  kv_dtype="float8_e4m3fn", soft_cap=3.0),
}  # fmt: skip
NUM_SINGLES, NUM_CHUNKS, CHUNK_TOKENS, MAX_LENGTH = 3, 3, 150, 320


@st.composite
def ragged_rows(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Lengths of single rows, and (tokens, length) of longer ones; padding rows anywhere among them."""
    length = st.sampled_from([0, 1, 127, 128, 129]) | st.integers(0, MAX_LENGTH)
    singles = tuple(draw(st.lists(length, min_size=NUM_SINGLES, max_size=NUM_SINGLES)))
    chunks, room = [], CHUNK_TOKENS
    for _ in range(NUM_CHUNKS):
        count = draw(st.sampled_from([0, 5, 125]) | st.integers(0, room))
        count = min(count, room)
        room -= count
        before = draw(st.sampled_from([0, 1, 16]) | st.integers(0, MAX_LENGTH - count)) if count else 0
        chunks.append((count, before + count))
    return singles, tuple(chunks)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=10, suppress_health_check=list(HealthCheck))  # one fixture serves all examples
@given(rows=ragged_rows(), seed=st.integers(0, 2**32 - 1), dma_mode=st.sampled_from(DMA_MODES))
def test_kernel_agrees_on_any_rows(
    layout: str, rows: tuple[tuple[int, ...], tuple[tuple[int, int], ...]], seed: int, dma_mode: str
) -> None:
    singles, chunks = rows
    padding = CHUNK_TOKENS - sum(count for count, _ in chunks)
    case = dataclasses.replace(LAYOUTS[layout], singles=singles, chunks=chunks, padding_tokens=padding)
    assert_agrees(make_inputs(case, seed), case, dma_mode)


# --- the work follows the real lengths --------------------------------------------------------------------------------


def test_padding_costs_no_item_and_no_page() -> None:
    padded = Case(name="", num_heads=1, num_kv_heads=1, head_dim=8, page_size=16, table_width=64, num_pages=12,
                  singles=(0, 20, 0, 0), chunks=((0, 0), (130, 130), (0, 0)), padding_tokens=500)  # fmt: skip
    work = plan(make_inputs(padded), "tpu")
    real = int(work.items_of_tile[-1])
    # The decode of 2 pages, and the chunk of 130 tokens from token 4 on in two tiles, of which the first ends at position 123.
    assert real == 3
    pages = np.asarray(work.end_page - work.first_page)[:real]
    np.testing.assert_array_equal(pages, [2, 8, 9])


@pytest.mark.parametrize("window", [1, 16, 17, 100])
def test_pages_before_the_window_are_not_read(window: int) -> None:
    case = Case(name="", num_heads=1, num_kv_heads=1, head_dim=8, page_size=16, singles=(400, 30), window=window)
    work = plan(make_inputs(case), "tpu")
    for item, length in enumerate(case.singles):
        assert int(work.end_page[item]) == -(-length // 16)
        assert int(work.first_page[item]) == max(length - window, 0) // 16


# --- this rung can fail -----------------------------------------------------------------------------------------------


class _NeverWaits:
    """A copy whose arrival nobody waits for."""

    def __init__(self, copy: Any) -> None:
        self._copy = copy

    def start(self) -> None:
        self._copy.start()

    def wait(self) -> None:
        pass


@pytest.mark.slow
def test_a_missing_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make_async_copy = tpu_kernel.pltpu.make_async_copy
    monkeypatch.setattr(tpu_kernel.pltpu, "make_async_copy", lambda *refs: _NeverWaits(make_async_copy(*refs)))
    case = BY_NAME["decodes_of_large_pages"]
    function = jax.jit(lambda inputs: attend(inputs, "tpu"))
    with pytest.raises(Exception, match=r"(?i)race|raced"):
        run_interpreted(function, make_inputs(case), dma_mode="eager")


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 24}, "page_size: expected 8, 16, 32, 64 or 128; found 24"),
        ({"head_dim": 264}, "head_dim: expected a multiple of 8 up to 256; found 264"),
        (
            {"num_heads": 512, "num_kv_heads": 64, "padding_tokens": 127},
            "64 KV heads of 8 query heads of 64 on one device take",
        ),
        ({"dtype": "float16"}, "queries: expected float32 or bfloat16; found float16"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(changes: dict[str, Any], message: str) -> None:
    case = dataclasses.replace(BY_NAME["one_decode"], **changes)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(partial(attend, impl="tpu"), make_inputs(case))


def test_a_pool_of_another_width_is_refused() -> None:
    inputs = make_inputs(BY_NAME["two_decodes"])
    with pytest.raises(ValueError, match=r"expected rows of pool_width\(80\) = 256; found 160"):
        paged_attention(inputs.queries, inputs.pages, plan(inputs, "tpu"), scale=1.0, impl="tpu")


def test_a_table_that_scalar_memory_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="256 rows of 1024 pages of 16 tokens take 1048576 bytes of scalar memory"):
        package.schedule(
            jnp.zeros((256, 1024), jnp.int32),
            jnp.arange(257),
            jnp.ones(256, jnp.int32),
            num_tokens=256,
            num_single=256,
            page_size=16,
            impl="tpu",
        )
