"""Answers of `/v1/responses`: the items that an output is made of, and the events of a stream that tell how they grow.

Pure. A whole answer is what the last event of a stream would hold, so there is one account of both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from jaxserve.engine.output import OutputDelta, ShownToken
from jaxserve.engine.tools.parts import CallArguments, CallBegin, Part, Reasoning, Text
from jaxserve.request import FinishReason
from jaxserve.server.wire import ChatShape

Event = dict[str, Any]


class _Item:
    """An item of the output that still grows.

    Args:
        index: its place in the output.
    """

    prefix: str

    def __init__(self, index: int, response_key: str) -> None:
        self.index = index
        self.item_id = f"{self.prefix}_{response_key}{index}"
        self._pieces: list[str] = []

    @property
    def _whole(self) -> str:
        return "".join(self._pieces)

    def value(self, status: str) -> dict[str, Any]:
        """The item as it is now."""
        raise NotImplementedError

    def begin(self) -> list[Event]:
        """Events, beside that of the item itself, that come before any text."""
        return []

    def grow(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Event:
        """Further text."""
        raise NotImplementedError

    def end(self) -> list[Event]:
        """Events that come after all text, before that of the item itself."""
        raise NotImplementedError


class _Content(_Item):
    """An item with one part of text."""

    event: str

    def part(self) -> dict[str, Any]:
        """The part as it is now."""
        raise NotImplementedError

    def begin(self) -> list[Event]:
        return [{"type": "response.content_part.added", **self._where(), "part": self.part()}]

    def _where(self) -> dict[str, Any]:
        return {"item_id": self.item_id, "output_index": self.index, "content_index": 0}

    def end(self) -> list[Event]:
        part = self.part()
        done = {"type": f"{self.event}.done", **self._where(), "text": self._whole}
        if "logprobs" in part:
            done["logprobs"] = part["logprobs"]
        return [done, {"type": "response.content_part.done", **self._where(), "part": part}]


class _Message(_Content):
    """What the model says."""

    prefix = "msg"
    event = "response.output_text"

    def __init__(self, index: int, response_key: str) -> None:
        super().__init__(index, response_key)
        self._logprobs: list[dict[str, Any]] = []

    def value(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part()]
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._whole, "annotations": [], "logprobs": list(self._logprobs)}

    def grow(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Event:
        self._pieces.append(text)
        self._logprobs.extend(logprobs)
        return {"type": f"{self.event}.delta", **self._where(), "delta": text, "logprobs": list(logprobs)}


class _Reasoning(_Content):
    """What the model thinks before it speaks."""

    prefix = "rs"
    event = "response.reasoning_text"

    def value(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part()]
        return {"id": self.item_id, "type": "reasoning", "status": status, "summary": [], "content": content}

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self._whole}

    def grow(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Event:
        self._pieces.append(text)
        return {"type": f"{self.event}.delta", **self._where(), "delta": text}


class _Call(_Item):
    """A function that the model calls."""

    prefix = "fc"

    def __init__(self, index: int, response_key: str, begin: CallBegin) -> None:
        super().__init__(index, response_key)
        self._call_id = begin.call_id
        self._name = begin.name

    def value(self, status: str) -> dict[str, Any]:
        return {
            "id": self.item_id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self._whole,
        }

    def _where(self) -> dict[str, Any]:
        return {"item_id": self.item_id, "output_index": self.index}

    def grow(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Event:
        self._pieces.append(text)
        return {"type": "response.function_call_arguments.delta", **self._where(), "delta": text}

    def end(self) -> list[Event]:
        whole = {"name": self._name, "arguments": self._whole}
        return [{"type": "response.function_call_arguments.done", **self._where(), **whole}]


class Items:
    """The output of one response, from deltas to items.

    Args:
        key: what no other response has; ids of items are made with it.

    Attributes:
        done: the items so far, as they are given.
    """

    def __init__(self, key: str, shape: ChatShape) -> None:
        self._key = key
        self._shape = shape
        self._open: _Item | None = None
        self._unread: deque[ShownToken] = deque()
        self.done: list[dict[str, Any]] = []

    def push(self, delta: OutputDelta) -> list[Event]:
        """Events for what a delta adds. Log probabilities are those of the tokens of the answer's text, and go with it."""
        if delta.parts is None:
            events = self._say(delta.text, delta.tokens)
        else:
            self._unread.extend(delta.tokens)
            events = [event for part in delta.parts for event in self._add(part)]
        if delta.finish_reason is not None:
            events += self._finish(delta.finish_reason)
        return events

    def _say(self, text: str, tokens: Sequence[ShownToken]) -> list[Event]:
        if not text and not tokens:
            return []
        logprobs = self._shape.logprobs(tokens)["content"] if tokens else ()
        return [*self._into(_Message), self._grow(text, logprobs)]

    def _tokens_of(self, text: Text) -> list[ShownToken]:
        """The tokens that spell any of `text`. Those before it spell what the answer's parts do not show."""
        unread, tokens = self._unread, []
        while len(unread) > 1 and unread[0].offset < text.start and unread[1].offset <= text.start:
            unread.popleft()
        while unread and unread[0].offset < text.end:
            tokens.append(unread.popleft())
        return tokens

    def _add(self, part: Part) -> list[Event]:
        match part:
            case Text(text):
                return self._say(text, self._tokens_of(part))
            case Reasoning(text):
                return [*self._into(_Reasoning), self._grow(text)]
            case CallBegin():
                return [*self._close("completed"), *self._begin(_Call(len(self.done), self._key, part))]
            case CallArguments(_, fragment):
                return [self._grow(fragment)]

    def _grow(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Event:
        assert self._open is not None
        return self._open.grow(text, logprobs)

    def _into(self, kind: type[_Content]) -> list[Event]:
        """Have an item of this kind be the one that grows."""
        if isinstance(self._open, kind):
            return []
        return [*self._close("completed"), *self._begin(kind(len(self.done), self._key))]

    def _begin(self, item: _Item) -> list[Event]:
        self._open = item
        added = {"type": "response.output_item.added", "output_index": item.index, "item": item.value("in_progress")}
        return [added, *item.begin()]

    def _close(self, status: str) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        value = item.value(status)
        self.done.append(value)
        return [*item.end(), {"type": "response.output_item.done", "output_index": item.index, "item": value}]

    def _finish(self, reason: FinishReason) -> list[Event]:
        """End what grows. An answer without any item is an empty message."""
        events = [] if self.done or self._open is not None else self._into(_Message)
        if isinstance(self._open, _Message):  # tokens of half a character, and such as have no text
            events += self._say("", self._unread)
        return events + self._close("incomplete" if reason is FinishReason.LENGTH else "completed")
