"""Fields of a chat about functions that the model may call, and calls in its messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from jaxserve.server.schema.body import Body, noun

MAX_TOOLS = 128
MAX_TOOL_CALLS = 128

FunctionName = Annotated[
    str,
    Meta(
        pattern="^[a-zA-Z0-9_.:/-]{1,128}$",
        extra=noun("a name of 1 to 128 letters, digits and _ . : / -", "such names"),
    ),
]


class FunctionDefinition(Body, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: (
        Annotated[dict[str, Any], Meta(description="JSON schema of its arguments, an object; without it, it takes none.")]
        | None
    ) = None
    strict: (
        Annotated[bool, Meta(description="Holds arguments to the schema also where the model is free not to call.")] | None
    ) = None


class FunctionTool(Body, frozen=True, kw_only=True):
    """A tool, which is a function."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body, frozen=True, kw_only=True):
    """A function of the body's tools."""

    name: str


class NamedToolChoice(Body, tag_field="type", tag="function", frozen=True, kw_only=True):
    """The model calls this function."""

    function: NamedFunction


class AllowedTool(Body, frozen=True, kw_only=True):
    """A tool that may be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body, frozen=True, kw_only=True):
    """The tools that may be called of those that the model is shown."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(Body, tag_field="type", tag="allowed_tools", frozen=True, kw_only=True):
    """The model calls these functions only."""

    allowed_tools: AllowedTools


TOOL_CHOICE = noun(
    'one of "none", "auto", "required", a function or allowed tools',
    'any of "none", "auto", "required", functions or allowed tools',
)

ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice,
    Meta(
        description="Whether the model calls: none, as it likes (auto), at least once (required), or one that is named.",
        extra=TOOL_CHOICE,
    ),
]


class CalledFunction(Body, frozen=True, kw_only=True):
    """What was called."""

    name: FunctionName
    arguments: Annotated[str, Meta(description="JSON, as the model wrote it.")]


class ToolCall(Body, frozen=True, kw_only=True):
    """A call that the model made."""

    type: Literal["function"]
    id: str
    function: CalledFunction
