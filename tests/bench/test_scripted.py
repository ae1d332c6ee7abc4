"""The scripted server, and the two benchmarks that need one: each run small, with the checks that a large run has."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from bench import hostile, server_overhead
from bench.hostile_clients import CLIENTS
from bench.scripted_engine import VOCAB_SIZE, scripted_text, scripted_tokenizer
from bench.scripted_server import server_process


def test_the_script_has_characters_of_several_tokens_and_is_cut_between_them() -> None:
    text = scripted_text([1, 2, 3], 32)
    assert text.count("🙂") == 2
    assert scripted_text([1, 2, 3], 18) == scripted_text([1, 2, 3], 16)
    assert scripted_text([1, 2, 4], 32) != text
    tokenizer = scripted_tokenizer()
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert len(tokenizer.encode("hello 🙂")) == len("hello 🙂".encode())


@pytest.mark.slow
def test_a_short_hostile_afternoon() -> None:
    """Of the large one this leaves out how long good requests take, which depends on who else is on the machine."""
    with server_process(*hostile.server_flags(0.002, max_seqs=128)) as server:
        report = asyncio.run(hostile.run(server, num_requests=300, concurrency=16, num_tokens=40, seed=1))
    assert not report.failures(timing=False)
    assert report.num_good == 200
    assert set(report.hostile) == set(CLIENTS)
    assert sum(report.hostile.values()) == 100
    assert report.dropped


def test_a_report_that_finds_nothing_wrong_only_where_nothing_is() -> None:
    assert hostile.Report(memory_mib=[50.0, 51.0]).failures(timing=True) == []
    for wrong in (
        hostile.Report(memory_mib=[1.0, 1.0], wrong=["x"]),
        hostile.Report(memory_mib=[1.0, 1.0], wrong_to_hostile=["x"]),
        hostile.Report(memory_mib=[1.0, 1.0], failures_in_log=["Traceback"]),
        hostile.Report(memory_mib=[1.0, 1.0], left={"pages": 1.0}),
        hostile.Report(memory_mib=[1.0, 99.0]),
        hostile.Report(memory_mib=[1.0, 1.0], slow=1),
    ):
        assert len(wrong.failures(timing=True)) == 1


@pytest.mark.slow
def test_overhead_is_measured() -> None:
    with server_process("--step-seconds=0.01", "--max-seqs=8", "--max-context=131072") as server:
        found = asyncio.run(server_overhead.measure(server, "chat", num_streams=8, step_seconds=0.01, seconds=1.0))
    assert 0 < found.tokens_per_second < 1000
    assert found.chunks_per_second > 0
    assert 0 < found.loop_ms < 5
    assert found.ceiling > 0


@pytest.mark.parametrize("module", ["hostile", "server_overhead", "scripted_server"])
@pytest.mark.slow
def test_help(module: str) -> None:
    found = subprocess.run([sys.executable, "-m", f"bench.{module}", "--help"], capture_output=True, text=True, check=True)
    assert "usage" in found.stdout
