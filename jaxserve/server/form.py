"""The form in which an API gives its answers, whole or as a stream of events: what each API has one of.

Owns what answers of all forms are made from. Does not know connections (`answers`) or any form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from jaxserve.engine.output import OutputDelta, ShownToken
from jaxserve.engine.text import Tokenizer
from jaxserve.engine.tools.parts import merge
from jaxserve.errors import JaxserveError
from jaxserve.request import FinishReason
from jaxserve.server.joining import Begun, Deltas
from jaxserve.server.ranking import Content


class Events(Protocol):
    """One stream, as bytes to be sent. Each method gives whole events, or nothing if there is nothing to say."""

    def opening(self) -> bytes:
        """What comes first."""
        ...

    def deltas(self, deltas: Deltas) -> bytes:
        """What one read of the call's source brought."""
        ...

    def ending(self) -> bytes:
        """What comes after the last delta."""
        ...

    def failure(self, error: JaxserveError | str) -> bytes:
        """What ends a stream that failed, in place of `ending`; a string is an error of ours, to be told so."""
        ...


class Form(Protocol):
    """How one API answers, about one model."""

    async def whole(self, begun: Begun) -> dict[str, Any]:
        """Wait for all of a call's outputs; the body of its answer."""
        ...

    def events(self, begun: Begun) -> Events:
        """The stream that answers a call."""
        ...


MakeForm = Callable[[Tokenizer, str], Form]
"""Makes the form for a model, from its tokenizer and its name."""


@dataclass(frozen=True, slots=True)
class WholeOutput:
    """One output, once it has ended.

    Attributes:
        content: its text, or what that is made of if the call is read for it.
        tokens: with log probabilities, if the request asked for them.
        stopped_by: the stop string or stop token that ended it, if one did.
    """

    content: Content
    tokens: tuple[ShownToken, ...]
    finish_reason: FinishReason
    stopped_by: str | int | None = None


async def whole_outputs(begun: Begun) -> list[WholeOutput]:
    """Wait for every output of a call."""
    collected: list[list[OutputDelta]] = [[] for _ in begun.call.requests]
    while deltas := await begun.source.read():
        for index, delta in deltas:
            collected[index].append(delta)
    return [_whole_output(deltas, as_parts=begun.call.reading is not None) for deltas in collected]


def _whole_output(deltas: list[OutputDelta], *, as_parts: bool) -> WholeOutput:
    last = next(delta for delta in deltas if delta.finish_reason is not None)
    assert last.finish_reason is not None
    return WholeOutput(
        merge(part for delta in deltas for part in delta.parts or ()) if as_parts else "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.tokens),
        last.finish_reason,
        last.stopped_by,
    )
