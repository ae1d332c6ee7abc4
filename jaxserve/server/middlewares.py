"""What is done for every request, whatever its route: its id, its key, OPTIONS, and errors as OpenAI's error object.

Owns which paths are open and which take an administrator. Bodies are in `limits`, other origins in `cors`, connections in
`connections`. Does not know what handlers do.
"""

from __future__ import annotations

import logging
import re
import uuid

from aiohttp import web
from aiohttp.typedefs import Handler

from jaxserve.errors import JaxserveError
from jaxserve.server import anthropic_form, wire
from jaxserve.server.access import SERVICE, authorization_of, caller_of
from jaxserve.server.cors import CROSS_ORIGIN

logger = logging.getLogger(__name__)

ADAPTER_ROUTES = frozenset({("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter")})
"""What takes an administrator's key wherever there are keys. Without any it is `--adapter-dir` that allows it."""

OPEN_PATHS = frozenset({"/health", "/ready"})
"""What is answered without an API key: what probes ask for."""

ADMIN_ROUTES = frozenset({("DELETE", "/v1/cache")})
"""What takes an administrator's key."""

MESSAGES_PATH = "/v1/messages"
"""Under which errors are Anthropic's."""

REQUEST_ID = web.RequestKey("request_id", str)
REQUEST_ID_HEADER = "X-Request-Id"

SERVER_NAME = "jaxserve"

_GOOD_ID = re.compile(r"[!-~]{1,255}")


# --- every answer -----------------------------------------------------------------------------------------------------


def request_id_of(request: web.BaseRequest) -> str:
    """The client's `X-Request-Id`, or one that we made: what answers carry and the log names."""
    return request.get(REQUEST_ID, "")


def new_request_id() -> str:
    """An id for a request that came without."""
    return f"req-{uuid.uuid4().hex}"


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Give an answer its request's id, and what a browser wants to see; take from it which versions of what run here."""
    response.headers["Server"] = SERVER_NAME
    response.headers[REQUEST_ID_HEADER] = request_id_of(request)
    if request.path.startswith(MESSAGES_PATH):
        response.headers["request-id"] = request_id_of(request)  # what Anthropic's clients show
    response.headers.update(request.app[CROSS_ORIGIN].answer_headers(request.headers.get("Origin")))


@web.middleware
async def name_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Keep the id that the client gave the request, if it is one; else make one."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    request[REQUEST_ID] = given if _GOOD_ID.fullmatch(given) else new_request_id()
    return await handler(request)


# --- errors -----------------------------------------------------------------------------------------------------------


def _error_response(
    request: web.Request,
    error: JaxserveError | str,
    status: int,
    *,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> web.Response:
    if request.path.startswith(MESSAGES_PATH):
        body = anthropic_form.error_body(error, status=status, code=code, request_id=request_id_of(request))
    else:
        body = wire.error_body(error, status=status, code=code)
    return web.json_response(body, status=status, headers=headers)


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error, ours and the framework's, with OpenAI's error object."""
    try:
        return await handler(request)
    except JaxserveError as error:
        return _error_response(request, error, wire.status_of(error), headers=wire.error_headers(error))
    except web.HTTPException as error:
        kept = {name: error.headers[name] for name in ("Accept-Encoding",) if name in error.headers}
        headers = {"Allow": _allowed(error)} if isinstance(error, web.HTTPMethodNotAllowed) else kept
        code = error.reason.lower().replace(" ", "_")
        return _error_response(request, _describe_http_error(request, error), error.status, code=code, headers=headers)
    except ConnectionError as error:  # while reading the body: nobody is there to answer
        return _error_response(request, repr(error), 400)
    except Exception:
        logger.exception("%s %s failed (request %s)", request.method, request.path, request_id_of(request))
        return _error_response(request, wire.internal_error(request_id_of(request)), 500, code="internal_error")


def _describe_http_error(request: web.Request, error: web.HTTPException) -> str:
    what = f"{request.method} {request.path}"
    if isinstance(error, web.HTTPNotFound):
        return f"{what}: there is no such route"
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{what}: the method must be one of {', '.join(sorted(error.allowed_methods))}"
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        limit = request.app[SERVICE].max_body_bytes
        return f"the body is larger than {limit} bytes, the most that this server reads"
    if isinstance(error, web.HTTPUnsupportedMediaType):
        return f"{what}: {error.text}"
    return f"{what}: {error.reason}"


def _allowed(error: web.HTTPMethodNotAllowed) -> str:
    return ", ".join(sorted({*error.allowed_methods, "OPTIONS"}))


@web.middleware
async def answer_options(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer OPTIONS with the methods that the path has."""
    error = request.match_info.http_exception
    if request.method == "OPTIONS" and isinstance(error, web.HTTPMethodNotAllowed):
        return web.Response(status=204, headers={"Allow": _allowed(error)})
    return await handler(request)


# --- keys -------------------------------------------------------------------------------------------------------------


@web.middleware
async def known_callers_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse whoever has no key of this server, whatever they ask for, but for `OPEN_PATHS`."""
    route, keys = (request.method, request.path), request.app[SERVICE].keys
    if route in ADMIN_ROUTES or (route in ADAPTER_ROUTES and keys.has_keys):
        keys.require_admin(authorization_of(request))
    elif request.path not in OPEN_PATHS:
        caller_of(request)
    return await handler(request)
