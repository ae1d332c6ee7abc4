"""Constraints on tokens as such: only some of them, or never certain ones in a row.

Owns masks over the vocabulary made of ids. Knows no text: words come as the ids that spell them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from jaxserve.constraint import is_empty, without
from jaxserve.errors import EngineError


def _ends_with(tokens: tuple[int, ...], end: tuple[int, ...]) -> bool:
    return len(end) <= len(tokens) and tokens[len(tokens) - len(end) :] == end


@dataclass(frozen=True)
class TokenSet:
    """Only some tokens, and of those never the last of a forbidden sequence after all its others.

    As vLLM has `allowed_token_ids` and `bad_words`: sequences are looked for in the output, not in the prompt, and end tokens
    are allowed only if they are among `allowed`. Where nothing else is left, the output ends.

    Attributes:
        allowed: a mask.
        forbidden: sequences, none of them empty.
        end: a mask of the tokens that end an output.
    """

    allowed: bytes
    forbidden: tuple[tuple[int, ...], ...]
    end: bytes

    def start(self) -> TokenSetMatcher:
        return TokenSetMatcher(self)


class TokenSetMatcher:
    """The last tokens of one sequence."""

    def __init__(self, tokens: TokenSet) -> None:
        self._set = tokens
        self._longest = max(map(len, tokens.forbidden), default=1)
        self._last: deque[int] = deque(maxlen=self._longest - 1)

    @property
    def done(self) -> bool:
        return False

    def mask(self) -> bytes:
        last = tuple(self._last)
        banned = [word[-1] for word in self._set.forbidden if _ends_with(last, word[:-1])]
        mask = without(self._set.allowed, banned) if banned else self._set.allowed
        if not is_empty(mask):
            return mask
        if is_empty(self._set.end):
            raise EngineError("allowed_token_ids and bad_words leave no token, and this model has none that ends an output")
        return self._set.end

    def advance(self, token_id: int) -> None:
        self._last.append(token_id)

    def forced(self) -> tuple[int, ...]:
        return ()
