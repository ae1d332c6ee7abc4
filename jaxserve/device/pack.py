"""A plan as one int32 vector, and that vector as arrays again on the device.

Owns the layout of the upload. Rows of one token come first, each at the token of its own number; then the chunk rows. Real
numbers travel as the bits of float32. Knows plans and shapes; runs nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxserve.device.buckets import Bucket
from jaxserve.models.batch import StepBatch
from jaxserve.plan import PlanRow, RunnerLimits, StepPlan

FROM_DEVICE = -1
"""In place of a token id that only the device knows."""

MAX_FORBIDDEN = 32
"""Stop and end-of-sequence ids of a row that `min_tokens` forbids."""

_INT_FIELDS = (
    "slot",
    "start",
    "count",
    "sample",
    "top_k",
    "num_prompt",
    "min_tokens",
    "num_logprobs",
    "has_bias",
)
_FLOAT_FIELDS = ("uniform", "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_NUM_FIELDS = len(_INT_FIELDS) + len(_FLOAT_FIELDS)


@struct.dataclass
class RowParams:
    """What sampling needs to know of each row.

    Attributes:
        slot: per-slot state of the row; `max_seqs`, a slot that nobody owns, for padding rows.
        next_position: where the sampled token goes.
        sample: whether to sample at all.
        num_logprobs: -1 for none.
        uniform: in [0, 1), for the draw.
        forbidden: ids that may not be sampled yet, padded with `V` or more.
    """

    slot: Int[Array, " R"]
    next_position: Int[Array, " R"]
    sample: Bool[Array, " R"]
    top_k: Int[Array, " R"]
    num_prompt: Int[Array, " R"]
    min_tokens: Int[Array, " R"]
    num_logprobs: Int[Array, " R"]
    has_bias: Bool[Array, " R"]
    forbidden: Int[Array, "R max_forbidden"]
    uniform: Float[Array, " R"]
    temperature: Float[Array, " R"]
    top_p: Float[Array, " R"]
    min_p: Float[Array, " R"]
    presence_penalty: Float[Array, " R"]
    frequency_penalty: Float[Array, " R"]
    repetition_penalty: Float[Array, " R"]


def table_width(limits: RunnerLimits) -> int:
    """Pages that the longest sequence can have."""
    return -(-limits.max_context // limits.page_size)


def upload_size(bucket: Bucket, limits: RunnerLimits) -> int:
    """Length of the packed vector."""
    per_row = _NUM_FIELDS + MAX_FORBIDDEN + table_width(limits)
    return bucket.num_tokens + bucket.num_rows * per_row


def pack(plan: StepPlan, bucket: Bucket, limits: RunnerLimits) -> tuple[np.ndarray, list[int]]:
    """Pack `plan` for `bucket`.

    Returns:
        The int32 vector, and for each row of the plan its place among the bucket's rows.
    """
    packed = np.zeros(upload_size(bucket, limits), np.int32)
    tokens, fields, forbidden, table = _views(packed, bucket, limits)
    tokens[:] = 0
    fields[_INT_FIELDS.index("slot")] = limits.max_seqs
    forbidden[:] = limits.vocab_size
    places = []
    single, chunk, chunk_token = 0, bucket.num_single, bucket.num_single
    for row in plan.rows:
        if row.count == 1:
            place, token = single, single
            single += 1
        else:
            place, token = chunk, chunk_token
            chunk += 1
            chunk_token += row.count
        places.append(place)
        tokens[token : token + len(row.tokens)] = row.tokens
        tokens[token + len(row.tokens) : token + row.count] = FROM_DEVICE
        fields[:, place] = _row_fields(row)
        if row.params.min_tokens:
            forbidden[place, : len(row.stop_ids)] = row.stop_ids
        num_pages = -(-(row.start + row.count) // limits.page_size)
        table[place, :num_pages] = row.pages[:num_pages]
    return packed, places


def _views(packed: np.ndarray, bucket: Bucket, limits: RunnerLimits) -> tuple[np.ndarray, ...]:
    """The vector's parts, as views: tokens [T], fields [fields, R], forbidden ids [R, n], block table [R, W]."""
    rows = bucket.num_rows
    sizes = (bucket.num_tokens, _NUM_FIELDS * rows, MAX_FORBIDDEN * rows, table_width(limits) * rows)
    ends = np.cumsum(sizes).tolist()
    tokens, fields, forbidden, table = (packed[end - size : end] for size, end in zip(sizes, ends, strict=True))
    return tokens, fields.reshape(_NUM_FIELDS, rows), forbidden.reshape(rows, -1), table.reshape(rows, -1)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 24 random bits, of a 64-bit seed and a position alone: output `position` of SplitMix64 (Steele,
    Lea and Flood, 2014) seeded with `seed`. Made on the host, where it costs a microsecond, since it is a number a row."""
    mask = (1 << 64) - 1
    x = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return ((x ^ (x >> 31)) >> 40) / (1 << 24)


def _row_fields(row: PlanRow) -> np.ndarray:
    params = row.params
    floats = np.array(
        [
            uniform(row.seed, row.start + row.count),
            0.0 if params.greedy else params.temperature,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        ],
        np.float32,
    )
    ints = np.array(
        [
            row.slot,
            row.start,
            row.count,
            row.sample,
            max(params.top_k, 0),
            row.num_prompt,
            params.min_tokens,
            -1 if params.logprobs is None else params.logprobs,
            bool(params.logit_bias),
        ],
        np.int32,
    )
    return np.concatenate([ints, floats.view(np.int32)])


def unpack(
    packed: Int[Array, " U"],
    tokens_by_slot: Int[Array, "slots C"],
    bucket: Bucket,
    limits: RunnerLimits,
) -> tuple[StepBatch, RowParams, Int[Array, " T"]]:
    """The vector as arrays, on the device.

    Args:
        tokens_by_slot: tokens of each slot's sequence by position, from which those that the host did not know are read.

    Returns:
        The model's batch, the sampler's rows, and the slot of each token (`max_seqs` for padding).
    """
    num_rows, num_tokens = bucket.num_rows, bucket.num_tokens
    sizes = (num_tokens, _NUM_FIELDS * num_rows, MAX_FORBIDDEN * num_rows, table_width(limits) * num_rows)
    ends = np.cumsum(sizes).tolist()
    parts = [packed[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    host_tokens = parts[0]
    fields = dict(zip(_INT_FIELDS + _FLOAT_FIELDS, parts[1].reshape(_NUM_FIELDS, num_rows), strict=True))
    for name in _FLOAT_FIELDS:
        fields[name] = lax.bitcast_convert_type(fields[name], jnp.float32)
    block_table = parts[3].reshape(num_rows, -1)

    counts = fields["count"]
    chunk_ends = bucket.num_single + jnp.cumsum(counts[bucket.num_single :])
    row_offsets = jnp.concatenate([jnp.arange(bucket.num_single + 1), chunk_ends]).astype(jnp.int32)
    token = jnp.arange(num_tokens)
    row = jnp.sum(token[:, None] >= row_offsets[None, 1:], axis=1)  # [T]; num_rows past the last chunk
    row = jnp.minimum(row, num_rows - 1)
    real = token - row_offsets[row] < counts[row]
    positions = jnp.where(real, fields["start"][row] + token - row_offsets[row], 0)
    slot = jnp.where(real, fields["slot"][row], limits.max_seqs)
    token_ids = jnp.where(host_tokens == FROM_DEVICE, tokens_by_slot[slot, positions], host_tokens)
    lengths = jnp.where(counts > 0, fields["start"] + counts, 0)
    page_ids = block_table[row, positions // limits.page_size]
    batch = StepBatch(
        token_ids=token_ids,
        positions=positions,
        page_ids=jnp.where(real, page_ids, limits.num_pages),
        page_offsets=positions % limits.page_size,
        block_table=block_table,
        row_offsets=row_offsets,
        lengths=lengths,
        last_token=jnp.where(counts > 0, row_offsets[:-1] + counts - 1, 0),
    )
    rows = RowParams(
        slot=fields["slot"],
        next_position=lengths,
        sample=fields["sample"] > 0,
        top_k=fields["top_k"],
        num_prompt=fields["num_prompt"],
        min_tokens=fields["min_tokens"],
        num_logprobs=fields["num_logprobs"],
        has_bias=fields["has_bias"] > 0,
        forbidden=parts[2].reshape(num_rows, -1),
        **{name: fields[name] for name in _FLOAT_FIELDS},
    )
    return batch, rows, slot


def abstract_upload(bucket: Bucket, limits: RunnerLimits, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """Shape of the packed vector."""
    return jax.ShapeDtypeStruct((upload_size(bucket, limits),), np.int32, sharding=sharding)
