"""The head over the rows that sample: on CPU a few at a time, as many as there are, since most steps with chunks have few.

Owns the loop. A step has places for as many rows that sample as there may be sequences, and the product with the vocabulary
over all of them takes as long as a sixth of a prompt of 128 tokens, for one row that does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.cpu_sums import MOST_COLUMNS

Head = Callable[[Float[Array, "E B"]], tuple[Float[Array, "V B"], Float[Array, "E B"]]]
"""Logits and hidden states of tokens as they leave the layers."""


def head_of_rows(
    head: Head, states: Float[Array, "E R"], num_rows: Int[Array, ""]
) -> tuple[Float[Array, "V R"], Float[Array, "E R"]]:
    """What `head` makes of the first `num_rows` rows; of others it is finite and means nothing."""
    return lax.platform_dependent(states, num_rows, cpu=partial(by_blocks, head), default=lambda states, _: head(states))


def by_blocks(
    head: Head, states: Float[Array, "E R"], num_rows: Int[Array, ""]
) -> tuple[Float[Array, "V R"], Float[Array, "E R"]]:
    """`head_of_rows` in a loop over blocks of the columns that a product sums best."""
    most, block = states.shape[1], MOST_COLUMNS
    if most <= block:
        return head(states)

    def one_block(index: Int[Array, ""], out: tuple[Array, Array]) -> tuple[Array, Array]:
        first = jnp.minimum(index * block, most - block)  # the last one overlaps the one before
        found = head(lax.dynamic_slice_in_dim(states, first, block, axis=1))
        update = lax.dynamic_update_slice_in_dim
        return update(out[0], found[0], first, axis=1), update(out[1], found[1], first, axis=1)

    shapes = jax.eval_shape(head, states)
    start = tuple(jnp.zeros(shape.shape, shape.dtype) for shape in shapes)
    return lax.fori_loop(0, -(-num_rows // block), one_block, (start[0], start[1]))
