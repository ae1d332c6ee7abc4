"""The form of Anthropic's `/v1/messages`: messages of blocks, named events, and errors. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxserve.engine.output import OutputDelta
from jaxserve.engine.text import Tokenizer
from jaxserve.engine.tools.parts import CallArguments, CallBegin, Part, Reasoning, Text
from jaxserve.errors import JaxserveError
from jaxserve.request import FinishReason
from jaxserve.server import wire
from jaxserve.server.form import whole_outputs
from jaxserve.server.joining import Begun, Deltas

Json = dict[str, Any]

STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: JaxserveError | str, *, status: int, code: str | None = None, request_id: str | None = None) -> Json:
    """Anthropic's error object, with the code and the field at fault beside what that has."""
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    known = wire.error_body(error, status=status, code=code)["error"]
    named = {"request_id": request_id} if request_id else {}
    return {"type": "error", "error": {**known, "type": kind}, **named}


class MessagesForm:
    """Answers of `/v1/messages`; a `form.Form`."""

    def __init__(self, _: Tokenizer, model_name: str) -> None:
        self._model_name = model_name

    async def whole(self, begun: Begun) -> Json:
        (output,) = await whole_outputs(begun)
        parts = (Text(output.content),) if isinstance(output.content, str) else output.content
        content = _content(parts)
        return self._message(begun, content) | _stop(output.finish_reason, output.stopped_by, content)

    def events(self, begun: Begun) -> MessageEvents:
        return MessageEvents(begun, self._message(begun, []))

    def _message(self, begun: Begun, content: list[Json]) -> Json:
        return {
            "id": begun.call.call_id,
            "type": "message",
            "role": "assistant",
            "model": self._model_name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(begun),
        }


def _usage(begun: Begun) -> Json:
    source = begun.source
    return {
        "input_tokens": begun.call.num_prompt_tokens - source.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": source.num_cached,
        "output_tokens": source.num_output,
    }


def _stop(reason: FinishReason, stopped_by: str | int | None, blocks: Sequence[Json]) -> Json:
    """Why an answer ended. One that was made to call a tool ends for the sake of that."""
    if isinstance(stopped_by, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
    called = reason is FinishReason.STOP and any(block["type"] == "tool_use" for block in blocks)
    return {"stop_reason": "tool_use" if called else STOP_REASONS[reason], "stop_sequence": None}


def _content(parts: Sequence[Part]) -> list[Json]:
    """Blocks, of parts whose neighbours are of different kinds."""
    blocks: list[Json] = []
    for part in parts:
        match part:
            case CallArguments(fragment=fragment):
                blocks[-1]["input"] = _input(fragment)
            case Text(text):
                blocks += [{"type": "text", "text": text}] if text else []
            case _:
                block = _opened(part)
                blocks.append({**block, "thinking": part.text} if isinstance(part, Reasoning) else block)
    return blocks


def _input(arguments: str) -> Json:
    """A call's arguments. Those that the end of the output cut off are no JSON, and are left out."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _opened(part: Part) -> Json:
    """The block that a part begins, with nothing in it yet."""
    match part:
        case Reasoning():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case CallBegin(call_id=call_id, name=name):
            return {"type": "tool_use", "id": call_id, "name": name, "input": {}}
    return {"type": "text", "text": ""}


class MessageEvents:
    """A stream of events; a `form.Events`."""

    def __init__(self, begun: Begun, message: Json) -> None:
        self._begun = begun
        self._message = message
        self._blocks: list[Json] = []
        self._is_open = False
        self._stop: Json = {}

    def opening(self) -> bytes:
        return wire.named_event({"type": "message_start", "message": self._message})

    def deltas(self, deltas: Deltas) -> bytes:
        return b"".join([self._delta(delta) for _, delta in deltas])

    def ending(self) -> bytes:
        stop = wire.named_event({"type": "message_delta", "delta": self._stop, "usage": _usage(self._begun)})
        return stop + wire.named_event({"type": "message_stop"})

    def failure(self, error: JaxserveError | str) -> bytes:
        status = 500 if isinstance(error, str) else wire.status_of(error)
        return wire.named_event(error_body(error, status=status, code="internal_error"))

    def _delta(self, delta: OutputDelta) -> bytes:
        parts = delta.parts if delta.parts is not None else (Text(delta.text),) if delta.text else ()
        events = b"".join([self._part(part) for part in parts])
        if delta.finish_reason is not None:
            self._stop = _stop(delta.finish_reason, delta.stopped_by, self._blocks)
            events += self._close()
        return events

    def _part(self, part: Part) -> bytes:
        events = b""
        if not isinstance(part, CallArguments):
            opened = _opened(part)
            if not self._is_open or opened["type"] == "tool_use" or self._blocks[-1]["type"] != opened["type"]:
                events = self._close() + self._open(opened)
        match part:
            case Text(text):
                return events + self._add({"type": "text_delta", "text": text})
            case Reasoning(text):
                return events + self._add({"type": "thinking_delta", "thinking": text})
            case CallArguments(fragment=fragment):
                return events + self._add({"type": "input_json_delta", "partial_json": fragment})
        return events

    def _open(self, block: Json) -> bytes:
        self._blocks.append(block)
        self._is_open = True
        return wire.named_event({"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block})

    def _add(self, delta: Json) -> bytes:
        return wire.named_event({"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta})

    def _close(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        return wire.named_event({"type": "content_block_stop", "index": len(self._blocks) - 1})
