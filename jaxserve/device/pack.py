"""A plan as one int32 vector, and that vector as arrays again on the device.

Owns the layout of the upload. Rows of one token come first, with a place among the rows for each that there may be; then the
chunk rows. Tokens of all rows stand one after another. Real numbers travel as the bits of float32. Knows plans and shapes;
runs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.device.buckets import Bucket, num_samples
from jaxserve.models.batch import NO_PAGE, LocalRows, StepBatch
from jaxserve.plan import PlanRow, RunnerLimits, StepPlan
from pallas_kernels import pytree

FROM_DEVICE = -1
"""In place of a token id that only the device knows."""

MAX_FORBIDDEN = 32
"""Stop and end-of-sequence ids of a row that `min_tokens` forbids."""

_ROW_FIELDS = ("slot", "start", "count")
_INT_FIELDS = (
    "slot",
    "last_token",
    "next_position",
    "top_k",
    "num_prompt",
    "min_tokens",
    "num_logprobs",
    "has_bias",
    "waits",
)
_FLOAT_FIELDS = (
    "uniform",
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_SAMPLE_FIELDS = _INT_FIELDS + _FLOAT_FIELDS
NUM_SAMPLE_FIELDS = len(_SAMPLE_FIELDS)


@pytree.dataclass
class SampleRows:
    """What sampling needs to know of each of the `R` rows that sample.

    Attributes:
        slot: per-slot state of the sequence; `max_seqs`, a slot that nobody owns, for padding.
        last_token: index of the row's last token among the step's.
        next_position: where the sampled token goes.
        num_logprobs: -1 for none.
        waits: not 0 where the step need not choose: in padding, and where `constrained` does so later.
        uniform: in [0, 1), for the draw.
        forbidden: ids that `min_tokens` forbids, padded with `V`.
    """

    slot: Int[Array, " R"]
    last_token: Int[Array, " R"]
    next_position: Int[Array, " R"]
    top_k: Int[Array, " R"]
    num_prompt: Int[Array, " R"]
    min_tokens: Int[Array, " R"]
    num_logprobs: Int[Array, " R"]
    has_bias: Int[Array, " R"]
    waits: Int[Array, " R"]
    uniform: Float[Array, " R"]
    temperature: Float[Array, " R"]
    top_p: Float[Array, " R"]
    min_p: Float[Array, " R"]
    presence_penalty: Float[Array, " R"]
    frequency_penalty: Float[Array, " R"]
    repetition_penalty: Float[Array, " R"]
    forbidden: Int[Array, "R max_forbidden"]


@pytree.dataclass
class KnownTokens:
    """Tokens that follow some of the step's tokens, and whose log probabilities are wanted; none in a bucket without chunks.

    Attributes:
        token: index among the step's tokens of the one that it follows.
        target: its id; -1 for padding, which comes last.
    """

    token: Int[Array, " known"]
    target: Int[Array, " known"]


def table_width(limits: RunnerLimits) -> int:
    """Pages that the longest sequence can have at once."""
    return limits.pages_for(limits.max_context)


def _part_shapes(bucket: Bucket, limits: RunnerLimits) -> dict[str, tuple[int, ...]]:
    """The parts of the packed vector, in order."""
    rows, samples = bucket.num_rows, num_samples(bucket, limits)
    return {
        "tokens": (bucket.num_tokens,),
        "rows": (len(_ROW_FIELDS), rows),
        "block_table": (rows, table_width(limits)),
        "local_table": (rows, table_width(limits.local) if limits.local else 0),
        "samples": (len(_SAMPLE_FIELDS), samples),
        "forbidden": (samples, MAX_FORBIDDEN),
        "known": (2, bucket.num_tokens if bucket.has_chunks else 0),
        "adapters": (rows if limits.max_adapters else 0,),
    }


def _split[Vector: (np.ndarray, Array)](packed: Vector, bucket: Bucket, limits: RunnerLimits) -> dict[str, Vector]:
    """The vector's parts by name; views, where it is NumPy's."""
    parts, start = {}, 0
    for name, shape in _part_shapes(bucket, limits).items():
        size = math.prod(shape)
        parts[name] = packed[start : start + size].reshape(shape)
        start += size
    return parts


def upload_size(bucket: Bucket, limits: RunnerLimits) -> int:
    """Length of the packed vector."""
    return sum(math.prod(shape) for shape in _part_shapes(bucket, limits).values())


def pack(plan: StepPlan, bucket: Bucket, limits: RunnerLimits) -> tuple[np.ndarray, list[int | None]]:
    """Pack `plan` for `bucket`.

    Returns:
        The int32 vector, with each row's adapter if there are any within `limits`; and for each row of the plan its place
        among the sampled rows, or None if it does not sample.
    """
    packed = np.zeros(upload_size(bucket, limits), np.int32)
    parts = _split(packed, bucket, limits)
    tokens, rows, samples = parts["tokens"], parts["rows"], parts["samples"]
    rows[0] = limits.max_seqs
    # Padding must not ask for anything: a repetition penalty of 0 or a top_p of 0 would.
    samples[:, :] = padding_sample(limits.max_seqs)[:, None]
    parts["forbidden"][:] = limits.vocab_size
    local = limits.local
    known, num_known = parts["known"], 0
    known[1] = -1
    parts["adapters"][:] = -1
    places: list[int | None] = []
    single, chunk, sample = 0, bucket.num_single, 0
    chunk_token = sum([row.count == 1 for row in plan.rows])
    for row in plan.rows:
        if row.count > 1 and bucket.has_chunks:
            own, token = slice(chunk, chunk + 1), chunk_token
            rows[:, chunk] = (row.slot, row.start, row.count)
            chunk += 1
            chunk_token += row.count
        else:  # a place for each of its tokens
            own, token = slice(single, single + row.count), single
            for offset in range(row.count):
                rows[:, single + offset] = (row.slot, row.start + offset, 1)
            single += row.count
        tokens[token : token + len(row.tokens)] = row.tokens
        tokens[token + len(row.tokens) : token + row.count] = FROM_DEVICE
        for place in range(own.start, own.stop):
            pages = _seen_pages(row, row.pages, row.first_page, int(rows[1, place]), limits)
            parts["block_table"][place, : len(pages)] = pages
            if local is not None:
                pages = _seen_pages(row, row.local_pages, row.first_local_page, int(rows[1, place]), local)
                parts["local_table"][place, : len(pages)] = pages
        if row.adapter >= 0:
            parts["adapters"][own] = row.adapter
        num_targets = len(row.targets)
        if num_targets:
            known[0, num_known : num_known + num_targets] = np.arange(token, token + num_targets)
            known[1, num_known : num_known + num_targets] = row.targets
            num_known += num_targets
        places.append(sample if row.sample else None)
        if row.sample:
            last_token = token + row.count - 1
            samples[:, sample] = _unasking_fields(row, last_token) if row.masked else sample_fields(row, last_token)
            if row.params.min_tokens and not row.masked:
                parts["forbidden"][sample, : len(row.stop_ids)] = row.stop_ids
            sample += 1
    return packed, places


def _seen_pages(row: PlanRow, pages: Sequence[int], first_page: int, start: int, limits: RunnerLimits) -> Sequence[int]:
    """Of the pages of `row` from `first_page` on, those from the first that the token at `start` sees."""
    end = -(-(row.start + row.count) // limits.page_size)
    return pages[limits.first_seen_page(start) - first_page : end - first_page]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 24 random bits, of a 64-bit seed and a position alone: output `position` of SplitMix64 (Steele,
    Lea and Flood, 2014) seeded with `seed`. Made on the host, where it costs a microsecond, since it is a number a row."""
    mask = (1 << 64) - 1
    x = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return ((x ^ (x >> 31)) >> 40) / (1 << 24)


def _fields(ints: tuple[int, ...], floats: tuple[float, ...]) -> np.ndarray:
    return np.concatenate([np.array(ints, np.int32), np.array(floats, np.float32).view(np.int32)])


def padding_sample(no_slot: int) -> np.ndarray:
    """Fields of a place where nothing is sampled."""
    return _fields((no_slot, 0, 0, 0, 0, 0, -1, 0, 1), (0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0))


def _unasking_fields(row: PlanRow, last_token: int) -> np.ndarray:
    """Of a row that will be sampled again, so that it costs the step nothing but the log probabilities that it asks for."""
    num_logprobs = -1 if row.params.logprobs is None else row.params.logprobs
    ints = (row.slot, last_token, row.start + row.count, 0, 0, 0, num_logprobs, 0, 1)
    return _fields(ints, (0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0))


def sample_fields(row: PlanRow, last_token: int) -> np.ndarray:
    """What `SampleRows` has of a row, but for `forbidden`, in its fields' order."""
    params, next_position = row.params, row.start + row.count
    ints = (
        row.slot,
        last_token,
        next_position,
        max(params.top_k, 0),
        row.num_prompt,
        params.min_tokens,
        -1 if params.logprobs is None else params.logprobs,
        bool(params.logit_bias),
        0,
    )
    floats = (
        uniform(row.seed, next_position),
        0.0 if params.greedy else params.temperature,
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
    )
    return _fields(ints, floats)


def unpack(
    packed: Int[Array, " U"],
    tokens_by_slot: Int[Array, "slots C"],
    bucket: Bucket,
    limits: RunnerLimits,
) -> tuple[StepBatch, SampleRows, Int[Array, " T"], KnownTokens]:
    """The vector as arrays, on the device.

    Args:
        tokens_by_slot: tokens of each slot's sequence by position, from which those that the host did not know are read.

    Returns:
        The model's batch, the rows that sample, the slot of each token (`max_seqs` for padding), and the known tokens whose
        log probabilities are wanted.
    """
    num_rows, num_tokens = bucket.num_rows, bucket.num_tokens
    parts = _split(packed, bucket, limits)
    slots, starts, counts = parts["rows"]
    samples = sample_rows(parts["samples"], parts["forbidden"])

    row_offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts)]).astype(jnp.int32)
    token = jnp.arange(num_tokens)
    row = jnp.sum(token[:, None] >= row_offsets[None, 1:], axis=1)  # [T]; num_rows past the last chunk
    row = jnp.minimum(row, num_rows - 1)
    real = token - row_offsets[row] < counts[row]
    positions = jnp.where(real, starts[row] + token - row_offsets[row], 0)
    token_slots = jnp.where(real, slots[row], limits.max_seqs)
    known = parts["tokens"] != FROM_DEVICE

    def lay_out(block_table: Int[Array, "S W"], limits: RunnerLimits) -> tuple[Int[Array, " T"], Int[Array, " S"]]:
        """The page of each token, and the length of each row from its table's first page on."""
        ends, page = starts + counts, positions // limits.page_size
        if limits.window is not None:  # tables begin with the first page that is seen, and for attention so do sequences
            unseen = jnp.maximum(starts + 1 - limits.window, 0) // limits.page_size
            ends = ends - unseen * limits.page_size
            page = page - unseen[row]
        return jnp.where(real, block_table[row, page], NO_PAGE), jnp.where(counts > 0, ends, 0)

    page_ids, lengths = lay_out(parts["block_table"], limits)
    local_rows = None
    if limits.local is not None:
        local_ids, local_lengths = lay_out(parts["local_table"], limits.local)
        local_rows = LocalRows(page_ids=local_ids, block_table=parts["local_table"], lengths=local_lengths)
    batch = StepBatch(
        token_ids=jnp.where(known, parts["tokens"], tokens_by_slot[token_slots, positions]),
        positions=positions,
        page_ids=page_ids,
        page_offsets=positions % limits.page_size,
        block_table=parts["block_table"],
        row_offsets=row_offsets,
        lengths=lengths,
        local=local_rows,
        adapters=jnp.where(real, parts["adapters"][row], -1) if limits.max_adapters else None,
    )
    return batch, samples, token_slots, KnownTokens(*parts["known"])


def sample_rows(packed: Int[Array, "fields R"], forbidden: Int[Array, "R max_forbidden"]) -> SampleRows:
    """Columns of `sample_fields`, on the device."""
    fields = dict(zip(_SAMPLE_FIELDS, packed, strict=True))
    for name in _FLOAT_FIELDS:
        fields[name] = lax.bitcast_convert_type(fields[name], jnp.float32)
    return SampleRows(forbidden=forbidden, **fields)


def abstract_upload(bucket: Bucket, limits: RunnerLimits, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """Shape of the packed vector."""
    return jax.ShapeDtypeStruct((upload_size(bucket, limits),), np.int32, sharding=sharding)
