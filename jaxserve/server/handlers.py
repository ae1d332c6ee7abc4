"""The routes: one handler each, and errors as OpenAI's error object for all of them.

Owns how a call is answered over a connection: in one piece or as server-sent events, to readers that leave or stall. Does
not know what bodies mean (`openai`), what answers look like (`responses`) or the server's lifetime (`app`).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from jaxserve import __version__
from jaxserve.engine.output import ShownToken
from jaxserve.engine.text import Tokenizer
from jaxserve.errors import JaxserveError, ModelNotFound
from jaxserve.request import FinishReason
from jaxserve.server import metrics, responses
from jaxserve.server.body import parse_json
from jaxserve.server.generation import Generation
from jaxserve.server.openai import Call, parse_chat, parse_completion
from jaxserve.server.service import Model, Service, State

logger = logging.getLogger(__name__)

SERVICE = web.AppKey("service", Service)

LARGE_BODY = 32 * 1024
"""Bytes from which a body is read in another thread, since encoding its text would hold up every stream."""

INTERNAL_ERROR = "the server failed; its log says how"

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class ReaderStalled(ConnectionError):
    """The client has read nothing for too long."""


# --- errors -----------------------------------------------------------------------------------------------------------


def _error_response(
    error: JaxserveError | str, status: int, *, code: str | None = None, headers: dict[str, str] | None = None
) -> web.Response:
    return web.json_response(responses.error_body(error, status=status, code=code), status=status, headers=headers)


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error, ours and the framework's, with OpenAI's error object."""
    try:
        return await handler(request)
    except JaxserveError as error:
        return _error_response(error, responses.status_of(error), headers=responses.retry_headers(error))
    except web.HTTPException as error:
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return _error_response(
            _describe_http_error(request, error), error.status, code=error.reason.lower().replace(" ", "_"), headers=allow
        )
    except ConnectionError as error:  # while reading the body: nobody is there to answer
        return _error_response(repr(error), 400)
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return _error_response(INTERNAL_ERROR, 500, code="internal_error")


def _describe_http_error(request: web.Request, error: web.HTTPException) -> str:
    what = f"{request.method} {request.path}"
    if isinstance(error, web.HTTPNotFound):
        return f"{what}: there is no such route"
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{what}: the method must be one of {', '.join(sorted(error.allowed_methods))}"
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        limit = request.app[SERVICE].config.max_body_bytes
        return f"the body is larger than {limit} bytes, the most that this server reads"
    return f"{what}: {error.reason}"


# --- completions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Endpoint:
    """What makes a completion endpoint: how to read a body, and the shape of its answer."""

    name: str
    id_prefix: str
    parse: Callable[..., Call]
    shape: Callable[[Tokenizer], responses.Shape]


COMPLETIONS = Endpoint("completions", "cmpl-", parse_completion, responses.CompletionShape)
CHAT = Endpoint("chat_completions", "chatcmpl-", parse_chat, responses.ChatShape)


async def completions(request: web.Request) -> web.StreamResponse:
    """`POST /v1/completions`."""
    return await _answer(request, COMPLETIONS)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """`POST /v1/chat/completions`."""
    return await _answer(request, CHAT)


@dataclass
class _Outcome:
    name: str = "error"


@contextmanager
def _counted(service: Service, endpoint: Endpoint) -> Iterator[_Outcome]:
    """Count the request by its outcome, which is `ok` unless an exception or `answer` says otherwise."""
    outcome = _Outcome("ok")
    try:
        yield outcome
    except JaxserveError as error:
        status = responses.status_of(error)
        outcome.name = "busy" if status in (429, 503) else "refused" if status < 500 else "error"
        raise
    except web.HTTPException:
        outcome.name = "refused"
        raise
    except (asyncio.CancelledError, ConnectionError):
        outcome.name = "disconnected"
        raise
    except BaseException:
        outcome.name = "error"
        raise
    finally:
        service.metrics.requests.labels(endpoint.name, outcome.name).inc()


async def _answer(request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
    service = request.app[SERVICE]
    clock = metrics.TokenClock(service.metrics)
    with _counted(service, endpoint) as outcome:
        model = service.require_model()
        call = await _read_call(request, endpoint, model)
        with model.engine.open(*call.requests) as stream:
            service.metrics.prompt_tokens.inc(call.num_prompt_tokens)
            generation = Generation(call, stream, model.tokenizer, clock, service.metrics)
            answer = _Answer(request, service, model, endpoint.shape(model.tokenizer), call, generation)
            response = await (answer.stream(outcome) if call.stream else answer.whole())
        if outcome.name == "ok":
            clock.finish()
        return response


async def _read_call(request: web.Request, endpoint: Endpoint, model: Model) -> Call:
    data = await request.read()

    def parse() -> Call:
        call_id = endpoint.id_prefix + uuid.uuid4().hex
        return endpoint.parse(
            parse_json(data), model.tokenizer, model=model.name, max_context=model.max_context, call_id=call_id
        )

    return parse() if len(data) < LARGE_BODY else await asyncio.to_thread(parse)


class _Answer:
    """Writes one call's answer."""

    def __init__(
        self,
        request: web.Request,
        service: Service,
        model: Model,
        shape: responses.Shape,
        call: Call,
        generation: Generation,
    ) -> None:
        self._request = request
        self._stall_seconds = service.config.stall_seconds
        self._model = model
        self._shape = shape
        self._call = call
        self._generation = generation
        self._created = int(time.time())

    async def whole(self) -> web.Response:
        """Wait for every choice, then answer at once."""
        num_choices = len(self._call.requests)
        texts: list[list[str]] = [[] for _ in range(num_choices)]
        tokens: list[list[ShownToken]] = [[] for _ in range(num_choices)]
        reasons: list[FinishReason] = [FinishReason.STOP] * num_choices
        while deltas := await self._generation.read():
            for index, delta in deltas:
                texts[index].append(delta.text)
                tokens[index].extend(delta.tokens)
                if delta.finish_reason is not None:
                    reasons[index] = delta.finish_reason
        wants_logprobs = self._call.requests[0].params.logprobs is not None
        body = responses.whole(
            self._shape,
            call_id=self._call.call_id,
            created=self._created,
            model=self._model.name,
            choices=[
                ("".join(texts[index]), tokens[index] if wants_logprobs else None, reasons[index])
                for index in range(num_choices)
            ],
            num_prompt=self._call.num_prompt_tokens,
            num_output=self._generation.num_output,
        )
        return web.json_response(body)

    async def stream(self, outcome: _Outcome) -> web.StreamResponse:
        """Answer with server-sent events as text comes; an error after the headers is an event too.

        A client that leaves ends this by cancellation or, where a write notices first, here.
        """
        response = web.StreamResponse(headers=STREAM_HEADERS)
        await response.prepare(self._request)
        try:
            error = await self._write_choices(response)
            if error is not None:
                outcome.name = "error"
                await self._write(response, responses.event(error))
            await self._write(response, responses.DONE)
        except ReaderStalled:
            outcome.name = "stalled"
        except ConnectionError:
            outcome.name = "disconnected"
        return response

    async def _write_choices(self, response: web.StreamResponse) -> dict[str, Any] | None:
        """Write chunks until every choice has ended; what to say if the engine, or we, failed."""
        try:
            await self._write_chunks(response)
        except ConnectionError:
            raise
        except JaxserveError as error:
            return responses.error_body(error, status=responses.status_of(error))
        except Exception:
            logger.exception("a stream failed")
            return responses.error_body(INTERNAL_ERROR, status=500, code="internal_error")
        return None

    async def _write_chunks(self, response: web.StreamResponse) -> None:
        call, generation = self._call, self._generation
        writer = responses.ChunkWriter(
            self._shape,
            call_id=call.call_id,
            created=self._created,
            model=self._model.name,
            num_choices=len(call.requests),
            include_usage=call.include_usage,
        )
        opening = b"".join(map(writer.opening, range(len(call.requests))))
        if opening:
            await self._write(response, opening)
        while deltas := await generation.read():
            chunks = b"".join([writer.delta(index, delta) for index, delta in deltas])
            if chunks:
                await self._write(response, chunks)
        if call.include_usage:
            await self._write(response, writer.usage(call.num_prompt_tokens, generation.num_output))

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        """Write, which waits only while the client reads more slowly than we write."""
        try:
            async with asyncio.timeout(self._stall_seconds):
                await response.write(data)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ReaderStalled(f"the client read nothing for {self._stall_seconds:g} s") from None


# --- models, and the server itself ------------------------------------------------------------------------------------


def _model_object(model: Model) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": model.created, "owned_by": "jaxserve"}


async def list_models(request: web.Request) -> web.Response:
    """`GET /v1/models`."""
    model = request.app[SERVICE].require_model()
    return web.json_response({"object": "list", "data": [_model_object(model)]})


async def get_model(request: web.Request) -> web.Response:
    """`GET /v1/models/{model}`."""
    model = request.app[SERVICE].require_model()
    wanted = request.match_info["model"]
    if wanted != model.name:
        raise ModelNotFound(f"the model {wanted!r:.200} does not exist; this server has {model.name!r}", param="model")
    return web.json_response(_model_object(model))


async def health(request: web.Request) -> web.Response:
    """`GET /health`: 200 while the process can still serve, now or once it has loaded; 503 after the engine died."""
    service = request.app[SERVICE]
    if service.failure is None:
        return web.json_response({"status": "ok"})
    return web.json_response({"status": "failed", "reason": repr(service.failure)}, status=503)


async def ready(request: web.Request) -> web.Response:
    """`GET /ready`: 200 while requests are served; 503 while loading, draining or dead."""
    state = request.app[SERVICE].state
    return web.json_response({"status": state.value}, status=200 if state is State.READY else 503)


async def export_metrics(request: web.Request) -> web.Response:
    """`GET /metrics`, for Prometheus."""
    body = request.app[SERVICE].metrics.export()
    return web.Response(body=body, headers={"Content-Type": metrics.CONTENT_TYPE})


async def version(_: web.Request) -> web.Response:
    """`GET /version`."""
    return web.json_response({"version": __version__})


ROUTES = [
    web.post("/v1/completions", completions),
    web.post("/v1/chat/completions", chat_completions),
    web.get("/v1/models", list_models),
    web.get("/v1/models/{model:.+}", get_model),
    web.get("/health", health),
    web.get("/ready", ready),
    web.get("/metrics", export_metrics),
    web.get("/version", version),
]
