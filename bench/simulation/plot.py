"""A plot of a simulation as SVG: how long requests waited, as shares of all and over time. Knows no simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from bench.simulation.record import Record, percentiles

WIDTH, HEIGHT, MARGIN = 900, 360, 60
NUM_BINS = 60
COLOURS = ("#1f6fb4", "#c4501e", "#2a8a43", "#777777")
Line = list[tuple[float, float]]


def latencies(title: str, record: Record, replicas: Sequence[tuple[float, int]]) -> str:
    """The whole picture."""
    outcomes = [outcome for outcome in record.outcomes.values() if outcome.first is not None]
    firsts = [outcome.first - outcome.arrived for outcome in outcomes if outcome.first is not None]
    ends = [outcome.last - outcome.arrived for outcome in outcomes if outcome.finished]
    shares = {"TTFT": _shares(firsts), "ITL": _shares(record.gaps), "E2E": _shares(ends)}
    end = max([outcome.last for outcome in outcomes], default=1.0)
    arrived = [outcome.arrived for outcome in outcomes]
    seconds = {"TTFT p50": _binned(arrived, firsts, end, "p50"), "TTFT p95": _binned(arrived, firsts, end, "p95")}
    counts: dict[str, Line] = {"requests/s": _rate([o.arrived for o in record.outcomes.values()], end)}
    if len(replicas) > 1:
        counts["replicas"] = _steps(replicas, end)
    parts = [
        _panel(0, f"{title}: share of all at most so long", shares, "seconds", log=True),
        _panel(1, "over time of arrival, seconds to the first token", seconds, "seconds of the trace"),
        _panel(2, "over time", counts, "seconds of the trace"),
    ]
    size = f'width="{WIDTH}" height="{3 * HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, f'<rect {size} fill="white"/>', *parts, "</svg>"]) + "\n"


def _shares(values: Sequence[float]) -> Line:
    ranked = sorted(values)
    picked = sorted({min(len(ranked) - 1, index * len(ranked) // 200) for index in range(201)}) if ranked else []
    return [(max(ranked[index], 1e-4), (index + 1) / len(ranked)) for index in picked]


def _binned(at: Sequence[float], values: Sequence[float], end: float, which: str) -> Line:
    bins: dict[int, list[float]] = {}
    for time, value in zip(at, values, strict=True):
        bins.setdefault(int(time / end * NUM_BINS), []).append(value)
    return [((index + 0.5) * end / NUM_BINS, percentiles(bins[index])[which]) for index in sorted(bins)]


def _rate(at: Sequence[float], end: float) -> Line:
    counts = [0] * NUM_BINS
    for time in at:
        counts[min(NUM_BINS - 1, int(time / end * NUM_BINS))] += 1
    return [((index + 0.5) * end / NUM_BINS, count * NUM_BINS / end) for index, count in enumerate(counts)]


def _steps(changes: Sequence[tuple[float, int]], end: float) -> Line:
    line: Line = []
    for (at, count), (until, _) in zip(changes, [*changes[1:], (end, 0)], strict=True):
        line += [(at, count), (until, count)]
    return line


def _panel(row: int, title: str, lines: dict[str, Line], across: str, *, log: bool = False) -> str:
    points = [point for line in lines.values() for point in line] or [(1.0, 1.0)]
    low, high = (min(x for x, _ in points), max(x for x, _ in points)) if log else (0.0, max(x for x, _ in points))
    high = max(high, low * 1.01, 1e-3)
    top = max(max(y for _, y in points), 1e-9)

    def x(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
        return MARGIN + (WIDTH - 2 * MARGIN) * share

    def y(value: float) -> float:
        return row * HEIGHT + HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * value / top

    parts = [f'<text x="{MARGIN}" y="{row * HEIGHT + 30}" font-size="14">{escape(title)}</text>']
    for value in _ticks(low, high, log=log):
        parts.append(_text(x(value), y(0) + 16, f"{value:g}", "middle"))
        parts.append(f'<line x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{y(0):.1f}" y2="{y(top):.1f}" stroke="#eee"/>')
    for value in _ticks(0.0, top):
        parts.append(_text(MARGIN - 6, y(value) + 4, f"{value:g}", "end"))
        parts.append(f'<line x1="{x(low):.1f}" x2="{x(high):.1f}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#eee"/>')
    parts.append(_text(WIDTH / 2, y(0) + 34, across, "middle"))
    for index, (name, line) in enumerate(lines.items()):
        colour = COLOURS[index]
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(_text(WIDTH - MARGIN, row * HEIGHT + 30 + 14 * index, name, "end", colour))
    return "\n".join(parts)


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#444") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _ticks(low: float, high: float, *, log: bool = False) -> list[float]:
    if log:
        return [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 8)
    return [low + step * index for index in range(int((high - low) / step + 1e-9) + 1)]
