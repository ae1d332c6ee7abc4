"""Cross-origin requests: which web pages' scripts may call the server and read its answers.

Owns the headers of the Fetch standard's CORS protocol. Does not know routes or keys. Pure but for `answer_preflights`.

Off unless origins are given. Then pages of those may send any header, the bearer token among them, and read the headers in
`EXPOSED`. No cookies are involved here, so credentials in that sense are never allowed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler

from jaxserve.errors import ConfigError

METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
EXPOSED = "X-Request-Id, Request-Id, Retry-After, WWW-Authenticate, X-Should-Retry"
MAX_AGE_SECONDS = 600

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s@]+")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2048}")


@dataclass(frozen=True, slots=True)
class CrossOrigin:
    """The origins that are let in: `scheme://host` or `scheme://host:port`, "null" for pages without one, "*" for all.

    Raises:
        ConfigError: one of them is none of these.
    """

    origins: tuple[str, ...]

    def __post_init__(self) -> None:
        for origin in self.origins:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origin must be an origin such as https://chat.example.org or http://localhost:3000, without a path "
                    f"or a slash at the end, or * for all, found {origin!r}"
                )

    def allows(self, origin: str | None) -> bool:
        """Whether pages of `origin`, the header's value, are let in."""
        return origin is not None and ("*" in self.origins or origin in self.origins)

    def answer_headers(self, origin: str | None) -> dict[str, str]:
        """What every answer to a request with this `Origin` header has."""
        if not self.origins:
            return {}
        if "*" in self.origins:
            return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": EXPOSED}
        if origin is None or not self.allows(origin):
            return {"Vary": "Origin"}
        return {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": EXPOSED, "Vary": "Origin"}

    def preflight_headers(self, wanted: str | None) -> dict[str, str]:
        """What the answer to a preflight has beside those; `wanted` are the header names that it asks for."""
        headers = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": str(MAX_AGE_SECONDS)}
        if wanted is not None and _HEADER_NAMES.fullmatch(wanted):
            headers["Access-Control-Allow-Headers"] = wanted
        return headers


CROSS_ORIGIN = web.AppKey("cross_origin", CrossOrigin)


@web.middleware
async def answer_preflights(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a browser that asks, without a key, whether a page may send a request."""
    cross_origin = request.app[CROSS_ORIGIN]
    if (
        request.method == "OPTIONS"
        and "Access-Control-Request-Method" in request.headers
        and cross_origin.allows(request.headers.get("Origin"))
    ):
        return web.Response(
            status=204, headers=cross_origin.preflight_headers(request.headers.get("Access-Control-Request-Headers"))
        )
    return await handler(request)
