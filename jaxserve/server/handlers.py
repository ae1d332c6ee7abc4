"""The routes: one handler each.

Owns how calls are counted, and that retries join what runs. Does not know what bodies mean or how the engine is set to work on
them (`endpoints`), how an answer is written (`answers`), what all requests have in common (`middlewares`) or the server's
lifetime (`app`).
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web

from jaxserve import __version__
from jaxserve.errors import InvalidRequest, JaxserveError, NotReady, QueueFull
from jaxserve.server import adapter_routes, batches, files, metrics, tokenization, wire
from jaxserve.server.access import SERVICE, caller_of
from jaxserve.server.answers import Answer, Outcome
from jaxserve.server.anthropic import count_tokens
from jaxserve.server.call import check_model
from jaxserve.server.endpoints import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES, Endpoint, generating, read_call
from jaxserve.server.joining import Begun
from jaxserve.server.keys import Caller
from jaxserve.server.schema.document import document
from jaxserve.server.service import Model, Service, State
from jaxserve.server.terms import grant

JOIN_HEADERS = ("Idempotency-Key", "X-Request-Id")
"""Headers that name a request, so that its retry is known; the first of them that it has counts."""

MAX_JOIN_KEY = 255

# --- completions ------------------------------------------------------------------------------------------------------


async def completions(request: web.Request) -> web.StreamResponse:
    """`POST /v1/completions`."""
    return await _answer(request, COMPLETIONS)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """`POST /v1/chat/completions`."""
    return await _answer(request, CHAT)


async def responses(request: web.Request) -> web.StreamResponse:
    """`POST /v1/responses`."""
    return await _answer(request, RESPONSES)


async def messages(request: web.Request) -> web.StreamResponse:
    """`POST /v1/messages`."""
    return await _answer(request, MESSAGES)


async def count_message_tokens(request: web.Request) -> web.Response:
    """`POST /v1/messages/count_tokens`."""
    model = request.app[SERVICE].require_model()
    data = await request.read()
    max_context = model.terms.limits.max_context
    count = await asyncio.to_thread(count_tokens, data, model.tokenizer, model=model.adapters.names, max_context=max_context)
    return web.json_response({"input_tokens": count})


async def embeddings(request: web.Request) -> web.StreamResponse:
    """`POST /v1/embeddings`."""
    return await _answer(request, EMBEDDINGS)


@contextmanager
def _counted(service: Service, endpoint: Endpoint, caller: Caller) -> Iterator[Outcome]:
    """Count the request by its outcome, which is `ok` unless an exception or `Answer` says otherwise."""
    outcome = Outcome("ok")
    try:
        yield outcome
    except JaxserveError as error:
        outcome.name = _outcome_of(error)
        if isinstance(error, (QueueFull, NotReady)):
            service.metrics.refused.labels(error.code).inc()
        raise
    except web.HTTPException:
        outcome.name = "refused"
        raise
    except (asyncio.CancelledError, ConnectionError):
        outcome.name = "stalled" if outcome.name == "stalled" else "disconnected"
        raise
    except BaseException:
        outcome.name = "error"
        raise
    finally:
        service.metrics.requests.labels(endpoint.name, outcome.name).inc()
        service.metrics.tenant_requests.labels(caller.label, outcome.name).inc()


def _outcome_of(error: JaxserveError) -> str:
    status = wire.status_of(error)
    if status in (429, 503):
        return "busy"
    if status == 408:
        return "timeout"
    return "refused" if status < 500 else "error"


async def _answer(request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
    service: Service = request.app[SERVICE]
    caller = caller_of(request)
    clock = metrics.TokenClock(service.metrics, caller.label)
    with _counted(service, endpoint, caller) as outcome:
        model = service.require_model()
        async with _begun(request, endpoint, caller, model, clock) as begun:
            form = endpoint.form(model.tokenizer, begun.call.model or model.name)
            answer = Answer(request, begun, form, ping_seconds=service.config.ping_seconds)
            response = await (answer.stream(outcome) if begun.call.stream else answer.whole())
        if outcome.name == "ok":
            clock.finish()
        return response


@asynccontextmanager
async def _begun(
    request: web.Request, endpoint: Endpoint, caller: Caller, model: Model, clock: metrics.TokenClock
) -> AsyncIterator[Begun]:
    """The request's call while this client waits for it: its own, or one that others wait for too."""
    service: Service = request.app[SERVICE]
    data = await request.read()

    async def begin() -> AbstractContextManager[Begun]:
        call = grant(await read_call(data, endpoint, model), caller, model.terms, now=clock.arrived)
        return generating(call, service, model, clock)

    key = _join_key(request)
    if key is None:
        with await begin() as begun:
            yield begun
        return
    fingerprint = hashlib.sha256(request.path.encode() + b"\0" + data).digest()
    with service.calls.join((caller.label, key), fingerprint, begin) as reader:
        yield await reader.begun()


def _join_key(request: web.Request) -> str | None:
    for name in JOIN_HEADERS:
        value = request.headers.get(name, "").strip()
        if len(value) > MAX_JOIN_KEY:
            raise InvalidRequest(f"the header {name} must have at most {MAX_JOIN_KEY} characters, found {len(value)}")
        if value:
            return value
    return None


# --- models, and the server itself ------------------------------------------------------------------------------------


def _model_objects(model: Model) -> dict[str, dict[str, Any]]:
    """The model and its adapters, by name. An adapter's `root` is where it lies, its `parent` the model, as vLLM has them."""
    common = {"object": "model", "owned_by": "jaxserve"}
    adapters = {
        one.adapter.name: {"id": one.adapter.name, "created": one.since, **common, "root": one.path, "parent": model.name}
        for one in model.adapters.loaded
    }
    return {model.name: {"id": model.name, "created": model.created, **common}, **adapters}


async def list_models(request: web.Request) -> web.Response:
    """`GET /v1/models`."""
    model = request.app[SERVICE].require_model()
    return web.json_response({"object": "list", "data": list(_model_objects(model).values())})


async def get_model(request: web.Request) -> web.Response:
    """`GET /v1/models/{model}`."""
    model = request.app[SERVICE].require_model()
    wanted = request.match_info["model"]
    check_model(wanted, model.adapters.names)
    return web.json_response(_model_objects(model)[wanted])


async def health(request: web.Request) -> web.Response:
    """`GET /health`: 200 while the process can still serve, now or once it has loaded; 503 after the engine died or hangs."""
    service = request.app[SERVICE]
    if service.failure is not None:
        return web.json_response({"status": "failed", "reason": repr(service.failure)}, status=503)
    if service.hung:
        reason = f"a step has not come back for {service.seconds_in_step:.0f} s"
        return web.json_response({"status": "hung", "reason": reason}, status=503)
    return web.json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """`GET /ready`: 200 while requests are served; 503 while loading, draining, hung or dead."""
    state = request.app[SERVICE].state
    return web.json_response({"status": state.value}, status=200 if state is State.READY else 503)


async def export_metrics(request: web.Request) -> web.Response:
    """`GET /metrics`, for Prometheus."""
    body = request.app[SERVICE].metrics.export()
    return web.Response(body=body, headers={"Content-Type": metrics.CONTENT_TYPE})


async def drop_cache(request: web.Request) -> web.Response:
    """`DELETE /v1/cache`: forget every prefix that no running request uses and that is not pinned."""
    model = request.app[SERVICE].require_model()
    return web.json_response({"object": "cache", "dropped_pages": await model.engine.drop_cache()})


async def version(_: web.Request) -> web.Response:
    """`GET /version`."""
    return web.json_response({"version": __version__})


@functools.cache
def _openapi_document(*, has_keys: bool) -> bytes:
    """Takes a tenth of a second to make."""
    return json.dumps(document(version=__version__, has_keys=has_keys)).encode()


async def openapi(request: web.Request) -> web.Response:
    """`GET /openapi.json`."""
    body = await asyncio.to_thread(_openapi_document, has_keys=len(request.app[SERVICE].keys) > 0)
    return web.Response(body=body, content_type="application/json")


ROUTES = [
    web.post("/v1/completions", completions),
    web.post("/v1/chat/completions", chat_completions),
    web.post("/v1/embeddings", embeddings),
    web.post("/v1/responses", responses),
    web.post("/v1/messages", messages),
    web.post("/v1/messages/count_tokens", count_message_tokens),
    web.post("/tokenize", tokenization.tokenize),
    web.post("/detokenize", tokenization.detokenize),
    web.get("/tokenizer_info", tokenization.tokenizer_info),
    web.get("/v1/models", list_models),
    web.get("/v1/models/{model:.+}", get_model),
    web.delete("/v1/cache", drop_cache),
    web.get("/health", health),
    web.get("/ready", ready),
    web.get("/metrics", export_metrics),
    web.get("/version", version),
    web.get("/openapi.json", openapi),
    *adapter_routes.ROUTES,
    *files.ROUTES,
    *batches.ROUTES,
]
