"""The form of the OpenAI API's responses: an object with items, and events that are numbered and named by their kind.

Owns the response object. What its items are is in `response_items`.
"""

from __future__ import annotations

import time
from typing import Any

from jaxserve.engine.text import Tokenizer
from jaxserve.errors import JaxserveError
from jaxserve.request import FinishReason
from jaxserve.server import wire
from jaxserve.server.joining import Begun, Deltas
from jaxserve.server.response_items import Event, Items


class ResponsesForm:
    """Answers of `/v1/responses`; a `form.Form`."""

    def __init__(self, tokenizer: Tokenizer, model_name: str) -> None:
        self._shape = wire.ChatShape(tokenizer)
        self._model_name = model_name

    async def whole(self, begun: Begun) -> dict[str, Any]:
        response = self._response(begun)
        while deltas := await begun.source.read():
            response.push(deltas)
        return response.final()

    def events(self, begun: Begun) -> ResponseEvents:
        return ResponseEvents(self._response(begun))

    def _response(self, begun: Begun) -> _Response:
        return _Response(begun, self._shape, self._model_name)


class _Response:
    """One response as it comes about."""

    def __init__(self, begun: Begun, shape: wire.ChatShape, model_name: str) -> None:
        self._begun = begun
        self._model_name = model_name
        self._items = Items(begun.call.call_id.removeprefix("resp_"), shape)
        self._reason: FinishReason | None = None

    def push(self, deltas: Deltas) -> list[Event]:
        """Events for what a read brought. There is one output."""
        events = []
        for _, delta in deltas:
            events += self._items.push(delta)
            self._reason = delta.finish_reason or self._reason
        return events

    def value(self, status: str, **fields: Any) -> dict[str, Any]:
        """The response as it is now."""
        base = {
            "id": self._begun.call.call_id,
            "object": "response",
            "created_at": self._begun.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model_name,
            "output": list(self._items.done),
        }
        return base | dict(self._begun.call.echo) | fields

    def final(self) -> dict[str, Any]:
        """The response once its output has ended."""
        if self._reason is FinishReason.LENGTH:
            return self.value("incomplete", incomplete_details={"reason": "max_output_tokens"}, usage=self._usage())
        return self.value("completed", completed_at=int(time.time()), usage=self._usage())

    def failed(self, message: str) -> dict[str, Any]:
        """The response if its output can't be had."""
        return self.value("failed", error={"code": "server_error", "message": message})

    def _usage(self) -> dict[str, Any]:
        num_prompt, source = self._begun.call.num_prompt_tokens, self._begun.source
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": source.num_cached, "cache_write_tokens": 0},
            "output_tokens": source.num_output,
            "output_tokens_details": {"reasoning_tokens": source.num_reasoning or 0},
            "total_tokens": num_prompt + source.num_output,
        }


class ResponseEvents:
    """A stream of a response's events; a `form.Events`. It ends with the event that has the whole response."""

    def __init__(self, response: _Response) -> None:
        self._response = response
        self._num_sent = 0

    def opening(self) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return self._spell([{"type": kind, "response": self._response.value("in_progress")} for kind in kinds])

    def deltas(self, deltas: Deltas) -> bytes:
        return self._spell(self._response.push(deltas))

    def ending(self) -> bytes:
        response = self._response.final()
        return self._spell([{"type": f"response.{response['status']}", "response": response}])

    def failure(self, error: JaxserveError | str) -> bytes:
        status = 500 if isinstance(error, str) else wire.status_of(error)
        what = wire.error_body(error, status=status, code="internal_error")["error"]
        told = {"type": "error", "code": what["code"], "message": what["message"], "param": what["param"]}
        return self._spell([told, {"type": "response.failed", "response": self._response.failed(what["message"])}])

    def _spell(self, events: list[Event]) -> bytes:
        spelled = []
        for event in events:
            spelled.append(wire.named_event(event | {"sequence_number": self._num_sent}))
            self._num_sent += 1
        return b"".join(spelled)
