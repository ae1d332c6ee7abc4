"""The lattice of step shapes: every program that the runner can run, in one function.

A step has `num_tokens` places, which rows of one token and longer rows share. Knows numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.plan import RunnerLimits, StepPlan

TOKENS_PER_CHUNK_ROW = 16
"""A chunk bucket of T places takes T / 16 longer rows, so that short prompts share a step; more take the next bucket."""

FIXED_PLACES = {"cpu": 16}
"""By platform, the places that take as long as what a step with chunks takes whatever its size: where arithmetic bounds it.
(97, 160 and 590 ms for 64, 128 and 512 places of the demo model on 2 cores.) On others reading the weights does."""


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The static shape of one compiled step.

    Attributes:
        num_tokens: places for tokens, whichever rows they are of.
        chunk_rows: longer rows at most; 0 for decodes alone.
        num_single: rows of one token at most.
    """

    num_tokens: int
    chunk_rows: int
    num_single: int

    @property
    def has_chunks(self) -> bool:
        """Whether it takes rows of more than one token as such."""
        return self.chunk_rows > 0

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

    Decodes alone come in powers of two, but for 2, 4 and 16, which would take an eighth to a quarter less time than 8 and 32:
    each bucket more costs a second of every start and up to 100 MB. Steps with chunks come at the full token budget, a
    quarter and a sixteenth of it, but with twice as many places as there may be decodes, so that there is room beside them.
    The largest holds `max_step_tokens` tokens in `max_seqs` rows of either kind, so every plan has a bucket.
    """
    seqs, tokens = limits.max_seqs, limits.max_step_tokens
    decode_only = [Bucket(size, 0, size) for size in doubling(1, seqs) if size not in (2, 4, 16) or size == seqs]
    sizes = sorted({min(tokens, max(16, 2 * seqs, tokens // part)) for part in (1, 4, 16)})
    rows = {size: seqs if size == tokens else min(seqs, max(2, size // TOKENS_PER_CHUNK_ROW)) for size in sizes}
    return (*decode_only, *(Bucket(size, rows[size], seqs) for size in sizes))


def choose_bucket(buckets: tuple[Bucket, ...], num_single: int, chunk_tokens: int, chunk_rows: int) -> Bucket:
    """The cheapest bucket that fits: fewest tokens, then fewest rows.

    In a bucket for rows of one token a longer row takes a place for each of its tokens: K and V of all of them are written
    before any of them attends.
    """

    def fits(bucket: Bucket) -> bool:
        if bucket.num_tokens < num_single + chunk_tokens:
            return False
        return not bucket.has_chunks or (bucket.num_single >= num_single and bucket.chunk_rows >= chunk_rows)

    fitting = [bucket for bucket in buckets if fits(bucket)]
    assert fitting, f"no bucket for {num_single} single rows and {chunk_tokens} tokens in {chunk_rows} chunk rows"
    return min(fitting, key=lambda bucket: (bucket.num_tokens, bucket.num_rows))


def bucket_for_plan(buckets: tuple[Bucket, ...], plan: StepPlan) -> Bucket:
    """The bucket that `plan` runs in. Only those for chunks give more than sampled tokens."""
    chunks = [row.count for row in plan.rows if row.count > 1]
    if any(row.targets or row.params.max_tokens == 0 for row in plan.rows):
        buckets = tuple(bucket for bucket in buckets if bucket.has_chunks)
    return choose_bucket(buckets, len(plan.rows) - len(chunks), sum(chunks), len(chunks))
