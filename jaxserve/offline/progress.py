"""What is shown on stderr while one waits: bars of loading and compiling, then of a run's lines, and which of them failed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

REFRESH_SECONDS = 0.5


_UNITS: dict[str, dict[str, Any]] = {
    "load": {"unit": "B", "unit_scale": True, "unit_divisor": 1024},
    "compile": {"unit": " programs"},
}


class StageBars:
    """A bar for each stage of building an engine, as `launch.Progress` reports them. Close it when the engine is there."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: tqdm | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage or self._bar is None:
            self.close()
            self._stage = stage
            self._bar = tqdm(
                total=total, desc=stage, file=sys.stderr, dynamic_ncols=True, leave=False, **_UNITS.get(stage, {})
            )
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class ProgressBar:
    """Lines done of all lines, output tokens per second, and how many sequences run and wait.

    Args:
        source: named with line numbers in what is told of failed lines.
        done: lines that an earlier run did.
    """

    def __init__(self, source: Path, *, total: int, done: int) -> None:
        self._source = source
        self._bar = tqdm(total=total, initial=done, unit=" lines", file=sys.stderr, dynamic_ncols=True)
        self._started_at = self._shown_at = time.monotonic()

    def line_done(self) -> None:
        self._bar.update()

    def line_failed(self, number: int, message: str) -> None:
        self._bar.write(f"{self._source}:{number}: {message}", file=sys.stderr)

    def step_done(self, num_output: int, num_running: int, num_waiting: int) -> None:
        now = time.monotonic()
        if now - self._shown_at >= REFRESH_SECONDS:
            self._shown_at = now
            rate = num_output / (now - self._started_at)
            self._bar.set_postfix_str(f"{rate:.1f} tokens/s, {num_running} running, {num_waiting} waiting")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()
