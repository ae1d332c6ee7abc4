"""Log probabilities of tokens that are known: how likely the model holds the prompt to be.

Owns the loop over them and what it leaves to be read. The loop runs once a block of tokens that are asked about, so never in a
step in which no row asks, and the logits of more than a block never exist.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.device.pack import KnownTokens
from jaxserve.request import TokenLogprobs

BLOCK = 64
"""Tokens at a time: 13 MB of logits for a vocabulary of 50,000, and the head's weights are read once a block."""


def score(
    head: Callable[[Float[Array, "E B"]], Float[Array, "V B"]],
    states: Float[Array, "E T"],
    known: KnownTokens,
    num_top: int,
) -> Int[Array, "T packed"]:
    """What the model says of each of `known`, in their order; what follows the last block that holds any is zeros.

    Args:
        head: makes logits of states.
        states: of the step's tokens, as they leave the layers.

    Returns:
        As `pack_columns` has it: how many tokens are as likely or likelier (itself counted, equals not), its log probability,
        and the most likely tokens'.
    """
    size = known.token.shape[0]
    block = min(BLOCK, size)
    num_blocks = -(-jnp.sum(known.target >= 0) // block)

    def one_block(index: Int[Array, ""], out: Int[Array, "T packed"]) -> Int[Array, "T packed"]:
        # The last block starts earlier where blocks do not divide the whole, alike in all three slices.
        # With the barrier what follows depends on the turn. Where one block is all there is, it would not, and XLA would
        # compute it before the loop: the whole head, in every step.
        index, everything = lax.optimization_barrier((index, known))
        token, target = (lax.dynamic_slice_in_dim(x, index * block, block) for x in (everything.token, everything.target))
        logits = head(states.at[:, token].get(mode="promise_in_bounds"))
        return lax.dynamic_update_slice_in_dim(
            out, _score_block(logits, jnp.maximum(target, 0), num_top), index * block, axis=0
        )

    return lax.fori_loop(0, num_blocks, one_block, jnp.zeros((size, 2 + 2 * num_top), jnp.int32))


def _score_block(logits: Float[Array, "V B"], target: Int[Array, " B"], num_top: int) -> Int[Array, "B packed"]:
    likelihood = jax.nn.logsumexp(logits, axis=0)
    own = jnp.take_along_axis(logits, target[None], axis=0)[0]
    rank = 1 + jnp.sum(logits > own, axis=0, dtype=jnp.int32)
    top, ids = lax.top_k(logits.T, num_top)
    # The same subtraction for both: a client compares a token with the most likely one, and they must be equal where it is it.
    return pack_columns(rank, own - likelihood, ids.astype(jnp.int32), top - likelihood[:, None])


def pack_columns(
    first: Int[Array, " R"], logprob: Float[Array, " R"], top_ids: Int[Array, "R n"], top_logprobs: Float[Array, "R n"]
) -> Int[Array, "R packed"]:
    """One array to read back: a number, a log probability's bits, the top ids, and their log probabilities' bits."""

    def bits(x: Array) -> Array:
        return lax.bitcast_convert_type(x, jnp.int32)

    return jnp.concatenate([first[:, None], bits(logprob)[:, None], top_ids, bits(top_logprobs)], axis=1)


def unpack_columns(packed: Int[np.ndarray, "R packed"], wanted: int, num_top: int) -> tuple[TokenLogprobs, ...]:
    """What `score` left of each token, with the `wanted` most likely of `num_top`."""
    numbers = packed.view(np.float32)
    ids = packed[:, 2 : 2 + wanted].tolist()
    top = numbers[:, 2 + num_top : 2 + num_top + wanted].tolist()
    rows = zip(packed[:, 0].tolist(), numbers[:, 1].tolist(), ids, top, strict=True)
    return tuple(TokenLogprobs(logprob, tuple(zip(i, t, strict=True)), rank) for rank, logprob, i, t in rows)
