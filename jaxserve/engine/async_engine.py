"""The engine behind asyncio: one thread drives `EngineCore`, and coroutines read token events as streams.

Owns the thread, the queue of commands into it, the streams out of it, draining and shutting down. Does not know text, HTTP
or what a step does.

Commands (add, abort) cross in a list under a condition variable, on which the thread sleeps while there is no work. Events
cross once a step, all of its events in one callback on the loop. Everything but `_Worker` runs on the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from jaxserve.engine.core import EngineStats
from jaxserve.engine.token_stream import TokenStream
from jaxserve.errors import EngineError, InvalidRequest, JaxserveError, NotReady, RequestTimeout
from jaxserve.host.admission import Admission
from jaxserve.request import Adapter, FinishReason, Request, TokenEvent

logger = logging.getLogger(__name__)

MAX_UNDELIVERED = 64
"""Batches of events that may wait for the loop before the engine waits for it too; some hundred milliseconds of fast steps."""


class Core(Protocol):
    """What the thread drives: `engine.core.EngineCore`, or what stands for it."""

    @property
    def dead(self) -> bool: ...
    @property
    def last_error(self) -> Exception | None: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> TokenEvent | None: ...
    def step(self) -> list[TokenEvent]: ...
    def drop_cache(self) -> int: ...
    def forget_adapter(self, adapter: Adapter) -> int: ...
    def stats(self) -> EngineStats: ...


def _failure(event: TokenEvent) -> JaxserveError:
    if event.problem:
        return InvalidRequest(event.problem)
    return EngineError("the engine failed while it worked on this request")


def _timeout(event: TokenEvent) -> RequestTimeout:
    done = f"{event.num_output} output tokens were made" if event.num_output else "it had not begun"
    return RequestTimeout(f"the request's time ran out: {done}")


class AsyncEngine:
    """Runs `core` in a thread of its own between `start` and `close`.

    Args:
        core: nobody else may call it after `start`.
        admission: the queue in front of it; `open` admits, events are reported back.

    Attributes:
        failure: why the engine is dead, or None while it is not. A dead engine refuses everything.
    """

    def __init__(self, core: Core, admission: Admission) -> None:
        self._core = core
        self._worker = _Worker(core, self._deliver_threadsafe, self._end_threadsafe)
        self._admission = admission
        self._streams: dict[str, TokenStream] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self.failure: Exception | None = None

    @property
    def stats(self) -> EngineStats:
        """Counters of the core after its last step."""
        return self._worker.stats

    @property
    def seconds_in_step(self) -> float:
        """How long the thread has been in its current step, as seen now; 0 while it waits for work."""
        began = self._worker.step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def num_live(self) -> int:
        """Requests that have not finished."""
        return len(self._streams)

    def start(self) -> None:
        """Start the thread; events go to the running loop, which alone may use this object from now on."""
        assert self._loop is None, "started twice"
        self._loop = asyncio.get_running_loop()
        self._worker.start()

    def open(self, *requests: Request) -> TokenStream:
        """Admit all of `requests`, or none, and start them. Close the stream when done, or earlier to abort them.

        Raises:
            InvalidRequest, QueueFull: as `Admission.admit`.
            NotReady: draining or closed.
            EngineError: the engine is dead.
        """
        if self.failure is not None:
            raise EngineError(f"the engine is dead: {self.failure!r}")
        if self._closed or self._loop is None:
            raise NotReady("the engine does not run")
        self._admission.admit(*requests)
        stream = TokenStream([request.request_id for request in requests], self._abort)
        self._streams.update((request.request_id, stream) for request in requests)
        self._idle.clear()
        stream.command = self._worker.send(add=requests)
        return stream

    async def generate(self, *requests: Request) -> AsyncGenerator[TokenEvent]:
        """Events of `requests` one by one; leaving the generator early (`aclose`, cancellation) aborts them.

        Raises:
            What `open` and `TokenStream.read` raise.
        """
        with self.open(*requests) as stream:
            while events := await stream.read():
                for event in events:
                    yield event

    async def drop_cache(self) -> int:
        """Forget every prefix that no running request uses and that is not pinned; the pages that held one.

        Raises:
            What `between_steps` raises.
        """
        return await self.between_steps(self._core.drop_cache)

    async def forget_adapter(self, adapter: Adapter) -> int:
        """Forget every prefix of an adapter that no live request has; the pages that held one.

        Raises:
            What `between_steps` raises.
        """
        return await self.between_steps(partial(self._core.forget_adapter, adapter))

    async def between_steps[T](self, call: Callable[[], T]) -> T:
        """What `call` gives, called by the thread after the commands so far and before its next step. It must be short.

        Raises:
            NotReady: closed.
            EngineError: the engine is dead, or dies first.
            What `call` raises.
        """
        if self.failure is not None:
            raise EngineError(f"the engine is dead: {self.failure!r}")
        if self._closed or self._loop is None:
            raise NotReady("the engine does not run")
        done: Future[T] = self._worker.call(call)
        return await asyncio.wrap_future(done)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, wait up to `seconds` for those that run, and abort the rest, whose streams raise NotReady."""
        self._admission.drain()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        if self._streams:
            logger.warning("draining took longer than %g s: %d requests are aborted", seconds, len(self._streams))
            self._abort_all()

    async def close(self) -> None:
        """Abort everything and end the thread. Safe to call again."""
        self._closed = True
        self._abort_all()
        if self._loop is None:
            return
        self._worker.stop()
        await self._ended.wait()
        self._worker.join()

    def _abort_all(self) -> None:
        error = NotReady("the server shut down before the request was finished")
        live = list(self._streams.items())
        self._abort([request_id for request_id, _ in live])
        for request_id, stream in live:
            stream.fail(request_id, error)

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._forget(request_id)
        if self.failure is None:
            self._worker.send(abort=request_ids)

    def _forget(self, request_id: str) -> TokenStream | None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._admission.forget(request_id)
            if not self._streams:
                self._idle.set()
        return stream

    def _deliver_threadsafe(self, batch: _Batch) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, batch)

    def _deliver(self, batch: _Batch) -> None:
        self._worker.note_delivered()
        found = [(event, self._streams.get(event.request_id)) for event in batch.events]
        # An event that was under way when its request was aborted has no stream, or a newer one that took over the id.
        known = [(event, stream) for event, stream in found if stream is not None and stream.command <= batch.num_commands]
        self._admission.observe([event for event, _ in known])
        for event, stream in known:
            if event.finish_reason is not None:
                self._forget(event.request_id)
            if event.finish_reason is FinishReason.ERROR:
                stream.fail(event.request_id, _failure(event))
            elif event.finish_reason is FinishReason.TIMEOUT:
                stream.fail(event.request_id, _timeout(event))
            else:
                stream.put(event)
        for request_id, error in batch.refusals:
            if (refused := self._forget(request_id)) is not None:
                refused.fail(request_id, error)

    def _end_threadsafe(self, failure: Exception | None) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._end, failure)

    def _end(self, failure: Exception | None) -> None:
        self.failure = failure
        for request_id in list(self._streams):
            if (stream := self._forget(request_id)) is not None:
                stream.fail(request_id, EngineError(f"the engine died: {failure!r}"))
        self._ended.set()


@dataclass(frozen=True, slots=True)
class _Batch:
    """What one turn of the thread sends to the loop.

    Attributes:
        num_commands: commands that the thread had carried out before these events came about.
    """

    events: list[TokenEvent]
    refusals: list[tuple[str, JaxserveError]]
    num_commands: int


def _give_up(done: Future[Any]) -> None:
    """Tell whoever still waits for a call that it will not be made."""
    if not done.done() and done.set_running_or_notify_cancel():
        done.set_exception(EngineError("the engine ended first"))


class _Worker:
    """The thread and its inbox. Only `send`, `call`, `stop` and `note_delivered` may be called from other threads.

    It runs ahead of the loop by `MAX_UNDELIVERED` batches at most: a loop that falls behind a fast engine would find ever more
    events at each turn, and its readers none.
    """

    def __init__(self, core: Core, deliver: Callable[[_Batch], None], end: Callable[[Exception | None], None]) -> None:
        self._core = core
        self._deliver = deliver
        self._end = end
        self._changed = threading.Condition()
        self._room = threading.Semaphore(MAX_UNDELIVERED)
        self._inbox: list[tuple[tuple[Request, ...], list[str]]] = []
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._taken: list[tuple[Callable[[], Any], Future[Any]]] = []  # of this turn
        self._num_sent = 0
        self._stopping = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self.stats = core.stats()
        self.step_began: float | None = None

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def send(self, *, add: tuple[Request, ...] = (), abort: list[str] | None = None) -> int:
        """Hand over a command; its number, from 1."""
        with self._changed:
            self._inbox.append((add, abort or []))
            self._num_sent += 1
            self._changed.notify()
            return self._num_sent

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Have the thread call `function` after the commands so far and before its next step."""
        done: Future[Any] = Future()
        with self._changed:
            if self._ended:
                done.set_exception(EngineError("the engine has ended"))
                return done
            self._calls.append((function, done))
            self._changed.notify()
        return done

    def note_delivered(self) -> None:
        """The loop has taken a batch."""
        self._room.release()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def _run(self) -> None:
        failure: Exception | None = None
        try:
            while self._turn():
                pass
        except Exception as error:
            logger.critical("the engine thread died", exc_info=error)
            failure = error
        except BaseException as error:
            failure = EngineError(f"{type(error).__name__}: {error}")
            raise
        finally:
            self.step_began = None
            with self._changed:
                self._ended = True
            for _, done in (*self._taken, *self._calls):
                _give_up(done)
            # The loop may be gone, if its owner did not close the engine; then there is nobody to tell.
            with contextlib.suppress(RuntimeError):
                self._end(failure)

    def _turn(self) -> bool:
        """Commands, then one step; whether to go on."""
        core = self._core
        self.step_began = None
        with self._changed:
            while not (self._inbox or self._calls or self._stopping or core.has_work):
                self._changed.wait()
            inbox, self._inbox = self._inbox, []
            self._taken, self._calls = self._calls, []
            num_commands, stopping = self._num_sent, self._stopping
        self.step_began = time.monotonic()
        refusals = self._apply(inbox)
        for function, done in self._taken:
            if done.set_running_or_notify_cancel():
                self._carry_out(function, done)
        self._taken = []
        if stopping and not core.has_work:
            self.stats = core.stats()
            return False
        events = core.step() if core.has_work else []
        self.stats = core.stats()
        if events or refusals:
            self.step_began = None
            self._room.acquire()
            self._deliver(_Batch(events, refusals, num_commands))
        if core.dead:
            raise EngineError(f"it gave up after failing too often: {core.last_error!r}") from core.last_error
        return True

    def _carry_out(self, function: Callable[[], Any], done: Future[Any]) -> None:
        try:
            result = function()
        except Exception as error:
            done.set_exception(error)
            return
        self.stats = self._core.stats()
        done.set_result(result)

    def _apply(self, inbox: list[tuple[tuple[Request, ...], list[str]]]) -> list[tuple[str, JaxserveError]]:
        refusals = []
        for requests, aborted in inbox:
            for request_id in aborted:
                self._core.abort(request_id)
            for request in requests:
                try:
                    self._core.add(request)
                except JaxserveError as error:
                    refusals.append((request.request_id, error))
        return refusals
