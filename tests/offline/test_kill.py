"""`kill -9` at random moments: run again until it is done, and the output is that of an unbroken run.

Every place on disk where a run can be cut is tried in test_journal; here are real processes, locks and signals.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.offline.runs import HELLO, Runs, batch

ROOT = Path(__file__).resolve().parent.parent.parent
STEP_SECONDS = 0.004
NUM_LINES = 60


def write_work(runs: Runs) -> None:
    choice = random.Random(0)
    lines: list[object] = []
    for i in range(NUM_LINES):
        max_tokens, temperature = choice.randint(1, 20), choice.choice([0, 1])
        if i % 10 == 9:
            lines.append("{broken")
        elif i % 3:
            lines.append({"prompt": f"prompt {i}", "max_tokens": max_tokens, "temperature": temperature})
        else:
            lines.append(batch(f"id{i}", messages=HELLO, max_tokens=max_tokens, temperature=temperature, n=1 + i % 2))
    runs.write(lines)


def start(
    runs: Runs, log: Path, *, step_seconds: float = STEP_SECONDS, limit_bytes: int | None = None
) -> subprocess.Popen[str]:
    argv = ["--model", "toy", "--input", str(runs.input), "--output", str(runs.output), "--max-seqs", "4"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.offline.child", str(step_seconds), str(log), *argv],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if limit_bytes is not None:
        # Long before it writes. A `preexec_fn` would fork, which JAX, loaded by other tests, warns about.
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    return process


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    with process:
        _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def recorded(runs: Runs) -> set[str]:
    """Lines that have a whole record in the journal, by the hash that their result and their requests share."""
    if not runs.journal.exists():
        return set()
    whole = runs.journal.read_bytes().split(b"\n")[1:-1]
    return {json.loads(record)["result"]["id"].removeprefix("batch_req_") for record in whole}


def requested(log: Path) -> set[str]:
    """Lines whose requests the engine was given, likewise."""
    return {request_id.split("-")[1] for request_id in log.read_text().split()} if log.exists() else set()


def wait_for_results(runs: Runs, count: int, process: subprocess.Popen[str]) -> None:
    while len(recorded(runs)) < count and process.poll() is None:
        time.sleep(0.002)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The output of a run that nobody disturbs."""
    runs = Runs(tmp_path_factory.mktemp("unbroken"))
    write_work(runs)
    code, errors = finish(start(runs, runs.folder / "log"))
    assert code == 3, errors
    assert len(requested(runs.folder / "log")) == NUM_LINES * 9 // 10
    return runs.output.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_moments_it_gives_the_same_output(runs: Runs, unbroken: bytes, seed: int) -> None:
    write_work(runs)
    choice = random.Random(seed)
    num_killed = 0
    while not runs.output.exists() or runs.journal.exists():
        done = recorded(runs)
        log = runs.folder / f"log{num_killed}"
        process = start(runs, log)
        if choice.random() < 0.8:
            wait_for_results(runs, len(done) + 1, process)
        time.sleep(choice.uniform(0.0, 0.15))
        process.kill()
        code, errors = finish(process)
        assert code in (-signal.SIGKILL, 3), errors
        assert done <= recorded(runs) or runs.output.exists(), "a result was lost"
        assert not requested(log) & done, "what was done was done again"
        num_killed += code != 3
    assert num_killed >= 3
    assert runs.output.read_bytes() == unbroken
    code, errors = finish(start(runs, runs.folder / "last"))
    assert (code, requested(runs.folder / "last")) == (3, set()), errors
    assert "finished already" in errors
    assert runs.output.read_bytes() == unbroken


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)])
def test_a_signal_stops_it_and_says_how_to_carry_on(runs: Runs, unbroken: bytes, number: signal.Signals, code: int) -> None:
    write_work(runs)
    process = start(runs, runs.folder / "log1")
    wait_for_results(runs, 5, process)
    process.send_signal(number)
    found, errors = finish(process)
    assert found == code, errors
    assert "Traceback" not in errors
    assert f"what is done is in {runs.journal}. Run the same command again to carry on" in errors
    done = recorded(runs)
    assert finish(start(runs, runs.folder / "log2"))[0] == 3
    assert not requested(runs.folder / "log2") & done
    assert runs.output.read_bytes() == unbroken


def test_two_at_once_do_not_mix(runs: Runs) -> None:
    write_work(runs)
    first = start(runs, runs.folder / "log1", step_seconds=60)
    while not requested(runs.folder / "log1"):
        assert first.poll() is None
        time.sleep(0.01)
    code, errors = finish(start(runs, runs.folder / "log2"))
    first.kill()
    finish(first)
    assert code == 2, errors
    assert "another run with this output is going on" in errors
    assert requested(runs.folder / "log2") == set()


@pytest.mark.slow
def test_a_disk_that_is_full_is_told_and_what_is_done_stays(runs: Runs, unbroken: bytes) -> None:
    """The limit of a file's size stands for the disk: a write comes out short, the next one fails."""
    write_work(runs)
    code, errors = finish(start(runs, runs.folder / "log1", limit_bytes=8000))
    assert code == 1, errors
    assert "Traceback" not in errors
    assert "File too large" in errors
    assert f"are kept in {runs.journal}" in errors
    done = recorded(runs)
    assert len(done) > 5
    assert runs.journal.read_bytes().endswith(b"\n")
    assert finish(start(runs, runs.folder / "log2"))[0] == 3
    assert not requested(runs.folder / "log2") & done
    assert runs.output.read_bytes() == unbroken
