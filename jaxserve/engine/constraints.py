"""What a request's parameters restrict tokens to, compiled.

Owns the way from `SamplingParams` to a `Constraint`, and how words are spelt in tokens. Grammars are `grammar`'s, sets of
tokens `token_sets`'. Knows neither requests nor wire formats.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.constraint import Constraint, mask_of
from jaxserve.engine.grammar import GrammarCompiler
from jaxserve.engine.text import Tokenizer
from jaxserve.engine.token_sets import TokenSet
from jaxserve.request import SamplingParams, check_token_ids


class Constraints:
    """Compiles them for one model. Safe to call from any thread.

    Args:
        vocab_size: of the model's logits.
        end_token_ids: those that end an output.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._grammars = GrammarCompiler(tokenizer, vocab_size, end_token_ids)

    def prepare(self) -> None:
        """Do now what the first grammar would wait for; see `GrammarCompiler.prepare`."""
        self._grammars.prepare()

    def of(self, params: SamplingParams) -> Constraint | None:
        """The constraint that `params` want; None if they want none. May take a second: not for an event loop.

        Raises:
            InvalidRequest: naming the field that cannot be used.
        """
        if params.grammar is not None:
            return self._grammars.compile(params.grammar)
        if not params.restricts_tokens:
            return None
        check_token_ids(params, self._vocab_size)
        allowed = mask_of(params.allowed_token_ids or range(self._vocab_size), self._vocab_size)
        return TokenSet(allowed, self._spellings(params.bad_words), mask_of(self._end_token_ids, self._vocab_size))

    def _spellings(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as the tokenizer spells it at the beginning of a text, and after a space."""
        encode = self._tokenizer.encode_plain
        spellings = [tuple(encode(before + word.lstrip(" "))) for word in words for before in ("", " ")]
        return tuple(dict.fromkeys(spelling for spelling in spellings if spelling))
