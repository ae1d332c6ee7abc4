"""The real scheduler and admission before a device that only costs time, by a clock that only moves when it works."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from jaxserve.errors import QueueFull
from jaxserve.host.admission import Admission
from jaxserve.host.scheduler import Scheduler
from jaxserve.plan import RunnerLimits, StepPlan, StepResult, StepStats
from jaxserve.request import FinishReason, Request, SamplingParams, TokenEvent

LIMITS = RunnerLimits(
    num_pages=400, page_size=16, max_seqs=16, max_step_tokens=256, max_context=1024, vocab_size=100
)  # fmt: skip


def step_seconds(plan: StepPlan) -> float:
    """About what a small model costs on a few cores: weights once, and something for each token and sequence."""
    return 0.020 + 0.0004 * plan.num_tokens + 0.001 * len(plan.rows)


@dataclass(frozen=True, slots=True)
class Arrival:
    time: float
    request: Request


@dataclass
class Served:
    """What became of one request that was let in."""

    request: Request
    since: float
    first: float | None = None
    last: float = 0.0
    longest_gap: float = 0.0
    reason: FinishReason | None = None


@dataclass
class VirtualServer:
    """Runs arrivals to the end; what it found is in its attributes.

    Attributes:
        tokens: positions computed by tenant, and output tokens given out under "output".
        refusals: by the error's code.
        most_queued: the most requests and prompt tokens that ever waited.
    """

    limits: RunnerLimits = LIMITS
    max_queue_requests: int = 256
    slo_ttft_seconds: float = 0.0
    num_tenants: int = 1
    cost: Callable[[StepPlan], float] = step_seconds
    now: float = 0.0
    served: dict[str, Served] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)
    retry_after: list[float] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    most_queued: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits, prefill_chunk=self.limits.max_step_tokens, seed=0, clock=lambda: self.now)
        self.admission = Admission(
            self.limits,
            max_queue_requests=self.max_queue_requests,
            max_queue_tokens=0,
            slo_ttft_seconds=self.slo_ttft_seconds,
            num_tenants=self.num_tenants,
            clock=lambda: self.now,
        )

    def run(self, arrivals: Iterable[Arrival], *, until: float = math.inf) -> VirtualServer:
        """Serve `arrivals`, in order of time, until the last is done or the clock says `until`."""
        coming = iter(arrivals)
        arrival = next(coming, None)
        while self.now < until and (arrival is not None or self.scheduler.num_live):
            while arrival is not None and arrival.time <= self.now:
                self._receive(arrival.request)
                arrival = next(coming, None)
            self._take(self.scheduler.expire())
            plan = self.scheduler.plan()
            if plan is None:
                self.now = until if arrival is None else max(self.now, arrival.time)
                continue
            self.now += self.cost(plan)
            self._take(self.scheduler.commit(plan, _result(plan)))
        return self

    def _receive(self, request: Request) -> None:
        try:
            self.admission.admit(request)
        except QueueFull as error:
            self.refusals[error.code] += 1
            self.retry_after.append(error.retry_after)
            return
        queued = self.admission.queued_requests, self.admission.queued_tokens
        self.most_queued = max(self.most_queued[0], queued[0]), max(self.most_queued[1], queued[1])
        self.served[request.request_id] = Served(request, self.now)
        self.scheduler.add(request)

    def _take(self, events: list[TokenEvent]) -> None:
        self.admission.observe(events)
        for event in events:
            served = self.served[event.request_id]
            if event.tokens:
                if served.first is None:
                    served.first = self.now
                    self.tokens[served.request.tenant] += event.num_prompt
                else:
                    served.longest_gap = max(served.longest_gap, self.now - served.last)
                served.last = self.now
                self.tokens["output"] += len(event.tokens)
                self.tokens[served.request.tenant] += len(event.tokens)
            served.reason = event.finish_reason

    def first_tokens(self, *, tenant: str | None = None, priority: int | None = None, before: float = math.inf) -> list[float]:
        """Times to the first token, sorted, of those that came before `before`; those without one count as for ever."""
        return sorted(
            math.inf if one.first is None else one.first - one.since
            for one in self.served.values()
            if tenant in (None, one.request.tenant) and priority in (None, one.request.priority) and one.since < before
        )


def _result(plan: StepPlan) -> StepResult:
    tokens = tuple((7,) if row.sample else () for row in plan.rows)
    return StepResult(plan.step_id, tokens, ((),) * len(plan.rows), StepStats(0.0, 0.0))


def percentile(values: list[float], percent: float) -> float:
    """Of sorted values, the one that so many percent do not exceed."""
    return values[min(len(values) - 1, math.ceil(len(values) * percent / 100) - 1)]


Lengths = Callable[[random.Random], tuple[int, int]]
"""Draws a request's prompt and output tokens."""


def many_short_few_long(rng: random.Random) -> tuple[int, int]:
    """Prompts of 16 to 400 tokens and outputs of 8 to 120."""
    return min(400, 16 + int(rng.expovariate(1 / 80))), min(120, 8 + int(rng.expovariate(1 / 30)))


def long_prompts(rng: random.Random) -> tuple[int, int]:
    """Prompts of 200 to 999 tokens and outputs of 1 to 8: slots are never short, but steps are."""
    return rng.randrange(200, 1000), rng.randrange(1, 9)


def poisson(
    rate: float,
    *,
    seconds: float,
    seed: int,
    tenant: str = "",
    weight: float = 1.0,
    priority: int = 0,
    lengths: Lengths = many_short_few_long,
) -> list[Arrival]:
    """Requests at `rate` a second on average, for so many seconds."""
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    now = 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        num_prompt, num_output = lengths(rng)
        request = Request(
            request_id=f"{tenant}{priority}-{seed}-{len(arrivals)}",
            prompt=(1,) * num_prompt,
            params=SamplingParams(max_tokens=num_output, temperature=0.0),
            tenant=tenant,
            weight=weight,
            priority=priority,
        )
        arrivals.append(Arrival(now, request))
    return arrivals


def merge(*streams: list[Arrival]) -> list[Arrival]:
    """All arrivals in order of time."""
    return sorted((arrival for stream in streams for arrival in stream), key=lambda arrival: arrival.time)
