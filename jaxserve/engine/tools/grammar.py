"""Grammars that hold a model to calls of functions, in its own form and with arguments as their schemas have them.

Owns the text of a grammar (Lark, as llguidance reads it) around the arguments and what reasoning may come first. Does not
compile it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.constraint import Grammar, GrammarKind
from jaxserve.engine.grammar import JSON_OPTIONS, RULE_IS, check_regex
from jaxserve.engine.json_schema import prepare_schema
from jaxserve.engine.tools.formats import Syntax
from jaxserve.engine.tools.gemma_schema import gemma_rules
from jaxserve.engine.tools.reasoning import ReasoningFormat

NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called.

    Attributes:
        parameters: JSON schema of its arguments.
    """

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Writing:
    """How a model writes, as far as a grammar has to know.

    Attributes:
        control_tokens: ids of the texts that are control tokens in its vocabulary.
        syntax: of calls.
        reasoning: what may come before the answer; None for nothing.
        opened: whether the prompt has opened the reasoning.
    """

    control_tokens: Mapping[str, int]
    syntax: Syntax | None = None
    reasoning: ReasoningFormat | None = None
    opened: bool = False


def required_calls(writing: Writing, functions: Sequence[Function], *, single: bool, beside: Grammar | None = None) -> str:
    """A grammar of answers that are calls and nothing else, but for reasoning before them.

    Args:
        single: exactly one call; else at least one.
        beside: what text beside the calls would be held to. There is none, but the grammar compiles only if this does.

    Raises:
        ValueError: arguments cannot be held to a function's schema; with the reason. Or as `calls_or_answer`.
    """
    lark = _Lark(writing)
    sequence = lark.sequence(functions, single=single)
    calls = f"{lark.reasoning()} SPACE {sequence}"
    if beside is None:
        return lark.grammar(calls, _SPACE)
    return lark.grammar(f"({calls} | NEVER answer)", _SPACE, "NEVER: /a/ & /b/", _answer_rule(beside))


def calls_or_answer(writing: Writing, functions: Sequence[Function], answer: Grammar, *, single: bool) -> str:
    """A grammar of answers that are calls or an answer that is held to a grammar of its own.

    Raises:
        ValueError: as `required_calls`, or the answer's grammar cannot be part of another.
    """
    lark = _Lark(writing)
    sequence = lark.sequence(functions, single=single)
    return lark.grammar(f"{lark.reasoning('SPACE')} (SPACE {sequence} | answer)", _SPACE, _answer_rule(answer))


def reasoned_answer(writing: Writing, answer: Grammar) -> str:
    """A grammar of an answer that is held to a grammar of its own, with reasoning before it.

    Raises:
        ValueError: the answer's grammar cannot be part of another.
    """
    lark = _Lark(writing)
    return lark.grammar(f"{lark.reasoning('SPACE')} answer", _SPACE, _answer_rule(answer))


def triggered_calls(writing: Writing, functions: Sequence[Function], *, single: bool) -> str:
    """A grammar of any answers, in which what begins as a call goes on as one.

    Args:
        single: at most one call.

    Raises:
        ValueError: as `required_calls`.
    """
    lark = _Lark(writing)
    syntax = lark.syntax
    if not syntax.trigger:
        sequence = lark.sequence(functions, single=single)
        return lark.grammar(f"{lark.reasoning()} SPACE ({sequence} | other)?", _SPACE, "other: /[^\\s{](.|\\n)*/")
    if syntax.before:
        sequence = lark.sequence(functions, single=single, without=syntax.trigger)
    else:
        sequence = lark.call(functions, without=syntax.trigger)
    # Nothing comes after a single call, or it could be another.
    answer = f"(before {sequence} | after)" if single else f"(before {sequence})* after"
    plain = lark.plain()
    rules = (lark.up_to("before", syntax.trigger, text=plain), f"after: {plain}")
    return lark.grammar(f"{lark.reasoning()} {answer}", *rules)


_SPACE = "SPACE: /[ \\n]{0,4}/"


def _answer_rule(answer: Grammar) -> str:
    match answer.kind:
        case GrammarKind.JSON_SCHEMA:
            return f"{RULE_IS}the schema\nanswer: %json {inline_json(json.loads(answer.text))}"
        case GrammarKind.CHOICE:
            return "answer: " + " | ".join(map(json.dumps, json.loads(answer.text)))
        case GrammarKind.REGEX:
            return f"{RULE_IS}the expression\nanswer: /{_UNESCAPED_SLASH.sub(_escape_slash, check_regex(answer.text))}/"
    raise ValueError(
        "a grammar in Lark's notation cannot be combined with tools, nor with reasoning that the prompt has opened"
    )


_UNESCAPED_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)


def _escape_slash(match: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(match[0], match[0])


def inline_json(schema: Any) -> str:
    """A JSON schema as grammars have it among their rules; it is changed.

    Raises:
        ValueError: it cannot be held to; with the reason.
    """
    return json.dumps({**prepare_schema(schema), "x-guidance": JSON_OPTIONS})


class _Lark:
    """Builds a grammar's text, rule by rule."""

    def __init__(self, writing: Writing) -> None:
        self._writing = writing
        self.syntax = writing.syntax or Syntax(call=str)
        self._rules = ["TEXT: /(.|\\n)*/"]
        self._names: set[str] = set()
        tokens = sorted(writing.control_tokens, key=len, reverse=True)
        self._control = re.compile(f"({'|'.join(map(re.escape, tokens))})" if tokens else "((?!))")

    def grammar(self, start: str, *rules: str) -> str:
        """The whole text."""
        return "\n".join(["%llguidance {}", f"start: {start}", *rules, *self._rules, ""])

    def terms(self, text: str) -> str:
        """`text` as terms of a rule: control tokens by their ids, all else as strings."""
        tokens = self._writing.control_tokens
        pieces = [piece for piece in self._control.split(text) if piece]
        return " ".join(f"<[{tokens[piece]}]>" if piece in tokens else json.dumps(piece) for piece in pieces)

    def up_to(self, name: str, marker: str, *, text: str = "TEXT") -> str:
        """The rule `name` of any text up to and with the first `marker`."""
        if marker in self._writing.control_tokens:
            return f"{name}: {text} {self.terms(marker)}"  # which no text spells
        return f"{name}[lazy]: {text} {self.terms(marker)}"

    def plain(self) -> str:
        """The terminal of text that does not begin as reasoning does, where that is text and may come."""
        reasoning = self._writing.reasoning
        if reasoning is None or self._writing.opened or reasoning.open in self._writing.control_tokens:
            return "TEXT"
        self._rules.append(f"PLAIN: TEXT & ~/{re.escape(reasoning.open)}(.|\\n)*/")
        return "PLAIN"

    def reasoning(self, after: str = "") -> str:
        """What may, or if it is open must, come before the answer.

        Args:
            after: what comes between reasoning and the answer; without reasoning it would be the answer's own.
        """
        reasoning = self._writing.reasoning
        if reasoning is None:
            return ""
        if self._writing.opened:
            self._rules.append(self.up_to("thought", reasoning.close))
            return f"thought {after}"
        # One lexeme where the tags are text: its beginning alone is always part of a longer one.
        text = "TEXT" if reasoning.open in self._writing.control_tokens else f"{self.terms(reasoning.open)} TEXT"
        opening = self.terms(reasoning.open) if text == "TEXT" else ""
        self._rules.append(self.up_to("thought", reasoning.close, text=text))
        return f"({opening} thought {after})?"

    def sequence(self, functions: Sequence[Function], *, single: bool, without: str = "") -> str:
        """One call or more with what stands around them, `without` its beginning."""
        syntax = self.syntax
        call = self.call(functions)
        before = self.terms(syntax.before.removeprefix(without))
        further = "" if single else f"({self.terms(syntax.between)} {call})*"
        return f"{before} {call} {further} {self.terms(syntax.after)}"

    def call(self, functions: Sequence[Function], *, without: str = "") -> str:
        """The rule of a call, `without` its beginning."""
        syntax = self.syntax
        for i, function in enumerate(functions):
            opening = self.terms(syntax.call(function.name).removeprefix(without))
            self._rules.append(f"call_{i}: {opening} arguments_{i} {self.terms(syntax.after_call)}")
            self._rules += self._arguments(f"arguments_{i}", function)
        self._rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
        return "call"

    def _string(self, quote: str) -> str:
        """Any string between quote tokens."""
        if "to_quote" not in self._names:
            self._rules.append(self.up_to("to_quote", quote))
            self._names.add("to_quote")
        return f"{self.terms(quote)} to_quote"

    def _arguments(self, name: str, function: Function) -> list[str]:
        try:
            schema = _object_schema(function.parameters)
            if quote := self.syntax.quote:
                return gemma_rules(name, prepare_schema(schema), self.terms(quote), self._string(quote))
            arguments = inline_json(schema)
        except ValueError as error:
            raise ValueError(f"the parameters of {function.name!r:.100}: {error}") from None
        return [f"{RULE_IS}the parameters of {function.name!r:.100}", f"{name}: %json {arguments}"]


def _object_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema for an object of arguments; the caller's is not changed."""
    schema: dict[str, Any] = json.loads(json.dumps(parameters))
    kind = schema.setdefault("type", "object")
    if kind != "object":
        raise ValueError(f"'type' must be 'object', found {kind!r:.60}")
    return schema
