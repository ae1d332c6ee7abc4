"""The simulator: traces, virtual time, fleets, the search for a batch, the command. No JAX."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time
import tomllib
from functools import partial
from pathlib import Path

import pytest

from bench import calibrate, serve_load, simulate
from bench.simulation import autoscale
from bench.simulation.fleet import Fleet, Scaling
from bench.simulation.record import Record, Targets, percentiles
from bench.simulation.replica import Setting, limits_of, run_closed, run_open, tokens_of_equal_cost
from bench.simulation.search import find_batch, profile_toml, try_batch
from bench.simulation.traces import Arrival, at_rate, clip, prompt_tokens, read_trace
from bench.simulation.virtual import CostRunner, VirtualClock
from bench.validate import compare
from jaxserve.config import EngineConfig, HttpConfig, ServeConfig
from jaxserve.device.buckets import choose_bucket, enumerate_buckets
from jaxserve.errors import ConfigError
from jaxserve.from_mapping import from_mapping
from jaxserve.host.cost import FittedCost, KindCost
from jaxserve.host.cost_file import CostOrigin, format_cost, parse_cost, read_cost
from jaxserve.host.fit import fit_cost, relative_errors
from jaxserve.plan import RunnerLimits

ROOT = Path(__file__).resolve().parents[2]
TRACES = ROOT.parent / "shared/data/traces"
DECODE, CHUNK = 0.010, 0.040
COST = FittedCost(
    decode=KindCost(places=(1,), seconds=(DECODE,)),
    chunked=KindCost(places=(1,), seconds=(CHUNK,)),
)
"""A step takes 10 ms, or 40 ms when it has a chunk in it."""


def make_setting(cost: FittedCost = COST, *, http: HttpConfig | None = None, **engine: object) -> Setting:
    values = {"max_seqs": 4, "max_step_tokens": 64, "page_size": 16, "num_pages": 64, "max_context": 512, **engine}
    config = ServeConfig(model="m", engine=EngineConfig(**values), http=http or HttpConfig())
    return Setting(config, cost, kv_bytes_per_token=1.0)


# --- traces -----------------------------------------------------------------------------------------------------------


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9995700,396,0\n"
    )
    first, second = read_trace(path)
    assert first == Arrival(0.0, 374, 44)
    assert second.at == pytest.approx(4.318980)
    assert second.num_output == 1


def test_mooncake(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    rows = [{"timestamp": 1500, "input_length": 700, "output_length": 5, "hash_ids": [0, 7]}]
    rows.append({"timestamp": 2000, "input_length": 600, "output_length": 9, "hash_ids": [0, 8]})
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = read_trace(path)
    assert (first.at, second.at) == (0.0, 0.5)
    one, other = prompt_tokens(first, 0), prompt_tokens(second, 1)
    assert (len(one), len(other)) == (700, 600)
    assert one[:512] == other[:512]
    assert one[512] != other[512]


def test_lengths_need_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "l.csv"
    path.write_text("first_prompt_tokens,first_reply_tokens,turns\n197,41,12\n14,242,2\n")
    with pytest.raises(ConfigError, match="--rate"):
        read_trace(path)
    arrivals = read_trace(path, rate=2.0, seed=1)
    assert [(a.num_prompt, a.num_output) for a in arrivals] == [(197, 41), (14, 242)]
    assert arrivals == read_trace(path, rate=2.0, seed=1) != read_trace(path, rate=2.0, seed=2)


def test_arrivals_have_the_rate() -> None:
    arrivals = at_rate([Arrival(0.0, 1, 1)] * 4000, 5.0, seed=0)
    assert arrivals[-1].at == pytest.approx(800, rel=0.05)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a,b\n1,2\n", "expected Azure"), ('{"timestamp": 1}\n', "does not fit"), ("TIMESTAMP,x\n", "no req")],
)
def test_traces_that_are_wrong_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_trace(path)
    assert "wrong" in str(caught.value)


def test_clip_and_prompts() -> None:
    (arrival,) = clip([Arrival(0.0, 100, 50)], max_prompt=10, max_output=0)
    assert (arrival.num_prompt, arrival.num_output) == (10, 50)
    assert set(prompt_tokens(arrival, 3)).isdisjoint(prompt_tokens(arrival, 4))


# --- one replica ------------------------------------------------------------------------------------------------------


def times(record: Record) -> list[tuple[float, float]]:
    """(first token, last token) of each request, in order of arrival."""
    return [(pytest.approx(outcome.first), pytest.approx(outcome.last)) for outcome in record.outcomes.values()]


def test_a_request_alone_takes_a_chunk_and_its_decodes() -> None:
    record = Record()
    replica = run_open(make_setting(), [Arrival(5.0, 30, 4)], record)
    assert times(record) == [(5 + CHUNK, 5 + CHUNK + 3 * DECODE)]
    assert replica.runner.busy_seconds == pytest.approx(CHUNK + 3 * DECODE)


def test_a_prompt_longer_than_the_budget_takes_several_chunks() -> None:
    record = Record()
    run_open(make_setting(), [Arrival(0.0, 150, 1)], record)
    assert times(record) == [(3 * CHUNK, 3 * CHUNK)]


@pytest.mark.parametrize(("overlap", "first"), [(True, 3 * DECODE + CHUNK), (False, 2 * DECODE + CHUNK)])
def test_who_comes_during_a_step_waits_for_what_is_dispatched(overlap: bool, first: float) -> None:
    """With overlap the next step has left already as well."""
    record = Record()
    comes = CHUNK + 1.5 * DECODE
    run_open(make_setting(overlap=overlap), [Arrival(0.0, 30, 40), Arrival(comes, 30, 1)], record)
    assert times(record)[1] == (CHUNK + first, CHUNK + first)


@pytest.mark.parametrize(
    ("comes", "first"),
    [
        (5.0, 5.0 + 0.002 + CHUNK),
        # Before the first step ends, and yet it gets to the engine after it, when the next two are under way.
        (CHUNK + 0.001, 0.002 + CHUNK + 2 * DECODE + CHUNK),
    ],
)
def test_the_ways_in_and_out_count(comes: float, first: float) -> None:
    record = Record()
    setting = dataclasses.replace(make_setting(), request_seconds=0.002, reply_seconds=0.003)
    run_open(setting, [Arrival(0.0, 30, 40), Arrival(comes, 30, 2)], record)
    assert times(record)[1] == (first + 0.003, first + DECODE + 0.003)
    assert min(record.gaps) == pytest.approx(DECODE)


def test_a_closed_loop_waits_for_the_answer_and_the_way_back() -> None:
    record = Record()
    setting = dataclasses.replace(make_setting(), request_seconds=0.002, reply_seconds=0.003)
    replica = run_closed(setting, [Arrival(0.0, 30, 1)] * 5, record, concurrency=1)
    assert replica.clock.now == pytest.approx(5 * (0.002 + CHUNK) + 4 * 0.003)
    took = [outcome.first - outcome.arrived for outcome in record.outcomes.values()]
    assert took == pytest.approx([0.002 + CHUNK + 0.003] * 5)


def test_shared_prefixes_are_found() -> None:
    arrivals = [Arrival(0.0, 400, 1, (1, 2)), Arrival(5.0, 400, 1, (1, 3)), Arrival(10.0, 400, 1)]
    record = Record()
    run_open(make_setting(), arrivals, record)
    assert [outcome.cached for outcome in record.outcomes.values()] == [0, 399, 0]


def test_the_server_s_order_of_eviction_is_simulated() -> None:
    """One block comes five times, then others pass through a small pool: what was used often is still there, or not."""
    used_often = [(1,)] * 5 + [(n,) for n in range(10, 14)] + [(1,)]
    arrivals = [Arrival(float(at), 513, 1, blocks) for at, blocks in enumerate(used_often)]

    def cached(eviction: str) -> int:
        record = Record()
        run_open(make_setting(eviction=eviction, num_pages=5, page_size=512, max_context=600), arrivals, record)
        return list(record.outcomes.values())[-1].cached

    assert (cached("lru"), cached("cost")) == (0, 512)


def test_attention_s_share_follows_from_the_costs() -> None:
    chip, _ = read_cost(ROOT / "configs/costs/h200-llama-3.1-8b.toml")
    # 16 billion operations for a token; for each that it sees four in 32 layers of 4,096.
    assert tokens_of_equal_cost(chip) == pytest.approx(16.06e9 / (4 * 32 * 4096), rel=0.01)
    assert tokens_of_equal_cost(dataclasses.replace(COST)) == math.inf
    kind = KindCost(places=(16, 144), seconds=(0.02, 0.084), per_product=1e-7)
    assert tokens_of_equal_cost(FittedCost(decode=kind, chunked=kind)) == pytest.approx(0.0005 / 1e-7)


def test_the_queue_is_bounded_as_in_the_server() -> None:
    record = Record()
    setting = make_setting(http=HttpConfig(max_queue_requests=3))
    run_open(setting, [Arrival(0.001 * i, 30, 40) for i in range(20)] + [Arrival(1.0, 600, 5)], record)
    assert record.refused == {"QueueFull": 20 - len(record.outcomes)}
    assert record.too_long == 1
    assert 3 <= len(record.outcomes) < 15
    assert all(outcome.finished for outcome in record.outcomes.values())


def test_a_closed_loop_is_always_full() -> None:
    record = Record()
    replica = run_closed(make_setting(), [Arrival(0.0, 2, 11)] * 40, record, concurrency=4)
    assert all(outcome.finished for outcome in record.outcomes.values())
    assert len(record.outcomes) == 40
    assert replica.runner.busy_seconds == pytest.approx(replica.clock.now)


def test_the_same_trace_gives_the_same_figures() -> None:
    def gaps() -> list[float]:
        record = Record()
        run_open(make_setting(num_pages=20), at_rate([Arrival(0.0, 100, 30)] * 50, 8.0, seed=3), record)
        return list(record.gaps)

    assert gaps() == gaps()


def test_the_pool_follows_the_memory() -> None:
    setting = make_setting(num_pages=0, kv_memory=1000, max_seqs=4)
    assert limits_of(setting).num_pages == 1000 // 16
    setting = make_setting(num_pages=0, kv_memory=10**9)
    assert limits_of(setting).num_pages == 4 * 512 // 16
    # A row of 64 tokens and the 32 before it are in 7 pages at most.
    assert limits_of(dataclasses.replace(setting, window=33)).num_pages == 4 * 7
    with pytest.raises(ConfigError, match="the simulator knows no host tier"):
        limits_of(make_setting(host_kv_memory=2**30))
    with pytest.raises(ConfigError, match="pin_prefix"):
        limits_of(make_setting(pin_prefix="system.txt"))


def test_simulating_does_not_load_jax() -> None:
    code = "import sys, bench.simulate; print(sorted(n for n in sys.modules if n.split('.')[0] in ('jax', 'jaxlib', 'flax')))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# --- fleets -----------------------------------------------------------------------------------------------------------


def run_fleet(scaling: Scaling, arrivals: list[Arrival]) -> tuple[Fleet, Record, float]:
    record = Record()
    fleet = Fleet(make_setting(), scaling, record)
    end = fleet.run(arrivals)
    assert all(outcome.finished for outcome in record.outcomes.values())
    return fleet, record, end


RUSH = [Arrival(0.08 * i, 60, 30) for i in range(200)]
"""Sixteen seconds of several times what one replica can do."""


def test_requests_spread_over_replicas() -> None:
    fleet, record, end = run_fleet(Scaling(low=2, high=2), [Arrival(0.0, 30, 50) for _ in range(8)])
    assert max(outcome.first for outcome in record.outcomes.values()) < 3 * CHUNK
    assert fleet.summarise(Targets(), end).replica_seconds == pytest.approx(2 * end)


@pytest.mark.parametrize("name", ["by_queue", "by_tokens", "by_utilisation"])
def test_policies_scale_up_under_load_and_down_after_it(name: str) -> None:
    thresholds = autoscale.Thresholds(waiting=2, tokens=400, utilisation=0.7)
    policy = getattr(autoscale, name)(thresholds)
    scaling = Scaling(low=1, high=6, policy=policy, interval=1.0, load_seconds=3.0, cooldown=5.0)
    late = [Arrival(60.0 + 10 * i, 30, 2) for i in range(6)]
    fleet, _, end = run_fleet(scaling, RUSH + late)
    counts = [count for _, count in fleet.history]
    assert max(counts) > 1
    assert counts[-1] < max(counts)
    cost = fleet.summarise(Targets(), end).replica_seconds
    assert end < cost < max(counts) * end


def test_a_new_replica_works_only_once_it_is_loaded_and_costs_before() -> None:
    scaling = Scaling(low=1, high=2, policy=lambda load: 2, interval=1.0, load_seconds=8.0, cooldown=1e9)
    fleet, _, end = run_fleet(scaling, RUSH)
    _, late = fleet._replicas
    assert (late.started, late.ready_at) == (1.0, 9.0)
    assert late.runner.busy_seconds <= end - 9.0
    assert fleet.summarise(Targets(), end).replica_seconds == pytest.approx(end + (end - 1.0))


def test_a_schedule_is_kept() -> None:
    steps = autoscale.parse_schedule("0:1,5:3,12:1")
    scaling = Scaling(low=1, high=4, policy=autoscale.by_schedule(steps), interval=1.0, load_seconds=0.5, cooldown=0.0)
    fleet, _, _ = run_fleet(scaling, RUSH)
    assert fleet.history[:3] == [(0.0, 1), (5.0, 3), (12.0, 1)]


@pytest.mark.parametrize("text", ["", "5:1", "0:1,a:2", "0:0", "0:1,5:2,3:1"])
def test_schedules_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="schedule"):
        autoscale.parse_schedule(text)


# --- the search -------------------------------------------------------------------------------------------------------

LINEAR = FittedCost(
    decode=KindCost(places=(1, 64), seconds=(0.01, 0.073)),
    chunked=KindCost(places=(1, 64), seconds=(0.01, 0.073)),
)
"""A step takes 9 ms and 1 ms for each place."""


@pytest.mark.slow
def test_the_search_finds_the_largest_batch_within_the_targets() -> None:
    setting = make_setting(LINEAR, num_pages=4096)
    arrivals = [Arrival(0.0, 40, 10 + i % 37) for i in range(200)]
    targets = Targets(ttft=1.0, itl=0.06)
    tried = []
    best = find_batch(setting, arrivals, targets, max_seqs=64, progress=tried.append)
    assert best is not None
    assert best.fits
    assert best.itl_p95 <= targets.itl
    larger = [one for one in tried if one.max_seqs > best.max_seqs]
    assert larger
    assert not any(one.fits for one in larger)
    assert best.output_tokens_per_second == max(one.output_tokens_per_second for one in tried if one.fits)
    assert best.max_seqs == 16  # beside 32 decodes the smallest chunks do not keep up with what comes
    assert try_batch(setting, arrivals, targets, best.max_seqs, best.max_step_tokens) == best


def test_the_search_says_when_nothing_fits() -> None:
    setting = make_setting(LINEAR)
    assert find_batch(setting, [Arrival(0.0, 40, 30)] * 10, Targets(1.0, 0.001), max_seqs=8, progress=lambda _: None) is None


def test_a_profile_is_a_serving_configuration() -> None:
    setting = make_setting(LINEAR, num_pages=4096)
    targets = Targets(2.0, 0.05)
    best = try_batch(setting, [Arrival(0.0, 40, 30)] * 20, targets, 16, 64)
    text = profile_toml(best, setting, targets, ["--find-batch", "--rate", "1"])
    config = from_mapping(ServeConfig, tomllib.loads(text), where="profile")
    assert (config.engine.max_seqs, config.engine.max_step_tokens, config.engine.slo_itl_ms) == (16, 64, 50.0)
    assert config.http.slo_ttft_ms == 2000.0


# --- calibration ------------------------------------------------------------------------------------------------------


def test_calibration_finds_the_costs_of_a_runner() -> None:
    cost = FittedCost(
        decode=KindCost(places=(1, 8, 16), seconds=(0.01, 0.02, 0.03), per_context=1e-6),
        chunked=KindCost(places=(32, 48, 144), seconds=(0.05, 0.06, 0.2), per_context=2e-6, per_product=1e-7),
    )
    limits = RunnerLimits(num_pages=64, page_size=16, max_seqs=16, max_step_tokens=128, max_context=512, vocab_size=1000)
    clock = VirtualClock()
    runner = CostRunner(limits, cost, partial(choose_bucket, enumerate_buckets(limits)), clock)
    progress = []
    points, samples = calibrate.measure(
        runner, rounds=2, progress=lambda done, total: progress.append((done, total)), clock=clock
    )
    fitted = fit_cost(samples)
    assert relative_errors(fitted, samples)[-1] < 1e-6
    assert fitted.chunked.per_product == pytest.approx(1e-7, rel=1e-3)
    assert progress[-1] == (2 * len(points), 2 * len(points))
    read, origin = parse_cost(format_cost(fitted, calibrate.origin_of("m", fitted, samples, 1024.0)), where="x")
    assert (origin.model, origin.num_steps, origin.kv_bytes_per_token) == ("m", len(points), 1024.0)
    assert read.seconds(samples[0].work) == pytest.approx(samples[0].seconds, rel=1e-4)


@pytest.mark.parametrize("path", sorted((ROOT / "configs/costs").glob("*.toml")), ids=lambda path: path.stem)
def test_cost_files_can_be_read(path: Path) -> None:
    _, origin = read_cost(path)
    assert origin.machine
    assert origin.kv_bytes_per_token > 0


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    cost = tmp_path / "cost.toml"
    cost.write_text(format_cost(LINEAR, CostOrigin(kv_bytes_per_token=100.0)))
    trace = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:15:{i // 10:02}.{i % 10}000000,{20 + i},{5 + i % 9}" for i in range(120)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    return ["--model", "m", "--cost", str(cost), "--trace", str(trace), "--max-seqs", "8", "--max-step-tokens", "64"]


def test_without_costs_those_of_the_model_are_taken(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--model", "smollm2-135m-instruct", "--max-context", "2048", *files[4:]]) == 0
    assert "epyc-2-cores-smollm2-135m.toml" in capsys.readouterr().err
    assert simulate.main(["--model", "m", *files[4:]]) == 2
    assert "bench.calibrate" in capsys.readouterr().err


def test_the_command_reports_plots_and_writes(files: list[str], tmp_path: Path, capsys) -> None:
    out, svg = tmp_path / "deep/out.json", tmp_path / "plots/p.svg"
    assert simulate.main([*files, "--json", str(out), "--plot", str(svg)]) == 0
    said = capsys.readouterr().out
    for name in ("TTFT", "ITL", "goodput", "shed", "preemptions", "busy"):
        assert name in said
    (found,) = json.loads(out.read_text())["found"]
    assert found["num_requests"] == found["num_finished"] == 120
    assert 0 < found["ttft"]["p50"] <= found["ttft"]["p95"]
    assert svg.read_text().startswith("<svg")
    assert svg.read_text().count("<polyline") == 6


def test_the_command_compares_policies(files: list[str], capsys) -> None:
    flags = ["--replicas", "1:3", "--autoscale", "tokens,utilisation", "--load-seconds", "1", "--interval", "1"]
    assert simulate.main([*files, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["policy", "fixed", "fixed", "tokens", "utilisation"]


@pytest.mark.slow
def test_the_command_writes_a_profile(files: list[str], tmp_path: Path, capsys) -> None:
    out = tmp_path / "profile.toml"
    flags = [
        "--find-batch",
        "--slo-ttft-p95",
        "1",
        "--slo-itl-p95",
        "0.05",
        "--limit-seqs",
        "2",
        "--requests",
        "60",
        "--out",
        str(out),
    ]
    assert simulate.main([*files, *flags]) == 0
    assert "best:" in capsys.readouterr().out
    assert from_mapping(ServeConfig, tomllib.loads(out.read_text()), where="profile").model == "m"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replicas", "1:3"], "needs --autoscale"),
        (["--replicas", "1:3", "--autoscale", "magic"], "found magic"),
        (["--replicas", "1:3", "--autoscale", "schedule"], "with --schedule"),
        (["--trace", "/nonexistent"], "/nonexistent"),
        (["--cost", "/nonexistent.toml"], "bench.calibrate"),
    ],
)
def test_the_command_says_what_is_wrong(files: list[str], flags: list[str], message: str, capsys) -> None:
    assert simulate.main([*files, *flags]) == 2
    assert message in capsys.readouterr().err


def test_validation_compares_percentiles() -> None:
    record = Record()
    run_open(make_setting(), [Arrival(0.0, 30, 3)], record)
    measured = serve_load.Outcome(ttft=CHUNK / 2, latency=0.1, gaps=[DECODE, DECODE], num_prompt=30, num_output=3)
    ttft, _, itl, *_ = compare([measured, serve_load.Outcome(error="x")], record)
    assert ttft.error == pytest.approx(1.0)
    assert "OUTSIDE" in str(ttft)
    assert itl.error == pytest.approx(0.0)
    assert "within" in str(itl)


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.is_dir(), reason="the recorded traces are not here")
def test_recorded_traffic_is_simulated_in_far_less_than_its_time() -> None:
    """An hour in five minutes, held for its first five minutes; and Mooncake's shared prefixes are found."""
    cost, origin = read_cost(ROOT / "configs/costs/h200-llama-3.1-8b.toml")
    engine = EngineConfig(max_seqs=128, max_step_tokens=2048, prefill_chunk=2048, kv_memory=100 << 30)
    setting = Setting(ServeConfig(model="m", engine=engine), cost, origin.kv_bytes_per_token)
    arrivals = read_trace(TRACES / "AzureLLMInferenceTrace_conv.csv")
    assert len(arrivals) == 19366
    record, started = Record(), time.process_time()
    run_open(setting, arrivals[:1500], record)
    assert time.process_time() - started < 300 * 1500 / 19366
    assert percentiles(record.gaps)["p95"] < 0.1
    record = Record()
    run_open(setting, read_trace(TRACES / "mooncake_conversation_trace.jsonl", rate=2.0)[:100], record)
    assert sum(outcome.cached for outcome in record.outcomes.values()) > 0
