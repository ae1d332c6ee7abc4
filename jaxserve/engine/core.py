"""The loop: plan, submit, collect, commit, with the host's work hidden behind the device's.

Owns the order of these four, what is in flight, what happens when the runner fails, and the counters of it. Does not
know how plans are made (`host.scheduler`), what runs them (a `plan.Runner`), threads, text or time limits.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.errors import EngineError
from jaxserve.host.scheduler import Scheduler
from jaxserve.plan import Runner, StepHandle, StepPlan
from jaxserve.request import Adapter, FinishReason, Request, SamplingParams, TokenEvent

logger = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 3

DEVICE_WAS_IDLE_SECONDS = 50e-6
"""A result that takes less than this to wait for was ready before we asked, so the device had run dry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the start (`num_*`, `*_seconds`) and the state of this moment (`running`, `waiting`, `*_pages`).

    Attributes:
        num_steps: steps collected.
        num_tokens: positions computed, those of preempted and discarded rows included.
        num_output_tokens: tokens given out.
        num_preemptions: times that a sequence lost its pages.
        num_failures: times that the runner raised.
        exposed_host_seconds: host time during which the device had nothing to do. An upper bound: where a result was
            ready before we asked for it, all host time since the last one counts.
        wait_seconds: time spent waiting for results.
        num_prefix_asked_tokens, num_prefix_hit_tokens: prompt tokens of sequences that ran, and how many of them were cached.
        num_evicted_pages: pages that lost their prefix to make room.
        free_pages: pages that can be had, those that hold a prefix nobody uses among them.
        cached_pages: those of the free ones.
        num_saved_pages, num_loaded_pages: pages copied to host memory, and back.
        host_pages: pages held in host memory.
        pinned_pages: pages kept for `--pin-prefix`.
    """

    num_steps: int
    num_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_failures: int
    exposed_host_seconds: float
    wait_seconds: float
    running: int
    waiting: int
    free_pages: int
    total_pages: int
    num_prefix_asked_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_evicted_pages: int = 0
    cached_pages: int = 0
    pinned_pages: int = 0
    num_saved_pages: int = 0
    num_loaded_pages: int = 0
    host_pages: int = 0


class EngineCore:
    """Drives one scheduler and one runner. Not thread-safe: one thread calls everything.

    With `overlap`, step n+1 is planned and submitted before the result of step n is read, so the device goes from one
    to the next while the host commits. Without, each step is read before the next is planned.

    Constrained rows of step n+1 get their masks when step n has been read, while the device computes step n+1; only then is
    step n+2 planned.

    When the runner raises, every request with a row in flight ends with `FinishReason.ERROR` and returns its pages;
    requests that only hold pages are preempted, since the runner may have lost the pool, and are recomputed; waiting
    ones are untouched. The engine then goes on. After `MAX_FAILURES_IN_A_ROW` failures with no good step between them
    it is `dead`: every request ends with ERROR, and `add` raises.

    Args:
        clock: seconds.

    Attributes:
        on_step: called after each step whose time on the device could be told, with its plan and the seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        overlap: bool,
        clock: Callable[[], float] = time.perf_counter,
        on_step: Callable[[StepPlan, float], None] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self.on_step = on_step
        self._max_in_flight = 2 if overlap else 1
        self._in_flight: deque[tuple[StepPlan, StepHandle]] = deque()
        self._failures_in_a_row = 0
        self.last_error: Exception | None = None
        self._num_steps = 0
        self._num_tokens = 0
        self._num_output_tokens = 0
        self._num_failures = 0
        self._exposed_host_seconds = 0.0
        self._wait_seconds = 0.0
        self._host_since = 0.0

    @property
    def dead(self) -> bool:
        """Whether the runner failed too often in a row for the engine to go on."""
        return self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end every sequence which does not ignore them."""
        return self._scheduler.eos_token_ids

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do: a live request, or a result to collect."""
        return bool(self._in_flight) or self._scheduler.num_live > 0

    def add(self, request: Request) -> None:
        """Queue `request`.

        Raises:
            InvalidRequest: it can never be served, or its id is live.
            EngineError: the engine is dead.
        """
        if self.dead:
            raise EngineError(f"the engine is dead after {self._failures_in_a_row} failed steps in a row: {self.last_error!r}")
        self._scheduler.add(request)

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request now; its last event, or None when no such request is live. Its id and pages are free at once."""
        return self._scheduler.abort(request_id)

    def step(self) -> list[TokenEvent]:
        """End what is overdue; plan and submit one step if there is something to plan; collect the oldest if it is time to.

        With overlap the first call only submits, so it gives no tokens. Never blocks when `has_work` is False.
        """
        return self._scheduler.expire() + self._run_step()

    def _run_step(self) -> list[TokenEvent]:
        started = self._clock()
        plan = self._scheduler.plan()
        if plan is not None:
            try:
                handle = self._runner.submit(plan)
            except Exception as error:
                return self._fail(error)
            self._note_submitted(started)
            self._in_flight.append((plan, handle))
        events = self._constrain_oldest() if plan is not None and len(self._in_flight) == 1 else []
        if not self._in_flight or (plan is not None and len(self._in_flight) < self._max_in_flight):
            return events
        return events + self._collect_oldest()

    def _constrain_oldest(self) -> list[TokenEvent]:
        """Give the oldest step in flight its masks, which all tokens before it decide; the last events of whoever that ends.

        The device computes the step meanwhile, and the next one is not submitted before.
        """
        plan, handle = self._in_flight[0]
        if not any(row.masked for row in plan.rows):
            return []
        masks, events = self._scheduler.masks(plan)
        if any(mask is not None for mask in masks):
            try:
                handle.constrain(masks)
            except Exception as error:
                return events + self._fail(error)
        return events

    def _collect_oldest(self) -> list[TokenEvent]:
        plan, handle = self._in_flight.popleft()
        wait_from = self._clock()
        try:
            result = handle.result()
        except Exception as error:
            return self._fail(error)
        wait_to = self._clock()
        self._note_waited(plan, wait_from, wait_to)
        events = self._scheduler.commit(plan, result)
        if not self._in_flight:
            self._exposed_host_seconds += self._clock() - wait_to
        self._failures_in_a_row = 0
        self._num_steps += 1
        self._num_tokens += plan.num_tokens
        self._num_output_tokens += sum(len(event.tokens) for event in events)
        return events + self._constrain_oldest() if self._in_flight else events

    def _note_submitted(self, started: float) -> None:
        if not self._in_flight:
            self._host_since = self._clock()
            self._exposed_host_seconds += self._host_since - started

    def _note_waited(self, plan: StepPlan, wait_from: float, wait_to: float) -> None:
        self._wait_seconds += wait_to - wait_from
        if wait_to - wait_from < DEVICE_WAS_IDLE_SECONDS:
            self._exposed_host_seconds += wait_from - self._host_since
        elif self.on_step is not None:  # the device went from the last result, or from idleness, straight to this one
            self.on_step(plan, wait_to - self._host_since)
        self._host_since = wait_to

    def _fail(self, error: Exception) -> list[TokenEvent]:
        self.last_error = error
        self._num_failures += 1
        self._failures_in_a_row += 1
        self._in_flight.clear()
        events = self._scheduler.fail_in_flight()
        logger.error("the runner failed; %d requests in flight end with an error", len(events), exc_info=error)
        if self.dead:
            events += self._scheduler.fail_all()
            logger.critical("%d steps failed in a row; the engine takes no more requests", self._failures_in_a_row)
        return events

    def pin(self, tokens: tuple[int, ...]) -> int:
        """Compute a prefix, and keep its full pages from now on; how many those are. For before the first request.

        Raises:
            ConfigError: it is too long for that.
            EngineError: it could not be computed.
        """
        num_pages = self._scheduler.pin(tokens)
        self.add(Request(request_id="pin-prefix", prompt=tokens, params=SamplingParams(temperature=0.0, max_tokens=1)))
        while self.has_work:
            if any(event.finish_reason is FinishReason.ERROR for event in self.step()):
                raise EngineError(f"a prefix of {len(tokens)} tokens could not be computed: {self.last_error!r}")
        return num_pages

    def drop_cache(self) -> int:
        """Forget every prefix that no running request uses and is not pinned, on the host too; the pages that held one."""
        return self._scheduler.memory.drop_idle()

    def forget_adapter(self, adapter: Adapter) -> int:
        """Forget every prefix of an adapter that no live request has; the pages that held one."""
        return self._scheduler.memory.forget_adapter(adapter.load)

    def stats(self) -> EngineStats:
        """A snapshot. Cheap and only reads: from another thread, some figures may be those before a step, others after."""
        scheduler, memory = self._scheduler, self._scheduler.memory
        tier = memory.tier
        return EngineStats(
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_failures=self._num_failures,
            exposed_host_seconds=self._exposed_host_seconds,
            wait_seconds=self._wait_seconds,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            free_pages=scheduler.num_free_pages,
            total_pages=self._runner.limits.num_pages,
            num_prefix_asked_tokens=memory.num_asked_tokens,
            num_prefix_hit_tokens=memory.num_hit_tokens,
            num_evicted_pages=memory.num_evicted,
            cached_pages=memory.num_cached,
            pinned_pages=memory.num_pinned,
            num_saved_pages=0 if tier is None else tier.num_saved,
            num_loaded_pages=0 if tier is None else tier.num_loaded,
            host_pages=0 if tier is None else len(tier),
        )
