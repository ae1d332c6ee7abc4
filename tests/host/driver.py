"""Small builders, and a `Driver` that puts a scheduler's plans on a fake runner and commits them when a test says so."""

from __future__ import annotations

from collections import deque
from typing import Any

from jaxserve.host.prefix import PrefixTree
from jaxserve.host.scheduler import Scheduler
from jaxserve.host.sizes import NO_SIZES, StepSizes
from jaxserve.host.tier import HostTier, Pays
from jaxserve.plan import PlanRow, RunnerLimits, StepPlan, StepResult, StepStats
from jaxserve.request import Request, SamplingParams, Sequence, TokenEvent
from tests.fakes import FakeHandle, FakeRunner, PlanViolation

EOS = 0


def make_limits(**changes: int) -> RunnerLimits:
    values = {"num_pages": 64, "page_size": 4, "max_seqs": 4, "max_step_tokens": 16, "max_context": 64, "vocab_size": 50}
    return RunnerLimits(**{**values, **changes})


def make_request(
    request_id: str = "a",
    num_prompt: int = 4,
    *,
    priority: int = 0,
    tenant: str = "",
    weight: float = 1.0,
    deadline: float | None = None,
    **params: Any,
) -> Request:
    """A request with the prompt 1, 2, ... and `params`; greedy unless they say otherwise."""
    return Request(
        request_id=request_id,
        prompt=tuple(1 + i % 40 for i in range(num_prompt)),
        params=SamplingParams(**{"temperature": 0.0, **params}),
        priority=priority,
        tenant=tenant,
        weight=weight,
        deadline=deadline,
    )


class Driver:
    """A scheduler and a fake runner, with any number of steps in flight. Checks integrity after every call.

    Args:
        pays: of the host tier, which there is with `prefixes` where `limits` have slots for it.
    """

    def __init__(
        self,
        limits: RunnerLimits | None = None,
        *,
        prefill_chunk: int = 16,
        eos_token_ids: tuple[int, ...] = (EOS,),
        prefixes: bool = False,
        sizes: StepSizes = NO_SIZES,
        pays: Pays = lambda start, num_pages, num_tokens: True,
        **runner: Any,
    ) -> None:
        self.now = 0.0
        self.limits = limits or make_limits()
        self.tier = HostTier(self.limits.host_pages, pays) if prefixes and self.limits.host_pages else None
        self.scheduler = Scheduler(
            self.limits,
            prefill_chunk=prefill_chunk,
            eos_token_ids=eos_token_ids,
            seed=1,
            prefixes=PrefixTree(self.limits.page_size) if prefixes else None,
            tier=self.tier,
            clock=lambda: self.now,
            sizes=sizes,
        )
        self.runner = FakeRunner(self.limits, **{"next_token": lambda tokens, seed: 7, **runner})
        self.in_flight: deque[tuple[StepPlan, FakeHandle]] = deque()

    def add(self, *args: Any, **kwargs: Any) -> Sequence:
        """`make_request`, added."""
        seq = self.scheduler.add(make_request(*args, **kwargs))
        self.scheduler.check_integrity()
        return seq

    def abort(self, request_id: str) -> TokenEvent | None:
        event = self.scheduler.abort(request_id)
        self.scheduler.check_integrity()
        return event

    def expire(self, now: float) -> list[TokenEvent]:
        """Let the clock say `now`, and end what is overdue."""
        self.now = now
        events = self.scheduler.expire()
        self.scheduler.check_integrity()
        return events

    def plan(self) -> dict[str, PlanRow]:
        """Plan and submit a step; its rows by "s" and the sequence's number."""
        plan = self.scheduler.plan()
        self.scheduler.check_integrity()
        if plan is None:
            return {}
        try:
            self.in_flight.append((plan, self.runner.submit(plan)))
        except PlanViolation as violation:
            raise AssertionError(str(violation)) from violation
        return {f"s{row.seq_id}": row for row in plan.rows}

    def commit(self) -> list[TokenEvent]:
        """Commit the oldest step."""
        plan, handle = self.in_flight.popleft()
        events = self.scheduler.commit(plan, handle.result())
        self.scheduler.check_integrity()
        return events

    def step(self) -> list[TokenEvent]:
        """Plan, submit and commit."""
        assert self.plan(), "nothing could be planned"
        return self.commit()

    def run(self, *, max_steps: int = 1000) -> dict[str, list[TokenEvent]]:
        """Step until nothing is live; the events by request."""
        events: dict[str, list[TokenEvent]] = {}
        for _ in range(max_steps):
            if not self.scheduler.num_live:
                return events
            for event in self.step():
                events.setdefault(event.request_id, []).append(event)
        raise AssertionError(f"{self.scheduler.num_live} requests live on after {max_steps} steps")


def make_result(plan: StepPlan, *tokens: int) -> StepResult:
    """A result that gives `tokens` to the rows that sample, in order."""
    left = list(tokens)
    sampled = tuple((left.pop(0),) if row.sample else () for row in plan.rows)
    assert not left, f"{left} is more than the plan samples"
    return StepResult(plan.step_id, sampled, tuple(() for _ in plan.rows), StepStats(0.0, 0.0))


def output_of(events: list[TokenEvent]) -> tuple[int, ...]:
    return tuple(token for event in events for token in event.tokens)
