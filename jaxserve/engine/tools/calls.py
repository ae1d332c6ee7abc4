"""Calls written as JSON objects, `{"name": ..., "arguments": {...}}`, which most formats have in common.

Owns the numbering of an answer's calls, and the keys of a call's object in whatever order they come. Does not know what a
format puts around such an object.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Generator
from dataclasses import dataclass

from jaxserve.engine.tools.feed import WAIT, Feed, Parse, peek, read_until, skip_space
from jaxserve.engine.tools.parts import CallArguments, CallBegin, Part
from jaxserve.engine.tools.values import DecodedString, RawValue

ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass
class Calls:
    """The calls of one answer, as they begin.

    Attributes:
        names: of the functions that there are.
        make_id: the id of the call with this number.
    """

    names: frozenset[str]
    make_id: Callable[[int], str]
    num_calls: int = 0

    def begin(self, name: str) -> CallBegin:
        """The next call."""
        index = self.num_calls
        self.num_calls += 1
        return CallBegin(index, self.make_id(index), name)

    def arguments(self, fragment: str) -> CallArguments:
        """Arguments of the call that began last."""
        return CallArguments(self.num_calls - 1, fragment)


class Outcome(enum.Enum):
    """What came of the attempt to read a call.

    NONE: there is no call, and nothing was yielded.
    WHOLE: its arguments are all there.
    OPEN: it began, and its arguments broke off: at the end of the text, or at something that is not JSON.
    """

    NONE = enum.auto()
    WHOLE = enum.auto()
    OPEN = enum.auto()


ReadCall = Generator[Part | None, None, Outcome]


def read_call(feed: Feed, calls: Calls, *, only_known: bool = False) -> ReadCall:
    """Read the call that the next character, a brace, begins. The caller has set `feed.keep`, and puts back what is none.

    Args:
        only_known: whether it is one only if a function of that name is there, and it has no keys but a call's.
    """
    reader = _CallObject(feed, calls, only_known)
    outcome = yield from reader.read()
    if outcome is not Outcome.NONE:
        feed.keep = None
    return outcome


def read_arguments(feed: Feed, calls: Calls) -> ReadCall:
    """Read the arguments of the call that began last, a JSON value that begins here."""
    whole = yield from read_value(feed, RawValue(), calls)
    return Outcome.WHOLE if whole else Outcome.OPEN


def read_value(
    feed: Feed, value: RawValue | DecodedString, calls: Calls | None, held: list[str] | None = None
) -> Generator[Part | None, None, bool]:
    """Read `value`, as arguments if there are `calls`, else into `held`; whether it is whole."""
    while True:
        if fragment := value.read(feed):
            if held is not None:
                held.append(fragment)
            if calls is not None:
                yield calls.arguments(fragment)
        if value.done or value.broken or feed.ended:
            return value.done
        yield WAIT


def read_rest(feed: Feed, calls: Calls, markers: tuple[str, ...]) -> Parse:
    """Read what follows arguments that broke off, which are still arguments, up to the first of `markers`."""
    marker = yield from read_until(feed, markers, calls.arguments)
    feed.pos -= len(marker)


class _CallObject:
    def __init__(self, feed: Feed, calls: Calls, only_known: bool) -> None:
        self._feed = feed
        self._calls = calls
        self._only_known = only_known
        self._begun = False
        self._has_arguments = False
        self._early: list[str] = []  # arguments that came before the name

    def read(self) -> ReadCall:
        feed = self._feed
        feed.pos += 1
        while True:
            character = yield from skip_space(feed)
            if character == "}":
                feed.pos += 1
                return (yield from self._close())
            if character == ",":
                feed.pos += 1
                continue
            read_on = yield from self._read_entry()
            if not read_on:
                return self._broken()

    def _close(self) -> ReadCall:
        if not self._begun:
            return Outcome.NONE
        if not self._has_arguments:
            yield self._calls.arguments("{}")
        return Outcome.WHOLE

    def _broken(self) -> Outcome:
        if not self._begun:
            return Outcome.NONE
        return Outcome.WHOLE if self._has_arguments else Outcome.OPEN

    def _read_entry(self) -> Generator[Part | None, None, bool]:
        feed = self._feed
        key = yield from read_string(feed)
        colon = yield from skip_space(feed)
        if key is None or colon != ":":
            return False
        feed.pos += 1
        yield from skip_space(feed)
        if key == "name" and not self._begun:
            return (yield from self._read_name())
        if key in ARGUMENT_KEYS and not self._has_arguments:
            return (yield from self._read_arguments())
        if self._only_known and not self._begun and key != "type":
            return False
        return (yield from read_value(feed, RawValue(), None))

    def _read_name(self) -> Generator[Part | None, None, bool]:
        name = yield from read_string(self._feed)
        if not name or (self._only_known and name not in self._calls.names):
            return False
        self._begun = True
        # Nothing is put back from here on.
        self._feed.keep = None
        yield self._calls.begin(name)
        for fragment in self._early:
            yield self._calls.arguments(fragment)
        return True

    def _read_arguments(self) -> Generator[Part | None, None, bool]:
        first = yield from peek(self._feed)
        value: RawValue | DecodedString = RawValue()
        if first == '"':  # JSON within JSON
            self._feed.pos += 1
            value = DecodedString()
        if self._begun:
            whole = yield from read_value(self._feed, value, self._calls)
        else:
            whole = yield from read_value(self._feed, value, None, self._early)
        self._has_arguments = whole
        return whole


def read_string(feed: Feed) -> Generator[None, None, str | None]:
    """Read a JSON string; None if the next thing is none."""
    quote = yield from peek(feed)
    if quote != '"':
        return None
    feed.pos += 1
    value, text = DecodedString(), ""
    while True:
        text += value.read(feed)
        if value.done:
            return text
        if value.broken or feed.ended:
            return None
        yield WAIT


def quoted(text: str) -> str:
    """`text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)
