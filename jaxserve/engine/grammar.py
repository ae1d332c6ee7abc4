"""Grammars for outputs, by llguidance: compiled once, matched token by token.

Owns the vocabulary as llguidance wants it, the limits within which a grammar is compiled and followed, and the bound on
whitespace in JSON: at most one space where JSON allows any. Does not know requests, devices or how a mask is applied.

A caller writes grammars, so everything about them is hostile: their size is limited, and llguidance's own limits bound what
compiling and each token may take. What passes them and still runs into one later ends that one sequence with an error.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import llguidance

from jaxserve.constraint import Constraint, Grammar, GrammarKind, mask_size
from jaxserve.engine.grammar_depth import check_rules
from jaxserve.engine.json_schema import prepare_schema
from jaxserve.engine.text import Tokenizer
from jaxserve.errors import EngineError, InvalidRequest

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_CHARACTERS = 200_000
MAX_REASON_CHARACTERS = 500
MAX_CHOICES = 10_000
CACHED_GRAMMARS = 256

RULE_IS = "//: "
"""Begins a line of a grammar in Lark that says what the rule below it is, for errors."""

_GUARD = "\x02"
"""A character that no merge reaches across."""

JSON_OPTIONS: JsonCompileOptions = {
    # One space at most: a model that likes whitespace would fill its whole output with it.
    "whitespace_flexible": True,
    "whitespace_pattern": " ?",
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
    # Without \u, since a key can be spelt with it in a way that no grammar tells from a property's name.
    "json_allowed_escapes": '"\\bfnrt',
    "json_allow_general_unicode_escapes": False,
}


def _limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,  # 20 ms
        step_lexer_fuel=100_000,  # 7 ms
        step_max_items=10_000,  # 4 ms
        max_lexer_states=20_000,  # 40 MB
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Safe to call from any thread.

    The first one takes what `prepare` does more, unless that was called, or waits for it: of a vocabulary of 49,152 tokens
    0.1 seconds and 14 MB, of one of 262,144 0.7 seconds and 105 MB.

    Args:
        vocab_size: of the model's logits, which masks cover; the tokenizer's may be smaller or larger.
        end_token_ids: those that end an output.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[GrammarKind, str], CompiledGrammar] = OrderedDict()

    def prepare(self) -> None:
        """Have the vocabulary as llguidance wants it. Holds up every thread of this process meanwhile, as it never lets go of
        the interpreter: for when nobody is served yet."""
        if self._end_token_ids:
            self._shared_vocabulary()

    def compile(self, grammar: Grammar) -> Constraint:
        """The grammar as a constraint, compiled or from the cache.

        Raises:
            InvalidRequest: naming the grammar's `param`, with the reason why it cannot be used.
        """
        key = (grammar.kind, grammar.text)
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return found
        try:
            compiled = self._compile(grammar)
        except ValueError as error:
            reason = _explain(str(error), grammar)[:MAX_REASON_CHARACTERS]
            raise InvalidRequest(f"{grammar.param}: {reason}", param=grammar.param) from None
        with self._lock:
            self._compiled[key] = compiled
            while len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return compiled

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        if not self._end_token_ids:
            raise ValueError("this model has no end-of-sequence token, so no grammar can end its output")
        if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
            raise ValueError(f"it has {len(grammar.text)} characters, which is more than {MAX_GRAMMAR_CHARACTERS}")
        source = _SOURCES[grammar.kind](grammar.text)
        compiled = CompiledGrammar(self._shared_vocabulary(), source, frozenset(self._end_token_ids), self._vocab_size)
        # Much is put off until the first mask, and only that shows whether there is anything to say.
        compiled.check()
        return compiled

    def _shared_vocabulary(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                names = _Vocabulary(self._tokenizer, self._vocab_size, self._end_token_ids)
                ends = list(self._end_token_ids)
                self._vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(names), eos_token=ends)
            return self._vocabulary


_PLACE = re.compile(r"at (\d+)\(\d+\): (.*)")


def _explain(reason: str, grammar: Grammar) -> str:
    """What is wrong; of a rule that has `RULE_IS` above it, in the words that follow there, and not by its place."""
    if grammar.kind is not GrammarKind.LARK or (place := _PLACE.match(reason)) is None:
        return reason
    above = grammar.text.split("\n")[max(0, int(place[1]) - 2)]
    return f"{above.removeprefix(RULE_IS)}: {place[2]}" if above.startswith(RULE_IS) else reason


class _Vocabulary:
    """Our tokenizer under the names that llguidance looks for. Ids that stand for no text are never matched."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._guard = tokenizer.encode_plain(_GUARD)
        self.eos_token_id = end_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self._special = frozenset(filter(tokenizer.is_special, range(vocab_size)))
        self.special_token_ids = sorted(self._special.union(end_token_ids))

    @cached_property
    def _id_of(self) -> dict[bytes, int]:
        """Ids by their bytes, which tokenizers that can spell any text never ask for."""
        ids = reversed(range(len(self.tokens)))
        return {self.tokens[i]: i for i in ids if self.tokens[i] and i not in self._special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._id_of), default=1)

    def __call__(self, text: str) -> list[int]:
        """Ids that spell a piece of an output, as a model would have it in the middle of a text."""
        if isinstance(text, bytes):
            raise TypeError("text, not bytes")
        ids = self._tokenizer.encode_plain(text)
        if self._spells(ids, text):
            return ids
        # A tokenizer that puts a space before every text puts it before something else.
        guarded = self._tokenizer.encode_plain(_GUARD + text)
        ids = guarded[len(self._guard) :]
        if guarded[: len(self._guard)] == self._guard and self._spells(ids, text):
            return ids
        return self._longest_first(text.encode())

    def _spells(self, ids: list[int], text: str) -> bool:
        return max(ids, default=0) < len(self.tokens) and b"".join([self.tokens[i] for i in ids]) == text.encode()

    def _longest_first(self, text: bytes) -> list[int]:
        ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._id_of), None)
            if end is None:
                return []
            ids.append(self._id_of[text[start:end]])
            start = end
        return ids


class CompiledGrammar:
    """A grammar of one vocabulary; see `constraint.Constraint`.

    What its matchers have found out about its regular expressions they share, so later ones are faster; but llguidance counts
    that against the limits of each. So one that runs into a limit begins again on its own.
    """

    def __init__(
        self, vocabulary: llguidance.LLTokenizer, source: str, end_token_ids: frozenset[int], vocab_size: int
    ) -> None:
        self._vocabulary = vocabulary
        self._source = source
        self.end_token_ids = end_token_ids
        self.mask_size = mask_size(vocab_size)
        self._lock = threading.Lock()
        self._matcher = self.build()

    def build(self) -> llguidance.LLMatcher:
        """A matcher that shares nothing."""
        return llguidance.LLMatcher(self._vocabulary, self._source, log_level=0, limits=_limits())

    def check(self) -> None:
        """Raise `ValueError` if nothing can be made of it."""
        first = self._matcher.deep_copy()
        if not first.is_error():
            first.compute_bitmask()
        if _is_stuck(first):
            raise ValueError(_reason(first))

    def start(self) -> GrammarMatcher:
        with self._lock:
            return GrammarMatcher(self, self._matcher.deep_copy())

    def renew(self) -> llguidance.LLMatcher:
        """Forget what matchers have shared, from now on; a matcher at the start."""
        matcher = self.build()
        with self._lock:
            self._matcher = matcher
            return matcher.deep_copy()


class GrammarMatcher:
    """One sequence's place in a grammar; see `constraint.Matcher`."""

    def __init__(self, grammar: CompiledGrammar, matcher: llguidance.LLMatcher) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._tokens: list[int] = []
        self._was_renewed = False
        self._ended = False

    @property
    def done(self) -> bool:
        return self._ended or (self._matcher.is_stopped() and self._matcher.is_accepting())

    def accepts(self, token_ids: list[int]) -> bool:
        """Whether these tokens, none of them an end token, can come next and the output end after them."""
        matcher = self._matcher.deep_copy()
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and bool(matcher.is_accepting())

    def mask(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        if _is_stuck(self._matcher) and not self._was_renewed:
            self._was_renewed = True
            self._matcher = self._grammar.renew()
            self._matcher.consume_tokens(self._tokens)
            mask = self._matcher.compute_bitmask()
        if _is_stuck(self._matcher):
            raise EngineError(f"the output's grammar could not be followed: {_reason(self._matcher)}")
        # llguidance may add a word.
        whole: bytes = mask[: self._grammar.mask_size]
        return whole

    def advance(self, token_id: int) -> None:
        # After the end only end tokens come, if the sequence goes on at all.
        if self._ended:
            return
        self._ended = token_id in self._grammar.end_token_ids
        if not self._ended:
            self._tokens.append(token_id)
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)

    def forced(self) -> tuple[int, ...]:
        return () if self._matcher.is_stopped() else tuple(self._matcher.compute_ff_tokens())


def _is_stuck(matcher: llguidance.LLMatcher) -> bool:
    """Whether nothing can follow, not even the end."""
    return matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting())


def _reason(matcher: llguidance.LLMatcher) -> str:
    """Why a matcher is in an error, or stopped where it does not accept."""
    reason, error = matcher.stop_reason(), matcher.get_error()
    if "NoExtension" in f"{reason} {error}":
        return "no text satisfies it"
    return (error.removesuffix("\n<non-verbose/>") or reason)[:MAX_REASON_CHARACTERS]


def _json_source(text: str) -> str:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    schema = prepare_schema(schema)
    source: str = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_OPTIONS)
    return source


def check_regex(text: str) -> str:
    """A regular expression, which must not end in the middle of an escape: llguidance would leave that out without a word.

    Raises:
        ValueError: it does.
    """
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise ValueError("invalid regex: a backslash at its end escapes nothing")
    return text


def _regex_source(text: str) -> str:
    source: str = llguidance.LLMatcher.grammar_from_regex(check_regex(text))
    return source


def _choice_source(text: str) -> str:
    choices = json.loads(text)
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("choices must be strings that are not empty, at least one")
    if len(choices) > MAX_CHOICES:
        raise ValueError(f"{len(choices)} choices > {MAX_CHOICES}")
    source: str = llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))
    return source


def _lark_source(text: str) -> str:
    check_rules(text)
    source: str = llguidance.LLMatcher.grammar_from_lark(text)
    return source


_SOURCES: dict[GrammarKind, Callable[[str], str]] = {
    GrammarKind.JSON_SCHEMA: _json_source,
    GrammarKind.REGEX: _regex_source,
    GrammarKind.CHOICE: _choice_source,
    GrammarKind.LARK: _lark_source,
}
