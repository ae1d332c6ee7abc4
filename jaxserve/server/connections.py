"""Connections: how long a client may take to say or read something, how many there may be, and what malformed HTTP gets.

Owns aiohttp's connection as we run it. Does not know routes, bodies or what is served.

A slow client costs a socket and a timer. It has `head_seconds` for a request's line and headers, all of them; bodies are timed
where they are read (`limits`). Whatever the kernel does not take of an answer at once has the stall timer on it, also once the
connection is closed, so nobody keeps a buffer by not reading it: transports are told to call anything that is left a pause.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.typedefs import Handler

from jaxserve.server.middlewares import REQUEST_ID_HEADER, SERVER_NAME, new_request_id
from jaxserve.server.wire import error_body

logger = logging.getLogger(__name__)

MAX_HEADERS = 100
LAST_WORDS_SECONDS = 1.0
"""For how long a client that was dropped may still read why."""

STALL_CHECKS = 2
"""How often a reader is looked at before it is dropped: each time less has to be unread than the time before."""

LINGER_SECONDS = 5.0
"""How long we go on reading a body that was refused, so that the client comes to read why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What one connection may take.

    Attributes:
        max_connections: at once. One more takes the place of the one that has been idle for longest; where none is, it is
            answered 503 and closed.
        max_line_bytes: of the request line, and of each header field.
        head_seconds: for a new connection's or a begun request's line and headers.
        idle_seconds: between two requests.
        stall_seconds: without reading anything of what is there to be read.
    """

    max_connections: int
    max_line_bytes: int
    head_seconds: float
    idle_seconds: float
    stall_seconds: float


class Connections:
    """Makes connections, for `loop.create_server`, and counts them.

    Args:
        server: the application's, of an `AppRunner` that is set up.
        on_drop: called with a reason for each connection that was ended for what its client did: "too_many", "slow_head",
            "malformed", "stalled" or "idle" (others wanted its place).

    Attributes:
        count: of connections that are open.
        idle: those on which no request is handled, longest first.
    """

    def __init__(self, server: web.Server, limits: ConnectionLimits, on_drop: Callable[[str], None]) -> None:
        self._server = server
        self.limits = limits
        self.on_drop = on_drop
        self.count = 0
        self.idle: dict[Connection, None] = {}

    def __call__(self) -> Connection:
        return Connection(self, self._server)

    def make_room(self) -> bool:
        """End the connection that has been idle for longest; whether there is one."""
        return any(connection.end_if_idle() for connection in list(self.idle))


class Connection(web.RequestHandler):
    """One connection.

    Attributes:
        stalled: whether it was dropped because its client read nothing.
    """

    __slots__ = (
        "_busy",
        "_counted",
        "_head_timer",
        "_owner",
        "_quiet_checks",
        "_refused",
        "_stall_timer",
        "_unread",
        "_wire",
        "stalled",
    )

    def __init__(self, owner: Connections, server: web.Server) -> None:
        limits = owner.limits
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=limits.idle_seconds,
            lingering_time=LINGER_SECONDS,
            max_line_size=limits.max_line_bytes,
            max_field_size=limits.max_line_bytes,
            max_headers=MAX_HEADERS,
            auto_decompress=False,  # a few kilobytes can hold gigabytes; bodies that are compressed are refused
            access_log=None,  # type: ignore[arg-type]
        )
        self._owner = owner
        self._wire: asyncio.Transport | None = None
        self._busy = self._refused = self._counted = False
        self._head_timer: asyncio.Handle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unread = self._quiet_checks = 0
        self.stalled = False

    # --- its beginning and end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        self._wire = transport
        self._counted = True
        self._owner.count += 1
        if self._owner.count > self._owner.limits.max_connections and not self._owner.make_room():
            self._refused = True
            self._owner.on_drop("too_many")
            transport.write(_last_words(503, "too_many_connections", "the server has as many connections as it may have"))
            transport.close()
            return
        self._owner.idle[self] = None
        transport.set_write_buffer_limits(high=0)
        self._start_head_timer()
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._owner.count -= self._counted
        self._counted = False
        self._owner.idle.pop(self, None)
        self._stop_head_timer()
        self._stop_stall_timer()
        self._wire = None
        super().connection_lost(exc)

    # --- slow senders

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if not self._busy and self._head_timer is None:
            self._start_head_timer()

    def begin_request(self) -> None:
        """Its head is complete, and a handler runs."""
        self._busy = True
        self._owner.idle.pop(self, None)
        self._stop_head_timer()

    def end_request(self) -> None:
        """The handler is done."""
        self._busy = False
        if self._counted:
            self._owner.idle[self] = None

    def end_if_idle(self) -> bool:
        """Close the connection for the sake of others, unless its client still has to read something."""
        if self._wire is None or self._wire.get_write_buffer_size():
            return False
        self._owner.idle.pop(self, None)
        self._owner.on_drop("idle")
        self.force_close()
        return True

    def _start_head_timer(self) -> None:
        self._head_timer = self._loop.call_later(self._owner.limits.head_seconds, self._check_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _check_head(self) -> None:
        # Where it was we who were slow, the request may be here already, and its handler is about to run.
        self._head_timer = self._loop.call_soon(self._drop_slow_head)

    def _drop_slow_head(self) -> None:
        self._head_timer = None
        if self.transport is None:
            return
        self._owner.on_drop("slow_head")
        seconds = self._owner.limits.head_seconds
        self.transport.write(_last_words(408, "timeout", f"the request's line and headers did not come within {seconds:g} s"))
        # Closed at once, its next byte would be answered with a reset, which takes what was written with it.
        self._refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._head_timer = self._loop.call_later(LAST_WORDS_SECONDS, self.force_close)

    # --- slow readers

    def pause_writing(self) -> None:
        super().pause_writing()
        self._quiet_checks = 0
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall_timer()

    def _watch_reader(self) -> None:
        if self._wire is not None:
            self._unread = self._wire.get_write_buffer_size()
            self._stall_timer = self._loop.call_later(self._owner.limits.stall_seconds / STALL_CHECKS, self._check_reader)

    def _check_reader(self) -> None:
        if self._wire is None:
            return
        # What is there to be read may also have grown since the last check; by the next, that is over.
        self._quiet_checks = 0 if self._wire.get_write_buffer_size() < self._unread else self._quiet_checks + 1
        if self._quiet_checks < STALL_CHECKS:
            self._watch_reader()
            return
        self.stalled = True
        self._owner.on_drop("stalled")
        self._wire.abort()

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    # --- what is not HTTP

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to malformed HTTP, or to what went wrong outside of the application."""
        self.begin_request()
        if isinstance(exc, HttpProcessingError):
            self._owner.on_drop("malformed")
            logger.debug("malformed HTTP from %s: %s", request.remote, exc.message)
            status = 431 if isinstance(exc, LineTooLong) else 400
            said = f"the request is not HTTP that this server can read: {exc.message.splitlines()[0]:.200}"
            body = error_body(said, status=status, code="malformed_http")
        else:
            logger.error("a connection failed", exc_info=exc)
            body = error_body("the server failed; its log says how", status=status, code="internal_error")
        if request.writer.output_size > 0:
            raise ConnectionError("an answer is under way, so it is too late for another")
        response = _answer(body, status)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; what the framework itself refuses, before the application sees it, is refused with JSON too."""
        if isinstance(resp, web.HTTPException):
            body = error_body(resp.reason, status=resp.status, code=resp.reason.lower().replace(" ", "_"))
            resp = _answer(body, resp.status)
        return await super().finish_response(request, resp, start_time)


def _answer(body: Any, status: int) -> web.Response:
    """An answer to what did not come as far as the application, with the headers that the application gives its own."""
    headers = {"Server": SERVER_NAME, REQUEST_ID_HEADER: new_request_id()}
    return web.json_response(body, status=status, headers=headers)


@web.middleware
async def mark_busy(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tell the connection while one of its requests is handled."""
    connection = request.protocol
    assert isinstance(connection, Connection)
    connection.begin_request()
    try:
        return await handler(request)
    finally:
        connection.end_request()


def _last_words(status: int, code: str, message: str) -> bytes:
    """An answer where there is no request to answer."""
    body = json.dumps(error_body(message, status=status, code=code))
    reason = {408: "Request Timeout", 503: "Service Unavailable"}[status]
    retry = "Retry-After: 1\r\n" if status == 503 else ""
    return (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json; charset=utf-8\r\n{retry}"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
    ).encode()
