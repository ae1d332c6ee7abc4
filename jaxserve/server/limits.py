"""How large a request's body may be, what kind, and how long it may take to come.

Owns the reading of bodies: handlers find them read, but for those of `FORM_ROUTES`. Does not know what they mean.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.typedefs import Handler

from jaxserve.errors import InvalidRequest, RequestTimeout
from jaxserve.server.access import SERVICE

FORM_ROUTES = frozenset({("POST", "/v1/files")})
"""What takes a multipart form, and reads it itself, within `in_time`."""

MIN_BYTES_PER_SECOND = 16 * 1024
"""What a client has to send a body with, after its first seconds."""


@web.middleware
async def read_bodies(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Have the body read before the handler runs.

    Raises:
        web.HTTPRequestEntityTooLarge: it is larger than `Service.max_body_bytes`.
        web.HTTPUnsupportedMediaType: it is compressed, or a form where there is none to fill in.
        InvalidRequest: its chunks are broken.
        RequestTimeout: it took too long.
    """
    if request.match_info.http_exception is not None or not request.body_exists:
        return await handler(request)
    if (coding := request.headers.get("Content-Encoding", "identity").lower()) != "identity":
        raise web.HTTPUnsupportedMediaType(
            text=f"the body must not be compressed, found {coding!r:.80}", headers={"Accept-Encoding": "identity"}
        )
    if (request.method, request.path) in FORM_ROUTES:
        return await handler(request)
    if request.content_type.startswith("multipart/"):
        raise web.HTTPUnsupportedMediaType(text=f"the body must be JSON, found {request.content_type}")
    service = request.app[SERVICE]
    limit = service.max_body_bytes
    if (request.content_length or 0) > limit:
        raise web.HTTPRequestEntityTooLarge(limit)
    request = request.clone(client_max_size=limit)
    try:
        if request.content.is_eof():
            await request.read()
        else:
            async with in_time(request, service.config.body_timeout):
                await request.read()
    except web.RequestPayloadError as error:
        raise InvalidRequest(f"the body cannot be read: {error!s:.200}") from None
    return await handler(request)


@asynccontextmanager
async def in_time(request: web.Request, seconds: float) -> AsyncIterator[None]:
    """Within it the body has to come: in `seconds`, and as many more as `MIN_BYTES_PER_SECOND` gives it.

    Raises:
        RequestTimeout: it did not.
    """
    began = time.monotonic()
    try:
        async with asyncio.timeout(seconds) as clock:
            extension = _Extension(clock, request, seconds)
            try:
                yield
            finally:
                extension.stop()
    except TimeoutError:
        raise RequestTimeout(f"the body did not come within {time.monotonic() - began:.0f} s") from None


class _Extension:
    """Puts a clock back as bytes come, once a second. An object, since a function that names itself would keep the body alive
    until garbage is collected."""

    def __init__(self, clock: asyncio.Timeout, request: web.Request, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._content = request.content
        self._since = self._loop.time() + seconds
        self._every = min(seconds / 2, 1.0)
        self._timer = self._loop.call_later(self._every, self._extend)

    def _extend(self) -> None:
        if not self._clock.expired():
            self._clock.reschedule(self._since + self._content.total_bytes / MIN_BYTES_PER_SECOND)
            self._timer = self._loop.call_later(self._every, self._extend)

    def stop(self) -> None:
        self._timer.cancel()
