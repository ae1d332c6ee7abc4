"""Runs of `python -m jaxserve.offline --input` in this process, over toy engines, in a folder of their own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jaxserve import journal as journal_module
from jaxserve.config import ServeConfig
from jaxserve.offline.cli import main
from jaxserve.request import Request
from tests.offline.toy import ToyEngine, toy_engine

Lines = Sequence[Any]


@dataclass
class Runs:
    """Runs the command in a folder, and keeps the engines that it built."""

    folder: Path
    engines: list[ToyEngine] = field(default_factory=list)
    engine_options: dict[str, Any] = field(default_factory=dict)

    @property
    def input(self) -> Path:
        return self.folder / "in.jsonl"

    @property
    def output(self) -> Path:
        return self.folder / "out.jsonl"

    @property
    def journal(self) -> Path:
        return self.folder / "out.jsonl.partial"

    def write(self, lines: Lines) -> None:
        """Strings are lines as they are, anything else is spelled as JSON."""
        self.input.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))

    def __call__(self, *flags: str) -> int:
        argv = ["--model", "toy", "--input", str(self.input), "--output", str(self.output), "--max-tokens", "12", *flags]
        return main(argv, build_engine=self._build)

    def _build(self, config: ServeConfig) -> ToyEngine:
        self.engines.append(toy_engine(max_seqs=config.engine.max_seqs, **self.engine_options))
        return self.engines[-1]

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def added(self) -> list[Request]:
        return [request for engine in self.engines for request in engine.added]


def batch(custom_id: str, **body: Any) -> dict[str, Any]:
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "toy", "max_tokens": 9, **body}}


HELLO = [{"role": "user", "content": "hello"}]


def interrupt_after(monkeypatch: pytest.MonkeyPatch, num_results: int) -> None:
    """Ctrl-C just after a number of results have been recorded."""
    append, left = journal_module.Journal.append, iter(range(num_results - 1))

    def interrupted(*args: Any, **options: Any) -> None:
        append(*args, **options)
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(journal_module.Journal, "append", interrupted)
