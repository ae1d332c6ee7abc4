"""The size of a step with chunks: following the rule is never slower than one step with room for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.device.buckets import Bucket, choose_bucket, enumerate_buckets
from jaxserve.host.cost import FittedCost, KindCost
from jaxserve.host.sizes import NO_SIZES, ChunkBudget, StepSizes, fixed_places
from jaxserve.host.waiting import WaitingQueue
from tests.host.driver import Driver, make_limits

LIMITS = make_limits(num_pages=256, page_size=16, max_seqs=32, max_step_tokens=512, max_context=2048)
BUCKETS = enumerate_buckets(LIMITS)
FIXED = 16


def test_the_buckets_are_those_that_the_figures_below_are_of() -> None:
    assert [(bucket.num_tokens, bucket.chunk_rows) for bucket in BUCKETS if bucket.has_chunks] == [
        (64, 4),
        (128, 8),
        (512, 32),
    ]


@pytest.mark.parametrize(
    ("num_decodes", "wanted", "tokens"),
    [
        (0, 1, 64),
        (0, 64, 64),
        (0, 65, 128),  # 144 instead of twice 80
        (0, 130, 128),  # 144 + 80 instead of 528
        (0, 448, 128),  # 3 x 144 + 80
        (0, 449, 512),  # 4 x 144 would take longer
        (0, 5000, 512),
        (8, 120, 120),
        (8, 128, 120),
        (31, 33, 33),
        (31, 400, 481),
    ],
)
def test_the_size_that_has_all_computed_soonest(num_decodes: int, wanted: int, tokens: int) -> None:
    budget = StepSizes(BUCKETS, FIXED).budget(num_decodes, wanted)
    assert budget == ChunkBudget(tokens, 1 if tokens + num_decodes == 512 else 16)


@given(
    sizes=st.sets(st.integers(1, 600), min_size=1, max_size=5),
    fixed=st.integers(0, 300),
    num_decodes=st.integers(0, 600),
    wanted=st.integers(1, 600),
)
def test_following_the_rule_is_never_slower_than_one_step_for_all(
    sizes: set[int], fixed: int, num_decodes: int, wanted: int
) -> None:
    rule = StepSizes([Bucket(size, 8, 8) for size in sizes], fixed)
    budget = rule.budget(num_decodes, wanted)
    if num_decodes >= max(sizes):
        assert budget is None
        return

    def smallest(num_tokens: int) -> int:
        return min(size for size in sizes if size >= num_tokens)

    seconds = left = 0
    left = wanted
    while left:
        budget = rule.budget(num_decodes, left)
        assert budget is not None
        assert 1 <= budget.tokens <= max(sizes) - num_decodes
        taken = min(left, budget.tokens)
        seconds += smallest(num_decodes + taken) + fixed
        left -= taken
    if num_decodes + wanted <= max(sizes):
        assert seconds <= smallest(num_decodes + wanted) + fixed


def test_none_is_no_bound() -> None:
    assert NO_SIZES.budget(3, 1000) is None


@pytest.mark.parametrize("fixed", [0, 16, 100])
def test_fixed_places_come_from_costs(fixed: int) -> None:
    seconds = tuple(1e-3 * (size + fixed) for size in (64, 128, 512))
    cost = FittedCost(decode=KindCost(places=(1,), seconds=(0.01,)), chunked=KindCost(places=(64, 128, 512), seconds=seconds))
    assert fixed_places(cost, BUCKETS) == pytest.approx(fixed, abs=1e-6)
    assert fixed_places(cost, BUCKETS[:-2]) == 0


def steps_of(prompts: list[int], sizes: StepSizes, num_decodes: int = 0) -> list[list[int]]:
    """Tokens of the longer rows of each step until all prompts are computed."""
    driver = Driver(LIMITS, prefill_chunk=512, sizes=sizes)
    for number in range(num_decodes):
        driver.add(f"decodes {number}", 2, max_tokens=40)
    if num_decodes:
        driver.step()
    for number, length in enumerate(prompts):
        driver.add(f"prompt {number}", length, max_tokens=2)
    steps = []
    while any(seq.computed < seq.num_prompt for seq in driver.scheduler._live.values()):
        driver.plan()
        rows = driver.in_flight[-1][0].rows
        steps.append([row.count for row in rows if row.count > 1])
        driver.commit()
    driver.run()
    return steps


def bucket_sizes(steps: list[list[int]], num_decodes: int) -> list[int]:
    return [choose_bucket(BUCKETS, num_decodes, sum(step), len(step)).num_tokens for step in steps if step]


def test_a_prompt_a_little_too_long_takes_two_small_steps() -> None:
    sizes = StepSizes(BUCKETS, FIXED)
    assert steps_of([140], sizes) == [[128], [12]]
    assert steps_of([140], NO_SIZES) == [[140]]
    assert steps_of([128], sizes, num_decodes=8) == [[120], [8]]


def test_many_short_prompts_stay_in_the_size_that_was_chosen() -> None:
    """Ten prompts of six tokens have room in a step of 64 but for their number; of 128, too, which takes eight."""
    sizes = StepSizes(BUCKETS, FIXED)
    assert bucket_sizes(steps_of([6] * 10, sizes), 0) == [128, 32]  # the last twelve tokens take places of decodes
    assert bucket_sizes(steps_of([6] * 10, NO_SIZES), 0) == [512]


def test_those_that_wait_for_a_slot_do_not_make_a_step_larger() -> None:
    sizes = StepSizes(BUCKETS, FIXED)
    steps = steps_of([200] * 3, sizes, num_decodes=31)
    assert steps[0] == [97]


def test_no_more_that_wait_are_looked_at_than_have_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait, a plan costs what its rows cost."""
    looked_at = []
    iterate = WaitingQueue.__iter__
    monkeypatch.setattr(WaitingQueue, "__iter__", lambda queue: (looked_at.append(seq) or seq for seq in iterate(queue)))
    driver = Driver(LIMITS, prefill_chunk=512, sizes=StepSizes(BUCKETS, FIXED))
    for number in range(200):
        driver.add(str(number), 2)
    looked_at.clear()
    assert driver.scheduler.plan() is not None
    assert 0 < len(looked_at) <= LIMITS.max_seqs
