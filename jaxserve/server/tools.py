"""The functions that a body lets the model call, and what follows: what the template shows, and what the output has to be.

Pure. Owns the meaning of `tools`, `tool_choice` and `parallel_tool_calls`. Forms of calls, their parsers and their grammars
are `engine.tools`'.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.constraint import Grammar, GrammarKind
from jaxserve.engine.text import Tokenizer
from jaxserve.engine.tools.formats import ToolFormat
from jaxserve.engine.tools.grammar import (
    ANY_ARGUMENTS,
    NO_ARGUMENTS,
    Function,
    Writing,
    calls_or_answer,
    reasoned_answer,
    required_calls,
    triggered_calls,
)
from jaxserve.errors import InvalidRequest
from jaxserve.server.schema.decoding import check_depth, invalid
from jaxserve.server.schema.tools import AllowedToolsChoice, FunctionTool, NamedToolChoice, ToolChoice

FORMAT = "response_format"
"""Begins the name of what says how an answer is to look if there is one, and not what the output has to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What may be called.

    Attributes:
        tools: all that the template shows.
        callable: names of those of them that may be called.
        required: whether there must be a call.
        named: whether there must be one of a function that the body names.
        parallel: whether there may be several.
    """

    tools: tuple[FunctionTool, ...]
    callable: frozenset[str]
    required: bool = False
    named: bool = False
    parallel: bool = True

    def for_template(self) -> list[dict[str, Any]]:
        """The tools as templates read them."""
        return [{"type": "function", "function": _shown(tool)} for tool in self.tools]


def _shown(tool: FunctionTool) -> dict[str, Any]:
    function = tool.function
    shown = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {key: value for key, value in shown.items() if value is not None}


def read_offer(tools: Sequence[FunctionTool] | None, choice: ToolChoice | None, parallel: bool | None) -> Offer | None:
    """What may be called; None where nothing may be.

    Raises:
        InvalidRequest: naming the field: a choice without tools, or of a tool that is not there; two of one name.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice is allowed only where there are tools", param="tool_choice")
        return None
    names = [tool.function.name for tool in tools]
    for i, (name, tool) in enumerate(zip(names, tools, strict=True)):
        if name in names[:i]:
            raise InvalidRequest(f"tools[{i}].function.name is that of another: {name!r}", param=f"tools[{i}].function.name")
        check_depth(f"tools[{i}].function.parameters", tool.function.parameters)
    if choice == "none":
        return None
    callable_names, required, named = names, choice == "required", False
    if isinstance(choice, NamedToolChoice):
        callable_names, required, named = [choice.function.name], True, True
        _check_named(choice.function.name, names, "tool_choice.function.name")
    elif isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        callable_names, required = [tool.function.name for tool in allowed.tools], allowed.mode == "required"
        for i, name in enumerate(callable_names):
            _check_named(name, names, f"tool_choice.allowed_tools.tools[{i}].function.name")
    return Offer(
        tools=tuple(tools),
        callable=frozenset(callable_names),
        required=required,
        named=named,
        parallel=parallel is not False and not named,
    )


def _check_named(name: str, names: Collection[str], path: str) -> None:
    if name not in names:
        raise invalid(path, "the name of one of the tools", name)


def require_shown(tokenizer: Tokenizer, chat_template: str | None) -> None:
    """Check that the template shows tools to the model.

    Raises:
        InvalidRequest: it does not.
    """
    if not tokenizer.template_for(chat_template, tools=True).shows_tools:
        raise InvalidRequest("tools: the model's chat template drops tools", param="tools")


def require_format(tokenizer: Tokenizer) -> ToolFormat:
    """The form in which the model writes calls.

    Raises:
        InvalidRequest: it is not known.
    """
    if tokenizer.dialect.tools is None:
        raise InvalidRequest(
            "tools are not supported: the form of this model's calls is not known, and its chat template shows none that is; "
            "a server can be started with --tool-format",
            param="tools",
        )
    return tokenizer.dialect.tools


def output_grammar(wanted: Grammar | None, offer: Offer | None, tokenizer: Tokenizer, *, opened: bool) -> Grammar | None:
    """What the whole output has to be: reasoning, calls, and the answer as `wanted` has it. None where the model is free.

    A model that need not call is held to something only by a function that is strict, by tools that it sees and may not call,
    where it may not call twice, or by `wanted`.

    Args:
        wanted: what the answer has to be.
        opened: whether the prompt has opened the model's reasoning.

    Raises:
        InvalidRequest: naming `tools` or the field of `wanted`: it cannot be held to.
    """
    dialect = tokenizer.dialect
    syntax = None if dialect.tools is None else dialect.tools.syntax
    writing = Writing(tokenizer.special_ids_by_name(dialect.markers), syntax, dialect.reasoning, opened)
    param = "tools" if wanted is None else wanted.param
    try:
        if offer is None:
            return wanted if wanted is None else _after_reasoning(wanted, writing)
        return _with_calls(wanted, offer, writing, single=not offer.parallel or dialect.single_call)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from None


def _after_reasoning(wanted: Grammar, writing: Writing) -> Grammar:
    """`wanted` after reasoning, if there may be any. What a caller writes in Lark can say itself what comes first."""
    if writing.reasoning is None or (wanted.kind is GrammarKind.LARK and not writing.opened):
        return wanted
    return Grammar(GrammarKind.LARK, reasoned_answer(writing, wanted), wanted.param)


def _with_calls(wanted: Grammar | None, offer: Offer, writing: Writing, *, single: bool) -> Grammar | None:
    offered = [tool for tool in offer.tools if tool.function.name in offer.callable]
    functions = [_function(tool, holds=offer.required or bool(tool.function.strict)) for tool in offered]
    if offer.required:
        if wanted is not None and not wanted.param.startswith(FORMAT):
            raise ValueError("there is no answer that it could restrict where tool_choice requires a call")
        # The format of an answer, which clients that have one send along with every turn, is kept to by calls alone.
        param = "tools" if wanted is None else wanted.param
        return Grammar(GrammarKind.LARK, required_calls(writing, functions, single=single, beside=wanted), param)
    if wanted is not None:
        return Grammar(GrammarKind.LARK, calls_or_answer(writing, functions, wanted, single=single), wanted.param)
    is_strict = any(tool.function.strict for tool in offered)
    if not is_strict and offer.parallel and len(offered) == len(offer.tools):
        return None
    return Grammar(GrammarKind.LARK, triggered_calls(writing, functions, single=single), "tools")


def _function(tool: FunctionTool, *, holds: bool) -> Function:
    parameters = tool.function.parameters
    if not holds:
        return Function(tool.function.name, ANY_ARGUMENTS)
    return Function(tool.function.name, NO_ARGUMENTS if parameters is None else parameters)
