"""`kv_update` against a loop: what it writes, and that it writes nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.kv_update import kv_update
from pallas_kernels.page_layout import Layout, from_rows

NUM_PAGES, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM, NUM_TOKENS = 7, 3, 8, 10, 12
NUM_PLACES = NUM_PAGES * PAGE_SIZE

WAYS: tuple[tuple[Layout, str], ...] = (("rows", "xla"), ("halves", "xla"), ("rows", "cpu"))
"""Layouts, and who writes them."""

update = jax.jit(kv_update, static_argnames=("layout", "impl"))


def random(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def check(page_ids: list[int], page_offsets: list[int], dtype: str, layout: Layout, impl: str) -> None:
    num_tokens = len(page_ids)
    pages = random(0, NUM_PAGES, NUM_KV_HEADS, PAGE_SIZE, 2 * HEAD_DIM, dtype=dtype)
    keys, values = random(1, num_tokens, NUM_KV_HEADS, HEAD_DIM), random(2, num_tokens, NUM_KV_HEADS, HEAD_DIM)
    expected = np.array(pages)
    for token, (page, offset) in enumerate(zip(page_ids, page_offsets, strict=True)):
        if page < NUM_PAGES:
            expected[page, :, offset, :HEAD_DIM] = keys[token].astype(dtype)
            expected[page, :, offset, HEAD_DIM:] = values[token].astype(dtype)
    where = jnp.array(page_ids), jnp.array(page_offsets)
    found = update(from_rows(pages, layout), keys, values, *where, layout=layout, impl=impl)
    assert found.dtype == pages.dtype
    np.testing.assert_array_equal(np.asarray(found), np.asarray(from_rows(jnp.asarray(expected), layout)))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "impl"), WAYS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@given(
    places=st.lists(st.integers(0, NUM_PLACES - 1), min_size=NUM_TOKENS, max_size=NUM_TOKENS, unique=True),
    padding=st.lists(
        st.sampled_from([None, None, NUM_PAGES, NUM_PAGES + 1, 2**31 - 1]), min_size=NUM_TOKENS, max_size=NUM_TOKENS
    ),
)
def test_writes_each_token_to_its_place_and_padding_nowhere(
    layout: Layout, impl: str, dtype: str, places: list[int], padding: list[int | None]
) -> None:
    page_ids = [place // PAGE_SIZE if none is None else none for place, none in zip(places, padding, strict=True)]
    check(page_ids, [place % PAGE_SIZE for place in places], dtype, layout, impl)


@pytest.mark.parametrize(("layout", "impl"), WAYS)
@pytest.mark.parametrize("page", [0, 3, NUM_PAGES - 1, NUM_PAGES, 2**30])
def test_writes_a_single_token(layout: Layout, impl: str, page: int) -> None:
    check([page], [5], "float32", layout, impl)


@pytest.mark.parametrize("num_tokens", [1, 8])
@pytest.mark.parametrize("num_heads", [1, NUM_KV_HEADS])
@pytest.mark.parametrize(("layout", "impl"), WAYS)
def test_a_donated_pool_is_written_in_place(layout: Layout, impl: str, num_heads: int, num_tokens: int) -> None:
    pages = random(0, 1000, num_heads, PAGE_SIZE, 2 * HEAD_DIM)
    rows = random(1, num_tokens, num_heads, HEAD_DIM)
    places = jnp.arange(num_tokens)
    donating = jax.jit(kv_update, static_argnames=("layout", "impl"), donate_argnums=0)
    lowered = donating.lower(pages, rows, rows, places, places % PAGE_SIZE, layout=layout, impl=impl)
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == pages.nbytes
    assert memory.temp_size_in_bytes < pages.nbytes / 10
