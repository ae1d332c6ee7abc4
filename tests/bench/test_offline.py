"""The throughput benchmark's arithmetic, its peers and its report, on a fake device."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import offline, ours, startup
from bench.limits import memory_read_bandwidth
from bench.ours import run_workload
from bench.peers import Peer, PeerError, figures_for, parse_figures
from bench.report import OURS, Figure, Rounds, throughput_line, throughput_table
from bench.workloads import WORKLOADS, Throughput, Workload, prompts, throughput
from jaxserve.engine.core import EngineCore
from jaxserve.host.scheduler import Scheduler
from jaxserve.plan import RunnerLimits
from tests.fakes import FakeRunner

VOCAB = 50_000


class FakeEngine:
    """What `launch.build_engine` gives, without a device; every token is one that ends a sequence unless that is ignored."""

    runner = SimpleNamespace(weight_bytes=1000, kv_bytes=2000)

    def __init__(self, **runner: Any) -> None:
        limits = RunnerLimits(
            num_pages=1024, page_size=16, max_seqs=32, max_step_tokens=512, max_context=2048, vocab_size=VOCAB
        )
        scheduler = Scheduler(limits, prefill_chunk=512, eos_token_ids=(7,), seed=1)
        self.core = EngineCore(scheduler, FakeRunner(limits, next_token=lambda tokens, seed: 7, **runner), overlap=True)


def peer(tmp_path: Path, script: str, *, arguments: str = "") -> Peer:
    path = tmp_path / "peer.py"
    path.write_text(script)
    return Peer("peer", f"{sys.executable} {path} {arguments}")


def test_prompts_are_those_of_the_peers() -> None:
    random.seed(0)
    assert prompts(WORKLOADS["b"]) == [tuple(random.randint(100, 40000) for _ in range(128)) for _ in range(8)]


def test_rates_follow_their_definitions() -> None:
    found = throughput(Workload("x", 4, 100, 11), first_seconds=2.0, all_seconds=6.0)
    assert found == Throughput(prefill=4 * 100 / 2.0, decode=4 * 10 / 4.0, total=4 * 11 / 6.0)


def test_a_workload_runs_to_its_length_and_is_timed() -> None:
    engine = FakeEngine(step_seconds=0.002)
    timing = run_workload(engine.core, Workload("x", 8, 100, 5), num_output=5)
    # 800 prompt tokens take two steps of 512; the first of them also fills some prompts, so five or six more decode.
    assert timing.num_steps in (6, 7)
    assert timing.seconds >= timing.num_steps * 0.002
    assert 0 <= timing.exposed_share < 1
    assert engine.core.stats().num_output_tokens == 40
    assert not engine.core.has_work


def test_a_run_that_does_not_reach_its_length_is_no_measurement() -> None:
    engine = FakeEngine(fail_on_submit=[2])
    with pytest.raises(RuntimeError, match="to end by length"):
        run_workload(engine.core, WORKLOADS["a"], num_output=64)


@pytest.mark.slow
def test_memory_is_read_at_some_speed() -> None:
    assert memory_read_bandwidth(repeats=1) > 1e8


# --- peers ------------------------------------------------------------------------------------------------------------


def test_figures_are_read_from_other_output() -> None:
    text = (
        "loading\n"
        "llama.cpp B=8 in=128 out=64 prefill 735 tok/s; decode 184.0 tok/s; total out 123.0 tok/s\n"
        "RES vllm B=1 in=128 out=64 prefill 430 tok/s; decode 17.6 tok/s; total out 16.5 tok/s\n"
        "  times 1 128 1 [0.15]\n"
    )
    assert parse_figures(text) == {(8, 128, 64): Throughput(735, 184.0, 123.0), (1, 128, 64): Throughput(430, 17.6, 16.5)}


def test_our_line_reads_back() -> None:
    found = Throughput(735, 184.5, 123.5)
    assert parse_figures(throughput_line(OURS, WORKLOADS["c"], found)) == {(32, 128, 64): found}


def test_a_peer_is_given_the_workload(tmp_path: Path) -> None:
    script = (
        "import sys\nassert sys.argv[1:] == ['b']\n"
        "print('B=8 in=128 out=64 prefill 1 tok/s; decode 2 tok/s; total out 3 tok/s')"
    )
    one = peer(tmp_path, script, arguments="{workload}")
    assert one.one_workload_at_a_time
    assert figures_for(one, WORKLOADS["b"], one.run(WORKLOADS["b"], timeout=30)) == Throughput(1, 2, 3)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("raise SystemExit('out of memory')", "exit code 1(.|\n)*out of memory"),
        ("print('hello')", "no figures"),
        pytest.param("import time; time.sleep(60)", "timed out", marks=pytest.mark.slow),
    ],
)
def test_a_peer_that_fails_says_why(tmp_path: Path, script: str, message: str) -> None:
    with pytest.raises(PeerError, match=message):
        peer(tmp_path, script).run(None, timeout=2)


def test_a_peer_without_the_workload_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="no figures for B=8 in=128 out=64"):
        figures_for(Peer("p", "c"), WORKLOADS["b"], {(1, 1, 1): Throughput(1, 1, 1)})


@pytest.mark.parametrize("flag", ["", "name", "=command", "name="])
def test_a_peer_needs_a_name_and_a_command(flag: str) -> None:
    with pytest.raises(ValueError, match="NAME=COMMAND"):
        Peer.parse(flag)


# --- the report -------------------------------------------------------------------------------------------------------


def test_a_ratio_is_the_median_of_rounds_not_the_ratio_of_medians() -> None:
    rounds, workload = Rounds(), WORKLOADS["a"]
    for our, their in ((10.0, 5.0), (100.0, 100.0), (30.0, 10.0)):
        rounds.add(OURS, workload, Throughput(1, 1, our))
        rounds.add("peer", workload, Throughput(1, 1, their))
    assert rounds.ratio("peer", workload) == 2.0
    assert rounds.ratio("absent", workload) is None
    medians = rounds.medians(OURS, workload)
    assert medians is not None
    assert medians.total == 30.0
    assert "2.00x" in throughput_table(rounds, [workload])


def test_a_figure_knows_whether_it_is_met() -> None:
    assert Figure("f", 70, 70, at_least=True).met is True
    assert Figure("f", 69.9, 70, at_least=True).met is False
    assert Figure("f", 5.1, 5, at_least=False).met is False
    assert Figure("f", 5, 5, at_least=False).met is True
    assert Figure("f", None, 5, at_least=False).met is None
    assert "not measured" in str(Figure("f", None, 5, at_least=False))


def test_the_whole_run_reports_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = [startup.Start(first_token_seconds=s, peak_bytes=1 << 30, weight_bytes=1000, kv_bytes=2000) for s in (25, 12)]
    monkeypatch.setattr(ours, "build", lambda config: FakeEngine(step_seconds=0.001))
    monkeypatch.setattr(startup, "measure", lambda config: tuple(starts))
    monkeypatch.setattr(offline.limits, "memory_read_bandwidth", lambda: 1e6)
    slow = peer(tmp_path, "print('B=1 in=128 out=64 prefill 1 tok/s; decode 1 tok/s; total out 1 tok/s')")
    report = tmp_path / "new" / "report.json"
    flags = ["--model", "m", "--workloads", "ac", "--repeats", "2", "--peer", f"slow={slow.command}", "--json", str(report)]
    assert offline.main(flags) == 0
    printed = capsys.readouterr()
    assert "left out of this round: slow: no figures for B=32" in printed.err
    assert "slow" in printed.out
    written = json.loads(report.read_text())
    assert written["config"]["engine"]["dtype"] == "float32"
    assert len(written["findings"]["timings"]["c"]) == 2
    figures = {figure["name"]: figure for figure in written["figures"]}
    assert figures["total output over slow, a: 1 x (128 -> 64)"]["met"] is True
    assert figures["total output over slow, c: 32 x (128 -> 64)"]["met"] is None
    assert figures["start to first token, no compile cache"]["met"] is True
    assert figures["start to first token, with it"]["met"] is False
    assert figures["peak memory beside weights and KV pool"]["met"] is True
    assert figures["host time not hidden at 32 sequences, share of the step"]["value"] > 0
    # A step of 1 ms that reads 1,000 bytes is all that 1 MB/s allows.
    assert 30 < figures["decode at 1 sequence, share of the memory's limit"]["value"] < 102


@pytest.mark.parametrize(
    "flags", [["--workloads", "xyz"], ["--workloads", ""], ["--repeats", "0"], ["--peer", "nonsense"], ["--model"]]
)
def test_bad_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        offline.main(["--model", "m", *flags])
    assert stop.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_no_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert offline.main([]) == 2
    assert capsys.readouterr().err.startswith("bench.offline: error: no model is named")
