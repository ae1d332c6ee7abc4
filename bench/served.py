"""What steps cost in a server under load, and what a request spends outside the engine.

Owns the load that this is learnt from, and how costs follow from a server's step log. A bare engine's steps are faster: beside
them nobody parses requests, makes text of tokens, or reads streams on the same cores.

The load is a closed loop at several widths, so that every size of step comes up, half full and full, with prompts of all
lengths; it knows nothing of the traffic that is to be predicted.
"""

from __future__ import annotations

import bisect
import contextlib
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from urllib.error import URLError
from urllib.request import urlopen

import aiohttp

from bench.costs import origin_of
from bench.serve_load import Client, Job, Outcome, run_closed
from bench.step_log import StepLog
from bench.workloads import FIRST_TOKEN_ID, LAST_TOKEN_ID
from jaxserve.config import EngineConfig
from jaxserve.device.buckets import doubling
from jaxserve.host.cost import FittedCost
from jaxserve.host.cost_file import CostOrigin
from jaxserve.host.fit import fit_cost, spread_of

READY_SECONDS = 300.0
LOAD_SECONDS = 120.0
SMALLEST_DECODE = 8
SHORTEST_PROMPT = 8
LONG_SHARE = 0.2
OUTPUT_TOKENS = (32, 96)


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of load: how wide, from when to when by `time.perf_counter`, and what became of its requests."""

    concurrency: int
    start: float
    end: float
    outcomes: tuple[Outcome, ...]


@contextlib.contextmanager
def serving(command: Sequence[str]) -> Iterator[str]:
    """A server process of this command, to which a port is added, once it is ready; its address. It is stopped in the end.

    Raises:
        RuntimeError: it ended or was not ready in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([sys.executable, "-m", *command, "--port", str(port)])
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server was not ready within {READY_SECONDS:g} s, or ended: code {process.poll()}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def _is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/ready", timeout=5) as answer:
            return answer.status == 200
    except (URLError, OSError):
        return False


@contextlib.contextmanager
def recorded(engine_flags: Sequence[str], log: Path) -> Iterator[str]:
    """A server with these flags that writes its step log to `log` when the context ends; its address.

    Raises:
        RuntimeError: as `serving`.
    """
    log.unlink(missing_ok=True)
    with serving(["bench.recorded_server", *engine_flags, "--record", str(log)]) as url:
        yield url


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[Client, int]]:
    """A client of the model that a server has, and the model's context."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        async with session.get(f"{url}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        async with session.post(f"{url}/tokenize", json={"prompt": "a"}) as response:
            context = (await response.json())["max_model_len"]
        yield Client(session, url, model), context


def widths(max_seqs: int) -> tuple[int, ...]:
    """Concurrencies at which each size of decode step comes up, about as often full as not."""
    sizes = [size for size in doubling(min(SMALLEST_DECODE, max_seqs), max_seqs) if size > 1]
    return tuple(sorted({1, max_seqs, *(size * 3 // 4 for size in sizes)}))


def jobs_until(end: float, step_tokens: int, longest: int, draw: random.Random) -> Iterator[Job]:
    """Requests until that time, with prompts of all orders of length up to a step's, and one in five of more than a step.

    Steps that a single prompt fills in part are what light traffic is made of: they must not be rare.
    """
    fitting = max(SHORTEST_PROMPT, min(step_tokens, longest))
    while time.perf_counter() < end:
        length = round(SHORTEST_PROMPT * (fitting / SHORTEST_PROMPT) ** draw.random())
        if draw.random() < LONG_SHARE:
            length = draw.randint(fitting, longest)
        prompt = draw.choices(range(FIRST_TOKEN_ID, LAST_TOKEN_ID), k=length)
        yield Job(0.0, prompt, draw.randint(*OUTPUT_TOKENS))


async def load(url: str, engine: EngineConfig, *, seconds: float, seed: int) -> list[Phase]:
    """Load the server for about so long, at each width for an equal part of it, with prompts of up to two steps.

    Raises:
        RuntimeError: a request failed.
    """
    phases, draw = [], random.Random(seed)
    async with connected(url) as (client, context):
        longest = max(SHORTEST_PROMPT, min(2 * engine.max_step_tokens, context - OUTPUT_TOKENS[1]))
        levels = widths(engine.max_seqs)
        for width in levels:
            start = time.perf_counter()
            outcomes = await run_closed(
                jobs_until(start + seconds / len(levels), engine.max_step_tokens, longest, draw), client, width
            )
            phases.append(Phase(width, start, time.perf_counter(), tuple(outcomes)))
            if failed := [outcome.error for outcome in outcomes if outcome.error is not None]:
                raise RuntimeError(f"{len(failed)} of {len(outcomes)} requests failed at {width} at once: {failed[0]}")
    return phases


def learn(model: str, log: StepLog, phases: Sequence[Phase]) -> tuple[FittedCost, CostOrigin]:
    """Fit costs to the steps of these phases, and measure what their requests spent before and after steps.

    Raises:
        ConfigError: there are too few of them.
    """
    samples = log.samples([(phase.start, phase.end) for phase in phases])
    cost = fit_cost(samples)
    alone = [outcome for phase in phases if phase.concurrency == 1 for outcome in phase.outcomes]
    every = [outcome for phase in phases for outcome in phase.outcomes]
    origin = replace(
        origin_of(model, cost, samples, log.kv_bytes_per_token),
        window=log.window,
        request_seconds=_before(log, alone),
        reply_seconds=_after(log, every),
        spread=spread_of(cost, samples),
        note="of a server under load, by python -m bench.calibrate --served",
    )
    return cost, origin


def _before(log: StepLog, outcomes: Sequence[Outcome]) -> float:
    """Seconds from arrival to the first step of requests that came one by one, in the middle."""
    submitted = [step.submitted for step in log.steps]
    firsts = [(bisect.bisect_left(submitted, outcome.arrived), outcome.arrived) for outcome in outcomes]
    return median([submitted[index] - arrived for index, arrived in firsts if index < len(submitted)] or [0.0])


def _after(log: StepLog, outcomes: Sequence[Outcome]) -> float:
    """Seconds from when a first token had been read from the device until its client had it, in the middle."""
    ready = [step.ready for step in log.steps]
    firsts = [outcome.arrived + outcome.ttft for outcome in outcomes if outcome.ttft is not None]
    known = [(bisect.bisect_right(ready, first) - 1, first) for first in firsts]
    return median([first - ready[index] for index, first in known if index >= 0] or [0.0])
