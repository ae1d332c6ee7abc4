"""The head over rows that sample, and over tokens that are scored: no more of it than there are rows that ask."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device.heads import by_blocks, head_of_rows
from jaxserve.device.pack import KnownTokens
from jaxserve.device.scoring import BLOCK, score
from jaxserve.models.layers import linear
from pallas_kernels.cpu_sums import MOST_COLUMNS

VOCAB, HIDDEN = 40, 16


def make_head(num_in: int = HIDDEN):
    weights = jnp.asarray(np.random.default_rng(0).standard_normal((VOCAB, num_in)), jnp.float32)
    return lambda states: (linear(weights, states), 2 * states)


@pytest.mark.parametrize("most", [3, 8, 9, 20, 32])
def test_rows_that_sample_have_their_logits(most: int) -> None:
    """And of the others only as many are computed as are in the last block of those that do."""
    states = jnp.asarray(np.random.default_rng(1).standard_normal((HIDDEN, most)), jnp.float32)
    head = make_head()
    logits, hidden = (np.asarray(x) for x in head(states))
    run = jax.jit(partial(by_blocks, head))
    for num_rows in range(most + 1):
        found = [np.asarray(x) for x in run(states, num_rows)]
        np.testing.assert_allclose(found[0][:, :num_rows], logits[:, :num_rows], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found[1][:, :num_rows], hidden[:, :num_rows])
        computed = most if most <= MOST_COLUMNS else min(most, -(-num_rows // MOST_COLUMNS) * MOST_COLUMNS)
        assert (np.abs(found[0]).sum(axis=0) > 0).sum() == computed


def test_elsewhere_than_on_a_cpu_there_is_no_loop() -> None:
    states = jax.ShapeDtypeStruct((HIDDEN, 32), jnp.float32)
    traced = jax.jit(lambda x, n: head_of_rows(make_head(), x, n)).trace(states, jax.ShapeDtypeStruct((), jnp.int32))
    assert "stablehlo.while" in traced.lower(lowering_platforms=("cpu",)).as_text()
    for platform in ("cuda", "tpu"):
        assert "stablehlo.while" not in traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("size", [BLOCK, 2 * BLOCK])
def test_scoring_that_nobody_asks_for_costs_no_head(size: int) -> None:
    """Where the tokens are one block, what its turn computes is the same in each, and the compiler would do it before."""
    head = make_head()
    states = jax.ShapeDtypeStruct((HIDDEN, size), jnp.float32)
    known = KnownTokens(token=jax.ShapeDtypeStruct((size,), jnp.int32), target=jax.ShapeDtypeStruct((size,), jnp.int32))
    program = (
        jax.jit(lambda states, known: score(lambda x: head(x)[0], states, known, 4)).lower(states, known).compile().as_text()
    )
    assert program is not None
    before, entry = program.split("\nENTRY ")
    assert f"f32[{VOCAB},{BLOCK}]" in before
    assert f"f32[{VOCAB},{BLOCK}]" not in entry
