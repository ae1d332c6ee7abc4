"""`kill -9` at random moments of a run with a real, if tiny, model: run again until it is done, and nothing shows of it.

`test_kill` tries many more moments with an engine that needs no device.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.offline.runs import HELLO, batch
from tests.test_soak import write_tiny_model

ROOT = Path(__file__).resolve().parent.parent.parent
NUM_LINES = 40
MAX_KILLS = 6
MIN_KILLS_IN_GENERATION = 2

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Command:
    """The command, for one output and whatever is common to all."""

    folder: Path
    cache: Path
    output: Path

    @property
    def journal(self) -> Path:
        return self.output.with_name(f"{self.output.name}.partial")

    def start(self) -> subprocess.Popen[str]:
        # At most two at a time, so that results come one by one.
        limits = "--max-seqs 2 --max-step-tokens 16 --prefill-chunk 16 --max-context 192 --page-size 8 --num-pages 48"
        files = ["--model", str(self.folder / "tiny"), "--input", str(self.folder / "in.jsonl"), "--output", str(self.output)]
        return subprocess.Popen(
            [sys.executable, "-m", "jaxserve.offline", *files, *limits.split(), "--compile-cache", str(self.cache)],
            cwd=ROOT,
            env={**os.environ, "JAXSERVE_CACHE": str(self.cache)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def recorded(self) -> bytes:
        """The journal's whole lines, the header among them."""
        data = self.journal.read_bytes() if self.journal.exists() else b""
        return data[: data.rfind(b"\n") + 1]

    def num_done(self) -> int:
        return max(0, self.recorded().count(b"\n") - 1)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    with process:
        _, errors = process.communicate(timeout=240)
    return process.returncode, errors


def write_lines(path: Path) -> None:
    choice = random.Random(0)
    lines = []
    for i in range(NUM_LINES):
        sampling = {"max_tokens": choice.randint(40, 100), "temperature": choice.choice([0, 1]), "n": 1 + (i % 4 == 3)}
        if i % 3:
            lines.append(batch(f"id{i}", **{**sampling, "model": "tiny", "prompt": "hello world " * choice.randint(1, 4)}))
        else:
            lines.append(batch(f"id{i}", **{**sampling, "model": "tiny", "messages": HELLO}))
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Command:
    """A run that nobody disturbed, after which there is nothing left to compile."""
    folder = tmp_path_factory.mktemp("real")
    write_tiny_model(folder / "tiny")
    write_lines(folder / "in.jsonl")
    command = Command(folder, pytestconfig.cache.mkdir("compiled"), folder / "unbroken.jsonl")
    code, errors = finish(command.start())
    assert code == 0, errors
    assert command.output.read_bytes().count(b"\n") == NUM_LINES
    return command


def kill_at_random(command: Command, choice: random.Random) -> tuple[int, str, str]:
    """Start a run and kill it; its exit code, what it wrote, and when that was.

    Most kills are timed from the run's first result, or they would all fall into loading.
    """
    done = command.num_done()
    generating = choice.random() < 0.75
    delay = choice.uniform(0, 0.4 if generating else 4.0)
    process = command.start()
    while generating and process.poll() is None and command.num_done() <= done:
        time.sleep(0.002)
    time.sleep(delay)
    process.kill()
    code, errors = finish(process)
    return code, errors, f"{delay:.3f} s after {'its first result' if generating else 'its start'}, {command.num_done()} done"


@pytest.mark.parametrize("seed", [0])
def test_killed_at_random_moments_it_gives_the_same_output(unbroken: Command, seed: int) -> None:
    command = dataclasses.replace(unbroken, output=unbroken.folder / f"killed{seed}.jsonl")
    choice = random.Random(seed)
    moments: list[str] = []
    num_in_generation = 0
    while len(moments) < MAX_KILLS and not command.output.exists():
        before = command.recorded()
        code, errors, moment = kill_at_random(command, choice)
        if code == 0:
            break
        moments.append(moment)
        assert code == -signal.SIGKILL, (moments, errors)
        assert command.output.exists() or command.recorded().startswith(before), f"a result was lost: {moments}"
        num_in_generation += 0 < command.num_done() < NUM_LINES
    code, errors = finish(command.start())
    assert code == 0, (moments, errors)
    assert num_in_generation >= MIN_KILLS_IN_GENERATION, moments
    assert not command.journal.exists(), moments
    assert command.output.read_bytes() == unbroken.output.read_bytes(), f"killed {moments}"
