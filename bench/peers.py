"""Other engines on the same work: run a command, read its figures from the lines it prints. Knows nothing of ours.

A line counts when it has `B=8 in=128 out=64 ... prefill 735 tok/s; decode 184.0 tok/s; total out 123.0 tok/s` in it.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass

from bench.workloads import Throughput, Workload

PLACEHOLDER = "{workload}"
_FIGURES = re.compile(
    r"\bB=(?P<batch>\d+)\s+in=(?P<prompt>\d+)\s+out=(?P<output>\d+)\b"
    r".*?\bprefill\s+(?P<prefill>[\d.]+)\s*tok/s"
    r".*?\bdecode\s+(?P<decode>[\d.]+)\s*tok/s"
    r".*?\btotal out\s+(?P<total>[\d.]+)\s*tok/s"
)


class PeerError(Exception):
    """A peer's command failed, or printed no figures for a workload. The message has the command and its last words."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another engine: `command` is run by the shell's rules of quoting, without a shell."""

    name: str
    command: str

    @classmethod
    def parse(cls, flag: str) -> Peer:
        """From `NAME=COMMAND`.

        Raises:
            ValueError: either half is missing.
        """
        name, _, command = flag.partition("=")
        if not name.strip() or not command.strip():
            raise ValueError(f"expected NAME=COMMAND, found {flag!r}")
        return cls(name.strip(), command.strip())

    @property
    def one_workload_at_a_time(self) -> bool:
        """Whether the command takes a workload's letter; otherwise it runs them all."""
        return PLACEHOLDER in self.command

    def run(self, workload: Workload | None, *, timeout: float) -> dict[tuple[int, int, int], Throughput]:
        """Run the command, for one workload where it takes one, and read every figure it prints.

        Raises:
            PeerError: it cannot be run, fails, takes longer than `timeout` seconds, or prints no figures.
        """
        command = self.command.replace(PLACEHOLDER, workload.name if workload else "")
        try:
            done = subprocess.run(shlex.split(command), capture_output=True, text=True, errors="replace", timeout=timeout)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerError(f"{self.name}: {command}: {error}") from None
        figures = parse_figures(done.stdout)
        if done.returncode or not figures:
            last_words = "\n".join((done.stdout + done.stderr).splitlines()[-10:])
            raise PeerError(f"{self.name}: {command}: exit code {done.returncode}, no figures in:\n{last_words}")
        return figures


def parse_figures(text: str) -> dict[tuple[int, int, int], Throughput]:
    """Figures by (batch, prompt, output); the last line wins where a workload comes twice."""
    return {
        (int(found["batch"]), int(found["prompt"]), int(found["output"])): Throughput(
            float(found["prefill"]), float(found["decode"]), float(found["total"])
        )
        for found in map(_FIGURES.search, text.splitlines())
        if found
    }


def figures_for(peer: Peer, workload: Workload, figures: dict[tuple[int, int, int], Throughput]) -> Throughput:
    """The figures of one workload.

    Raises:
        PeerError: there are none.
    """
    key = (workload.batch, workload.prompt, workload.output)
    if key not in figures:
        raise PeerError(f"{peer.name}: no figures for B={key[0]} in={key[1]} out={key[2]}; found {sorted(figures)}")
    return figures[key]
