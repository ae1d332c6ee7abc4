"""What a run of the throughput benchmark found: medians, ratios, the figures we hold ourselves to, as text and as JSON.

Knows no engine; it is given numbers.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from bench.workloads import Throughput, Workload

OURS = "jaxserve"


@dataclass(slots=True)
class Rounds:
    """Throughput by engine and workload, one entry a round, ours and the peers' in turn."""

    found: dict[str, dict[str, list[Throughput]]] = field(default_factory=dict)

    def add(self, engine: str, workload: Workload, throughput: Throughput) -> None:
        self.found.setdefault(engine, {}).setdefault(workload.name, []).append(throughput)

    def medians(self, engine: str, workload: Workload) -> Throughput | None:
        """Each rate's median over the rounds, or None where the engine has none."""
        rounds = self.found.get(engine, {}).get(workload.name)
        if not rounds:
            return None
        return Throughput(*(median(getattr(one, rate) for one in rounds) for rate in ("prefill", "decode", "total")))

    def ratio(self, peer: str, workload: Workload) -> float | None:
        """Our total output rate over the peer's: the median of the rounds that both have."""
        ours = self.found.get(OURS, {}).get(workload.name, [])
        theirs = self.found.get(peer, {}).get(workload.name, [])
        ratios = [our.total / their.total for our, their in zip(ours, theirs, strict=False)]
        return median(ratios) if ratios else None


@dataclass(frozen=True, slots=True)
class Figure:
    """One number that we hold ourselves to: `value` is to be at least, or at most, `target`; None where unmeasured."""

    name: str
    value: float | None
    target: float
    at_least: bool
    unit: str = ""

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target

    def __str__(self) -> str:
        verdict = {None: "not measured", True: "met", False: "MISSED"}[self.met]
        value = "-" if self.value is None else f"{self.value:.3g}{self.unit}"
        return f"{self.name:<58} {value:>10}   {'>=' if self.at_least else '<='} {self.target:g}{self.unit}: {verdict}"


def throughput_line(engine: str, workload: Workload, found: Throughput) -> str:
    """One line, in the form that `bench.peers` reads."""
    return (
        f"{engine} B={workload.batch} in={workload.prompt} out={workload.output} prefill {found.prefill:.0f} tok/s; "
        f"decode {found.decode:.1f} tok/s; total out {found.total:.1f} tok/s"
    )


def throughput_table(rounds: Rounds, workloads: Sequence[Workload]) -> str:
    """Medians by workload and engine, with our total over each peer's."""
    lines = [f"{'workload':<22} {'engine':<16} {'prefill':>9} {'decode':>9} {'total out':>10} {'ours/peer':>10}"]
    for workload in workloads:
        for engine in rounds.found:
            found = rounds.medians(engine, workload)
            if found is None:
                continue
            ratio = None if engine == OURS else rounds.ratio(engine, workload)
            lines.append(
                f"{workload.title:<22} {engine:<16} {found.prefill:>9.0f} {found.decode:>9.1f} {found.total:>10.1f} "
                f"{'' if ratio is None else f'{ratio:.2f}x':>10}"
            )
    return "\n".join(lines)


def environment() -> dict[str, Any]:
    """What the figures depend on beside the code, and the code's commit."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "clean": _git("status", "--porcelain") == "",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("jax", "jaxlib", "numpy")},
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "argv": sys.argv[1:],
    }


def write_json(path: Path, parts: Mapping[str, Any], figures: Iterable[Figure]) -> None:
    """Write the whole report, making the folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"environment": environment(), **parts, "figures": [{**asdict(figure), "met": figure.met} for figure in figures]}
    path.write_text(json.dumps(report, indent=1, default=asdict) + "\n")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
