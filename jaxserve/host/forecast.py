"""When a newcomer's first token will come: from what goes before it, and what was measured of the engine until now.

Owns the forecast and what corrects it. Does not know whom to refuse, nor the engine but by its events.

Two things keep a request waiting, and the slower counts: that prompts ahead of it are computed, and that those which run make
room. The first is known from the rate at which prompt tokens drain while there is a backlog; the second, which that rate
shows only once it has happened, from how soon those that run end. What both leave out, and what is wrong with them, the
margin makes up for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from jaxserve.host.backlog import Backlog, Entry, InService
from jaxserve.host.overload import DrainRate, Margin, PromptSpeed, RecentService, Turnover
from jaxserve.plan import RunnerLimits
from jaxserve.request import Request

CALIBRATION_SHARE = 0.75
"""Only forecasts of at least this part of the target teach the margin: whether shorter ones are kept matters to nobody."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is foreseen for a request.

    Attributes:
        seconds: to its first token; infinite while nobody knows.
        tokens_ahead: prompt tokens that go before it.
    """

    seconds: float
    tokens_ahead: float

    def __str__(self) -> str:
        if math.isinf(self.seconds):
            return "nobody knows when, for all places are taken and nothing has ended yet"
        return f"after about {self.seconds:.2f} s"


class FirstTokens:
    """Foresees first tokens, and learns from those that come.

    Args:
        target: seconds in which they should come.
        backlog, in_service: what waits and runs, which the owner keeps up to date.
    """

    def __init__(self, limits: RunnerLimits, target: float, backlog: Backlog, in_service: InService) -> None:
        self._limits = limits
        self._target = target
        self._backlog = backlog
        self._in_service = in_service
        self._turnover = Turnover()
        self._prompt_speed = PromptSpeed()
        self._service = RecentService()
        self.drain_rate = DrainRate()
        self.margin = Margin()

    def forecast(self, request: Request, num_tokens: int, now: float) -> Forecast:
        """For the last of the prompts of `num_tokens` together that come with `request`; stretched by the margin."""
        ahead = self._backlog.tokens_ahead(
            request.priority, request.tenant, request.weight, num_tokens, lambda tenant: self._service.tokens(now, tenant)
        )
        rate = self.drain_rate.tokens_per_second or math.inf
        alone = num_tokens / max(rate, self._prompt_speed.tokens_per_second(now))
        wait = max(ahead / rate, self._seconds_to_slot(request.priority, ahead))
        return Forecast((wait + alone) * self.margin.factor, ahead)

    def _seconds_to_slot(self, priority: int, tokens_ahead: float) -> float:
        """Seconds until so many have ended that those ahead, and one more, have a slot and pages."""
        num_ahead = tokens_ahead * len(self._backlog) / self._backlog.num_tokens if tokens_ahead else 0.0
        num_running = len(self._in_service)
        room = self._limits.max_seqs
        if num_running:
            limits = self._limits
            longest = limits.pages_for(limits.max_context) * limits.page_size
            held = min(self._in_service.num_tokens / num_running + limits.page_size, longest)
            room = min(room, int(limits.num_pages * limits.page_size / held))
        room = max(1, room)
        num_running = self._in_service.num_at(priority)  # the others make room
        return self._turnover.seconds_until(num_ahead + 1 + num_running - room, max(num_running, room))

    def observe(self, now: float, started: Iterable[Entry], *, num_running: int, num_ended: int) -> None:
        """Take note of a step's events.

        Args:
            started: those whose first token came.
            num_running: how many ran before it.
            num_ended: how many of those and of the started ones have ended.
        """
        num_tokens = 0
        waits = []
        for entry in started:
            waits.append(now - entry.since)
            num_tokens += entry.num_tokens
            self._prompt_speed.observe(now, entry.num_tokens, now - entry.since)
            self._service.observe(now, entry.tenant, entry.num_tokens)
            if entry.forecast is not None and entry.forecast >= CALIBRATION_SHARE * self._target:
                self.margin.observe(entry.forecast, now - entry.since)
        self._turnover.observe(now, num_running=num_running, num_ended=num_ended, waits=waits)
        self.drain_rate.observe(now, num_tokens, self._backlog.oldest)

    def observe_abort(self, now: float, num_running: int) -> None:
        """Take note that one of `num_running` was aborted."""
        self._turnover.observe(now, num_running=num_running, num_ended=1)
