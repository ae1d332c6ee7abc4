"""The formats of calls that are known, and which of them a chat template has.

Owns how each format spells a call, for grammars and for the parsers' choice. Knows templates as text only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.engine.tools import gemma, hermes, llama, mistral
from jaxserve.engine.tools.calls import Calls, quoted
from jaxserve.engine.tools.feed import Feed, Parse


def _make_id(seed: str) -> str:
    return f"call_{hashlib.sha256(seed.encode()).hexdigest()[:24]}"


@dataclass(frozen=True, slots=True)
class Syntax:
    """How calls are spelled: `before`, each call between `call(name)` and `after_call` with `between` in between, `after`.

    Attributes:
        trigger: what no text holds unless a call begins there; "" if there is no such thing.
        quote: what strings among the arguments stand between; "" where arguments are JSON.
    """

    call: Callable[[str], str]
    after_call: str = ""
    between: str = ""
    before: str = ""
    after: str = ""
    trigger: str = ""
    quote: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way in which models write calls.

    Attributes:
        read: the parser of an answer that may have calls.
        markers: texts that are control tokens in some vocabularies; the parser has to see them.
        make_id: a call's id from a text that no other call has.
    """

    name: str
    read: Callable[[Feed, Calls], Parse]
    markers: tuple[str, ...]
    syntax: Syntax
    make_id: Callable[[str], str] = _make_id


def _gemma(name: str, tokens: gemma.Tokens) -> ToolFormat:
    syntax = Syntax(
        call=lambda function: f"{tokens.open}call:{function}", after_call=tokens.close, trigger=tokens.open, quote=tokens.quote
    )
    return ToolFormat(name, tokens.read, tokens.markers, syntax)


_HERMES = Syntax(
    call=lambda name: f'{hermes.OPEN}\n{{"name": {quoted(name)}, "arguments": ',
    after_call=f"}}\n{hermes.CLOSE}",
    between="\n",
    trigger=hermes.OPEN,
)
_LLAMA = Syntax(call=lambda name: f'{{"name": {quoted(name)}, "parameters": ', after_call="}", between="; ")
_MISTRAL = Syntax(
    before=f"{mistral.TOOL_CALLS}[",
    call=lambda name: f'{{"name": {quoted(name)}, "arguments": ',
    after_call="}",
    between=", ",
    after="]",
    trigger=mistral.TOOL_CALLS,
)
_MISTRAL_ARGS = Syntax(call=lambda name: f"{mistral.TOOL_CALLS}{name}{mistral.ARGS}", trigger=mistral.TOOL_CALLS)

TOOL_FORMATS = {
    format.name: format
    for format in (
        ToolFormat("hermes", hermes.read, hermes.MARKERS, _HERMES),
        ToolFormat("llama3", llama.read, llama.MARKERS, _LLAMA),
        ToolFormat("mistral", mistral.read, mistral.MARKERS, _MISTRAL, mistral.make_id),
        ToolFormat("mistral-args", mistral.read, mistral.MARKERS, _MISTRAL_ARGS, mistral.make_id),
        _gemma("gemma", gemma.GEMMA),
        _gemma("functiongemma", gemma.FUNCTION_GEMMA),
    )
}


def find_tool_format(template: str) -> ToolFormat | None:
    """The form that a chat template's own text asks the model for, or None if it is none of these."""
    signs = {
        "mistral-args": ("[TOOL_CALLS]", "[ARGS]"),
        "mistral": ("[TOOL_CALLS]",),
        "gemma": (gemma.GEMMA.open,),
        "functiongemma": (gemma.FUNCTION_GEMMA.open,),
        "hermes": (hermes.OPEN, '"name"', "arguments"),
        "llama3": ("<|start_header_id|>", '"name": ', '"parameters": '),
    }
    # The tags of Hermes around another notation, which is not known.
    if hermes.OPEN in template and "<function=" in template:
        return None
    return next((TOOL_FORMATS[name] for name, texts in signs.items() if all(text in template for text in texts)), None)
