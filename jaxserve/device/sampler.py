"""Choosing tokens on the device: penalties, bias, temperature, top-k, top-p, min-p, seeds, log probabilities.

Rows that are all greedy and ask nothing else cost one argmax; the rest is behind a branch that is taken when a row needs
it. Logits are `[vocabulary, rows]`, as the model's last product leaves them.

What the filters keep, in order: `min_p` keeps tokens whose probability is at least that fraction of the most likely one's;
`top_k` the k most likely; `top_p` the most likely of those whose renormalised probabilities first sum to p. Tokens as
likely as the last one kept are kept too. The draw is the inverse of the running sum at the row's uniform number, which the
host makes of seed and position (`pack.uniform`); so a sequence samples the same tokens in any batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxserve.device.pack import SampleRows
from jaxserve.request import MAX_LOGIT_BIAS, MAX_LOGPROBS

_CDF_BLOCK = 256
_ARGMAX_BLOCK = 128


@struct.dataclass
class SlotState:
    """What the device remembers of each slot. The last slot belongs to nobody: padding writes there.

    Attributes:
        tokens: the sequence's ids by position, prompt and sampled.
        bias_ids: `logit_bias` ids, padded with `V`.
    """

    tokens: Int[Array, "slots C"]
    bias_ids: Int[Array, "slots max_bias"]
    bias_values: Float[Array, "slots max_bias"]


@struct.dataclass
class Sampled:
    """One token a row. The log probabilities are zeros in a step where no row asked for any."""

    tokens: Int[Array, " R"]
    logprob: Float[Array, " R"]
    top_ids: Int[Array, "R max_logprobs"]
    top_logprobs: Float[Array, "R max_logprobs"]


def empty_state(num_slots: int, max_context: int, vocab_size: int) -> SlotState:
    """State of `num_slots` slots and the one that belongs to nobody."""
    return SlotState(
        tokens=jnp.zeros((num_slots + 1, max_context + 1), jnp.int32),
        bias_ids=jnp.full((num_slots + 1, MAX_LOGIT_BIAS), vocab_size, jnp.int32),
        bias_values=jnp.zeros((num_slots + 1, MAX_LOGIT_BIAS), jnp.float32),
    )


def sample(logits: Float[Array, "V R"], rows: SampleRows, state: SlotState) -> Sampled:
    """Choose a token for each row; padding rows choose one that means nothing."""
    penalised = (rows.presence_penalty != 0) | (rows.frequency_penalty != 0) | (rows.repetition_penalty != 1)
    adjusts = penalised | (rows.has_bias > 0) | (rows.min_tokens > 0)
    special = jnp.any(adjusts | (rows.temperature > 0))
    tokens = lax.cond(special, lambda: _special(logits.T, rows, state), lambda: first_argmax(logits))

    wanted = jnp.any(rows.num_logprobs >= 0)
    num_rows = logits.shape[1]
    num_top = min(MAX_LOGPROBS, logits.shape[0])
    nothing = (
        jnp.zeros((num_rows,)),
        jnp.zeros((num_rows, num_top), jnp.int32),
        jnp.zeros((num_rows, num_top)),
    )
    logprob, top_ids, top_logprobs = lax.cond(wanted, lambda: _logprobs(logits.T, tokens, num_top), lambda: nothing)
    return Sampled(tokens=tokens, logprob=logprob, top_ids=top_ids, top_logprobs=top_logprobs)


def first_argmax(logits: Float[Array, "V R"]) -> Int[Array, " R"]:
    """The most likely token of each row, the first of equals. Blocks first, then within the winning block: the one pass over
    all logits is a plain maximum, which runs in vectors where an argmax carries pairs. 10 times as fast on CPU."""
    vocab, num_rows = logits.shape
    block = math.gcd(vocab, _ARGMAX_BLOCK)
    blocks = logits.reshape(vocab // block, block, num_rows)
    winner = jnp.argmax(blocks.max(axis=1), axis=0)
    inside = blocks[winner, :, jnp.arange(num_rows)]  # [R, block]
    return (winner * block + jnp.argmax(inside, axis=1)).astype(jnp.int32)


def _special(logits: Float[Array, "R V"], rows: SampleRows, state: SlotState) -> Int[Array, " R"]:
    adjusted = adjust(logits, rows, state)
    greedy = first_argmax(adjusted.T)
    return lax.cond(
        jnp.any(rows.temperature > 0),
        lambda: jnp.where(rows.temperature > 0, draw(adjusted, rows), greedy),
        lambda: greedy,
    )


def adjust(logits: Float[Array, "R V"], rows: SampleRows, state: SlotState) -> Float[Array, "R V"]:
    """Penalties, then bias, then the ban on ending before `min_tokens`."""
    num_rows, vocab = logits.shape
    history = state.tokens[rows.slot]  # [R, C]
    position = jnp.arange(history.shape[1])[None, :]
    row = jnp.arange(num_rows)[:, None]
    known = position < rows.next_position[:, None]
    is_output = known & (position >= rows.num_prompt[:, None])

    def count(mask: Bool[Array, "R C"]) -> Float[Array, "R V"]:
        ids = jnp.where(mask, history, vocab)
        return jnp.zeros((num_rows, vocab)).at[row, ids].add(1.0, mode="drop")

    def penalise(logits: Float[Array, "R V"]) -> Float[Array, "R V"]:
        seen = count(known) > 0
        outputs = count(is_output)
        factor = jnp.where(seen, rows.repetition_penalty[:, None], 1.0)
        logits = jnp.where(logits > 0, logits / factor, logits * factor)
        logits = logits - rows.frequency_penalty[:, None] * outputs
        return logits - rows.presence_penalty[:, None] * (outputs > 0)

    penalised = (rows.presence_penalty != 0) | (rows.frequency_penalty != 0) | (rows.repetition_penalty != 1)
    logits = lax.cond(jnp.any(penalised), penalise, lambda logits: logits, logits)
    bias_ids = jnp.where((rows.has_bias > 0)[:, None], state.bias_ids[rows.slot], vocab)
    logits = logits.at[row, bias_ids].add(state.bias_values[rows.slot], mode="drop")
    too_early = rows.next_position - rows.num_prompt < rows.min_tokens
    forbidden = jnp.where(too_early[:, None], rows.forbidden, vocab)
    return logits.at[row, forbidden].set(-jnp.inf, mode="drop")


def draw(logits: Float[Array, "R V"], rows: SampleRows) -> Int[Array, " R"]:
    """Sample from the filtered distribution at each row's temperature (rows at 0 give something meaningless)."""
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature[:, None]
    weights = jnp.exp(scaled)  # the most likely token weighs 1
    weights = jnp.where(weights >= rows.min_p[:, None], weights, 0.0)
    filtered = jnp.any((rows.top_k > 0) | (rows.top_p < 1))
    weights = lax.cond(filtered, lambda w: keep_top_p(keep_top_k(w, rows.top_k), rows.top_p), lambda w: w, weights)
    return _inverse_cdf(weights, rows.uniform)


def keep_top_k(weights: Float[Array, "R V"], top_k: Int[Array, " R"]) -> Float[Array, "R V"]:
    """Zero all but the k largest weights (0 keeps all); those equal to the k-th largest stay."""

    def enough(threshold: Float[Array, " R"]) -> Bool[Array, " R"]:
        return jnp.sum(weights >= threshold[:, None], axis=-1) >= top_k

    kept = weights >= _largest_threshold(enough, len(weights))[:, None]
    return jnp.where((top_k == 0)[:, None] | kept, weights, 0.0)


def keep_top_p(weights: Float[Array, "R V"], top_p: Float[Array, " R"]) -> Float[Array, "R V"]:
    """Zero all but the largest weights that together reach `top_p` of the sum; those equal to the smallest of them stay."""
    goal = top_p * weights.sum(axis=-1)

    def enough(threshold: Float[Array, " R"]) -> Bool[Array, " R"]:
        return jnp.sum(jnp.where(weights >= threshold[:, None], weights, 0.0), axis=-1) >= goal

    kept = weights >= _largest_threshold(enough, len(weights))[:, None]
    return jnp.where((top_p >= 1)[:, None] | kept, weights, 0.0)


def _largest_threshold(enough: Callable[[Array], Array], num_rows: int) -> Float[Array, " R"]:
    """The largest float in [0, 1] that is `enough` for each row, by bisection over the bits of non-negative floats,
    which are ordered like the floats. `enough` is monotone, and true at 0. No sort of the vocabulary."""
    one = jnp.int32(0x3F800000)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # enough at low; not enough past high
        middle = low + (high - low + 1) // 2
        good = enough(lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

    low, _ = lax.fori_loop(0, 31, halve, (jnp.zeros((num_rows,), jnp.int32), jnp.full((num_rows,), one)))
    return lax.bitcast_convert_type(low, jnp.float32)


def _inverse_cdf(weights: Float[Array, "R V"], uniform: Float[Array, " R"]) -> Int[Array, " R"]:
    """The token where the running sum of weights passes `uniform` of the whole: first the block of 256, then within it, so
    that the sums stay short. Never a token of weight 0."""
    num_rows, vocab = weights.shape
    blocks = -(-vocab // _CDF_BLOCK)
    weights = jnp.pad(weights, ((0, 0), (0, blocks * _CDF_BLOCK - vocab))).reshape(num_rows, blocks, _CDF_BLOCK)
    sums = weights.sum(axis=-1)
    running = _running_sum(sums)
    target = uniform * running[:, -1]
    block = _first_past(running, target, sums)
    row = jnp.arange(num_rows)
    before = jnp.where(block > 0, running[row, block - 1], 0.0)
    inside = weights[row, block]
    return block * _CDF_BLOCK + _first_past(_running_sum(inside), target - before, inside)


def _running_sum(x: Float[Array, "R n"]) -> Float[Array, "R n"]:
    """Cumulative sum as a product with a triangle: short to compile everywhere, and no slower at these sizes."""
    size = x.shape[1]
    triangle = (jnp.arange(size)[:, None] <= jnp.arange(size)[None, :]).astype(x.dtype)
    return jnp.matmul(x, triangle, precision="highest")


def _first_past(running: Float[Array, "R n"], target: Float[Array, " R"], weights: Float[Array, "R n"]) -> Int[Array, " R"]:
    """First index where `running` exceeds `target`; the heaviest where rounding leaves none."""
    past = (running > target[:, None]) & (weights > 0)
    return jnp.where(past.any(axis=-1), jnp.argmax(past, axis=-1), jnp.argmax(weights, axis=-1)).astype(jnp.int32)


def _logprobs(
    logits: Float[Array, "R V"], tokens: Int[Array, " R"], num_top: int
) -> tuple[Float[Array, " R"], Int[Array, "R n"], Float[Array, "R n"]]:
    """Log probabilities under the model's own distribution: the chosen token's, and the most likely tokens'."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    top, ids = lax.top_k(logprobs, num_top)
    return jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0], ids.astype(jnp.int32), top
