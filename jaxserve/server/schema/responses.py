"""The body of `/v1/responses`, and the items of its input."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxserve.request import MAX_LOGPROBS
from jaxserve.server.schema.body import Body, Refused, noun, only
from jaxserve.server.schema.common import AnyGenerationRequest, Count
from jaxserve.server.schema.tools import MAX_TOOLS, TOOL_CHOICE

Ignored = Annotated[Any, Meta(description="What an answer said of itself; it means nothing in an input.")]

# --- the input --------------------------------------------------------------------------------------------------------


class InputText(Body, tag_field="type", tag="input_text", frozen=True, kw_only=True):
    """A piece of what is said to the model."""

    text: str


class OutputText(Body, tag_field="type", tag="output_text", frozen=True, kw_only=True):
    """A piece of what the model said, as an answer has it."""

    text: str
    annotations: Ignored = None
    logprobs: Ignored = None


class PlainText(Body, tag_field="type", tag="text", frozen=True, kw_only=True):
    """A piece of text, as chat completions have it."""

    text: str


class ReasoningText(Body, tag_field="type", tag="reasoning_text", frozen=True, kw_only=True):
    """A piece of what the model thought."""

    text: str


Content = Annotated[
    str | Annotated[list[InputText | OutputText | PlainText], Meta(min_length=1)],
    Meta(extra=noun("a string or an array of text parts", "strings or arrays of text parts")),
]


class MessageItem(Body, frozen=True, kw_only=True):
    """What somebody said."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: Ignored = None
    phase: Ignored = None
    status: Ignored = None


class CallItem(Body, frozen=True, kw_only=True):
    """A call of a function that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: Ignored = None
    status: Ignored = None
    caller: Refused = None
    namespace: Refused = None


class CallOutputItem(Body, frozen=True, kw_only=True):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: Ignored = None
    name: Ignored = None
    status: Ignored = None
    caller: Refused = None
    namespace: Refused = None


class ReasoningItem(Body, frozen=True, kw_only=True):
    """What the model thought before what follows."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    id: Ignored = None
    status: Ignored = None
    summary: Annotated[Any, only([])] = None
    encrypted_content: Refused = None


ITEMS: dict[str, type[Body]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}
"""Items by their type. One without a type is a message, for which the decoder has no word; so items are decoded one by one."""

_ITEM_SCHEMA = {"oneOf": [{"type": "object", "description": cls.__doc__} for cls in ITEMS.values()]}

# --- the rest ---------------------------------------------------------------------------------------------------------


class TextFormat(Body, tag_field="type", tag="text", frozen=True, kw_only=True):
    """Text as it comes."""


class JsonObjectFormat(Body, tag_field="type", tag="json_object", frozen=True, kw_only=True):
    """Any JSON object."""


class JsonSchemaFormat(Body, tag_field="type", tag="json_schema", frozen=True, kw_only=True):
    """JSON that a schema describes."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextOptions(Body, frozen=True, kw_only=True):
    """What the text is to be like."""

    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: Annotated[Any, only("medium")] = None


class ReasoningOptions(Body, frozen=True, kw_only=True):
    """How the model is to think."""

    effort: Annotated[str, Meta(description="For the model's template; refused where it does not read it.")] | None = None
    summary: Refused = None
    generate_summary: Refused = None
    context: Annotated[Any, only("auto")] = None
    mode: Refused = None


class FunctionTool(Body, frozen=True, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Annotated[Any, only(False)] = None
    output_schema: Refused = None
    allowed_callers: Refused = None


class NamedFunction(Body, tag_field="type", tag="function", frozen=True, kw_only=True):
    """The function that is to be called."""

    name: str


class AllowedFunction(Body, frozen=True, kw_only=True):
    """A function that may be called."""

    type: Literal["function"]
    name: str


class AllowedFunctions(Body, tag_field="type", tag="allowed_tools", frozen=True, kw_only=True):
    """The functions that may be called of those that the model is shown."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedFunction], Meta(min_length=1, max_length=MAX_TOOLS)]


class ResponseStreamOptions(Body, frozen=True, kw_only=True):
    """What a stream says beside its text."""

    include_obfuscation: Annotated[Any, only(False)] = None


class ResponsesRequest(AnyGenerationRequest, frozen=True, kw_only=True):
    """A body of `/v1/responses`."""

    input: Annotated[
        str | Annotated[list[dict[str, Any]], Meta(min_length=1, extra_json_schema={"items": _ITEM_SCHEMA})],
        Meta(extra=noun("a string or an array of at least one item", "inputs")),
    ]
    instructions: Annotated[str, Meta(description="What the conversation begins with, as the system's word.")] | None = None
    max_output_tokens: Annotated[Count, Meta(description="Output tokens at most; as many as fit if not given.")] | None = None
    include: (
        Annotated[
            list[Literal["message.output_text.logprobs"]],
            Meta(description="What else to say: log probabilities of the answer's tokens."),
        ]
        | None
    ) = None
    top_logprobs: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=MAX_LOGPROBS,
                description="Of so many of the likeliest too; needs include to ask for log probabilities.",
            ),
        ]
        | None
    ) = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: (
        Annotated[Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions, Meta(extra=TOOL_CHOICE)] | None
    ) = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(description="Of tools built into the server, of which there are none.")] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16, description="Given back as it is.")] | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="Variables of the model's own template.")] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    background: Annotated[Any, only(False)] = None
    context_management: Refused = None
    conversation: Refused = None
    moderation: Refused = None
    previous_response_id: Refused = None
    prompt: Refused = None
    prompt_cache_options: Refused = None
    prompt_cache_retention: Refused = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    store: Annotated[Any, only(False)] = None
    truncation: Annotated[Any, only("disabled")] = None


PASSED_ON = tuple(field.name for field in msgspec.structs.fields(AnyGenerationRequest))
"""Fields that mean to chat completions what they mean here."""
