"""Who may enter: requests that can never be served are refused for good, others while there is no room or no time for them.

Owns the limits of one request (pure functions) and the decision about each that comes (`Admission`). Does not know slots,
pages in use, threads or HTTP.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from jaxserve.errors import ContextExceeded, InvalidRequest, NotReady, QueueFull
from jaxserve.host.backlog import Backlog, Entry, InService
from jaxserve.host.forecast import FirstTokens
from jaxserve.host.overload import FinishRate, ShedShare
from jaxserve.plan import RunnerLimits
from jaxserve.request import BATCH_PRIORITY, FinishReason, Request, TokenEvent, check_token_ids

MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0

QUEUE_POOLS = 4
"""Prompt tokens that may wait where no number is given: as many as so many KV pools hold."""

BATCH_QUEUE_SHARE = 0.75
"""The part of the queue that requests of batch priority may fill; the rest is kept for others."""

TENANT_QUEUE_FACTOR = 2.0
"""A tenant among others may have so many times as much waiting as is still free (dynamic thresholds, Choudhury and Hahne,
1998): two thirds of the queue when it is alone, less when more of them crowd it, and always room for the next."""


def validate(request: Request, limits: RunnerLimits) -> None:
    """Check that `request` could be served by an idle engine with `limits`.

    Raises:
        InvalidRequest: naming the field and the numbers, when it never could.
    """
    prompt, params = request.prompt, request.params
    if not prompt:
        raise InvalidRequest("prompt must have at least 1 token, found 0", param="prompt")
    # First, since what follows looks at each token, of which there may be a million.
    if params.max_tokens == 0:
        _check_fits(len(prompt), "no output", 0, limits, param="prompt")
    else:
        _check_fits(len(prompt), "1 output token", 1, limits, param="prompt")
    for token_id in (min(prompt), max(prompt)):
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequest(
                f"prompt must have token ids from 0 to {limits.vocab_size - 1}, found {token_id}", param="prompt"
            )
    check_token_ids(params, limits.vocab_size)
    for name in ("max_tokens", "min_tokens"):
        value = getattr(params, name)
        if value:
            _check_fits(len(prompt), f"{name} {value}", value, limits, param=name)


def _check_fits(num_prompt: int, output: str, num_output: int, limits: RunnerLimits, *, param: str) -> None:
    if num_prompt + num_output > limits.max_context:
        message = f"prompt {num_prompt} + {output} > context {limits.max_context}"
        raise ContextExceeded(message, max_context=limits.max_context, param=param)
    # The last output token is never an input, so it needs no place in a page.
    num_pages = limits.pages_for(num_prompt + max(1, num_output) - 1)
    if num_pages > limits.num_pages:
        raise ContextExceeded(
            f"prompt {num_prompt} + {output} need {num_pages} pages of {limits.page_size} tokens "
            f"> the pool's {limits.num_pages}",
            max_context=limits.max_tokens,
            param=param,
        )


def output_limit(request: Request, limits: RunnerLimits) -> int:
    """Output tokens that a valid `request` may have: `max_tokens`, or else what context and pool leave it."""
    if request.params.max_tokens is not None:
        return request.params.max_tokens
    return limits.max_tokens - len(request.prompt)


def cap_output(request: Request, limits: RunnerLimits, max_output_tokens: int) -> Request:
    """`request` with no more output than `max_output_tokens` (0 for no cap), where it does not say how much it wants.

    Raises:
        InvalidRequest: it says that it wants more.
    """
    params = request.params
    for name in ("max_tokens", "min_tokens"):
        value = getattr(params, name)
        if max_output_tokens and value is not None and value > max_output_tokens:
            raise InvalidRequest(
                f"{name} must be at most {max_output_tokens}, this server's limit for one answer, found {value}", param=name
            )
    if not max_output_tokens or params.max_tokens is not None or output_limit(request, limits) <= max_output_tokens:
        return request
    return replace(request, params=replace(params, max_tokens=max_output_tokens))


class Admission:
    """The bounded queue in front of the engine: counts what waits, refuses what is too much or would be too late.

    A request waits from `admit` until its first token, and its weight is its prompt tokens. The caller that receives
    requests calls `admit` (and `forget` for one that it then does not hand on); the one that sees the engine's events
    calls `observe`, once for all events of a step. These may be two threads: a lock guards the counters.

    With a target for the time to the first token, a request is refused when its own would miss it, as `forecast` foresees it.
    Two are let in all the same: one of batch priority, for which no time is kept, and one that nothing goes before, since
    waiting would not help it.

    Args:
        max_queue_requests, max_queue_tokens: what may wait; 0 tokens for four times what the KV pool holds.
        slo_ttft_seconds: the target for the time to the first token; 0 for none.
        num_tenants: how many share the queue; where there are several, none may fill it alone.
        clock: seconds, monotonic.

    Attributes:
        max_queue_tokens: prompt tokens that may wait.
        num_admitted: requests let in so far.
        refused: requests refused so far for lack of room or time, by the error's code.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        *,
        max_queue_requests: int,
        max_queue_tokens: int,
        slo_ttft_seconds: float = 0.0,
        num_tenants: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._max_queue_requests = max_queue_requests
        self.max_queue_tokens = max_queue_tokens or QUEUE_POOLS * limits.pool_tokens
        self._slo = slo_ttft_seconds
        self._num_tenants = num_tenants
        self._clock = clock
        self._lock = threading.Lock()
        self._draining = False
        self._backlog = Backlog()
        self._in_service = InService()
        self._finish_rate = FinishRate()
        self._first_tokens = FirstTokens(limits, slo_ttft_seconds, self._backlog, self._in_service)
        self._shed = ShedShare()
        self.num_admitted = 0
        self.refused: Counter[str] = Counter()

    @property
    def queued_requests(self) -> int:
        """Requests that wait for their first token."""
        return len(self._backlog)

    @property
    def queued_tokens(self) -> int:
        """Their prompt tokens."""
        return self._backlog.num_tokens

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def drain_rate(self) -> float | None:
        """Prompt tokens a second that leave the queue while there is a backlog; None while that is unknown."""
        return self._first_tokens.drain_rate.tokens_per_second

    @property
    def margin(self) -> float:
        """The factor by which forecasts of the time to the first token are stretched."""
        return self._first_tokens.margin.factor

    @property
    def shed_share(self) -> float:
        """The share of requests that were refused for lack of room or time over the last minute."""
        return self._shed.share(self._clock())

    def drain(self) -> None:
        """Refuse every request from now on."""
        self._draining = True

    def admit(self, *requests: Request) -> None:
        """Let all of `requests`, which are of one tenant and priority, in, or none.

        Raises:
            NotReady: draining.
            InvalidRequest: one could never be served, its id is live, or together they exceed an empty queue.
            QueueFull: there is no room or no time; says when to retry.
        """
        if self._draining:
            raise NotReady("the server is draining and takes no new requests; retry elsewhere")
        for request in requests:
            validate(request, self._limits)
        num_tokens = sum([len(request.prompt) for request in requests])
        self._check_fits_empty_queue(requests, num_tokens)
        with self._lock:
            self._check_ids(requests)
            try:
                self._check_room(requests[0], len(requests), num_tokens)
                forecast = self._check_time(requests[0], num_tokens)
            except QueueFull as error:
                self.refused[error.code] += len(requests)
                self._shed.observe(self._clock(), len(requests), len(requests))
                raise
            self._let_in(requests, forecast)

    def _check_fits_empty_queue(self, requests: tuple[Request, ...], num_tokens: int) -> None:
        max_requests, max_tokens = self._room_for(requests[0])
        if len(requests) > max_requests or num_tokens > max_tokens:
            raise InvalidRequest(
                f"{len(requests)} requests with {num_tokens} prompt tokens at once exceed the whole queue, which holds "
                f"{max_requests} requests and {max_tokens} prompt tokens",
                param="prompt",
            )

    def _room_for(self, request: Request) -> tuple[int, int]:
        """Requests and prompt tokens that may wait, of those at the request's priority and all others together."""
        if request.priority < BATCH_PRIORITY:
            return self._max_queue_requests, self.max_queue_tokens
        return max(1, int(self._max_queue_requests * BATCH_QUEUE_SHARE)), int(self.max_queue_tokens * BATCH_QUEUE_SHARE)

    def _check_ids(self, requests: tuple[Request, ...]) -> None:
        ids = [request.request_id for request in requests]
        live = [i for i in ids if i in self._backlog or i in self._in_service]
        if live or len(set(ids)) < len(ids):
            raise InvalidRequest(f"request_id must be unique among live requests, found {live or ids}")

    def _let_in(self, requests: tuple[Request, ...], forecast: float | None) -> None:
        now = self._clock()
        if not self._backlog and not self._in_service:
            self._finish_rate.begin(now)
        for request in requests:
            entry = Entry(
                priority=request.priority,
                tenant=request.tenant,
                weight=request.weight,
                num_tokens=len(request.prompt),
                since=now,
                forecast=forecast,
            )
            self._backlog.add(request.request_id, entry)
        self.num_admitted += len(requests)
        self._shed.observe(now, len(requests), 0)

    def _check_room(self, request: Request, num_requests: int, num_tokens: int) -> None:
        queued_requests, queued_tokens = len(self._backlog), self._backlog.num_tokens
        max_requests, max_tokens = self._room_for(request)
        surplus_requests = queued_requests + num_requests - max_requests
        surplus_tokens = queued_tokens + num_tokens - max_tokens
        came = f"{num_requests} and {num_tokens} came"
        if surplus_requests > 0 or surplus_tokens > 0:
            raise QueueFull(
                f"the queue is full: {queued_requests} requests and {queued_tokens} prompt tokens wait, "
                f"at most {max_requests} and {max_tokens} may; {came}",
                retry_after=self._seconds_to_drain(surplus_requests, surplus_tokens),
            )
        if self._num_tenants < 2:
            return
        own_requests, own_tokens = self._backlog.of_tenant(request.tenant)
        max_requests = int(TENANT_QUEUE_FACTOR * (max_requests - queued_requests))
        max_tokens = int(TENANT_QUEUE_FACTOR * (max_tokens - queued_tokens))
        surplus_requests = own_requests + num_requests - max_requests
        surplus_tokens = own_tokens + num_tokens - max_tokens
        if surplus_requests > 0 or surplus_tokens > 0:
            raise QueueFull(
                f"this API key's share of the queue is full: {own_requests} requests and {own_tokens} prompt tokens of it "
                f"wait, at most {max_requests} and {max_tokens} may now; {came}",
                retry_after=self._seconds_to_drain(surplus_requests, surplus_tokens),
                code="tenant_share",
            )

    def _check_time(self, request: Request, num_tokens: int) -> float | None:
        """The forecast of the time to the first token, where there is a target for it."""
        if not self._slo or request.priority >= BATCH_PRIORITY:
            return None
        forecast = self._first_tokens.forecast(request, num_tokens, self._clock())
        if forecast.tokens_ahead and forecast.seconds > self._slo:
            raise QueueFull(
                f"the first token would come {forecast}, and this server holds itself to {self._slo:g} s: "
                f"{forecast.tokens_ahead:.0f} prompt tokens go before",
                retry_after=_whole(forecast.seconds - self._slo),
                code="too_late",
            )
        return forecast.seconds

    def _seconds_to_drain(self, num_requests: int, num_tokens: int) -> float:
        """Seconds in which so many requests and prompt tokens leave, at the rate at which requests finished lately."""
        return _whole(self._finish_rate.seconds_until(self._clock(), num_requests, num_tokens))

    def observe(self, events: Iterable[TokenEvent]) -> None:
        """Take note of a step's events: a first token ends the wait, a finish counts towards the rate."""
        with self._lock:
            now = self._clock()
            started = []
            num_ended = 0
            num_running = len(self._in_service)
            for event in events:
                entry = self._backlog.remove(event.request_id)
                if entry is not None and event.tokens:
                    started.append(entry)
                    self._in_service.start(event, entry)
                else:
                    self._in_service.add_tokens(event)
                if event.finish_reason is not None:
                    num_ended += self._end(event, now)
            self._first_tokens.observe(now, started, num_running=num_running, num_ended=num_ended)

    def _end(self, event: TokenEvent, now: float) -> bool:
        """Whether the request, which has finished, had run."""
        running = self._in_service.end(event.request_id)
        if running is not None and event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._finish_rate.observe(now, running.num_prompt)
        return running is not None

    def forget(self, request_id: str) -> None:
        """Undo `admit` for a request of which the engine will give no event; others are ignored."""
        with self._lock:
            self._backlog.remove(request_id)
            num_running = len(self._in_service)
            if self._in_service.end(request_id) is not None:
                self._first_tokens.observe_abort(self._clock(), num_running)

    def check_integrity(self) -> None:
        """Assert that the sums are those of their parts."""
        with self._lock:
            self._backlog.check_integrity()
            self._in_service.check_integrity()
            self._finish_rate.check_integrity()
            ids = self._backlog.ids()
            assert not any(request_id in self._in_service for request_id in ids), "a request both waits and runs"


def _whole(seconds: float) -> float:
    """Seconds for a client to wait, bounded. When nobody knows, a retry is worth it soon."""
    if math.isinf(seconds):
        return MIN_RETRY_SECONDS
    return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, float(math.ceil(seconds))))
