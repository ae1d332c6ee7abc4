"""What restricts a sequence's tokens beyond probabilities: grammars, sets of allowed tokens. Standard library only.

Owns the protocols by which the engine asks what may come next, `Grammar`, a restriction as the caller writes it, and masks:
bytes with a bit for each token id, lowest first, in whole little-endian words of 32 bits. Does not know how a grammar is
compiled or a mask applied.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class GrammarKind(enum.StrEnum):
    """The languages that a restriction can be written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole output has to be.

    Attributes:
        text: a JSON schema as JSON; a regular expression; a JSON array of strings, of which one is chosen; a Lark grammar.
        param: the request field that it came from, which errors name.
    """

    kind: GrammarKind
    text: str
    param: str = "grammar"


JSON_OBJECT = '{"type":"object"}'
"""The schema of any JSON object."""


class Matcher(Protocol):
    """One sequence's place in its constraint. Advanced by every output token, in order; one thread at a time."""

    @property
    def done(self) -> bool:
        """Whether nothing can follow but an end-of-sequence token."""
        ...

    def mask(self) -> bytes:
        """The tokens that may come next, never none.

        Raises:
            EngineError: that cannot be told within limits, or nothing may come next.
        """
        ...

    def advance(self, token_id: int) -> None:
        """The sequence got this token, which the last mask allowed."""
        ...

    def forced(self) -> tuple[int, ...]:
        """The tokens that come next whatever is sampled: each of their masks has this one bit. Often none."""
        ...


class Constraint(Protocol):
    """A compiled restriction, which never changes: any number of sequences can start from it, on any thread."""

    def start(self) -> Matcher:
        """A matcher for a sequence without output tokens."""
        ...


def mask_size(vocab_size: int) -> int:
    """Bytes of a mask."""
    return -(-vocab_size // 32) * 4


def mask_of(token_ids: Iterable[int], vocab_size: int) -> bytes:
    """The mask with these bits."""
    mask = bytearray(mask_size(vocab_size))
    for token_id in token_ids:
        mask[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(mask)


def without(mask: bytes, token_ids: Iterable[int]) -> bytes:
    """The mask with these bits cleared."""
    cleared = bytearray(mask)
    for token_id in token_ids:
        cleared[token_id >> 3] &= ~(1 << (token_id & 7))
    return bytes(cleared)


def is_empty(mask: bytes) -> bool:
    """Whether no bit is set."""
    return mask.count(0) == len(mask)
