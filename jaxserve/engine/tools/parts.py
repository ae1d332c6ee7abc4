"""What an answer is made of once it is read: text, reasoning, and calls of functions.

Plain values that every API shapes in its own way. Knows no format and no API.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Text:
    """Further text of the answer itself; not empty.

    Attributes:
        start: characters of the output before it, by which its tokens are found.
    """

    text: str
    start: int = field(default=0, compare=False)

    @property
    def end(self) -> int:
        """Characters of the output up to its end."""
        return self.start + len(self.text)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Further text of what the model thought before it answered; not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins. Its arguments follow, before any other call begins.

    Attributes:
        index: of the call in the answer, from 0.
    """

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A further piece of the JSON text of call `index`'s arguments; not empty."""

    index: int
    fragment: str


Part = Text | Reasoning | CallBegin | CallArguments


def merge(parts: Iterable[Part]) -> tuple[Part, ...]:
    """The same parts with neighbours of one kind joined, which is what does not depend on how the text came in."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        match part, last:
            case Text(text), Text(before, start):
                merged[-1] = Text(before + text, start)
            case Reasoning(text), Reasoning(before):
                merged[-1] = Reasoning(before + text)
            case CallArguments(index, fragment), CallArguments(before_index, before) if index == before_index:
                merged[-1] = CallArguments(index, before + fragment)
            case _:
                merged.append(part)
    return tuple(merged)
