"""What the queue can promise: each measurement by itself, and all of them at twice the sustainable load."""

from __future__ import annotations

import dataclasses
import functools
import math
import random

import pytest

from jaxserve.host import overload
from jaxserve.host.overload import DrainRate, FinishRate, Margin, PromptSpeed, RecentService, ShedShare, Turnover
from jaxserve.request import BATCH_PRIORITY
from tests.host.virtual_server import (
    LIMITS,
    Arrival,
    Lengths,
    VirtualServer,
    long_prompts,
    many_short_few_long,
    merge,
    percentile,
    poisson,
)

MINUTES_10 = 600.0
SUSTAINABLE = 7.47
"""Requests a second that the virtual server finishes of `poisson` traffic when it never runs dry."""


class TestDrainRate:
    def test_nothing_is_known_before_a_backlog(self) -> None:
        rate = DrainRate()
        for step in range(100):
            rate.observe(step / 10, 50, oldest=None)
        assert rate.tokens_per_second is None

    def test_it_is_what_leaves_while_something_waits(self) -> None:
        rate = DrainRate()
        for step in range(200):
            rate.observe(step / 10, 50, oldest=-1.0)
        assert rate.tokens_per_second == pytest.approx(500)

    def test_a_wait_for_steps_that_were_planned_before_is_no_backlog(self) -> None:
        rate = DrainRate()
        for step in range(200):
            rate.observe(step / 10, 50, oldest=step / 10 - 0.25)
        assert rate.tokens_per_second is None

    def test_idle_time_does_not_count_and_is_no_reason_to_forget(self) -> None:
        rate = DrainRate()
        for step in range(200):
            rate.observe(step / 10, 50, oldest=-1.0)
        rate.observe(20.0, 50, oldest=None)
        rate.observe(5000.0, 50, oldest=None)
        assert rate.tokens_per_second == pytest.approx(500)

    def test_it_follows_a_change(self) -> None:
        rate = DrainRate()
        for step in range(1000):
            rate.observe(step / 10, 50 if step < 500 else 10, oldest=-1.0)
        assert rate.tokens_per_second == pytest.approx(100, rel=0.05)


class TestTurnover:
    def test_nobody_knows_before_one_has_ended(self) -> None:
        turnover = Turnover()
        assert turnover.seconds_until(0.0, 4) == 0.0
        for second in range(10):
            turnover.observe(float(second), num_running=4, num_ended=0)
        assert turnover.seconds_until(1.0, 4) == math.inf

    def test_the_first_end_is_set_against_all_that_still_run(self) -> None:
        """The short ones end first: of 10 that ran for 5 s, one end says 50 s a request, not 5."""
        turnover = Turnover()
        turnover.observe(0.0, num_running=0, num_ended=0)
        turnover.observe(5.0, num_running=10, num_ended=1)
        assert turnover.seconds_until(2.0, 10) == pytest.approx(10.0)

    def test_it_is_the_length_of_a_stay(self) -> None:
        turnover = Turnover()
        for step in range(1000):  # 8 run for 4 s each, so that one ends each half second
            turnover.observe(step * 0.5, num_running=8, num_ended=1)
        assert turnover.seconds_until(3.0, 8) == pytest.approx(1.5, rel=0.01)

    def test_those_that_end_with_their_first_token_held_a_slot_for_a_step(self) -> None:
        turnover = Turnover()
        for step in range(1000):
            turnover.observe(step * 0.1, num_running=0, num_ended=4, waits=[3.0] * 4)
        assert turnover.seconds_until(8.0, 4) == pytest.approx(0.2, rel=0.01)

    def test_idle_time_changes_nothing(self) -> None:
        turnover = Turnover()
        for step in range(1000):
            turnover.observe(step * 0.5, num_running=8, num_ended=1)
        turnover.observe(5000.0, num_running=0, num_ended=0, waits=[0.1])
        assert turnover.seconds_until(3.0, 8) == pytest.approx(1.5, rel=0.01)


def test_the_finish_rate_is_that_of_the_last_half_minute() -> None:
    rate = FinishRate()
    rate.begin(0.0)
    assert rate.seconds_until(0.0, 1, 1) == math.inf
    for second in range(1, 61):
        rate.observe(float(second), 50)
    assert rate.seconds_until(60.0, 10, 0) == pytest.approx(10.0)
    assert rate.seconds_until(60.0, 1, 1000) == pytest.approx(20.0)
    rate.check_integrity()
    assert rate.seconds_until(100.0, 1, 1) == math.inf


def test_recent_service_fades_and_forgets_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "MAX_TENANTS", 2)
    service = RecentService()
    for tenant, num_tokens in [("a", 100), ("b", 300), ("c", 50)]:
        service.observe(0.0, tenant, num_tokens)
    assert [service.tokens(0.0, tenant) for tenant in "abc"] == [100, 300, 0]
    assert service.tokens(10.0, "b") == pytest.approx(300 / math.e)


def test_the_speed_of_a_prompt_is_that_of_the_fastest_and_fades() -> None:
    speed = PromptSpeed()
    assert speed.tokens_per_second(0.0) == 0.0
    speed.observe(0.0, 100, 0.1)
    speed.observe(1.0, 100, 5.0)
    assert speed.tokens_per_second(1.0) == pytest.approx(1000, rel=0.01)
    speed.observe(3600.0, 100, 5.0)
    assert speed.tokens_per_second(3600.0) == pytest.approx(20)


@pytest.mark.parametrize("truth", [0.7, 1.0, 3.0])
def test_the_margin_keeps_97_of_100_forecasts_whatever_their_error(truth: float) -> None:
    rng = random.Random(1)
    margin = Margin()
    missed = 0
    for number in range(20_000):
        forecast = margin.factor
        found = truth * rng.lognormvariate(0.0, 0.2)
        missed += number >= 10_000 and found > forecast
        margin.observe(forecast, found)
    assert missed / 10_000 == pytest.approx(0.03, abs=0.003)


def test_the_shed_share_is_that_of_the_last_minute() -> None:
    shed = ShedShare()
    assert shed.share(0.0) == 0.0
    for second in range(200):
        shed.observe(second + 0.2, 1, 0)
        shed.observe(second + 0.7, 3, 3 if second < 100 else 0)
    assert shed.share(99.9) == 0.0
    shed.observe(200.0, 4, 4)
    assert shed.share(200.0) == pytest.approx(4 / (59 * 4 + 4))
    assert shed.share(1000.0) == 0.0
    assert len(shed._seconds) == 0


def test_before_anything_has_ended_as_many_are_let_in_as_there_are_slots() -> None:
    """A flood in the first instant, of which nobody can say how long it takes."""
    server = VirtualServer(slo_ttft_seconds=2.0, max_queue_requests=10_000)
    flood = [Arrival(0.0, arrival.request) for arrival in poisson(100.0, seconds=10.0, seed=1)]
    server.run(flood)
    assert len(server.served) == LIMITS.max_seqs
    assert set(server.refusals) == {"too_late"}


# --- the scheduler and admission together, at more than they can bear -------------------------------------------------


@functools.cache
def saturated() -> VirtualServer:
    """Ten minutes of an endless queue, which nobody has to wait for: the best that this device can do."""
    server = VirtualServer(max_queue_requests=100_000)
    server.admission.max_queue_tokens = 10**9
    return server.run(poisson(2 * SUSTAINABLE, seconds=MINUTES_10, seed=1), until=MINUTES_10)


@pytest.mark.slow
def test_the_sustainable_rate_is_as_stated() -> None:
    finished = sum(one.reason is not None for one in saturated().served.values())
    assert finished / MINUTES_10 == pytest.approx(SUSTAINABLE, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("slo", [0.5, 2.0, 5.0])
def test_at_twice_the_sustainable_load_those_let_in_are_served_in_time(slo: float) -> None:
    server = VirtualServer(slo_ttft_seconds=slo)
    server.run(poisson(2 * SUSTAINABLE, seconds=MINUTES_10, seed=2), until=MINUTES_10)
    first_tokens = server.first_tokens(before=MINUTES_10 - 2 * slo)
    assert percentile(first_tokens, 95) <= slo
    # The gap between tokens is bounded by the longest step there is, since prompts go in chunks.
    gaps = sorted(one.longest_gap for one in server.served.values())
    assert percentile(gaps, 95) <= 0.020 + 0.0004 * LIMITS.max_step_tokens + 0.001 * LIMITS.max_seqs + 1e-9
    assert server.tokens["output"] >= 0.95 * saturated().tokens["output"]
    finished = [sum(one.reason is not None for one in run.served.values()) for run in (server, saturated())]
    assert finished[0] >= 0.95 * finished[1]
    assert server.most_queued[0] <= 16 * slo + LIMITS.max_seqs, "a queue much longer than the target allows"
    assert len(server.scheduler._live) <= server.admission.queued_requests + LIMITS.max_seqs
    assert 0.4 < server.admission.shed_share < 0.6
    assert set(server.refusals) == {"too_late"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "lengths"),
    [
        pytest.param({"num_pages": 60, "max_context": 640}, many_short_few_long, id="short of pages"),
        pytest.param({"num_pages": 2000, "max_seqs": 64}, long_prompts, id="short of steps"),
    ],
)
def test_whatever_is_short_sets_the_pace(limits: dict[str, int], lengths: Lengths) -> None:
    """Pages, or the tokens that a step computes, where slots are plenty."""
    machine = dataclasses.replace(LIMITS, **limits)
    best = VirtualServer(limits=machine, max_queue_requests=100_000)
    best.admission.max_queue_tokens = 10**9
    best.run(poisson(15.0, seconds=200.0, seed=1, lengths=lengths), until=200.0)
    sustainable = sum(one.reason is not None for one in best.served.values()) / 200.0
    server = VirtualServer(limits=machine, slo_ttft_seconds=3.0)
    server.run(poisson(2 * sustainable, seconds=200.0, seed=2, lengths=lengths), until=200.0)
    assert percentile(server.first_tokens(before=194.0), 95) <= 3.0
    # What is let in is a little shorter than what comes, so each is counted by what it is short of.
    unit = "output" if lengths is many_short_few_long else ""
    assert server.tokens[unit] >= 0.95 * best.tokens[unit]


@pytest.mark.slow
def test_without_a_target_the_queue_is_bounded_all_the_same_and_retries_are_told_when() -> None:
    server = VirtualServer(max_queue_requests=64)
    server.run(poisson(2 * SUSTAINABLE, seconds=MINUTES_10, seed=3), until=MINUTES_10)
    assert server.most_queued[0] == 64
    assert set(server.refusals) == {"queue_full"}
    assert server.tokens["output"] >= 0.95 * saturated().tokens["output"]
    # One more leaves the queue every 1 / 7.47 s: to come back after the least time is right.
    assert percentile(sorted(server.retry_after), 95) == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_a_flood_that_finds_it_idle_is_let_in_no_faster_than_it_can_be_served(seed: int) -> None:
    """While slots fill, prompts drain several times as fast as they ever will again: what drains says too little."""
    server = VirtualServer(slo_ttft_seconds=2.0).run(poisson(5 * SUSTAINABLE, seconds=12.0, seed=seed))
    assert percentile(server.first_tokens(), 90) <= 2.0
    assert server.first_tokens()[-1] <= 3.0


@pytest.mark.slow
def test_at_a_load_that_it_can_bear_hardly_anybody_is_turned_away() -> None:
    arrivals = poisson(0.7 * SUSTAINABLE, seconds=MINUTES_10, seed=4)
    server = VirtualServer(slo_ttft_seconds=2.0).run(arrivals)
    assert len(server.served) >= 0.99 * len(arrivals)


@pytest.mark.slow
def test_a_flood_from_one_tenant_does_not_keep_others_from_their_share() -> None:
    """One asks for four times what there is, another for three tenths, which is less than its half: it gets all of it."""
    quiet = poisson(0.3 * SUSTAINABLE, seconds=MINUTES_10, seed=5, tenant="quiet")
    flood = poisson(4.0 * SUSTAINABLE, seconds=MINUTES_10, seed=6, tenant="flood")
    server = VirtualServer(slo_ttft_seconds=3.0, num_tenants=2).run(merge(quiet, flood), until=MINUTES_10)
    let_in = sum(one.request.tenant == "quiet" for one in server.served.values())
    assert let_in >= 0.97 * len(quiet)
    assert percentile(server.first_tokens(tenant="quiet", before=MINUTES_10 - 6.0), 95) <= 3.0
    assert server.tokens["output"] >= 0.95 * saturated().tokens["output"]


@pytest.mark.slow
@pytest.mark.parametrize("slo", [0.0, 3.0])
def test_two_floods_are_served_by_their_weights(slo: float) -> None:
    streams = [
        poisson(3.0 * SUSTAINABLE, seconds=MINUTES_10, seed=7, tenant="light", weight=1.0),
        poisson(3.0 * SUSTAINABLE, seconds=MINUTES_10, seed=8, tenant="heavy", weight=3.0),
    ]
    server = VirtualServer(slo_ttft_seconds=slo, num_tenants=2).run(merge(*streams), until=MINUTES_10)
    assert server.tokens["heavy"] / server.tokens["light"] == pytest.approx(3.0, rel=0.1)


@pytest.mark.slow
def test_batch_work_takes_what_others_leave_and_costs_them_little() -> None:
    arrivals = poisson(0.5 * SUSTAINABLE, seconds=MINUTES_10, seed=9)
    alone = VirtualServer(slo_ttft_seconds=2.0).run(arrivals, until=MINUTES_10)
    batch = poisson(3.0 * SUSTAINABLE, seconds=MINUTES_10, seed=10, priority=BATCH_PRIORITY)
    server = VirtualServer(slo_ttft_seconds=2.0).run(merge(arrivals, batch), until=MINUTES_10)
    assert sum(one.request.priority == 0 for one in server.served.values()) >= 0.99 * len(arrivals)
    before = MINUTES_10 - 5.0
    found = percentile(server.first_tokens(priority=0, before=before), 95)
    assert found <= percentile(alone.first_tokens(priority=0, before=before), 95) + 0.2
    assert server.tokens["output"] >= 0.9 * saturated().tokens["output"], "batch work left the engine idle"
    assert set(server.refusals) == {"queue_full"}, "batch work has no target to miss"
