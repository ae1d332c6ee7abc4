"""What a handler finds out about its request: the server that it came to, and who sent it. Knows no routes."""

from __future__ import annotations

from aiohttp import web

from jaxserve.errors import NotFound
from jaxserve.server.keys import Caller
from jaxserve.server.service import Service
from jaxserve.server.store.store import Store

SERVICE = web.AppKey("service", Service)
STORE: web.AppKey[Store | None] = web.AppKey("store")


def authorization_of(request: web.Request) -> str | None:
    """The key that came with a request, as an `Authorization` header has it; Anthropic's clients send one of their own."""
    key = request.headers.get("x-api-key")
    return request.headers.get("Authorization", None if key is None else f"Bearer {key}")


def caller_of(request: web.Request) -> Caller:
    """Who sent the request.

    Raises:
        Unauthorized: it has no key of this server.
    """
    caller: Caller = request.app[SERVICE].keys.identify(authorization_of(request))
    return caller


def store_of(request: web.Request) -> Store:
    """Where the server keeps files and batches.

    Raises:
        NotFound: it keeps none.
    """
    store = request.app[STORE]
    if store is None:
        raise NotFound("this server keeps no files and batches: it was started without a --state-dir that it can write")
    return store
