"""The command line: what it prints, what it hands to `serving`, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import jaxserve
from jaxserve.__main__ import main
from jaxserve.config import ServeConfig
from jaxserve.errors import ConfigError


def serve_with(monkeypatch: pytest.MonkeyPatch, serve: Callable[[ServeConfig], int]) -> None:
    """Put a `jaxserve.serving` in place that has no JAX behind it."""
    serving = ModuleType("jaxserve.serving")
    serving.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jaxserve.serving", serving)
    monkeypatch.setattr(jaxserve, "serving", serving, raising=False)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"jaxserve {jaxserve.__version__}\n"


def test_flags_override_the_file_and_reach_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServeConfig] = []
    serve_with(monkeypatch, lambda config: seen.append(config) or 7)  # type: ignore[func-returns-value]
    path = tmp_path / "serve.toml"
    path.write_text('model = "from-file"\n[engine]\nmax_seqs = 3\nmax_step_tokens = 64\n[http]\nport = 1234\n')
    assert main(["serve", "--config", str(path), "--max-seqs", "5", "--host", "::1"]) == 7
    (config,) = seen
    assert (config.model, config.engine.max_seqs, config.engine.max_step_tokens) == ("from-file", 5, 64)
    assert (config.http.host, config.http.port) == ("::1", 1234)


def test_our_errors_are_one_line_and_exit_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def serve(config: ServeConfig) -> int:
        raise ConfigError("no such thing")

    serve_with(monkeypatch, serve)
    assert main(["serve", "--model", "m"]) == 2
    assert capsys.readouterr().err == "jaxserve: error: no such thing\n"


def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(config: ServeConfig) -> int:
        raise KeyError("a bug")

    serve_with(monkeypatch, serve)
    with pytest.raises(KeyError):
        main(["serve", "--model", "m"])


def test_ctrl_c_while_loading_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def serve(config: ServeConfig) -> int:
        raise KeyboardInterrupt

    serve_with(monkeypatch, serve)
    assert main(["serve", "--model", "m"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "COMMAND"),
        (["sevre"], "sevre"),
        (["serve"], "no model is named"),
        (["serve", "--model", "m", "--max-seqs", "many"], "--max-seqs"),
        (["serve", "--model", "m", "--max-seqs", "0"], "max_seqs must be at least 1"),
    ],
)
def test_mistakes_are_named(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(argv)
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    assert code == 2
    assert message in capsys.readouterr().err


def test_module_runs() -> None:
    done = subprocess.run([sys.executable, "-m", "jaxserve", "--help"], capture_output=True, text=True, check=True)
    assert "serve a model over HTTP" in done.stdout
    assert done.stderr == ""
