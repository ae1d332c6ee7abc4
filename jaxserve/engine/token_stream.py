"""Token events on their way from the engine to whoever reads them.

Owns what waits to be read, and that it stays small. Does not know threads, text or HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from jaxserve.errors import JaxserveError
from jaxserve.request import TokenEvent


class TokenStream:
    """Events of one or more requests, in the order in which they come. Made by `AsyncEngine.open`.

    A slow reader costs bounded memory: what it has not read merges into one event per request. Close it, or use it as a
    context manager: closing aborts what has not finished.

    Attributes:
        command: the number of the engine's command that added the requests.
    """

    def __init__(self, request_ids: Iterable[str], abort: Callable[[list[str]], None]) -> None:
        self._live = set(request_ids)
        self._abort = abort
        self._pending: dict[str, TokenEvent] = {}
        self._error: JaxserveError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.command = 0

    async def read(self) -> list[TokenEvent]:
        """The events since the last read, at most one per request; waits for one, and is empty once all have finished.

        Raises:
            EngineError: the engine failed under a request of this stream.
            RequestTimeout: a deadline has come.
            NotReady: the engine shut down before it finished.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._live:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._pending = list(self._pending.values()), {}
        return events

    def abort(self, request_id: str) -> None:
        """Abort one request, if it has not finished; no event of it comes any more."""
        if request_id in self._live:
            self._live.discard(request_id)
            self._pending.pop(request_id, None)
            self._abort([request_id])

    def close(self) -> None:
        """Abort what has not finished. Safe to call again."""
        live, self._live = self._live, set()
        self._pending.clear()
        if live:
            self._abort(sorted(live))
        self._wake()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, event: TokenEvent) -> None:
        """The engine's: an event has come."""
        before = self._pending.get(event.request_id)
        self._pending[event.request_id] = event if before is None else before.merged(event)
        if event.finish_reason is not None:
            self._live.discard(event.request_id)
        self._wake()

    def fail(self, request_id: str, error: JaxserveError) -> None:
        """The engine's: one request has ended with an error, which the reader gets after what came before."""
        self._live.discard(request_id)
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
