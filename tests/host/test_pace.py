"""Long prompts beside decodes: the chunk budget keeps the inter-token target, whatever the model that predicts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest

from bench.simulation.record import Record, percentiles
from bench.simulation.replica import Replica, Setting
from bench.simulation.traces import Arrival
from jaxserve.config import EngineConfig, ServeConfig
from jaxserve.device.buckets import choose_bucket, enumerate_buckets
from jaxserve.errors import ConfigError
from jaxserve.host.cost import FittedCost, KindCost, StepWork, chunk_products, work_of
from jaxserve.host.pace import Pacer
from jaxserve.plan import RunnerLimits
from tests.host.driver import Driver, make_limits

LIMITS = RunnerLimits(num_pages=4096, page_size=16, max_seqs=16, max_step_tokens=512, max_context=8192, vocab_size=1 << 31)
BUCKETS = enumerate_buckets(LIMITS)
BUCKET_FOR = partial(choose_bucket, BUCKETS)
SMALLEST, LARGEST = 32, 512
"""Places of the smallest of `BUCKETS`, whose step takes about 30 ms, and of the largest."""
COST = FittedCost(
    decode=KindCost(places=(1, 16), seconds=(0.01, 0.02), per_context=1e-7),
    chunked=KindCost(places=(SMALLEST, LARGEST), seconds=(0.03, 0.27), per_context=1e-7, per_product=1e-8),
)


def make_pacer(target_seconds: float, cost: FittedCost = COST) -> Pacer:
    return Pacer(cost, BUCKETS, BUCKET_FOR, target_seconds=target_seconds)


def seconds_of(pacer_budget: int, num_decodes: int, context: int, start: int) -> float:
    places = BUCKET_FOR(num_decodes, pacer_budget, 1).num_tokens
    end = start + pacer_budget
    return COST.seconds(StepWork(places, True, num_decodes + 1, 1, context, end, chunk_products(start, pacer_budget)))


def test_nothing_decodes_so_the_budget_is_whole() -> None:
    assert make_pacer(0.001).chunk_budget(0, 0, 4000).tokens == LIMITS.max_step_tokens


@pytest.mark.parametrize("target", [0.04, 0.1, 0.2, 1.0])
@pytest.mark.parametrize("num_decodes", [1, 9, 16])
@pytest.mark.parametrize("context", [100, 50_000])
@pytest.mark.parametrize("start", [0, 7000])
def test_the_budget_is_the_largest_that_keeps_the_target(target: float, num_decodes: int, context: int, start: int) -> None:
    budget = make_pacer(target).chunk_budget(num_decodes, context, start).tokens
    allowed = 0.9 * target
    assert SMALLEST <= budget + num_decodes <= LARGEST
    if budget + num_decodes > SMALLEST:
        assert seconds_of(budget, num_decodes, context, start) <= allowed
    if budget + num_decodes < LARGEST:
        assert seconds_of(budget + 1, num_decodes, context, start) > allowed


def test_an_impossible_target_leaves_the_floor() -> None:
    pacer = make_pacer(1e-6)
    assert pacer.chunk_budget(16, 10_000, 0).tokens == pacer.floor(16) == SMALLEST - 16


def test_many_short_prompts_stay_in_the_bucket_of_their_tokens() -> None:
    """A bucket has few rows for chunks: without a charge a row, ten prompts of three tokens would take the next larger."""
    limits = make_limits(num_pages=256, page_size=4, max_seqs=16, max_step_tokens=512, max_context=400)
    buckets = enumerate_buckets(limits)
    bucket_for = partial(choose_bucket, buckets)
    driver = Driver(limits, prefill_chunk=512)
    driver.scheduler._planner._pacer = Pacer(COST, buckets, bucket_for, target_seconds=0.04)
    driver.add("decodes", 3, max_tokens=50)
    driver.step()
    for number in range(10):
        driver.add(f"short {number}", 3, max_tokens=20)
    driver.plan()
    plan = driver.in_flight[0][0]
    assert [row.count for row in plan.rows] == [1, 3, 3]
    assert COST.seconds(work_of(plan, bucket_for)) <= 0.04
    driver.commit()
    driver.run()


def test_a_model_that_is_wrong_is_corrected_by_what_steps_take() -> None:
    right = make_pacer(0.2).chunk_budget(8, 1000, 0).tokens
    half = KindCost(places=COST.chunked.places, seconds=tuple(s / 2 for s in COST.chunked.seconds))
    pacer = make_pacer(0.2, replace(COST, chunked=half))
    assert pacer.chunk_budget(8, 1000, 0).tokens > 2 * right
    plan = serve(target_ms=100.0)[0].last_mixed_plan
    for _ in range(100):
        pacer.observe(plan, COST.seconds(work_of(plan, BUCKET_FOR)))
    assert pacer.chunk_budget(8, 1000, 0).tokens == pytest.approx(right, rel=0.1)


def test_one_long_pause_does_not_stop_prefill() -> None:
    plan = serve(target_ms=100.0)[0].last_mixed_plan
    pacer = make_pacer(0.1)
    before = pacer.chunk_budget(8, 1000, 0)
    pacer.observe(plan, 60.0)
    assert pacer.chunk_budget(8, 1000, 0) == before
    assert before.tokens > pacer.floor(8)


def test_a_target_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="positive"):
        make_pacer(0.0)


# --- the whole engine in virtual time ---------------------------------------------------------------------------------


class Watched(Replica):
    """A replica that keeps its last plan with chunks and decodes."""

    def __init__(self, setting: Setting, record: Record) -> None:
        super().__init__(setting, record)
        submit = self.runner.submit

        def watched(plan):
            if len(plan.rows) > 1 and any(row.count > 1 for row in plan.rows):
                self.last_mixed_plan = plan
            return submit(plan)

        self.runner.submit = watched


@cache
def serve(*, target_ms: float) -> tuple[Watched, Record]:
    """Eight long answers, and a long prompt now and then."""
    engine = EngineConfig(
        max_seqs=16, max_step_tokens=512, page_size=16, num_pages=4096, max_context=8192, slo_itl_ms=target_ms
    )
    record = Record()
    replica = Watched(Setting(ServeConfig(model="m", engine=engine), COST, 1.0), record)
    arrivals = [Arrival(0.0, 20, 250) for _ in range(8)] + [Arrival(1.0 + i, 4000, 4) for i in range(2)]
    for number, arrival in enumerate(arrivals):
        replica.advance(arrival.at)
        replica.offer(arrival, number)
    replica.advance()
    assert all(outcome.finished for outcome in record.outcomes.values())
    return replica, record


def test_long_prompts_do_not_stall_decodes() -> None:
    """Without a target the time between tokens is that of a whole chunk; with one it is kept, and prompts get on."""
    _, plain = serve(target_ms=0.0)
    _, paced = serve(target_ms=100.0)
    assert percentiles(plain.gaps)["p95"] > 0.25
    assert percentiles(paced.gaps)["p95"] <= 0.1
    assert max(paced.gaps) <= 0.11
    ttft = [outcome.first - outcome.arrived for outcome in paced.outcomes.values()]
    assert max(ttft) < 10


def test_the_target_holds_in_use_of_a_model_that_is_wrong_by_half() -> None:
    """The loop reports what steps took, so the prediction comes right within the run."""
    engine = EngineConfig(max_seqs=16, max_step_tokens=512, page_size=16, num_pages=4096, max_context=8192, slo_itl_ms=100.0)
    record = Record()
    replica = Replica(Setting(ServeConfig(model="m", engine=engine), COST, 1.0), record)
    chunked = COST.chunked
    replica.scheduler._planner._pacer._cost = replace(
        COST, chunked=replace(chunked, seconds=tuple(s / 2 for s in chunked.seconds), per_product=chunked.per_product / 2)
    )
    arrivals = [Arrival(0.0, 20, 500) for _ in range(8)] + [Arrival(1.0 + i, 4000, 4) for i in range(5)]
    for number, arrival in enumerate(arrivals):
        replica.advance(arrival.at)
        replica.offer(arrival, number)
    replica.advance()
    gaps = sorted(list(record.gaps)[len(record.gaps) // 2 :])
    assert gaps[len(gaps) * 95 // 100] <= 0.105
