"""Calibration: that the plans which are timed are ones a device could run, cover every bucket, and give a pacer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from bench.simulation.virtual import CostRunner, VirtualClock
from jaxserve.config import EngineConfig
from jaxserve.device.buckets import choose_bucket, enumerate_buckets
from jaxserve.engine import calibration
from jaxserve.engine.calibration import Calibrator, Point, bucket_of, build_pacer, quick_points, thorough_points
from jaxserve.errors import ConfigError
from jaxserve.host.cost import FittedCost, KindCost
from jaxserve.host.cost_file import CostOrigin, format_cost
from tests.fakes import FakeRunner
from tests.host.driver import make_limits

LIMITS = make_limits(num_pages=64, page_size=16, max_seqs=16, max_step_tokens=128, max_context=512)
COST = FittedCost(
    decode=KindCost(places=(1, 8, 16), seconds=(0.01, 0.02, 0.03), per_context=1e-6),
    chunked=KindCost(places=(24, 48, 144), seconds=(0.05, 0.06, 0.2), per_context=2e-6, per_product=1e-7),
)


@pytest.mark.parametrize(
    "limits",
    [
        *(LIMITS, make_limits(), make_limits(max_seqs=1, num_pages=8), make_limits(num_pages=2, max_context=9)),
        make_limits(num_pages=40, max_context=400, window=10),
        make_limits(num_pages=400, max_context=400, local_pages=24, local_window=10),
    ],
)
@pytest.mark.parametrize("points_of", [thorough_points, quick_points])
def test_every_kind_of_program_is_measured_by_plans_within_the_limits(limits, points_of) -> None:
    buckets = enumerate_buckets(limits)
    bucket_for = partial(choose_bucket, buckets)
    points = points_of(limits, buckets, bucket_for)
    calibrator = Calibrator(FakeRunner(limits), bucket_for)
    for point in points:
        plan = calibrator._plan(point)
        assert 0 < len(plan.rows) <= limits.max_seqs
        assert plan.num_tokens <= limits.max_step_tokens
        for row in plan.rows:
            assert row.start >= 0
            covered = (row.first_page + len(row.pages)) * limits.page_size
            assert row.start + row.count <= min(limits.max_context, covered)
            assert row.first_page == limits.first_seen_page(row.start)
            assert len(set(row.pages)) == len(row.pages) <= limits.num_pages
    kinds = {bucket_of(point, bucket_for).has_chunks for point in points}
    assert kinds == {False, True}


def test_the_thorough_points_are_in_every_bucket_and_more_than_the_quick_ones() -> None:
    buckets = enumerate_buckets(LIMITS)
    bucket_for = partial(choose_bucket, buckets)
    thorough, quick = (of(LIMITS, buckets, bucket_for) for of in (thorough_points, quick_points))
    assert {bucket_of(point, bucket_for) for point in thorough} == set(buckets)
    assert {bucket_of(point, bucket_for) for point in quick} == set(buckets)
    assert set(quick) < set(thorough)


class Disturbed(CostRunner):
    """Every second visit takes ten times as long."""

    def submit(self, plan):
        handle = super().submit(plan)
        if plan.step_id // 2 % 2:
            handle.ready_at = self._ready_at = self._ready_at + 9 * COST.seconds(calibration.work_of(plan, self._bucket_for))
        return handle


def test_a_quantile_of_the_visits_counts() -> None:
    clock = VirtualClock()
    bucket_for = partial(choose_bucket, enumerate_buckets(LIMITS))
    point = Point(1, 100)
    found = [
        Calibrator(Disturbed(LIMITS, COST, bucket_for, clock), bucket_for, clock=clock)
        .measure([point], rounds=4, quantile=quantile)[0]
        .seconds
        for quantile in (0.0, 1.0)
    ]
    assert found[0] == pytest.approx(0.0101)
    assert found[1] > 5 * found[0]


def test_no_target_no_pacer() -> None:
    buckets = enumerate_buckets(LIMITS)
    assert build_pacer(EngineConfig(), FakeRunner(LIMITS), buckets, partial(choose_bucket, buckets)) is None


def test_a_pacer_predicts_with_the_file_that_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cost.toml"
    path.write_text(format_cost(COST, CostOrigin(model="m")))
    buckets = enumerate_buckets(LIMITS)
    engine = EngineConfig(slo_itl_ms=100.0, step_cost=str(path))
    pacer = build_pacer(engine, FakeRunner(LIMITS), buckets, partial(choose_bucket, buckets))
    assert pacer is not None
    assert pacer.chunk_budget(8, 800, 0).tokens == 32 - 8  # 128 places take 180 ms
    with pytest.raises(ConfigError, match=r"none\.toml"):
        build_pacer(
            EngineConfig(slo_itl_ms=1.0, step_cost="none.toml"), FakeRunner(LIMITS), buckets, partial(choose_bucket, buckets)
        )


def test_a_pacer_without_a_file_measures_the_runner(monkeypatch) -> None:
    clock = VirtualClock()
    monkeypatch.setattr(calibration, "Calibrator", partial(Calibrator, clock=clock))
    buckets = enumerate_buckets(LIMITS)
    bucket_for = partial(choose_bucket, buckets)
    runner = CostRunner(LIMITS, COST, bucket_for, clock)
    pacer = build_pacer(EngineConfig(slo_itl_ms=100.0), runner, buckets, bucket_for)
    assert pacer is not None
    assert pacer.chunk_budget(8, 800, 0).tokens == 32 - 8
    assert runner.num_steps > 0
