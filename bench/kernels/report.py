"""What the lab writes: a table, CSV as results come in, JSON at the end, and a roofline plot as SVG. Knows no kernel."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from html import escape
from pathlib import Path
from typing import Any

from bench.report import environment


@dataclass(frozen=True, slots=True)
class Result:
    """One trial's.

    Attributes:
        error: from the definition, None where nothing ran.
        passed: whether that is within the subject's tolerance.
        spread: how far the middle half of the runs is apart, as a share of the median.
        share: the time that the measured limits allow at least, as a share of the median.
        temp_bytes, code_bytes, bundles, spills, registers, shared_bytes: the compiler's, ahead of time; see
            `pallas_kernels.aot.Figures`.
        problem: why there is no more; the trial failed.
    """

    shape: str
    variant: str
    error: float | None = None
    passed: bool | None = None
    seconds: float | None = None
    spread: float | None = None
    num_bytes: float | None = None
    operations: float | None = None
    bytes_per_second: float | None = None
    operations_per_second: float | None = None
    share: float | None = None
    temp_bytes: int | None = None
    code_bytes: int | None = None
    bundles: int | None = None
    spills: int | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    problem: str = ""


class CsvFile:
    """A row a result, on disk as soon as it is there, so that an interrupt loses nothing."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, [field.name for field in fields(Result)])
        self._writer.writeheader()

    def add(self, result: Result) -> None:
        self._writer.writerow(asdict(result))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def write_json(path: Path, kernel: str, target: str, limits: Any, results: Sequence[Result]) -> None:
    """Everything, with the environment that it came from."""
    report = {
        "environment": environment(),
        "kernel": kernel,
        "target": target,
        "limits": None if limits is None else asdict(limits),
        "results": [asdict(result) for result in results],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def table(results: Sequence[Result]) -> str:
    """The results for people: one block a shape, the fastest that passed marked."""
    lines: list[str] = []
    for shape in dict.fromkeys(result.shape for result in results):
        of_shape = [result for result in results if result.shape == shape]
        best = winner(of_shape)
        width = max(20, *(len(result.variant) for result in of_shape))
        lines += [
            "",
            shape,
            f"  {'variant':<{width}} {'error':>8} {'median':>10} {'spread':>7}  {'GB/s':>7} {'Gop/s':>8} {'of limit':>8}",
        ]
        lines += [f"{'* ' if result is best else '  '}{result.variant:<{width}} {_figures(result)}" for result in of_shape]
    return "\n".join(lines[1:])


def winner(results: Sequence[Result]) -> Result | None:
    """The fastest of those that passed; None where nothing was timed."""
    timed = [result for result in results if result.passed and result.seconds is not None]
    return min(timed, key=lambda result: result.seconds or math.inf, default=None)


def _figures(result: Result) -> str:
    if result.problem:
        return f"failed: {result.problem.strip().splitlines()[0][:150]}"
    if result.temp_bytes is not None:
        bundles = "" if not result.bundles else f", {result.bundles} bundles, {result.spills} of them spill"
        registers = (
            ""
            if not result.registers
            else f", {result.registers} registers, {result.spills} bytes spilled, {result.shared_bytes:,} shared"
        )
        return f"compiled: {result.temp_bytes:,} bytes of temporaries, {result.code_bytes:,} of code{bundles}{registers}"
    if not result.passed:
        return f"{result.error:>8.1e} WRONG, so not timed"
    columns = [
        f"{result.error:>8.1e}",
        f"{_time(result.seconds or 0):>10}",
        f"{result.spread or 0:>7.0%}",
        f" {(result.bytes_per_second or 0) / 1e9:>7.1f}",
        f"{(result.operations_per_second or 0) / 1e9:>8.1f}",
        f"{result.share or 0:>8.0%}",
    ]
    return " ".join(columns)


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3f} {unit}"
    return f"{seconds * 1e6:.1f} us"


# --- the roofline -----------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, MARGIN = 760, 480, 70


def roofline(title: str, bandwidth: float, matrix_rate: float, results: Sequence[Result]) -> str:
    """An SVG: operations a second over operations a byte, both logarithmic (Williams, Waterman and Patterson, 2009)."""
    points = [r for r in results if r.passed and r.seconds and r.num_bytes and r.operations]
    if not points:
        return ""
    ridge = matrix_rate / bandwidth
    across = [r.operations / r.num_bytes for r in points] + [ridge]  # type: ignore[operator]
    up = [r.operations_per_second or 1.0 for r in points] + [matrix_rate]
    left, right = min(across) / 4, max(across) * 4
    low, high = min(*up, left * bandwidth) / 2, matrix_rate * 3

    def x(value: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * math.log(value / left) / math.log(right / left)

    def y(value: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * math.log(value / low) / math.log(high / low)

    roof = f"{x(left):.1f},{y(left * bandwidth):.1f} {x(ridge):.1f},{y(matrix_rate):.1f} {x(right):.1f},{y(matrix_rate):.1f}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="30" font-size="15">{escape(title)}</text>',
        f'<polyline points="{roof}" fill="none" stroke="black" stroke-width="1.5"/>',
        f'<text x="{MARGIN}" y="{MARGIN - 18}">measured: {bandwidth / 1e9:.0f} GB/s, {matrix_rate / 1e9:.0f} Gop/s</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 20}" text-anchor="middle">operations per byte</text>',
        f'<text transform="translate(18 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">operations per second</text>',
    ]
    for place, values, anchor in ((x, _decades(left, right), "middle"), (y, _decades(low, high), "end")):
        for value in values:
            at = (place(value), HEIGHT - MARGIN + 16) if place is x else (MARGIN - 6, place(value) + 4)
            parts.append(f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="{anchor}" fill="#666">{value:.0e}</text>')
    for index, result in enumerate(points):
        point = x(result.operations / result.num_bytes), y(result.operations_per_second or 1.0)  # type: ignore[operator]
        colour = f"hsl({index * 137 % 360} 70% 40%)"
        parts.append(f'<circle cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="4" fill="{colour}"/>')
        label = escape(f"{result.variant} ({result.shape})")
        parts.append(f'<text x="{point[0] + 7:.1f}" y="{point[1] + 4:.1f}" fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _decades(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
