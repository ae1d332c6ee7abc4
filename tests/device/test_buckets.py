"""The lattice: every plan within the limits has a bucket, and gets the cheapest."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.device.buckets import Bucket, bucket_for_plan, choose_bucket, doubling, enumerate_buckets, num_samples
from jaxserve.plan import PlanRow, RunnerLimits, StepPlan
from jaxserve.request import SamplingParams


@st.composite
def any_limits(draw: st.DrawFn) -> RunnerLimits:
    max_seqs = draw(st.integers(1, 70))
    max_step_tokens = draw(st.integers(max_seqs, max_seqs + 20) | st.integers(max_seqs, 5000))
    return RunnerLimits(
        num_pages=1000, page_size=16, max_seqs=max_seqs, max_step_tokens=max_step_tokens, max_context=8192, vocab_size=100
    )


@st.composite
def limits_and_counts(draw: st.DrawFn) -> tuple[RunnerLimits, list[int]]:
    """Limits, and token counts of the rows of a plan within them; often as many or as large ones as there may be."""
    limits = draw(any_limits())
    num_rows = draw(st.integers(1, limits.max_seqs) | st.just(limits.max_seqs))
    room = limits.max_step_tokens - num_rows
    counts = []
    for _ in range(num_rows):
        extra = draw(st.just(0) | st.just(1) | st.integers(0, room) | st.just(room))
        extra = min(extra, room)
        room -= extra
        counts.append(1 + extra)
    return limits, counts


def plan_of(counts: list[int]) -> StepPlan:
    params = SamplingParams()
    rows = [
        PlanRow(slot, slot, 0, count, (0,) * count, [0] * count, True, count, params, 0, (), True)
        for slot, count in enumerate(counts)
    ]
    return StepPlan(0, tuple(rows))


@given(limits_and_counts())
def test_every_plan_has_a_bucket_and_gets_the_cheapest(case: tuple[RunnerLimits, list[int]]) -> None:
    limits, counts = case
    buckets = enumerate_buckets(limits)
    chunks = [count for count in counts if count > 1]
    num_single = len(counts) - len(chunks)

    chosen = bucket_for_plan(buckets, plan_of(counts))
    assert chosen in buckets

    def fits(bucket: Bucket) -> bool:
        if bucket.num_tokens < sum(counts):
            return False
        return not bucket.has_chunks or (bucket.num_single >= num_single and bucket.chunk_rows >= len(chunks))

    assert fits(chosen)
    assert num_samples(chosen, limits) >= len(counts)
    for other in buckets:
        assert not fits(other) or (other.num_tokens, other.num_rows) >= (chosen.num_tokens, chosen.num_rows)


def test_what_only_chunks_give_has_a_bucket_for_chunks() -> None:
    buckets = enumerate_buckets(RunnerLimits(8, 8, max_seqs=8, max_step_tokens=64, max_context=64, vocab_size=9))
    for count in (1, 3):
        (row,) = plan_of([count]).rows
        assert bucket_for_plan(buckets, StepPlan(0, (row,))).has_chunks is False
        for asks in ({"targets": (1,)}, {"params": SamplingParams(max_tokens=0)}):
            assert bucket_for_plan(buckets, StepPlan(0, (replace(row, **asks),))).has_chunks


@given(any_limits())
def test_the_lattice_is_small_and_holds_no_bucket_twice(limits: RunnerLimits) -> None:
    buckets = enumerate_buckets(limits)
    assert len(set(buckets)) == len(buckets)
    assert len(buckets) <= math.ceil(math.log2(limits.max_seqs)) + 1 + 6, "each costs seconds of warm-up"
    for bucket in buckets:
        assert bucket.num_single <= limits.max_seqs
        assert bucket.chunk_rows <= limits.max_seqs
        assert bucket.num_tokens <= limits.max_step_tokens
        assert bucket.num_tokens >= min(2 * limits.max_seqs, limits.max_step_tokens) or not bucket.has_chunks, "no room"
        assert 1 <= num_samples(bucket, limits) <= limits.max_seqs


@given(any_limits())
def test_decodes_alone_pad_to_one_eight_or_a_power_of_two_from_32(limits: RunnerLimits) -> None:
    buckets = enumerate_buckets(limits)
    for count in range(1, limits.max_seqs + 1):
        chosen = choose_bucket(buckets, count, 0, 0)
        assert chosen.has_chunks is False
        most = next((size for size in (1, 8) if size >= count), max(32, 2 * count))
        assert count <= chosen.num_single <= most


def test_what_is_outside_the_limits_has_no_bucket() -> None:
    limits = RunnerLimits(num_pages=9, page_size=16, max_seqs=4, max_step_tokens=32, max_context=64, vocab_size=10)
    buckets = enumerate_buckets(limits)
    for request in [(5, 0, 0), (0, 33, 1), (0, 32, 5)]:
        with pytest.raises(AssertionError, match="no bucket"):
            choose_bucket(buckets, *request)


@pytest.mark.parametrize(
    ("low", "high", "sizes"), [(1, 1, [1]), (1, 8, [1, 2, 4, 8]), (1, 12, [1, 2, 4, 8, 12]), (64, 16, [16])]
)
def test_doubling(low: int, high: int, sizes: list[int]) -> None:
    assert doubling(low, high) == sizes
