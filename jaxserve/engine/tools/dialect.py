"""How a model writes what is not plain text, and reading one answer of it.

Owns the choice of formats at start, and the order in which an answer is read: reasoning first, then text and calls. Knows
neither requests nor how an API shapes the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.engine.tools.calls import Calls
from jaxserve.engine.tools.feed import Feed, Parse, Parser, read_all
from jaxserve.engine.tools.formats import TOOL_FORMATS, ToolFormat, find_tool_format
from jaxserve.engine.tools.parts import Text
from jaxserve.engine.tools.reasoning import REASONING_FORMATS, ReasoningFormat, find_reasoning_format
from jaxserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Dialect:
    """A model's formats.

    Attributes:
        tools: of calls; None if it has none that is known.
        reasoning: None if it does not show any, or it is to be left in the text.
        single_call: whether the template takes but one call a message.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    single_call: bool = False

    @property
    def markers(self) -> frozenset[str]:
        """Texts of its formats that are control tokens in some vocabularies."""
        return _markers(self.tools, self.reasoning)

    def __str__(self) -> str:
        tools, reasoning = self.tools, self.reasoning
        return f"tool calls: {tools.name if tools else 'none'}; reasoning: {reasoning.name if reasoning else 'none'}"


def _markers(*formats: ToolFormat | ReasoningFormat | None) -> frozenset[str]:
    return frozenset(marker for format in formats if format is not None for marker in format.markers)


def choose_dialect(template: str | None, *, tool_format: str = "auto", reasoning_format: str = "auto") -> Dialect:
    """The formats that the chat template's text shows, unless they are named.

    Args:
        tool_format, reasoning_format: "auto", "none" or a name.

    Raises:
        ConfigError: there is no such name.
    """
    source = template or ""
    tools = _choose("tool_format", tool_format, TOOL_FORMATS, find_tool_format(source))
    reasoning = _choose("reasoning_format", reasoning_format, REASONING_FORMATS, find_reasoning_format(source))
    return Dialect(tools, reasoning, single_call="single tool-calls" in source)


def _choose[F](name: str, wanted: str, known: dict[str, F], found: F | None) -> F | None:
    if wanted == "auto":
        return found
    if wanted == "none":
        return None
    if wanted not in known:
        raise ConfigError(f"{name} must be auto, none or one of {', '.join(known)}, found {wanted!r}")
    return known[wanted]


@dataclass(frozen=True, slots=True)
class Reading:
    """How one request's answer is read.

    Attributes:
        tools: None to leave calls in the text.
        names: of the functions that may be called.
        reasoning: None to leave reasoning in the text.
        opened: whether the prompt has opened the reasoning.
        ends_with_calls: whether an answer that stops after calls ended for their sake.
        only_calls: whether a grammar leaves nothing but calls, so that what is none is the beginning of one that was cut off.
    """

    tools: ToolFormat | None = None
    names: frozenset[str] = frozenset()
    reasoning: ReasoningFormat | None = None
    opened: bool = False
    ends_with_calls: bool = True
    only_calls: bool = False

    @property
    def markers(self) -> frozenset[str]:
        """Texts that have to be shown to the parser also where they are control tokens."""
        return _markers(self.tools, self.reasoning)

    def parser(self, seed: str) -> AnswerParser:
        """A parser for one answer.

        Args:
            seed: what no other answer has; its calls get their ids from it.
        """
        return AnswerParser(self, seed)


class AnswerParser(Parser):
    """Reads one answer.

    Attributes:
        reasoning_end: characters up to the end of the reasoning, its tags included; 0 if there is none, and None while it
            goes on or may yet begin.
    """

    def __init__(self, reading: Reading, seed: str) -> None:
        self._reading = reading
        make_id = reading.tools.make_id if reading.tools is not None else str
        self._calls = Calls(reading.names, lambda index: make_id(f"{seed} {index}"))
        self.reasoning_end: int | None = None
        super().__init__(self._read)

    def _read(self, feed: Feed) -> Parse:
        reading = self._reading
        if reading.reasoning is not None:
            yield from reading.reasoning.read(feed, opened=reading.opened)
        self.reasoning_end = feed.offset
        if reading.tools is None:
            yield from read_all(feed)
        else:
            for part in reading.tools.read(feed, self._calls):
                if not (reading.only_calls and isinstance(part, Text)):
                    yield part

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._calls.num_calls


class ReasoningCounter:
    """Counts the tokens of an answer that are reasoning: those that begin before its end."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self.num_tokens = 0

    def push(self, offsets: Sequence[int]) -> None:
        """Further tokens, once the parser has their text.

        Args:
            offsets: for each, in order, how many characters of the answer come before it.
        """
        end = self._parser.reasoning_end
        if end is None:
            self.num_tokens += len(offsets)
        elif end == 0:
            self.num_tokens = 0
        elif offsets and offsets[0] < end:
            self.num_tokens += sum(offset < end for offset in offsets)
