"""The work that every engine is measured on: random prompts, greedy, no stop, so that only speed differs.

Owns shapes and prompts. Knows no engine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST_TOKEN_ID, LAST_TOKEN_ID = 100, 40_000


@dataclass(frozen=True, slots=True)
class Workload:
    """`batch` sequences at once, each of `prompt` tokens in and `output` tokens out."""

    name: str
    batch: int
    prompt: int
    output: int

    @property
    def title(self) -> str:
        return f"{self.name}: {self.batch} x ({self.prompt} -> {self.output})"

    @property
    def context(self) -> int:
        """Tokens of one sequence at its end."""
        return self.prompt + self.output


WORKLOADS = {
    "a": Workload("a", 1, 128, 64),
    "b": Workload("b", 8, 128, 64),
    "c": Workload("c", 32, 128, 64),
    "d": Workload("d", 8, 1024, 32),
}


def prompts(workload: Workload) -> list[tuple[int, ...]]:
    """Token ids from `random.Random(0)`, sequence by sequence: the same for every engine and run."""
    draw = random.Random(0)
    return [tuple(draw.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(workload.prompt)) for _ in range(workload.batch)]


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens per second on one workload."""

    prefill: float
    decode: float
    total: float


def throughput(workload: Workload, first_seconds: float, all_seconds: float) -> Throughput:
    """From the times to the first and to the last token of all sequences.

    Prefill is prompt tokens over the first; decode is the tokens after the first over the difference; total is output
    tokens over the second.
    """
    return Throughput(
        prefill=workload.batch * workload.prompt / first_seconds,
        decode=workload.batch * (workload.output - 1) / (all_seconds - first_seconds),
        total=workload.batch * workload.output / all_seconds,
    )
