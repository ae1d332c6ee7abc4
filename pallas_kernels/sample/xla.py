"""`sample` in plain XLA, with no sort of the vocabulary.

A filter is a threshold: the smallest weight that is kept. Mostly it lies among a row's `NUM_LARGEST` largest weights, which
cost two passes over the weights: the largest of each block, then the largest of the blocks that have the largest of those;
no other block can hold any. Where some row's threshold lies deeper, as with high temperatures and large k, all rows take the
general way: bisection over the bits of floats, 31 passes a filter.

The draw adds up blocks of 256 weights, finds the block, and adds up within it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

NUM_LARGEST = 128
LARGEST_BLOCK = 64
CDF_BLOCK = 256
STRIPES = 16


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
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature[:, None]
    weights = jnp.exp(scaled)  # the most likely token weighs 1
    weights = jnp.where(weights >= min_p[:, None], weights, 0.0)
    filtered = jnp.any((top_k > 0) | (top_p < 1))
    weights = lax.cond(filtered, lambda w: keep_top(w, top_k, top_p), lambda w: w, weights)
    return inverse_cdf(weights, uniform)


def keep_top(weights: Float[Array, "R V"], top_k: Int[Array, " R"], top_p: Float[Array, " R"]) -> Float[Array, "R V"]:
    """Zero what top-k, and then top-p of the rest, do not keep. Weights are between 0 and 1."""
    smallest, found = _threshold_among(_largest(weights), weights.sum(axis=-1), top_k, top_p)
    return lax.cond(
        found.all(),
        lambda w: jnp.where(w >= smallest[:, None], w, 0.0),
        lambda w: keep_top_p(keep_top_k(w, top_k), top_p),
        weights,
    )


def keep_top_k(weights: Float[Array, "R V"], top_k: Int[Array, " R"]) -> Float[Array, "R V"]:
    """Zero all but the k largest weights (0 keeps all); those equal to the k-th largest stay."""

    def enough(threshold: Float[Array, " R"]) -> Bool[Array, " R"]:
        return _sum(weights, lambda w: (w >= threshold[:, None]).astype(jnp.int32)) >= top_k

    kept = weights >= _largest_threshold(enough, len(weights))[:, None]
    return jnp.where((top_k == 0)[:, None] | kept, weights, 0.0)


def keep_top_p(weights: Float[Array, "R V"], top_p: Float[Array, " R"]) -> Float[Array, "R V"]:
    """Zero all but the largest weights that together reach `top_p` of the sum; those equal to the smallest of them stay."""
    goal = top_p * _sum(weights, lambda w: w)

    def enough(threshold: Float[Array, " R"]) -> Bool[Array, " R"]:
        return _sum(weights, lambda w: jnp.where(w >= threshold[:, None], w, 0.0)) >= goal

    kept = weights >= _largest_threshold(enough, len(weights))[:, None]
    return jnp.where((top_p >= 1)[:, None] | kept, weights, 0.0)


def _largest(weights: Float[Array, "R V"]) -> Float[Array, "R n"]:
    """The largest weights of each row in order, `NUM_LARGEST` or the whole vocabulary."""
    num_rows, vocab = weights.shape
    num_blocks = -(-vocab // LARGEST_BLOCK)
    if num_blocks <= NUM_LARGEST:
        return lax.top_k(weights, min(NUM_LARGEST, vocab))[0]
    padded = jnp.pad(weights, ((0, 0), (0, num_blocks * LARGEST_BLOCK - vocab)))
    blocks = padded.reshape(num_rows, num_blocks, LARGEST_BLOCK)
    _, block = lax.top_k(blocks.max(axis=-1), NUM_LARGEST)
    candidates = jnp.take_along_axis(blocks, block[:, :, None], axis=1)
    return lax.top_k(candidates.reshape(num_rows, NUM_LARGEST * LARGEST_BLOCK), NUM_LARGEST)[0]


def _threshold_among(
    largest: Float[Array, "R n"], total: Float[Array, " R"], top_k: Int[Array, " R"], top_p: Float[Array, " R"]
) -> tuple[Float[Array, " R"], Bool[Array, " R"]]:
    """The smallest weight that is kept, and whether it could be found."""
    num_largest = largest.shape[1]
    kth = jnp.take_along_axis(largest, jnp.clip(top_k - 1, 0, num_largest - 1)[:, None], axis=1)[:, 0]
    smallest = jnp.where(top_k == 0, 0.0, kth)
    # What equals the k-th is kept too, so its sum is known only if something smaller, or nothing at all, comes after it.
    known = (top_k < num_largest) & ((largest[:, -1] < smallest) | (smallest == 0))
    running = jnp.cumsum(jnp.where(largest >= smallest[:, None], largest, 0.0), axis=1)
    goal = top_p * jnp.where((top_k == 0) | (smallest == 0), total, running[:, -1])
    reached = running >= goal[:, None]
    pth = jnp.take_along_axis(largest, jnp.argmax(reached, axis=1)[:, None], axis=1)[:, 0]
    wants_p = top_p < 1
    found = ((top_k == 0) | known | ~wants_p & (top_k <= num_largest)) & (~wants_p | reached.any(axis=1))
    return jnp.where(wants_p, jnp.maximum(smallest, pth), smallest), found


def _sum(weights: Float[Array, "R V"], of: Callable[[Array], Array]) -> Array:
    """Sum of an elementwise function over each row. Stripes of the row are added up elementwise first, in one loop with the
    function, which XLA's CPU compiler would otherwise write to memory before it adds: a third of the time."""
    vocab = weights.shape[1]
    width = vocab // STRIPES
    total = sum((of(weights[:, i * width : (i + 1) * width]) for i in range(1, STRIPES)), of(weights[:, :width]))
    # Without the barrier the compiler puts the elementwise part back into the sum.
    total = lax.optimization_barrier(total).sum(axis=-1)
    rest = weights[:, STRIPES * width :]
    return total + of(rest).sum(axis=-1) if rest.shape[1] else total


def _largest_threshold(enough: Callable[[Array], Array], num_rows: int) -> Float[Array, " R"]:
    """The largest float in [0, 1] that is `enough` for each row, by bisection over the bits of non-negative floats, which
    are ordered like the floats. `enough` is monotone, and true at 0."""
    one = jnp.int32(0x3F800000)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # enough at low; not enough past high
        middle = low + (high - low + 1) // 2
        good = enough(lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

    low, _ = lax.fori_loop(0, 31, halve, (jnp.zeros((num_rows,), jnp.int32), jnp.full((num_rows,), one)))
    return lax.bitcast_convert_type(low, jnp.float32)


def inverse_cdf(weights: Float[Array, "R V"], uniform: Float[Array, " R"]) -> Int[Array, " R"]:
    """The token where the running sum of weights passes `uniform` of the whole: first the block of 256, then within it, so
    that the sums stay short. Never a token of weight 0."""
    num_rows, vocab = weights.shape
    blocks = -(-vocab // CDF_BLOCK)
    weights = jnp.pad(weights, ((0, 0), (0, blocks * CDF_BLOCK - vocab))).reshape(num_rows, blocks, CDF_BLOCK)
    sums = weights.sum(axis=-1)
    running = _running_sum(sums)
    target = uniform * running[:, -1]
    block = _first_past(running, target, sums)
    row = jnp.arange(num_rows)
    before = jnp.where(block > 0, running[row, block - 1], 0.0)
    inside = weights[row, block]
    return block * CDF_BLOCK + _first_past(_running_sum(inside), target - before, inside)


def _running_sum(x: Float[Array, "R n"]) -> Float[Array, "R n"]:
    """Cumulative sum as a product with a triangle: short to compile everywhere, and no slower at these sizes."""
    size = x.shape[1]
    triangle = (jnp.arange(size)[:, None] <= jnp.arange(size)[None, :]).astype(x.dtype)
    return jnp.matmul(x, triangle, precision="highest")


def _first_past(running: Float[Array, "R n"], target: Float[Array, " R"], weights: Float[Array, "R n"]) -> Int[Array, " R"]:
    """First index where `running` exceeds `target`; the last of any weight where rounding leaves none."""
    past = (running > target[:, None]) & (weights > 0)
    last = weights.shape[1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
    return jnp.where(past.any(axis=-1), jnp.argmax(past, axis=-1), last).astype(jnp.int32)
