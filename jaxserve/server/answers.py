"""How one call is answered over a connection: in one piece or as server-sent events, to readers that leave or stall.

Does not know what bodies mean (`openai`), what answers look like (a `form.Form`), where text comes from (a `joining.Source`)
or routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
from aiohttp import web

from jaxserve.errors import JaxserveError, RequestTimeout
from jaxserve.server import wire
from jaxserve.server.form import Events, Form
from jaxserve.server.joining import Begun
from jaxserve.server.middlewares import request_id_of

logger = logging.getLogger(__name__)

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


PING = b": keep-alive\n\n"


@dataclass
class Outcome:
    """How a request ended, as it is counted."""

    name: str = "error"


class Answer:
    """Writes one call's answer to one client."""

    def __init__(self, request: web.Request, begun: Begun, form: Form, *, ping_seconds: float) -> None:
        self._request = request
        self._begun = begun
        self._form = form
        self._ping_seconds = ping_seconds
        self._last_write = 0.0

    async def whole(self) -> web.Response:
        """Wait for every choice, then answer at once."""
        body = msgspec.json.encode(await self._form.whole(self._begun))
        return web.Response(body=body, content_type="application/json", charset="utf-8")

    async def stream(self, outcome: Outcome) -> web.StreamResponse:
        """Answer with server-sent events as text comes; an error after the headers is an event too.

        A client that leaves ends this by cancellation or, where a write notices first, here.
        """
        response = web.StreamResponse(headers=STREAM_HEADERS)
        await response.prepare(self._request)
        try:
            with self._pinging(response):
                await self._write_events(response, self._form.events(self._begun), outcome)
        except asyncio.CancelledError:
            if getattr(self._request.protocol, "stalled", False):
                outcome.name = "stalled"
            raise
        except ConnectionError:
            outcome.name = "disconnected"
        return response

    async def _write_events(self, response: web.StreamResponse, events: Events, outcome: Outcome) -> None:
        """Write the stream to its end, which is another if the engine, or we, failed, or time ran out."""
        try:
            await self._write(response, events.opening())
            while deltas := await self._begun.source.read():
                if self._begun.call.echoes:  # likeliest tokens at each of thousands of places would hold up every stream
                    await self._write(response, await asyncio.to_thread(events.deltas, deltas))
                else:
                    await self._write(response, events.deltas(deltas))
            ending = events.ending()
        except ConnectionError:
            raise
        except JaxserveError as error:
            outcome.name = "timeout" if isinstance(error, RequestTimeout) else "error"
            ending = events.failure(error)
        except Exception:
            request_id = request_id_of(self._request)
            logger.exception("a stream failed (request %s)", request_id)
            outcome.name = "error"
            ending = events.failure(wire.internal_error(request_id))
        await self._write(response, ending)

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        """Write, which waits only while the client reads more slowly than we write; `connections` drops it if it stalls."""
        if data:
            self._last_write = time.monotonic()
            await response.write(data)

    @contextmanager
    def _pinging(self, response: web.StreamResponse) -> Iterator[None]:
        """Have the stream say something, which clients skip, where it would be silent for long: proxies give such up."""
        if not self._ping_seconds:
            yield
            return
        task = asyncio.create_task(self._ping(response))
        try:
            yield
        finally:
            task.cancel()

    async def _ping(self, response: web.StreamResponse) -> None:
        self._last_write = time.monotonic()
        while True:
            silence = time.monotonic() - self._last_write
            if silence < self._ping_seconds:
                await asyncio.sleep(self._ping_seconds - silence)
            elif self._request.protocol.writing_paused:  # it has not read what there is
                await asyncio.sleep(self._ping_seconds)
            else:
                with contextlib.suppress(ConnectionError):
                    await self._write(response, PING)
