"""The forms of Gemma: `<|tool_call>call:name{key:<|"|>text<|"|>,n:3}<tool_call|>` in Gemma 4, and FunctionGemma's like it.

Arguments are no JSON: keys are bare, and strings stand between quote tokens with nothing escaped. They are turned into JSON
as they come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from dataclasses import dataclass

from jaxserve.engine.tools.calls import Calls, read_value
from jaxserve.engine.tools.feed import (
    MAX_NAME,
    Feed,
    Parse,
    accept,
    peek,
    put_back_before,
    read_before,
    read_content,
    read_until,
    skip_space,
    skip_to,
)
from jaxserve.engine.tools.parts import Part
from jaxserve.engine.tools.values import RawValue

_NAME = re.compile(r"[\w.\-:/]+")


@dataclass(frozen=True, slots=True)
class Tokens:
    """The control tokens of a form.

    Attributes:
        quote: before and after a string.
    """

    open: str
    close: str
    quote: str

    @property
    def markers(self) -> tuple[str, ...]:
        """All of them."""
        return (self.open, self.close, self.quote)

    def read(self, feed: Feed, calls: Calls) -> Parse:
        """The answer's text and calls. What follows an opening token is text if it is no call, but the token is not."""
        while (yield from read_content(feed, (self.open,))):
            num_read = feed.num_kept
            found = yield from self._read_call(feed, calls)
            if not found:
                yield from put_back_before(feed, num_read, self.open)

    def _read_call(self, feed: Feed, calls: Calls) -> Generator[Part | None, None, bool]:
        yield from skip_space(feed)
        if not (yield from accept(feed, ("call:",))):
            return False
        name = yield from _read_name(feed)
        if not name:
            return False
        feed.keep = None
        yield calls.begin(name)
        whole = yield from _Arguments(feed, calls, self.quote).read()
        if not whole:  # what is left is not JSON, nor can it be made JSON
            yield from skip_to(feed, (self.close,))
        yield from skip_space(feed)
        closed = yield from accept(feed, (self.close,))
        if not closed and self.close.startswith(feed.rest):  # cut off within the token
            feed.pos = len(feed.text)
        yield from skip_space(feed)
        return True


GEMMA = Tokens("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = Tokens("<start_function_call>", "<end_function_call>", "<escape>")


def _read_name(feed: Feed) -> Generator[None, None, str]:
    """Read a function's name; "" if no brace follows. The brace is left."""
    name, brace = yield from read_before(feed, ("{",), limit=MAX_NAME)
    feed.pos -= len(brace)
    return name if brace and _NAME.fullmatch(name) else ""


class _Arguments:
    """Reads an object in Gemma's notation, and gives it out as JSON."""

    def __init__(self, feed: Feed, calls: Calls, quote: str) -> None:
        self._feed = feed
        self._calls = calls
        self._quote = quote

    def read(self) -> Generator[Part | None, None, bool]:
        """Read the object that begins here; whether it is whole.

        Not recursive, since a model may open any number of brackets.
        """
        closers: list[str] = []
        while True:
            character = yield from skip_space(self._feed)
            if closers and character == closers[-1]:
                yield self._take(closers.pop())
            else:
                begun = yield from self._begin_value(closers)
                if not begun:
                    return False
                if begun == "bracket":
                    continue
            while closers and (yield from skip_space(self._feed)) == closers[-1]:
                yield self._take(closers.pop())
            if not closers:
                return True
            if not (yield from self._read_comma(closers[-1])):
                return False

    def _begin_value(self, closers: list[str]) -> Generator[Part | None, None, str]:
        """Read a key, if this is an object, and a value: all of it, or its opening bracket. "" if it is none."""
        if closers and closers[-1] == "}" and not (yield from self._read_key()):
            return ""
        character = yield from skip_space(self._feed)
        if character and character in "{[":
            closers.append("}" if character == "{" else "]")
            yield self._take(character)
            return "bracket"
        return "leaf" if (yield from self._read_leaf(character)) else ""

    def _take(self, character: str) -> Part:
        self._feed.pos += 1
        return self._calls.arguments(character)

    def _read_comma(self, closer: str) -> Generator[Part | None, None, bool]:
        if (yield from peek(self._feed)) != ",":
            return False
        self._feed.pos += 1
        if (yield from skip_space(self._feed)) != closer:  # JSON has no comma after the last
            yield self._calls.arguments(", ")
        return True

    def _read_key(self) -> Generator[Part | None, None, bool]:
        quote = yield from accept(self._feed, (self._quote, '"'))
        if quote:
            key, end = yield from read_before(self._feed, (quote,))
            colon = yield from skip_space(self._feed)
            if not end or colon != ":":
                return False
            self._feed.pos += 1
        else:
            key, end = yield from read_before(self._feed, (":", ",", "}"))
            if end != ":" or not key:
                return False
        yield self._calls.arguments(f"{_dumps(key)}: ")
        return True

    def _read_leaf(self, character: str) -> Generator[Part | None, None, bool]:
        """Read a string or a scalar. A bare word that is no JSON is a string."""
        if (yield from accept(self._feed, (self._quote,))):
            yield self._calls.arguments('"')
            end = yield from read_until(self._feed, (self._quote,), lambda text: self._calls.arguments(_dumps(text)[1:-1]))
            if end:
                yield self._calls.arguments('"')
            return bool(end)
        if character == '"':
            return (yield from read_value(self._feed, RawValue(), self._calls))
        text, end = yield from read_before(self._feed, (",", "}", "]"))
        self._feed.pos -= len(end)
        if text:
            yield self._calls.arguments(text if _is_json(text) else _dumps(text))
        return bool(text)


def _dumps(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_no_constant)
    except ValueError:
        return False
    return True


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
