"""How one call is answered over a connection: in one piece or as server-sent events, to readers that leave or stall.

Does not know what bodies mean (`openai`), what answers look like (`wire`), where text comes from (a `joining.Source`) or
routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from jaxserve.engine.output import ShownToken
from jaxserve.engine.tools.parts import Part, merge
from jaxserve.errors import JaxserveError, RequestTimeout
from jaxserve.request import FinishReason
from jaxserve.server import wire
from jaxserve.server.joining import Begun
from jaxserve.server.middlewares import request_id_of
from jaxserve.server.ranking import Content, shown_choices

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


async def whole_body(begun: Begun, shape: wire.Shape, *, model_name: str) -> dict[str, Any]:
    """Wait for every choice of a call; the body of its answer."""
    call, source = begun.call, begun.source
    num_outputs = len(call.requests)
    texts: list[list[str]] = [[] for _ in range(num_outputs)]
    parts: list[list[Part]] = [[] for _ in range(num_outputs)]
    tokens: list[list[ShownToken]] = [[] for _ in range(num_outputs)]
    reasons: list[FinishReason] = [FinishReason.STOP] * num_outputs
    while deltas := await source.read():
        for index, delta in deltas:
            texts[index].append(delta.text)
            parts[index].extend(delta.parts or ())
            tokens[index].extend(delta.tokens)
            if delta.finish_reason is not None:
                reasons[index] = delta.finish_reason
    contents: list[Content] = list(map("".join, texts)) if call.reading is None else list(map(merge, parts))
    outputs = list(zip(contents, tokens, reasons, strict=True))
    return wire.whole(
        shape,
        call_id=call.call_id,
        created=begun.created,
        model=model_name,
        choices=shown_choices(call, outputs),
        num_prompt=call.num_prompt_tokens,
        num_output=source.num_output,
        num_cached=source.num_cached,
        num_reasoning=source.num_reasoning,
    )


class Answer:
    """Writes one call's answer to one client."""

    def __init__(self, request: web.Request, begun: Begun, shape: wire.Shape, *, model_name: str, ping_seconds: float) -> None:
        self._request = request
        self._begun = begun
        self._call = begun.call
        self._source = begun.source
        self._created = begun.created
        self._shape = shape
        self._model_name = model_name
        self._ping_seconds = ping_seconds
        self._last_write = 0.0

    async def whole(self) -> web.Response:
        """Wait for every choice, then answer at once."""
        return web.json_response(await whole_body(self._begun, self._shape, model_name=self._model_name))

    async def stream(self, outcome: Outcome) -> web.StreamResponse:
        """Answer with server-sent events as text comes; an error after the headers is an event too.

        A client that leaves ends this by cancellation or, where a write notices first, here.
        """
        response = web.StreamResponse(headers=STREAM_HEADERS)
        await response.prepare(self._request)
        try:
            with self._pinging(response):
                error = await self._write_choices(response, outcome)
                if error is not None:
                    await self._write(response, wire.event(error))
                await self._write(response, wire.DONE)
        except asyncio.CancelledError:
            if getattr(self._request.protocol, "stalled", False):
                outcome.name = "stalled"
            raise
        except ConnectionError:
            outcome.name = "disconnected"
        return response

    async def _write_choices(self, response: web.StreamResponse, outcome: Outcome) -> dict[str, Any] | None:
        """Write chunks until every choice has ended; what to say if the engine, or we, failed, or time ran out."""
        try:
            await self._write_chunks(response)
        except ConnectionError:
            raise
        except JaxserveError as error:
            outcome.name = "timeout" if isinstance(error, RequestTimeout) else "error"
            return wire.error_body(error, status=wire.status_of(error))
        except Exception:
            request_id = request_id_of(self._request)
            logger.exception("a stream failed (request %s)", request_id)
            outcome.name = "error"
            return wire.error_body(wire.internal_error(request_id), status=500, code="internal_error")
        return None

    async def _write_chunks(self, response: web.StreamResponse) -> None:
        call, source = self._call, self._source
        writer = wire.ChunkWriter(
            self._shape,
            call_id=call.call_id,
            created=self._created,
            model=self._model_name,
            num_choices=len(call.requests),
            include_usage=call.include_usage,
            obfuscate=call.obfuscates,
        )
        if call.continuous_usage:
            writer.count(call.num_prompt_tokens, 0, 0, source.num_reasoning)
        opening = b"".join(map(writer.opening, range(len(call.requests))))
        if opening:
            await self._write(response, opening)
        while deltas := await source.read():
            if call.continuous_usage:
                writer.count(call.num_prompt_tokens, source.num_output, source.num_cached, source.num_reasoning)
            chunks = b"".join([writer.delta(index, delta) for index, delta in deltas])
            if chunks:
                await self._write(response, chunks)
        if call.include_usage:
            usage = writer.usage(call.num_prompt_tokens, source.num_output, source.num_cached, source.num_reasoning)
            await self._write(response, usage)

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        """Write, which waits only while the client reads more slowly than we write; `connections` drops it if it stalls."""
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
