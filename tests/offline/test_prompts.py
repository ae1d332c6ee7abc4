"""Prompts from the command line: answers in order on stdout, figures, exit codes; and bars on stderr."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import ServeConfig
from jaxserve.offline import prompts as prompts_module
from jaxserve.offline.cli import main
from jaxserve.offline.progress import ProgressBar, StageBars
from jaxserve.offline.prompts import DEMO_PROMPTS, process_seconds
from tests.offline.toy import ToyEngine, toy_engine

ROOT = Path(__file__).resolve().parent.parent.parent
FIGURES = (
    r"first token [0-9.]+ s after the prompts, [0-9.]+ s after the start; "
    r"(\d+) output tokens at [0-9.]+ tokens/s; peak memory (\d+\.\d+) GiB\n"
)


def run(*flags: str, **engine_options: Any) -> tuple[int, ToyEngine]:
    engines: list[ToyEngine] = []

    def build(config: ServeConfig) -> ToyEngine:
        engines.append(toy_engine(**engine_options))
        return engines[0]

    code = main(["--model", "toy", "--max-tokens", "12", *flags], build_engine=build)
    assert engines[0].num_closed == 1
    return code, engines[0]


@pytest.mark.parametrize("flags", [[], ["--demo"]])
def test_the_demo_answers_its_prompts_and_gives_figures(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, engine = run(*flags)
    assert code == 0
    out = capsys.readouterr().out
    figures = re.search(FIGURES + r"\Z", out)
    assert figures is not None, out
    assert int(figures[1]) == engine.core.stats().num_output_tokens
    assert 0.0 < float(figures[2]) < 16
    places = [out.index(f"> {prompt}\n") for prompt in DEMO_PROMPTS]
    assert places == sorted(places)


def test_prompts_go_through_the_template_if_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    chat = [{"role": "user", "content": "hello"}]
    _, engine = run("--prompt", "hello")
    assert [list(request.prompt) for request in engine.added] == [engine.tokenizer.encode_chat(chat)]
    for flags, options in ((["--no-chat"], {}), ([], {"chat_template": False})):
        _, engine = run("--prompt", "hello", *flags, **options)
        assert [list(request.prompt) for request in engine.added] == [engine.tokenizer.encode("hello")]
    assert engine.added[0].params.max_tokens == 12
    assert engine.added[0].params.greedy
    capsys.readouterr()


def test_answers_come_in_order_however_they_finish(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [str(i) for i in range(9)]
    code, _ = run(*(flag for text in texts for flag in ("--prompt", text)), "--temperature", "1")
    assert code == 0
    assert re.findall(r"^> (\d)$", capsys.readouterr().out, flags=re.MULTILINE) == texts


def test_a_prompt_that_cannot_be_served_is_told_and_the_others_are(capsys: pytest.CaptureFixture[str]) -> None:
    code, engine = run("--prompt", "x" * 500, "--prompt", "fine")
    assert code == 3
    out = capsys.readouterr().out
    assert "error: prompt 5" in out
    assert "> fine\n" in out
    assert len(engine.added) == 1


def test_a_prompt_for_a_model_without_template_with_chat(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run("--prompt", "a", "--chat", chat_template=False)
    assert code == 3
    assert "no chat template" in capsys.readouterr().out


def test_a_reader_who_leaves_early_gets_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.offline.child", "0", str(tmp_path / "log"), "--model", "toy", "--demo"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE


def test_process_seconds_count_from_the_start_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import time; time.sleep(0.5); from jaxserve.offline.prompts import process_seconds; print(process_seconds())"
    began = time.monotonic()
    found = float(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout)
    assert 0.5 <= found <= time.monotonic() - began + 1 / os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(prompts_module, "Path", lambda _: Path("/nonexistent"))
    assert 0 < process_seconds() < time.monotonic()


def test_help_is_complete_and_quick() -> None:
    began = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "jaxserve.offline", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0
    assert time.monotonic() - began < 30
    for flag in ("--input", "--restart", "--max-seqs", "--tensor-parallel", "--config", "exit codes:"):
        assert flag in result.stdout
    assert not re.search(r"\bjax$|\bjaxlib\b", result.stderr, flags=re.MULTILINE)


def test_bars(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stages = StageBars()
    for done in (0, 512, 1024):
        stages("load", done, 1024)
    stages("compile", 1, 2)
    stages.close()
    stages.close()
    errors = capsys.readouterr().err
    assert "load" in errors
    assert "1.00k" in errors
    assert "compile" in errors

    monkeypatch.setattr("jaxserve.offline.progress.REFRESH_SECONDS", 0.0)
    with ProgressBar(Path("in.jsonl"), total=10, done=4) as bar:
        bar.line_failed(7, "no good")
        bar.line_done()
        time.sleep(0.2)
        bar.step_done(50, 3, 2)
        bar.line_done()
    errors = capsys.readouterr().err
    assert "in.jsonl:7: no good\n" in errors
    assert "tokens/s, 3 running, 2 waiting" in errors
    assert "6/10" in errors
