"""Who may enter: requests that can never be served are refused for good, others while the queue is full or closed.

Owns the limits of one request (pure functions) and the bounded queue's counters (`Admission`). Does not know slots,
pages in use, threads or HTTP.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from jaxserve.errors import InvalidRequest, NotReady, QueueFull
from jaxserve.plan import RunnerLimits
from jaxserve.request import FinishReason, Request, TokenEvent, check_token_ids

RATE_WINDOW_SECONDS = 30.0
MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0


def validate(request: Request, limits: RunnerLimits) -> None:
    """Check that `request` could be served by an idle engine with `limits`.

    Raises:
        InvalidRequest: naming the field and the numbers, when it never could.
    """
    prompt, params = request.prompt, request.params
    if not prompt:
        raise InvalidRequest("prompt must have at least 1 token, found 0", param="prompt")
    for token_id in (min(prompt), max(prompt)):
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequest(
                f"prompt must have token ids from 0 to {limits.vocab_size - 1}, found {token_id}", param="prompt"
            )
    check_token_ids(params, limits.vocab_size)
    _check_fits(len(prompt), "1 output token", 1, limits, param="prompt")
    for name in ("max_tokens", "min_tokens"):
        value = getattr(params, name)
        if value:
            _check_fits(len(prompt), f"{name} {value}", value, limits, param=name)


def _check_fits(num_prompt: int, output: str, num_output: int, limits: RunnerLimits, *, param: str) -> None:
    if num_prompt + num_output > limits.max_context:
        raise InvalidRequest(f"prompt {num_prompt} + {output} > context {limits.max_context}", param=param)
    # The last output token is never an input, so it needs no place in a page.
    num_pages = -(-(num_prompt + num_output - 1) // limits.page_size)
    if num_pages > limits.num_pages:
        raise InvalidRequest(
            f"prompt {num_prompt} + {output} need {num_pages} pages of {limits.page_size} tokens "
            f"> the pool's {limits.num_pages}",
            param=param,
        )


def output_limit(request: Request, limits: RunnerLimits) -> int:
    """Output tokens that a valid `request` may have: `max_tokens`, or else what context and pool leave it."""
    if request.params.max_tokens is not None:
        return request.params.max_tokens
    return min(limits.max_context, limits.num_pages * limits.page_size + 1) - len(request.prompt)


class Admission:
    """The bounded queue in front of the engine: counts what waits, refuses what is too much.

    A request waits from `admit` until its first token, and its weight is its prompt tokens. The caller that receives
    requests calls `admit` (and `forget` for one that it then does not hand on); the one that sees the engine's events
    calls `observe`. These may be two threads: a lock guards the counters.

    Args:
        max_queue_requests, max_queue_tokens: what may wait.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        *,
        max_queue_requests: int,
        max_queue_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._max_queue_requests = max_queue_requests
        self._max_queue_tokens = max_queue_tokens
        self._clock = clock
        self._lock = threading.Lock()
        self._draining = False
        self._queued: dict[str, int] = {}
        self._queued_tokens = 0
        self._started: dict[str, int] = {}
        self._finished: deque[tuple[float, int]] = deque()
        self._finished_tokens = 0
        self._busy_since = 0.0

    @property
    def queued_requests(self) -> int:
        """Requests that wait for their first token."""
        return len(self._queued)

    @property
    def queued_tokens(self) -> int:
        """Their prompt tokens."""
        return self._queued_tokens

    @property
    def draining(self) -> bool:
        return self._draining

    def drain(self) -> None:
        """Refuse every request from now on."""
        self._draining = True

    def admit(self, *requests: Request) -> None:
        """Let all of `requests` in, or none.

        Raises:
            NotReady: draining.
            InvalidRequest: one could never be served, its id is live, or together they exceed an empty queue.
            QueueFull: the queue is full; says when to retry.
        """
        if self._draining:
            raise NotReady("the server is draining and takes no new requests; retry elsewhere")
        for request in requests:
            validate(request, self._limits)
        weights = {request.request_id: len(request.prompt) for request in requests}
        num_tokens = sum(weights.values())
        if len(requests) > self._max_queue_requests or num_tokens > self._max_queue_tokens:
            raise InvalidRequest(
                f"{len(requests)} requests with {num_tokens} prompt tokens at once exceed the whole queue, which holds "
                f"{self._max_queue_requests} requests and {self._max_queue_tokens} prompt tokens",
                param="prompt",
            )
        with self._lock:
            live = [i for i in weights if i in self._queued or i in self._started]
            if live or len(weights) < len(requests):
                raise InvalidRequest(f"request_id must be unique among live requests, found {live or list(weights)}")
            self._check_room(len(requests), num_tokens)
            if not self._queued and not self._started:
                self._busy_since = self._clock()
            self._queued.update(weights)
            self._queued_tokens += num_tokens

    def _check_room(self, num_requests: int, num_tokens: int) -> None:
        surplus_requests = len(self._queued) + num_requests - self._max_queue_requests
        surplus_tokens = self._queued_tokens + num_tokens - self._max_queue_tokens
        if surplus_requests <= 0 and surplus_tokens <= 0:
            return
        raise QueueFull(
            f"the queue is full: {len(self._queued)} requests and {self._queued_tokens} prompt tokens wait, "
            f"at most {self._max_queue_requests} and {self._max_queue_tokens} may; {num_requests} and {num_tokens} came",
            retry_after=self._seconds_to_drain(surplus_requests, surplus_tokens),
        )

    def _seconds_to_drain(self, num_requests: int, num_tokens: int) -> float:
        """Seconds in which so many requests and prompt tokens leave, at the rate at which requests finished lately."""
        now = self._clock()
        self._drop_old(now)
        if not self._finished:
            return MIN_RETRY_SECONDS
        since = min(self._busy_since, self._finished[0][0])
        window = max(1.0, min(RATE_WINDOW_SECONDS, now - since))
        seconds = window * max(num_requests / len(self._finished), num_tokens / self._finished_tokens)
        return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, float(math.ceil(seconds))))

    def _drop_old(self, now: float) -> None:
        while self._finished and self._finished[0][0] <= now - RATE_WINDOW_SECONDS:
            self._finished_tokens -= self._finished.popleft()[1]

    def observe(self, events: Iterable[TokenEvent]) -> None:
        """Take note of what the engine gave: a first token ends the wait, a finish counts towards the rate."""
        with self._lock:
            for event in events:
                self._start(event.request_id)
                if event.finish_reason is not None:
                    weight = self._started.pop(event.request_id, None)
                    if weight is not None and event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                        self._count_finished(weight)

    def _start(self, request_id: str) -> None:
        weight = self._queued.pop(request_id, None)
        if weight is not None:
            self._queued_tokens -= weight
            self._started[request_id] = weight

    def _count_finished(self, weight: int) -> None:
        now = self._clock()
        self._drop_old(now)
        self._finished.append((now, weight))
        self._finished_tokens += weight

    def forget(self, request_id: str) -> None:
        """Undo `admit` for a request of which the engine will give no event; others are ignored."""
        with self._lock:
            self._start(request_id)
            self._started.pop(request_id, None)

    def check_integrity(self) -> None:
        """Assert that the sums are those of their parts."""
        with self._lock:
            assert self._queued_tokens == sum(self._queued.values()), "queued tokens do not add up"
            assert self._finished_tokens == sum(weight for _, weight in self._finished), "finished tokens do not add up"
            assert not self._queued.keys() & self._started.keys(), "a request both waits and runs"
