"""`paged_attention` for Hopper against the definition, interpreted: numbers, races, and memory that is nobody's.

The interpreter has no products of registers, which stand beside the rest of the kernel in one function; all else is what
the hardware runs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams

from pallas_kernels.paged_attention import gpu, reference
from pallas_kernels.paged_attention.cases import CASES, Case, Inputs, attend, make_inputs, owned_pages, plan, real_tokens

# What the interpreter's numpy says of queries that a block lacks, and of keys past a row's end.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

TOLERANCE = 2e-2
"""Outputs are averages of standard normal values; weights and outputs are rounded to 8 bits."""

BY_NAME = {case.name: dataclasses.replace(case, dtype="bfloat16") for case in CASES}
# So few workers that blocks are cut and that each has several segments.
NUM_WORKERS = 3
WHOLE_BLOCKS: dict[str, Any] = {
    "chunks": ((200, 200), (0, 0), (70, 300)), "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16,
    "dtype": "bfloat16", "padding_tokens": 5,
}  # fmt: skip
MORE = (
    Case(name="whole_blocks", sinks=True, **WHOLE_BLOCKS),
    Case(name="whole_blocks_in_a_window", window=100, soft_cap=2.0, **WHOLE_BLOCKS),
    Case(name="whole_blocks_of_float8", kv_dtype="float8_e4m3fn", **WHOLE_BLOCKS),
    Case(name="a_group_of_a_hundred", num_heads=100, num_kv_heads=1, head_dim=64, page_size=32, dtype="bfloat16",
         singles=(100, 7), chunks=((3, 90),)),
)  # fmt: skip
QUICK = ("bfloat16_decodes",)
SLOW = (
    "decodes_around_page_and_block_ends",
    "two_decodes",
    "decodes_of_large_pages",
    "chunks_of_every_kind",
    "decodes_and_chunks",
    "a_window_of_several_blocks",
    "soft_capped",
    "everything_at_once",
    "int8_pages",
    "float8_pages",
    "nothing_but_padding",
)


def attention(implementation: Any, **options: Any) -> Callable[[Inputs], jax.Array]:
    """A jitted function of inputs."""

    def attention_of(inputs: Inputs) -> jax.Array:
        return attend(implementation, inputs, plan(implementation, inputs), **options).astype(jnp.float32)

    return jax.jit(attention_of)


def spoiled(inputs: Inputs) -> Inputs:
    """NaN wherever no row has a position: in nobody's pages, and past each row's end in its last."""
    if jnp.issubdtype(inputs.pages.dtype, jnp.integer):
        return inputs
    pages, page_size = np.array(inputs.pages, np.float32), inputs.pages.shape[2]
    pages[np.setdiff1d(np.arange(pages.shape[0]), owned_pages(inputs))] = np.nan
    for table, length in zip(np.asarray(inputs.block_table), np.asarray(inputs.lengths), strict=True):
        if length % page_size:
            pages[table[length // page_size], :, length % page_size :] = np.nan
    return dataclasses.replace(inputs, pages=jnp.asarray(pages, inputs.pages.dtype))


def spoil_free(inputs: Inputs) -> Inputs:
    """The same with zeros there, for a definition that multiplies them by zero."""
    return dataclasses.replace(inputs, pages=jnp.nan_to_num(inputs.pages))


@pytest.mark.parametrize(
    "case",
    [pytest.param(BY_NAME[name], id=name) for name in QUICK]
    + [pytest.param(BY_NAME[name], id=name, marks=pytest.mark.slow) for name in SLOW]
    + [pytest.param(case, id=case.name, marks=pytest.mark.slow) for case in MORE],
)
def test_agrees_with_the_definition_without_races(case: Case) -> None:
    inputs = spoiled(make_inputs(case))
    kernel = attention(gpu, interpret=InterpretGPUParams(detect_races=True), num_workers=NUM_WORKERS)
    found, real = np.asarray(kernel(inputs)), real_tokens(inputs)
    expected = np.asarray(attention(reference)(spoil_free(inputs)))
    np.testing.assert_allclose(found[real], expected[real], rtol=TOLERANCE, atol=TOLERANCE)
    assert not found[~real].any(), "padding gives zeros"


OF_MODEL: dict[str, Any] = {
    "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "dtype": "bfloat16", "kv_dtype": "bfloat16",
    "has_scales": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"dtype": "float32", "kv_dtype": "float32"}, "expected bfloat16 queries, found float32"),
        ({"kv_dtype": "float16"}, "expected pages of bfloat16, int8 or float8_e4m3fn, found float16"),
        ({"kv_dtype": "int8"}, "kv_scales go with pages in eight bits"),
        ({"has_scales": True}, "kv_scales go with pages in eight bits"),
        ({"head_dim": 72}, "found 72"),
        ({"page_size": 24}, "found 24"),
        ({"num_heads": 129, "num_kv_heads": 1}, "found 129 for 1"),
    ],
    ids=str,
)
def test_refuses_what_it_cannot_do(change: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=re.escape(what)):
        gpu.check(**OF_MODEL | change)
