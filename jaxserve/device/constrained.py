"""Sampling again, among the tokens of a mask, what a step has sampled freely: a program of its own beside the step's.

The masks of a step depend on the tokens of the one before, which the host reads while the device computes the step. So a step
leaves its logits, and this program follows it once the masks are there: it writes the tokens where the step would have. One
program for each number of rows that can sample; a step without constrained rows never runs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxserve.constraint import mask_size
from jaxserve.device.compiler import sampling_options
from jaxserve.device.pack import MAX_FORBIDDEN, NUM_SAMPLE_FIELDS, SampleRows, padding_sample, sample_fields, sample_rows
from jaxserve.device.sampler import SlotState, choose_tokens
from jaxserve.plan import Masks, RunnerLimits, StepPlan


class ConstrainedSampling:
    """The program for steps that sample `num_rows` rows, compiled.

    Args:
        draw_impl: as `sampler.choose_draw` has it.
        slots: abstract, with shardings; donated by each call.
        result_width: of a step's packed result.
    """

    def __init__(
        self, draw_impl: str, slots: SlotState, num_rows: int, result_width: int, limits: RunnerLimits, mesh: Mesh
    ) -> None:
        self._limits = limits
        self._num_rows = num_rows
        everywhere = NamedSharding(mesh, PartitionSpec())

        def abstract(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

        logits = abstract((limits.vocab_size, num_rows), np.float32)
        result = abstract((num_rows, result_width), np.int32)
        upload = abstract((num_rows, upload_width(limits.vocab_size)), np.int32)
        lowered = jit_constrain(draw_impl, limits.vocab_size, mesh).lower(slots, logits, result, upload)
        self._program = lowered.compile(compiler_options=sampling_options())

    def __call__(
        self, slots: SlotState, logits: jax.Array, result: jax.Array, plan: StepPlan, places: list[int | None], masks: Masks
    ) -> tuple[SlotState, jax.Array]:
        """Sample the rows of `plan` that have a mask; the slots, which are donated, and the result with their tokens."""
        upload = pack_masks(plan, places, masks, self._num_rows, self._limits)
        # Given as it is: to put it on the device first takes twice as long while the step computes.
        slots, result = self._program(slots, logits, result, upload)
        return slots, result


def jit_constrain(draw_impl: str, vocab_size: int, mesh: Mesh) -> Any:
    """The program over the mesh, with the slots donated."""
    # Every device has all of it, and a kernel in it does not want to be split.
    whole = PartitionSpec()
    function = make_constrain(draw_impl, vocab_size)
    sharded = jax.shard_map(function, mesh=mesh, in_specs=(whole,) * 4, out_specs=(whole, whole), check_vma=False)
    return jax.jit(sharded, donate_argnums=(0,))


def upload_width(vocab_size: int) -> int:
    """Words for each row: what `sample_fields` says of it, then its mask."""
    return NUM_SAMPLE_FIELDS + mask_size(vocab_size) // 4


def pack_masks(plan: StepPlan, places: list[int | None], masks: Masks, num_rows: int, limits: RunnerLimits) -> np.ndarray:
    """A line for each row that samples, in the order of `places`. An empty mask says that the row keeps its token."""
    upload = np.zeros((num_rows, upload_width(limits.vocab_size)), np.int32)
    upload[:, :NUM_SAMPLE_FIELDS] = padding_sample(limits.max_seqs)
    for row, place, mask in zip(plan.rows, places, masks, strict=True):
        if mask is not None:
            assert row.masked, f"a mask for sequence {row.seq_id}, whose row is not masked"
            upload[place, :NUM_SAMPLE_FIELDS] = sample_fields(row, last_token=0)
            upload[place, NUM_SAMPLE_FIELDS:] = np.frombuffer(mask, np.int32)
    return upload


def make_constrain(
    draw_impl: str, vocab_size: int
) -> Callable[[SlotState, Array, Array, Array], tuple[SlotState, Int[Array, "R width"]]]:
    """The program as a pure function of slots, logits, a step's packed result and the upload."""

    def constrain(
        slots: SlotState, logits: Float[Array, "V R"], result: Int[Array, "R width"], upload: Int[Array, "R words"]
    ) -> tuple[SlotState, Int[Array, "R width"]]:
        rows, words = unpack_masks(upload, vocab_size)
        tokens = choose_tokens(logits, rows, slots, draw_impl, allowed_tokens(words, vocab_size))
        # Rows that keep their token have the slot that belongs to nobody.
        slots = dataclasses.replace(slots, tokens=slots.tokens.at[rows.slot, rows.next_position].set(tokens))
        is_constrained = jnp.any(words != 0, axis=1)
        return slots, jnp.where(is_constrained[:, None], with_tokens(result, tokens, logits), result)

    return constrain


def with_tokens(result: Int[Array, "R width"], tokens: Int[Array, " R"], logits: Float[Array, "V R"]) -> Int[Array, "R width"]:
    """A step's packed result with other tokens, and what it tells of their log probabilities where it tells any.

    A token among the most likely has the log probability that stands there; another's is as far from that of the token which
    the step chose as their logits are from each other.
    """
    num_top = (result.shape[1] - 2) // 2
    before, top_ids = result[:, 0], result[:, 2 : 2 + num_top]
    logprob, top = (lax.bitcast_convert_type(x, jnp.float32) for x in (result[:, 1], result[:, 2 + num_top :]))
    row = jnp.arange(len(result))
    is_top = top_ids == tokens[:, None]
    shifted = jnp.where(tokens == before, logprob, logprob + (logits[tokens, row] - logits[before, row]))
    logprob = jnp.where(is_top.any(axis=1), jnp.sum(jnp.where(is_top, top, 0.0), axis=1), shifted)
    return result.at[:, 0].set(tokens).at[:, 1].set(lax.bitcast_convert_type(logprob, jnp.int32))


def unpack_masks(upload: Int[Array, "R words"], vocab_size: int) -> tuple[SampleRows, Int[Array, "R W"]]:
    """The upload as arrays. `min_tokens` is in the masks already."""
    forbidden = jnp.full((upload.shape[0], MAX_FORBIDDEN), vocab_size, jnp.int32)
    rows = sample_rows(upload[:, :NUM_SAMPLE_FIELDS].T, forbidden)
    rows = dataclasses.replace(rows, min_tokens=jnp.zeros_like(rows.min_tokens))
    return rows, upload[:, NUM_SAMPLE_FIELDS:]


def allowed_tokens(words: Int[Array, "R W"], vocab_size: int) -> Bool[Array, "V R"]:
    """Masks' bits."""
    bits = words.T[:, None, :] >> jnp.arange(32)[None, :, None] & 1  # [W, 32, R]
    return bits.reshape(-1, words.shape[0])[:vocab_size] != 0
