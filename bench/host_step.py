"""What planning and committing a step costs the host, and that it does not grow with what waits.

`python -m bench.host_step` drives the scheduler alone, with its prefix tree, through decode steps of as many sequences as it
has slots. Nothing runs on a device; the result that a device would give is made outside the time that is measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.host.prefix import PrefixTree
from jaxserve.host.scheduler import Scheduler
from jaxserve.plan import RunnerLimits, StepPlan, StepResult, StepStats
from jaxserve.request import Request, SamplingParams

PAGE_SIZE = 64
PROMPT_TOKENS = 100
"""Of which the first 64 are the same for all: a page that everyone shares."""


@dataclass(frozen=True, slots=True)
class HostCost:
    """Milliseconds a step, of plan and commit together."""

    num_waiting: int
    median: float
    p99: float


def measure(num_seqs: int, num_waiting: int, num_steps: int) -> HostCost:
    """Run `num_steps` decode steps of `num_seqs` sequences while `num_waiting` wait."""
    scheduler = _filled(num_seqs, num_waiting, num_steps)
    while any(seq.num_output == 0 for seq in scheduler._running) or scheduler.num_running < num_seqs:
        _step(scheduler)
    seconds = sorted(_step(scheduler) for _ in range(num_steps))
    return HostCost(num_waiting, 1e3 * statistics.median(seconds), 1e3 * seconds[len(seconds) * 99 // 100])


def _filled(num_seqs: int, num_waiting: int, num_steps: int) -> Scheduler:
    num_positions = PROMPT_TOKENS + 3 * num_steps + 1000
    limits = RunnerLimits(
        num_pages=num_seqs * (-(-num_positions // PAGE_SIZE) + 2),
        page_size=PAGE_SIZE,
        max_seqs=num_seqs,
        max_step_tokens=max(num_seqs, 4096),
        max_context=num_positions + 1,
        vocab_size=32_000,
    )
    scheduler = Scheduler(limits, prefill_chunk=512, prefixes=PrefixTree(PAGE_SIZE), seed=0)
    params = SamplingParams(max_tokens=num_positions - PROMPT_TOKENS, ignore_eos=True)
    for number in range(num_seqs + num_waiting):
        own = [(number * 31 + i) % limits.vocab_size for i in range(PROMPT_TOKENS - PAGE_SIZE)]
        scheduler.add(Request(request_id=str(number), prompt=(*range(PAGE_SIZE), *own), params=params))
    return scheduler


def _step(scheduler: Scheduler) -> float:
    """Plan and commit one step; the seconds that both took."""
    started = time.perf_counter()
    plan = scheduler.plan()
    planned = time.perf_counter()
    assert plan is not None
    result = _result(plan)
    committing = time.perf_counter()
    scheduler.commit(plan, result)
    return planned - started + time.perf_counter() - committing


def _result(plan: StepPlan) -> StepResult:
    tokens = tuple(((7 * row.seq_id + row.start) % 1000,) if row.sample else () for row in plan.rows)
    return StepResult(plan.step_id, tokens, ((),) * len(plan.rows), StepStats(0.0, 0.0))


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.host_step", description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--seqs", type=int, default=256, metavar="N", help="sequences that run (default: 256)")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="steps to time (default: 300)")
    parser.add_argument(
        "--waiting", default="0,1000,100000", metavar="N,...", help="requests that wait (default: 0,1000,100000)"
    )
    args = parser.parse_args(argv)
    print(f"plan and commit of a step of {args.seqs} sequences, {args.steps} steps, ms")
    print(f"{'waiting':>10}{'median':>10}{'p99':>10}")
    for num_waiting in map(int, args.waiting.split(",")):
        cost = measure(args.seqs, num_waiting, args.steps)
        print(f"{cost.num_waiting:>10}{cost.median:>10.3f}{cost.p99:>10.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
