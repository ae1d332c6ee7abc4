"""What a handler finds out about its request: the server that it came to, and who sent it. Knows no routes."""

from __future__ import annotations

from aiohttp import web

from jaxserve.server.keys import Caller
from jaxserve.server.service import Service

SERVICE = web.AppKey("service", Service)


def caller_of(request: web.Request) -> Caller:
    """Who sent the request.

    Raises:
        Unauthorized: it has no key of this server.
    """
    caller: Caller = request.app[SERVICE].keys.identify(request.headers.get("Authorization"))
    return caller
