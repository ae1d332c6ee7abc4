"""Reading an answer in pieces, for tests."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.engine.tools.dialect import Reading
from jaxserve.engine.tools.formats import TOOL_FORMATS
from jaxserve.engine.tools.parts import CallArguments, CallBegin, Part, Reasoning, Text, merge

NAMES = frozenset({"get_weather", "f", "math.add"})


def tool_reading(name: str) -> Reading:
    return Reading(tools=TOOL_FORMATS[name], names=NAMES)


def read(reading: Reading, text: str, cuts: Sequence[int] = ()) -> tuple[Part, ...]:
    """All parts of `text`, pushed in pieces that end at `cuts`; neighbours of a kind are merged."""
    parser = reading.parser("answer")
    parts: list[Part] = []
    start = 0
    for end in [*sorted(cut for cut in cuts if cut <= len(text)), len(text)]:
        parts += parser.push(text[start:end])
        start = end
    parts += parser.finish()
    check_order(parts)
    assert all(text[part.start : part.end] == part.text for part in parts if isinstance(part, Text))
    return merge(parts)


def check_order(parts: Sequence[Part]) -> None:
    """Calls begin once each, in order, and arguments belong to the call that began last; nothing is empty."""
    num_calls = 0
    for part in parts:
        match part:
            case CallBegin(index, call_id, name):
                assert (index, bool(call_id), bool(name)) == (num_calls, True, True)
                num_calls += 1
            case CallArguments(index, fragment):
                assert index == num_calls - 1
                assert fragment
            case Text(text) | Reasoning(text):
                assert text


def calls_of(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """Names and arguments."""
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallBegin):
            calls.append((part.name, ""))
        elif isinstance(part, CallArguments):
            name, before = calls.pop()
            calls.append((name, before + part.fragment))
    return calls


def text_of(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))
