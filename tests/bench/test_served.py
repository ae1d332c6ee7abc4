"""What is learnt of a server from its step log: from a simulated one, whose costs are known."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from bench import validate
from bench.serve_load import Job, Outcome
from bench.served import Phase, learn, widths
from bench.simulation.record import Record
from bench.simulation.replica import Replica, Setting, run_closed
from bench.simulation.traces import Arrival
from bench.step_log import LoggedStep, RecordedRunner, StepLog, read_log
from bench.validate import Run, steps_compared
from jaxserve.config import EngineConfig, ServeConfig
from jaxserve.device.buckets import choose_bucket, enumerate_buckets
from jaxserve.errors import ConfigError
from jaxserve.host.cost import FittedCost, KindCost, StepWork
from jaxserve.host.cost_file import format_cost, parse_cost

ENGINE = EngineConfig(max_seqs=16, max_step_tokens=64, page_size=16, num_pages=512, max_context=512)
ENGINE_FLAGS = [
    "--max-seqs",
    "16",
    "--max-step-tokens",
    "64",
    "--page-size",
    "16",
    "--num-pages",
    "512",
    "--max-context",
    "512",
]
COST = FittedCost(
    decode=KindCost(places=(1, 8, 16), seconds=(0.010, 0.014, 0.020), per_row=0.0004, per_context=1e-6),
    chunked=KindCost(places=(32, 80), seconds=(0.030, 0.060), per_row=0.0004, per_chunk=0.003),
)
SETTING = Setting(ServeConfig(model="m", engine=ENGINE), COST, 1.0, request_seconds=0.004, reply_seconds=0.003)


def recorded_replica(setting: Setting, record: Record) -> tuple[Replica, RecordedRunner]:
    """A simulated server, and what notes its steps."""
    replica = Replica(setting, record)
    runner = RecordedRunner(replica.runner, replica.clock)
    replica.core._runner = runner
    return replica, runner


def steps_of(runner: RecordedRunner) -> tuple[LoggedStep, ...]:
    return runner.steps(partial(choose_bucket, enumerate_buckets(runner.limits)))


def phase_of(record: Record, width: int, replica: Replica) -> Phase:
    """What clients would have seen, but for gaps."""
    outcomes = [
        Outcome(arrived=one.arrived, ttft=one.first - one.arrived, latency=one.last - one.arrived)
        for one in record.outcomes.values()
        if one.first is not None
    ]
    return Phase(width, 0.0, replica.clock.now, tuple(outcomes))


def serve(arrivals: list[Arrival], width: int, monkeypatch: pytest.MonkeyPatch) -> tuple[StepLog, Phase]:
    """A closed loop in virtual time: the log that a recorded server would write, and what its clients would have seen."""
    runners: list[RecordedRunner] = []

    def recorded(setting: Setting, record: Record) -> Replica:
        replica, runner = recorded_replica(setting, record)
        runners.append(runner)
        return replica

    record = Record()
    with monkeypatch.context() as patched:
        patched.setattr("bench.simulation.replica.Replica", recorded)
        replica = run_closed(SETTING, arrivals, record, width)
    return StepLog(steps=steps_of(runners[0]), kv_bytes_per_token=7.0, window=9), phase_of(record, width, replica)


@dataclass(frozen=True)
class Twice:
    """What steps cost on a machine half as fast."""

    cost: FittedCost

    def seconds(self, work: StepWork) -> float:
        return 2 * self.cost.seconds(work)


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


@pytest.mark.parametrize(("max_seqs", "found"), [(1, (1,)), (4, (1, 3, 4)), (32, (1, 6, 12, 24, 32))])
def test_every_size_of_step_comes_up(max_seqs: int, found: tuple[int, ...]) -> None:
    assert widths(max_seqs) == found


# --- held against a server --------------------------------------------------------------------------------------------


def test_validation_learns_from_the_load_alone_and_says_what_was_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server whose trace met a machine half as fast as its load did: costs of its own steps are right, others are not."""
    trace = tmp_path / "trace.csv"
    lines = ("first_prompt_tokens,first_reply_tokens", *(f"{2 + 7 * i % 90},{2 + i % 20}" for i in range(40)))
    trace.write_text("\n".join(lines))

    def run_for_real(config: ServeConfig, flags: list[str], jobs: list[Job], *_: object, log: Path, **__: object) -> Run:
        assert flags == ["--model", "m", *ENGINE_FLAGS]
        arrivals = [Arrival(job.arrival, len(job.prompt), job.num_output) for job in jobs]
        load_log, load = serve([Arrival(0.0, 2 + 11 * i % 100, 2 + i % 23) for i in range(60)], 16, monkeypatch)
        load = replace(load, concurrency=1, outcomes=load.outcomes[:1])  # the first came to an idle server
        slow = replace(SETTING, cost=Twice(COST))
        record = Record()
        replica, runner = recorded_replica(slow, record)
        for number, arrival in enumerate(arrivals):
            replica.advance(arrival.at + slow.request_seconds)
            replica.offer(arrival, number)
        replica.advance()
        trace_log = StepLog(steps=steps_of(runner))
        trace_log, phase = shifted(trace_log, phase_of(record, 1, replica), load.end + 1.0)
        phase.outcomes[0].gaps += list(record.gaps)
        everything = StepLog(steps=(*load_log.steps, *trace_log.steps), kv_bytes_per_token=7.0)
        return Run(list(phase.outcomes), (phase.start, phase.end + 1.0), [load], everything)

    monkeypatch.setattr("bench.validate.run_for_real", run_for_real)
    found = tmp_path / "found.json"
    flags = ["--model", "m", "--trace", str(trace), "--rate", "2", "--json", str(found), *ENGINE_FLAGS]
    assert validate.main([*flags, "--results", str(tmp_path)]) == 1
    figures = json.loads(found.read_text())["figures"]
    predicted, own = figures[validate.PREDICTED], figures[validate.OWN_STEPS]
    assert all(one["error"] < -0.3 for one in predicted if one["name"].startswith("ITL"))
    assert all(one["error"] == pytest.approx(0.0, abs=1e-3) for one in own if not one["name"].startswith("E2E"))
    said = capsys.readouterr().out
    assert "OUTSIDE" in said.split(validate.OWN_STEPS)[0]
    assert "OUTSIDE" not in said.split(validate.OWN_STEPS)[1]
