"""Our engine on the workloads: greedy requests through `EngineCore`, timed, with the host time that the device did not hide.

Owns how a workload becomes requests and how a run is timed. Knows no peers, limits or reports.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from bench.workloads import Workload, prompts
from jaxserve.config import ServeConfig
from jaxserve.engine.core import EngineCore
from jaxserve.request import FinishReason, Request, SamplingParams

_request_ids = itertools.count()


class Sizes(Protocol):
    """Bytes that a runner holds over all its devices."""

    @property
    def weight_bytes(self) -> int: ...
    @property
    def kv_bytes(self) -> int: ...


class Engine(Protocol):
    """What the benchmarks need of an engine that `jaxserve.launch` built."""

    @property
    def core(self) -> EngineCore: ...
    @property
    def runner(self) -> Sizes: ...


def build(config: ServeConfig) -> Engine:
    """A warm engine, with its progress on stderr. Imports JAX, so only whoever runs one pays for that."""
    from jaxserve.launch import build_engine

    return build_engine(config, progress=tenths())


def tenths() -> Callable[[str, int, int], None]:
    """Says on stderr each tenth of a stage that is done, whatever it counts."""
    said: dict[str, int] = {}

    def progress(stage: str, done: int, total: int) -> None:
        tenth = done * 10 // total
        if tenth > said.get(stage, 0):
            said[stage] = tenth
            print(f"{stage} {10 * tenth}%", end="\n" if done == total else "... ", file=sys.stderr, flush=True)

    return progress


@dataclass(frozen=True, slots=True)
class Timing:
    """One run of a workload.

    Attributes:
        seconds: from the first request's arrival to the last token.
        exposed_seconds: host time in it during which the device had nothing to do.
        num_steps: steps that it took.
    """

    seconds: float
    exposed_seconds: float
    num_steps: int

    @property
    def exposed_share(self) -> float:
        return self.exposed_seconds / self.seconds


def run_workload(core: EngineCore, workload: Workload, num_output: int) -> Timing:
    """Run all sequences of `workload` at once for `num_output` tokens each.

    Raises:
        RuntimeError: a sequence ended otherwise than by length, so the run measured something else.
    """
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    requests = [
        Request(request_id=f"bench-{next(_request_ids)}", prompt=prompt, params=params) for prompt in prompts(workload)
    ]
    before = core.stats()
    reasons: list[FinishReason] = []
    started = time.perf_counter()
    for request in requests:
        core.add(request)
    while core.has_work:
        reasons += [event.finish_reason for event in core.step() if event.finish_reason]
    seconds = time.perf_counter() - started
    after = core.stats()
    if reasons != [FinishReason.LENGTH] * workload.batch:
        raise RuntimeError(f"workload {workload.title}: expected {workload.batch} sequences to end by length, found {reasons}")
    return Timing(
        seconds=seconds,
        exposed_seconds=after.exposed_host_seconds - before.exposed_host_seconds,
        num_steps=after.num_steps - before.num_steps,
    )


def first_token(core: EngineCore, prompt: tuple[int, ...]) -> None:
    """Generate one token."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    core.add(Request(request_id=f"bench-{next(_request_ids)}", prompt=prompt, params=params))
    while core.has_work:
        core.step()
