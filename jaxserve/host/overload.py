"""What a queue in front of an engine can promise: how fast it drains, when a newcomer's first token comes, what was shed.

Owns measurements only, each of constant memory. Does not know requests, limits or whom to refuse.
"""

from __future__ import annotations

import math
from collections import deque

MEMORY_SECONDS = 10.0
"""Seconds of backlog after which a measured drain rate counts for 1/e."""

MAX_TENANTS = 1024

SPEED_MEMORY_SECONDS = 600.0
"""Seconds after which the fastest prompt counts for 1/e."""

MIN_BACKLOG_SECONDS = 0.5
"""Seconds of backlog that must have been seen before their rate is believed."""

PIPELINE_BATCHES = 3
"""Batches of events that a request may wait for its first token without there being a backlog: those of steps that were
planned before it came, and its own."""

TARGET_MISSES = 0.03
MARGIN_GAIN = 0.1
MIN_MARGIN, MAX_MARGIN = 0.5, 8.0

SHARE_SECONDS = 60


class DrainRate:
    """Prompt tokens a second that leave the queue while more of them wait.

    Time without a backlog does not count: what leaves then says how much came, not how much could have left. While there
    is one, slots, pages, prompts and decodes together set the pace, so one figure says what all of them allow.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._times: deque[float] = deque(maxlen=PIPELINE_BATCHES)
        self._had_backlog = False

    def observe(self, now: float, num_tokens: int, oldest: float | None) -> None:
        """Take note of a batch of events.

        Args:
            num_tokens: prompt tokens of the requests whose first token it has.
            oldest: when the one came that has waited longest after it, or None when nothing waits.
        """
        if self._had_backlog:
            seconds = now - self._times[-1]
            kept = math.exp(-seconds / MEMORY_SECONDS)
            self._tokens = self._tokens * kept + num_tokens
            self._seconds = self._seconds * kept + seconds
        self._had_backlog = oldest is not None and len(self._times) == PIPELINE_BATCHES and oldest <= self._times[0]
        self._times.append(now)

    @property
    def tokens_per_second(self) -> float | None:
        """The rate, recent backlogs counting most; None while too little has been seen."""
        if self._seconds < MIN_BACKLOG_SECONDS or not self._tokens:
            return None
        return self._tokens / self._seconds


class RecentService:
    """Prompt tokens that each tenant was given lately, those of `MEMORY_SECONDS` ago counting for 1/e."""

    def __init__(self) -> None:
        self._tokens: dict[str, tuple[float, float]] = {}  # and the time at which they were so many

    def observe(self, now: float, tenant: str, num_tokens: int) -> None:
        """Take note of a prompt."""
        self._tokens[tenant] = self.tokens(now, tenant) + num_tokens, now
        if len(self._tokens) > MAX_TENANTS:
            del self._tokens[min(self._tokens, key=lambda name: self.tokens(now, name))]

    def tokens(self, now: float, tenant: str) -> float:
        """The tokens; 0 for a tenant of which nothing is remembered."""
        tokens, since = self._tokens.get(tenant, (0.0, now))
        return tokens * math.exp((since - now) / MEMORY_SECONDS)


class PromptSpeed:
    """Prompt tokens a second of the fastest prompt of late, from its arrival to its first token: what one alone may take.

    A lower bound of what the engine can do, and under load a loose one, for then every prompt waits for others.
    """

    def __init__(self) -> None:
        self._fastest = 0.0
        self._seen = -math.inf

    def observe(self, now: float, num_tokens: int, seconds: float) -> None:
        """Take note of a prompt whose first token came after `seconds`."""
        speed = num_tokens / max(seconds, 1e-6)
        if speed >= self.tokens_per_second(now):
            self._fastest, self._seen = speed, now

    def tokens_per_second(self, now: float) -> float:
        """The speed, a fastest one of long ago counting less; 0 before any was seen."""
        return self._fastest * math.exp((self._seen - now) / SPEED_MEMORY_SECONDS) if self._fastest else 0.0


class Margin:
    """The factor by which forecasts must be stretched so that 97 in 100 are kept.

    A quantile followed by stochastic approximation (Robbins and Monro, 1951; over time that changes, the adaptive conformal
    inference of Gibbs and Candes, 2021): a forecast that was not kept raises it, one that was lowers it by that much less
    often as there must be more of them. While the factor stays within its bounds the share that is not kept comes out at
    the target whatever makes the forecasts wrong, without a model of it.
    """

    def __init__(self) -> None:
        self.factor = 1.0

    def observe(self, forecast: float, found: float) -> None:
        """Take note of how long it took, in the unit of the forecast, which was stretched by the factor of its time."""
        missed = found > forecast
        self.factor *= math.exp(MARGIN_GAIN * ((1 - TARGET_MISSES) if missed else -TARGET_MISSES))
        self.factor = min(MAX_MARGIN, max(MIN_MARGIN, self.factor))


class ShedShare:
    """The share of requests that were refused over the last minute."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int, int]] = deque()  # second, requests, refused

    def observe(self, now: float, num_requests: int, num_refused: int) -> None:
        """Take note of requests of which so many were refused."""
        second = math.floor(now)
        if self._seconds and self._seconds[-1][0] == second:
            _, requests, refused = self._seconds.pop()
            num_requests, num_refused = num_requests + requests, num_refused + refused
        self._seconds.append((second, num_requests, num_refused))
        self._drop_old(now)

    def share(self, now: float) -> float:
        """From 0 to 1; 0 when none came."""
        self._drop_old(now)
        num_requests = sum([requests for _, requests, _ in self._seconds])
        return sum([refused for _, _, refused in self._seconds]) / num_requests if num_requests else 0.0

    def _drop_old(self, now: float) -> None:
        while self._seconds and self._seconds[0][0] <= now - SHARE_SECONDS:
            self._seconds.popleft()
