"""What became of each request in a simulation, and the summary of it.

TTFT is from arrival to the first token, ITL between one token and the next, E2E from arrival to the last. A request is good
when its TTFT and the mean of its ITL keep the targets; goodput is good requests a second.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.request import TokenEvent


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds that users are willing to wait, for the first token and for each next."""

    ttft: float = 1.0
    itl: float = 0.1


@dataclass(slots=True)
class Outcome:
    """One request: when it came, when its tokens came. `first` is None until there is one."""

    arrived: float
    num_prompt: int
    num_output: int = 0
    cached: int = 0
    first: float | None = None
    last: float = 0.0
    finished: bool = False

    def good(self, targets: Targets) -> bool:
        """Whether it was answered in full and within both targets."""
        if not self.finished or self.first is None or self.first - self.arrived > targets.ttft:
            return False
        return self.num_output < 2 or (self.last - self.first) / (self.num_output - 1) <= targets.itl


class Record:
    """Collects events.

    Attributes:
        gaps: every ITL, in seconds.
        refused: requests that were shed, by the error's type.
        too_long: requests that could never fit.
    """

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.gaps = array("d")
        self.refused: dict[str, int] = {}
        self.too_long = 0

    def arrive(self, request_id: str, at: float, num_prompt: int) -> None:
        """Take note that a request was let in."""
        self.outcomes[request_id] = Outcome(at, num_prompt)

    def observe(self, events: Iterable[TokenEvent], now: float) -> None:
        """Take note of what came at `now`."""
        for event in events:
            outcome = self.outcomes[event.request_id]
            if event.tokens:
                if outcome.first is None:
                    outcome.first = now
                    outcome.cached = event.num_cached
                else:
                    self.gaps.append(now - outcome.last)
                outcome.last = now
            if event.finish_reason is not None:
                outcome.num_output = event.num_output
                outcome.finished = event.finish_reason.value in ("stop", "length")


def percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """p50, p95 and p99 by nearest rank; empty where there are no values."""
    ranked = np.sort(np.asarray(values, np.float64))
    return {f"p{p}": float(ranked[-(-len(ranked) * p // 100) - 1]) for p in (50, 95, 99)} if len(ranked) else {}


@dataclass(frozen=True, slots=True)
class Summary:
    """A simulation in figures. Latencies in seconds, shares from 0 to 1.

    Attributes:
        num_requests: all that came.
        seconds: of virtual time, from the first arrival to the last token.
        goodput: requests a second that kept both targets.
        good_share: of all that came.
        hit_share: of prompt tokens that were let in, those found in the prefix cache.
        shed_share: of all that came, those refused for lack of room or time.
        utilisation: share of the time in which the device was busy.
        replica_seconds: of all replicas, from their start to their end.
    """

    num_requests: int
    num_finished: int
    num_too_long: int
    seconds: float
    ttft: dict[str, float]
    itl: dict[str, float]
    e2e: dict[str, float]
    goodput: float
    good_share: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    hit_share: float
    num_preemptions: int
    shed_share: float
    utilisation: float
    num_steps: int
    replica_seconds: float


def summarise(
    record: Record,
    targets: Targets,
    *,
    seconds: float,
    busy_seconds: float,
    replica_seconds: float,
    num_steps: int,
    num_preemptions: int,
) -> Summary:
    """The summary of `record`; what it does not know is given."""
    outcomes = record.outcomes.values()
    finished = [outcome for outcome in outcomes if outcome.finished]
    num_good = sum(outcome.good(targets) for outcome in finished)
    num_shed = sum(record.refused.values())
    total = len(outcomes) + num_shed + record.too_long
    num_prompt = sum(outcome.num_prompt for outcome in outcomes)
    span = max(seconds, 1e-9)
    return Summary(
        num_requests=total,
        num_finished=len(finished),
        num_too_long=record.too_long,
        seconds=seconds,
        ttft=percentiles([o.first - o.arrived for o in outcomes if o.first is not None]),
        itl=percentiles(record.gaps),
        e2e=percentiles([outcome.last - outcome.arrived for outcome in finished]),
        goodput=num_good / span,
        good_share=num_good / total if total else 0.0,
        prompt_tokens_per_second=sum(outcome.num_prompt for outcome in finished) / span,
        output_tokens_per_second=sum(outcome.num_output for outcome in finished) / span,
        hit_share=sum(outcome.cached for outcome in outcomes) / num_prompt if num_prompt else 0.0,
        num_preemptions=num_preemptions,
        shed_share=num_shed / total if total else 0.0,
        utilisation=busy_seconds / replica_seconds if replica_seconds else 0.0,
        num_steps=num_steps,
        replica_seconds=replica_seconds,
    )


def format_summary(summary: Summary, targets: Targets) -> str:
    """A few lines for people; latencies in milliseconds."""
    lines = [
        f"requests     {summary.num_finished} of {summary.num_requests} answered in {summary.seconds:.0f} s of virtual time; "
        f"{summary.shed_share:.1%} shed, {summary.num_too_long} longer than the context",
        f"tokens       {summary.prompt_tokens_per_second:.0f} in/s, {summary.output_tokens_per_second:.0f} out/s",
        f"goodput      {summary.goodput:.2f} requests/s within {targets.ttft:g} s and {1e3 * targets.itl:g} ms, "
        f"{summary.good_share:.1%} of all",
    ]
    for name, found in (("TTFT", summary.ttft), ("ITL", summary.itl), ("E2E", summary.e2e)):
        shown = ", ".join(f"{percent} {1000 * value:.1f}" for percent, value in found.items())
        lines.append(f"{name:<12} {shown + ' ms' if shown else 'nothing to report'}")
    lines += [
        f"cache        {summary.hit_share:.1%} of prompt tokens found, {summary.num_preemptions} preemptions",
        f"device       busy {summary.utilisation:.1%} of {summary.replica_seconds:.0f} replica-seconds, "
        f"{summary.num_steps} steps",
    ]
    return "\n".join(lines)
