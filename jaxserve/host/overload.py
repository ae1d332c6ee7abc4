"""What a queue in front of an engine can promise: how fast it drains, when a newcomer's first token comes, what was shed.

Owns measurements only, each of bounded memory. Does not know requests, limits or whom to refuse.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

RATE_WINDOW_SECONDS = 30.0

MEMORY_SECONDS = 10.0
"""Seconds of backlog after which a measured drain rate counts for 1/e."""

TURNOVER_MEMORY_SECONDS = 30.0

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
FIRST_MARGIN, MIN_MARGIN, MAX_MARGIN = 1.5, 0.5, 8.0

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


class FinishRate:
    """Requests and prompt tokens that finish a second, over the last `RATE_WINDOW_SECONDS` in which there were any."""

    def __init__(self) -> None:
        self._finished: deque[tuple[float, int]] = deque()
        self._num_tokens = 0
        self._busy_since = 0.0

    def begin(self, now: float) -> None:
        """Take note that there is something to do again."""
        self._busy_since = now

    def observe(self, now: float, num_tokens: int) -> None:
        """Take note of a request that has finished, of so many prompt tokens."""
        self._drop_old(now)
        self._finished.append((now, num_tokens))
        self._num_tokens += num_tokens

    def seconds_until(self, now: float, num_requests: int, num_tokens: int) -> float:
        """Seconds in which so many finish; infinite while none has lately."""
        self._drop_old(now)
        if not self._finished:
            return math.inf
        since = min(self._busy_since, self._finished[0][0])
        window = max(1.0, min(RATE_WINDOW_SECONDS, now - since))
        return window * max(num_requests / len(self._finished), num_tokens / self._num_tokens)

    def _drop_old(self, now: float) -> None:
        while self._finished and self._finished[0][0] <= now - RATE_WINDOW_SECONDS:
            self._num_tokens -= self._finished.popleft()[1]

    def check_integrity(self) -> None:
        """Assert that the sum is that of its parts."""
        assert self._num_tokens == sum(num_tokens for _, num_tokens in self._finished), "finished tokens do not add up"


class Turnover:
    """How soon a running request ends: ends over the time that slots were held, which those that still run add to.

    So it is right from the first end on, although the short ones end first.
    """

    def __init__(self) -> None:
        self._ends = 0.0
        self._slot_seconds = 0.0
        self._since = 0.0

    def observe(self, now: float, *, num_running: int, num_ended: int, waits: Iterable[float] = ()) -> None:
        """Take note of what happened since the last time.

        Args:
            num_running: how many ran all the while.
            num_ended: how many of these and of new ones have ended now.
            waits: seconds that each new one waited, for the last step of which it had a slot.
        """
        seconds = now - self._since
        self._since = now
        held = seconds * num_running + sum([min(wait, seconds) for wait in waits])
        if num_running or num_ended:
            kept = math.exp(-seconds / TURNOVER_MEMORY_SECONDS) if num_running else 1.0
            self._ends = self._ends * kept + num_ended
            self._slot_seconds = self._slot_seconds * kept + held

    def seconds_until(self, num_ends: float, num_running: int) -> float:
        """Seconds in which so many end while `num_running` run; infinite while none was seen to end."""
        if num_ends <= 0:
            return 0.0
        return num_ends * self._slot_seconds / (self._ends * num_running) if self._ends else math.inf


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
        self.factor = FIRST_MARGIN

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
