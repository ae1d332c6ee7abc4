"""The definition of `sample`: sort, cut, add up. Obvious, not fast."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def draw(
    logits: Float[Array, "R V"],
    *,
    temperature: Float[Array, " R"],
    min_p: Float[Array, " R"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    uniform: Float[Array, " R"],
) -> Int[Array, " R"]:
    """See `pallas_kernels.sample.draw`."""
    vocab = logits.shape[1]
    weights = jnp.exp((logits - logits.max(axis=1, keepdims=True)) / temperature[:, None])
    weights = jnp.where(weights >= min_p[:, None], weights, 0.0)

    largest_first = -jnp.sort(-weights, axis=1)
    last = jnp.where(top_k == 0, vocab, jnp.minimum(top_k, vocab)) - 1
    smallest = jnp.take_along_axis(largest_first, last[:, None], axis=1)
    weights = jnp.where(weights >= smallest, weights, 0.0)

    largest_first = jnp.where(largest_first >= smallest, largest_first, 0.0)
    running = jnp.cumsum(largest_first, axis=1)
    reached = running >= top_p[:, None] * running[:, -1:]
    smallest = jnp.take_along_axis(largest_first, jnp.argmax(reached, axis=1)[:, None], axis=1)
    weights = jnp.where((weights >= smallest) | (top_p[:, None] >= 1), weights, 0.0)

    running = jnp.cumsum(weights, axis=1)
    past = (running > uniform[:, None] * running[:, -1:]) & (weights > 0)
    # Where rounding leaves none past the number, it is the last that may be drawn.
    last_drawable = vocab - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=1)
    return jnp.where(past.any(axis=1), jnp.argmax(past, axis=1), last_drawable).astype(jnp.int32)
