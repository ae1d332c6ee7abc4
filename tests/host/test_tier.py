"""What goes to the host tier, what comes back, and when computing is cheaper."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
from hypothesis import settings

from jaxserve.config import EngineConfig
from jaxserve.device.buckets import choose_bucket, enumerate_buckets
from jaxserve.engine.tiering import build_tier
from jaxserve.errors import ConfigError
from jaxserve.host.cost import ChipCost, FittedCost, KindCost, StepCost
from jaxserve.host.prefix import PrefixTree
from jaxserve.host.tier import HostTier, LoadOrCompute
from jaxserve.plan import RunnerLimits
from jaxserve.request import Request, SamplingParams, Sequence
from tests.host.driver import Driver, make_limits, output_of
from tests.host.test_scheduler_machine import SchedulerMachine

PAGE = 4


def tiered(host_pages: int, *, num_pages: int = 6, **options: Any) -> Driver:
    """A pool of few pages over a tier."""
    limits = make_limits(num_pages=num_pages, host_pages=host_pages, max_context=24)
    return Driver(limits, prefixes=True, eos_token_ids=(), **options)


def ask(driver: Driver, first: int, num_prompt: int = 17, *, max_tokens: int = 1, salt: str = "") -> int:
    """Run a prompt, `first` and the numbers after it, alone; how much of it was cached."""
    request_id = f"{driver.scheduler._next_seq_id}"
    prompt = tuple((first + i) % 50 for i in range(num_prompt))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    driver.scheduler.add(Request(request_id=request_id, prompt=prompt, params=params, cache_salt=salt))
    events = driver.run()[request_id]
    assert output_of(events) == (7,) * max_tokens
    return events[-1].num_cached


def test_evicted_pages_come_back_and_keep_their_slots() -> None:
    driver = tiered(8)
    tier = driver.tier
    assert tier is not None
    assert [ask(driver, 0), ask(driver, 20)] == [0, 0]
    assert (len(tier), tier.num_saved, driver.runner.num_saves) == (3, 3, 3)
    assert ask(driver, 0) == 16  # a page was left in the pool, three come back
    assert (tier.num_loaded, driver.runner.num_loads) == (3, 3)
    assert ask(driver, 20) == 16
    saved = tier.num_saved
    assert saved == 6  # of each the pages that have gone and come, once
    assert [ask(driver, 0), ask(driver, 20), ask(driver, 0)] == [16, 16, 16]
    assert (tier.num_saved, driver.runner.num_saves, tier.num_lost) == (saved, saved, 0)


def test_salts_are_kept_apart() -> None:
    driver = tiered(16)
    ask(driver, 0, salt="a")
    ask(driver, 20, salt="a")
    assert ask(driver, 0, salt="b") == ask(driver, 0) == 0
    assert ask(driver, 0, salt="a") == 16


def test_the_oldest_is_given_up_first_and_later_pages_before_earlier_ones() -> None:
    driver = tiered(4)
    for first in (0, 20, 35):  # first three pages of the first go, then its last one and three of the second
        ask(driver, first)
    assert driver.tier is not None
    assert (driver.tier.num_saved, driver.tier.num_lost, len(driver.tier)) == (7, 3, 4)
    assert ask(driver, 0) == 4


def test_what_came_back_is_given_up_from_its_end() -> None:
    tree = PrefixTree(PAGE)
    seq = Sequence(0, Request(request_id="a", prompt=(1,)), list(range(9)), 1)
    root = tree.root("")
    first = tree.child(root, tree.key(seq.tokens, 0))
    second = tree.child(first, tree.key(seq.tokens, 1))
    other = tree.child(root, tree.key(range(40, 44), 0))
    tier = HostTier(2, lambda start, num_pages, num_tokens: True)
    tier.save(second, 5)
    tier.save(first, 6)
    assert tier.take_moves() == (((5, 0), (6, 1)), ())
    found = tier.find(tree, root, seq, 0, 2)
    tier.hold(found)
    tier.load(found, [2, 3])
    tier.save(other, 7)  # both slots are in use
    assert tier.take_moves() == ((), ((1, 2), (0, 3)))
    tier.save(other, 7)
    assert tier.take_moves() == (((7, 0),), ())
    assert tier.find(tree, root, seq, 0, 2) == found[:1]
    assert (tier.num_saved, tier.num_loaded, tier.num_lost, len(tier)) == (3, 2, 2, 2)


def test_a_tier_that_does_not_pay_is_not_asked() -> None:
    driver = tiered(8, pays=lambda start, num_pages, num_tokens: False)
    assert [ask(driver, first) for first in (0, 20, 0)] == [0, 0, 4]
    assert driver.runner.num_loads == 0


def test_what_pays_is_asked_with_what_there_is() -> None:
    asked: list[tuple[int, int, int]] = []

    def pays(*question: int) -> bool:
        asked.append(question)
        return True

    driver = tiered(8, pays=pays)
    for first in (0, 20, 0):
        ask(driver, first)
    assert asked == [(4, 3, 17)]


def test_a_preempted_sequence_comes_back_by_loads() -> None:
    """Two grow until one must go; its pages are wanted by the other, and afterwards come back."""
    driver = tiered(16, num_pages=8)
    for name, first in (("a", 0), ("b", 25)):
        prompt = tuple(range(first, first + 9))
        params = SamplingParams(temperature=0.0, max_tokens=15)
        driver.scheduler.add(Request(request_id=name, prompt=prompt, params=params))
    events = driver.run()
    assert driver.scheduler.num_preemptions == 1
    assert {name: output_of(found) for name, found in events.items()} == {"a": (7,) * 15, "b": (7,) * 15}
    assert driver.runner.num_loads > 0


def test_dropping_the_cache_and_failures_empty_the_tier() -> None:
    driver = tiered(8)
    ask(driver, 0)
    ask(driver, 20)
    memory = driver.scheduler.memory
    assert memory.drop_idle() == 5 + 3
    assert ask(driver, 0) == 0
    ask(driver, 20)
    driver.scheduler.fail_in_flight()
    driver.runner.forget()
    assert driver.tier is not None
    assert len(driver.tier) == 0
    assert ask(driver, 0) == 0


def test_a_tier_needs_prefixes() -> None:
    with pytest.raises(ConfigError, match=r"host_kv_memory .* needs prefix_cache, which is off"):
        EngineConfig(host_kv_memory=1, prefix_cache=False)
    with pytest.raises(ConfigError, match="host_kv_memory must be at least 0"):
        EngineConfig(host_kv_memory=-1)


# --- to load or to compute --------------------------------------------------------------------------------------------

LIMITS = make_limits(num_pages=256, page_size=16, max_step_tokens=256, max_context=2048, host_pages=64)
BUCKETS = enumerate_buckets(LIMITS)
MS_PER_TOKEN = 1e-3
LINEAR = FittedCost(
    decode=KindCost(places=(1,), seconds=(1e-3,)),
    chunked=KindCost(places=(0, 1), seconds=(0.0, MS_PER_TOKEN)),
)
"""A millisecond a place, and so 16 for a page."""


def choice(load_seconds: dict[int, float], cost: StepCost = LINEAR) -> LoadOrCompute:
    return LoadOrCompute(load_seconds, cost, partial(choose_bucket, BUCKETS), 16, 256)


def test_the_cheaper_way_is_taken() -> None:
    assert choice({1: 15e-3})(0, 3, 64)  # a bucket of 16 tokens instead of one of 64
    assert not choice({1: 17e-3})(0, 3, 64)


def test_many_pages_are_cheaper_in_batches() -> None:
    pays = choice({8: 40e-3, 1: 30e-3})
    assert pays.seconds_to_load(19) == pytest.approx(2 * 40e-3 + 3 * 30e-3)
    assert pays(0, 12, 256)
    assert not pays(0, 3, 64)


def test_pages_that_only_make_a_step_fuller_save_nothing() -> None:
    """A step costs what its bucket does: with 200 tokens to compute in any case, one page more changes nothing."""
    assert not choice({1: 1e-9})(0, 1, 16 + 200)
    assert choice({1: 1e-9})(0, 12, 256)


def test_late_pages_cost_more_to_compute() -> None:
    """On a chip where attention to a long context is most of the work."""
    chip = ChipCost(
        bytes_per_second=1e12, flops=1e9, weight_bytes=0, flops_per_token=0, kv_bytes_per_token=0, flops_per_product=1e3
    )
    pays = choice({1: 5e-3}, chip)
    assert not pays(0, 4, 65)
    assert pays(1024, 4, 1024 + 65)


def test_a_tier_that_never_pays_is_refused_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    bucket_for = partial(choose_bucket, BUCKETS)
    engine = EngineConfig(host_kv_memory=1 << 20, prefill_chunk=256)
    assert build_tier(engine, LIMITS, {1: 17e-3}, LINEAR, bucket_for) is None
    assert "host tier: not used" in caplog.text
    tier = build_tier(engine, LIMITS, {1: 1e-3}, LINEAR, bucket_for)
    assert isinstance(tier, HostTier)


# --- random traffic ---------------------------------------------------------------------------------------------------


class TieredMachine(SchedulerMachine):
    """Random traffic in a small pool over a tier of some slots, more or fewer than it has."""

    def choose(self, limits: RunnerLimits, prefixes: bool) -> tuple[RunnerLimits, bool]:
        few = max(4, min(12, limits.num_pages))
        return dataclasses.replace(limits, num_pages=few, host_pages=max(few // 2, limits.host_pages)), True


TestTieredMachine = pytest.mark.slow(TieredMachine.TestCase)
TestTieredMachine.settings = settings(stateful_step_count=100)
