"""Choosing tokens on the device: penalties, bias, temperature, top-k, top-p, min-p, seeds, log probabilities.

Rows that are all greedy and ask nothing else cost one argmax; the rest is behind a branch that is taken when a row needs
it. Logits are `[vocabulary, rows]`, as the model's last product leaves them.

Filters and draw are `pallas_kernels.sample`. The row's uniform number the host makes of seed and position (`pack.uniform`);
so a sequence samples the same tokens in any batch.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxserve.device.pack import SampleRows
from jaxserve.request import MAX_LOGIT_BIAS, MAX_LOGPROBS
from pallas_kernels import pytree
from pallas_kernels import sample as kernel

_ARGMAX_BLOCK = 128


@pytree.dataclass
class SlotState:
    """What the device remembers of each slot. The last slot belongs to nobody: padding writes there.

    Attributes:
        tokens: the sequence's ids by position, prompt and sampled.
        bias_ids: `logit_bias` ids, padded with `V`.
    """

    tokens: Int[Array, "slots C"]
    bias_ids: Int[Array, "slots max_bias"]
    bias_values: Float[Array, "slots max_bias"]


@pytree.dataclass
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


def choose_draw(platform: str, vocab_size: int) -> tuple[str, str]:
    """Name of the implementation of `pallas_kernels.sample` for a platform, and the reason for it, in words for the log."""
    if platform != "tpu":
        return "xla", f"there is no kernel for platform {platform}"
    from pallas_kernels.sample import tpu  # what other platforms need not import

    try:
        tpu.check(vocab_size)
    except ValueError as error:
        return "xla", str(error)
    return "tpu", f"the Pallas kernel takes vocabularies of {vocab_size}"


def sample(logits: Float[Array, "V R"], rows: SampleRows, state: SlotState, draw_impl: str = "xla") -> Sampled:
    """Choose a token for each row; padding rows choose one that means nothing.

    Args:
        draw_impl: of `pallas_kernels.sample`, as `choose_draw` has it.
    """
    tokens = choose_tokens(logits, rows, state, draw_impl)
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


def choose_tokens(
    logits: Float[Array, "V R"],
    rows: SampleRows,
    state: SlotState,
    draw_impl: str,
    allowed: Bool[Array, "V R"] | None = None,
) -> Int[Array, " R"]:
    """A token for each row, one of those that are `allowed` to it where that is given; 0 where all rows wait."""
    penalised = (rows.presence_penalty != 0) | (rows.frequency_penalty != 0) | (rows.repetition_penalty != 1)
    adjusts = penalised | (rows.has_bias > 0) | (rows.min_tokens > 0)
    special = jnp.any(adjusts | (rows.temperature > 0))

    # Within the branches, where the compiler has it in one loop with what reads it first.
    def masked() -> Float[Array, "V R"]:
        return logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)

    branches = (
        lambda: first_argmax(masked()),
        lambda: _special(masked().T, rows, state, draw_impl),
        lambda: jnp.zeros(logits.shape[1], jnp.int32),
    )
    return lax.switch(jnp.where(jnp.all(rows.waits != 0), 2, special.astype(jnp.int32)), branches)


def first_argmax(logits: Float[Array, "V R"]) -> Int[Array, " R"]:
    """The most likely token of each row, the first of equals. Blocks first, then within the winning block: the one pass over
    all logits is a plain maximum, which runs in vectors where an argmax carries pairs. 10 times as fast on CPU."""
    vocab, num_rows = logits.shape
    block = math.gcd(vocab, _ARGMAX_BLOCK)
    blocks = logits.reshape(vocab // block, block, num_rows)
    winner = jnp.argmax(blocks.max(axis=1), axis=0)
    inside = blocks[winner, :, jnp.arange(num_rows)]  # [R, block]
    return (winner * block + jnp.argmax(inside, axis=1)).astype(jnp.int32)


def _special(logits: Float[Array, "R V"], rows: SampleRows, state: SlotState, draw_impl: str) -> Int[Array, " R"]:
    adjusted = adjust(logits, rows, state)
    greedy = first_argmax(adjusted.T)
    return lax.cond(
        jnp.any(rows.temperature > 0),
        lambda: jnp.where(rows.temperature > 0, draw(adjusted, rows, draw_impl), greedy),
        lambda: greedy,
    )


def adjust(logits: Float[Array, "R V"], rows: SampleRows, state: SlotState) -> Float[Array, "R V"]:
    """Penalties, then bias, then the ban on ending before `min_tokens`."""
    num_rows, vocab = logits.shape
    history = state.tokens[rows.slot]  # [R, C]
    position = jnp.arange(history.shape[1])[None, :]
    known = position < rows.next_position[:, None]
    is_output = known & (position >= rows.num_prompt[:, None])

    def count(mask: Bool[Array, "R C"]) -> Float[Array, "R V"]:
        return add_at(jnp.zeros((num_rows, vocab)), jnp.where(mask, history, vocab), jnp.ones(mask.shape))

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
    logits = add_at(logits, bias_ids, state.bias_values[rows.slot])
    too_early = rows.next_position - rows.num_prompt < rows.min_tokens
    forbidden = jnp.where(too_early[:, None], rows.forbidden, vocab)
    return logits.at[jnp.arange(num_rows)[:, None], forbidden].set(-jnp.inf, mode="drop")


def add_at(values: Float[Array, "R V"], ids: Int[Array, "R n"], amounts: Float[Array, "R n"]) -> Float[Array, "R V"]:
    """`values` with each amount added at its id, where there is such an id.

    Row by row on a TPU: of all rows at once, 64 with 8,192 ids each, its compiler makes 4 MB of code in eight seconds, of one
    row a tenth of both.
    """
    return lax.platform_dependent(values, ids, amounts, tpu=add_by_row, default=add_at_once)


def add_at_once(values: Float[Array, "R V"], ids: Int[Array, "R n"], amounts: Float[Array, "R n"]) -> Float[Array, "R V"]:
    """`add_at` in one scatter."""
    return values.at[jnp.arange(values.shape[0])[:, None], ids].add(amounts, mode="drop")


def add_by_row(values: Float[Array, "R V"], ids: Int[Array, "R n"], amounts: Float[Array, "R n"]) -> Float[Array, "R V"]:
    """`add_at` in a scatter a row."""
    return lax.map(lambda row: row[0].at[row[1]].add(row[2], mode="drop"), (values, ids, amounts))


def draw(logits: Float[Array, "R V"], rows: SampleRows, impl: str = "xla") -> Int[Array, " R"]:
    """Sample from the filtered distribution at each row's temperature (rows at 0 give something meaningless)."""
    return kernel.draw(
        logits,
        temperature=jnp.where(rows.temperature > 0, rows.temperature, 1.0),
        min_p=rows.min_p,
        top_k=rows.top_k,
        top_p=rows.top_p,
        uniform=rows.uniform,
        impl=impl,
    )


def _logprobs(
    logits: Float[Array, "R V"], tokens: Int[Array, " R"], num_top: int
) -> tuple[Float[Array, " R"], Int[Array, "R n"], Float[Array, "R n"]]:
    """Log probabilities under the model's own distribution: the chosen token's, and the most likely tokens'."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    top, ids = lax.top_k(logprobs, num_top)
    return jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0], ids.astype(jnp.int32), top
