"""`kv_update` against a loop: what it writes, and that it writes nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.kv_update import kv_update

NUM_PAGES, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM, NUM_TOKENS = 7, 3, 8, 10, 12
NUM_PLACES = NUM_PAGES * PAGE_SIZE

update = jax.jit(kv_update)


def random(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@given(
    places=st.lists(st.integers(0, NUM_PLACES - 1), min_size=NUM_TOKENS, max_size=NUM_TOKENS, unique=True),
    padding=st.lists(
        st.sampled_from([None, None, NUM_PAGES, NUM_PAGES + 1, 2**31 - 1]), min_size=NUM_TOKENS, max_size=NUM_TOKENS
    ),
)
def test_writes_each_token_to_its_place_and_padding_nowhere(dtype: str, places: list[int], padding: list[int | None]) -> None:
    pages = random(0, NUM_PAGES, NUM_KV_HEADS, PAGE_SIZE, 2 * HEAD_DIM, dtype=dtype)
    keys, values = random(1, NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM), random(2, NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM)
    page_ids = [place // PAGE_SIZE if none is None else none for place, none in zip(places, padding, strict=True)]
    page_offsets = [place % PAGE_SIZE for place in places]

    expected = np.array(pages)
    for token, (page, offset) in enumerate(zip(page_ids, page_offsets, strict=True)):
        if page < NUM_PAGES:
            expected[page, :, offset, :HEAD_DIM] = keys[token].astype(dtype)
            expected[page, :, offset, HEAD_DIM:] = values[token].astype(dtype)
    found = update(pages, keys, values, jnp.array(page_ids), jnp.array(page_offsets))
    assert found.dtype == pages.dtype
    np.testing.assert_array_equal(np.asarray(found), expected)
