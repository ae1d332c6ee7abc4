"""The lattice of step shapes: every program that the runner can run, in one function.

A step has `num_single` places for rows of one token and room for `chunk_tokens` tokens of `chunk_rows` longer rows. Knows
numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.plan import RunnerLimits, StepPlan

TOKENS_PER_CHUNK_ROW = 16
"""A chunk bucket of T tokens has room for T / 16 rows, so that short prompts share a step; more take the next bucket."""


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The static shape of one compiled step."""

    chunk_tokens: int
    chunk_rows: int
    num_single: int

    @property
    def num_tokens(self) -> int:
        return self.num_single + self.chunk_tokens

    @property
    def num_rows(self) -> int:
        return self.num_single + self.chunk_rows


def num_samples(bucket: Bucket, limits: RunnerLimits) -> int:
    """Places for rows that sample: a row each, and a sequence has one row at most."""
    return min(bucket.num_rows, limits.max_seqs)


def doubling(low: int, high: int) -> list[int]:
    """`low`, twice that and so on, ending in `high` itself."""
    sizes = []
    size = low
    while size < high:
        sizes.append(size)
        size *= 2
    return [*sizes, high]


def enumerate_buckets(limits: RunnerLimits) -> tuple[Bucket, ...]:
    """All buckets.

    Decodes alone come in powers of two, but for 2 and 16, which would take an eighth less time than 4 and 32 at most. Steps
    with chunks come at the full token budget, a quarter and a sixteenth of it, each with places for all decodes, since an
    empty place costs one column of the products and no attention. (Without them a chunk of 128 tokens takes a fifth less
    time, one of 512 a twentieth; but each bucket more costs a second of every start and up to 100 MB.) The largest holds
    `max_step_tokens` tokens in `max_seqs` rows of either kind, so every plan has a bucket.
    """
    seqs, tokens = limits.max_seqs, limits.max_step_tokens
    decode_only = [Bucket(0, 0, size) for size in doubling(1, seqs) if size not in (2, 16) or size == seqs]
    chunks = sorted({max(min(16, tokens), tokens // part) for part in (1, 4, 16)})
    rows = {chunk: seqs if chunk == tokens else min(seqs, max(2, chunk // TOKENS_PER_CHUNK_ROW)) for chunk in chunks}
    return (*decode_only, *(Bucket(chunk, rows[chunk], seqs) for chunk in chunks))


def choose_bucket(buckets: tuple[Bucket, ...], num_single: int, chunk_tokens: int, chunk_rows: int) -> Bucket:
    """The cheapest bucket that fits: fewest tokens, then fewest rows.

    In a bucket for rows of one token a longer row takes a place for each of its tokens: K and V of all of them are written
    before any of them attends.
    """

    def fits(bucket: Bucket) -> bool:
        if not bucket.chunk_tokens:
            return bucket.num_single >= num_single + chunk_tokens
        return bucket.num_single >= num_single and bucket.chunk_tokens >= chunk_tokens and bucket.chunk_rows >= chunk_rows

    fitting = [bucket for bucket in buckets if fits(bucket)]
    assert fitting, f"no bucket for {num_single} single rows and {chunk_tokens} tokens in {chunk_rows} chunk rows"
    return min(fitting, key=lambda bucket: (bucket.num_tokens, bucket.num_rows))


def bucket_for_plan(buckets: tuple[Bucket, ...], plan: StepPlan) -> Bucket:
    """The bucket that `plan` runs in. Only those for chunks give more than sampled tokens."""
    chunks = [row.count for row in plan.rows if row.count > 1]
    if any(row.targets or row.params.max_tokens == 0 for row in plan.rows):
        buckets = tuple(bucket for bucket in buckets if bucket.chunk_tokens)
    return choose_bucket(buckets, len(plan.rows) - len(chunks), sum(chunks), len(chunks))
