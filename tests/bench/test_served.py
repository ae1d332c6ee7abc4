"""What is learnt of a server from its step log: from a simulated one, whose costs are known."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bench.serve_load import Outcome
from bench.served import Phase, learn, widths
from bench.simulation.record import Record
from bench.simulation.replica import Replica, Setting, limits_of, run_closed
from bench.simulation.traces import Arrival
from bench.step_log import RecordedRunner, StepLog, read_log
from bench.validate import steps_compared
from jaxserve.config import EngineConfig, ServeConfig
from jaxserve.device.buckets import choose_bucket, enumerate_buckets
from jaxserve.errors import ConfigError
from jaxserve.host.cost import FittedCost, KindCost
from jaxserve.host.cost_file import format_cost, parse_cost

ENGINE = EngineConfig(max_seqs=16, max_step_tokens=64, page_size=16, num_pages=512, max_context=512)
COST = FittedCost(
    decode=KindCost(places=(1, 8, 16), seconds=(0.010, 0.014, 0.020), per_row=0.0004, per_context=1e-6),
    chunked=KindCost(places=(32, 80), seconds=(0.030, 0.060), per_row=0.0004, per_chunk=0.003),
)
SETTING = Setting(ServeConfig(model="m", engine=ENGINE), COST, 1.0, request_seconds=0.004, reply_seconds=0.003)


def serve(arrivals: list[Arrival], concurrency: int, monkeypatch: pytest.MonkeyPatch) -> tuple[StepLog, Phase]:
    """A closed loop in virtual time: the log that a recorded server would write, and what its clients would have seen."""
    recorded: list[RecordedRunner] = []

    class Recorded(Replica):
        def __init__(self, setting: Setting, record: Record) -> None:
            super().__init__(setting, record)
            self.core._runner = RecordedRunner(self.runner, self.clock)
            recorded.append(self.core._runner)

    monkeypatch.setattr("bench.simulation.replica.Replica", Recorded)
    record = Record()
    replica = run_closed(SETTING, arrivals, record, concurrency)
    log = StepLog(
        steps=recorded[0].steps(partial(choose_bucket, enumerate_buckets(limits_of(SETTING)))),
        kv_bytes_per_token=7.0,
        window=9,
    )
    outcomes = tuple(Outcome(arrived=one.arrived, ttft=one.first - one.arrived) for one in record.outcomes.values())
    return log, Phase(concurrency, 0.0, replica.clock.now, outcomes)


def shifted(log: StepLog, phase: Phase, seconds: float) -> tuple[StepLog, Phase]:
    """The same, later."""
    steps = tuple(replace(step, submitted=step.submitted + seconds, ready=step.ready + seconds) for step in log.steps)
    outcomes = tuple(replace(outcome, arrived=outcome.arrived + seconds) for outcome in phase.outcomes)
    return replace(log, steps=steps), replace(phase, start=seconds, end=seconds + phase.end, outcomes=outcomes)


def test_costs_and_delays_of_a_server_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    log, phases, end = StepLog(steps=()), [], 0.0
    for width in widths(ENGINE.max_seqs):
        arrivals = [Arrival(0.0, draw.randint(2, 100), draw.randint(2, 20)) for _ in range(8 + width)]
        later, phase = shifted(*serve(arrivals, width, monkeypatch), end)
        log = StepLog(steps=(*log.steps, *later.steps), kv_bytes_per_token=7.0, window=9)
        phases.append(phase)
        end = phase.end + 1.0
    cost, origin = parse_cost(format_cost(*learn("m", log, phases)), where="here")
    assert isinstance(cost, FittedCost)
    for step in log.steps:
        assert cost.seconds(step.work) == pytest.approx(COST.seconds(step.work), rel=1e-3)
    assert cost.decode.per_row == pytest.approx(COST.decode.per_row, rel=0.01)
    assert origin.request_seconds == pytest.approx(SETTING.request_seconds)
    assert origin.reply_seconds == pytest.approx(SETTING.reply_seconds)
    assert origin.spread == pytest.approx((1.0,) * len(origin.spread), rel=1e-3)
    assert (origin.kv_bytes_per_token, origin.window, origin.num_steps) == (7.0, 9, len(log.steps))
    assert [one.error for one in steps_compared(cost, log, (0.0, end))] == pytest.approx([0.0, 0.0], abs=1e-3)


def test_only_steps_of_the_span_are_learnt_from(monkeypatch: pytest.MonkeyPatch) -> None:
    log, phase = serve([Arrival(0.0, 20, 5)] * 4, 2, monkeypatch)
    middle = phase.end / 2
    halves = [log.samples([span]) for span in ((0.0, middle), (middle, phase.end))]
    assert all(halves)
    assert sum(map(len, halves)) == len(log.samples([(0.0, middle), (middle, phase.end)])) == len(log.steps)


def test_a_step_that_is_read_late_took_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that was dispatched before the last was read has taken its time from there, so that none counts twice."""
    log, phase = serve([Arrival(0.0, 20, 9)] * 3, 3, monkeypatch)
    busy = [step.seconds for step in log.steps]
    assert sum(busy) == pytest.approx(phase.end - log.steps[0].submitted)
    assert any(late.submitted < early.ready for early, late in itertools.pairwise(log.steps))


def test_a_log_is_read_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log, _ = serve([Arrival(0.0, 20, 3)], 1, monkeypatch)
    log.write(tmp_path / "deep/steps.json")
    assert read_log(tmp_path / "deep/steps.json") == log


def test_what_is_no_log_is_named(tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    with pytest.raises(ConfigError, match="told to stop"):
        read_log(path)
    for text in ("nothing", "[]", json.dumps({"steps": [{"ready": 1}]})):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"wrong\.json is not a step log"):
            read_log(path)


@pytest.mark.parametrize(("max_seqs", "found"), [(1, (1,)), (4, (1, 3, 4)), (32, (1, 5, 8, 9, 16, 17, 32))])
def test_every_size_of_step_is_filled_and_just_needed(max_seqs: int, found: tuple[int, ...]) -> None:
    assert widths(max_seqs) == found
