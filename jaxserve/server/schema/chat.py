"""The body of `/v1/chat/completions`, and the messages in it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from jaxserve.request import MAX_LOGPROBS
from jaxserve.server.schema.body import Body, Refused, noun, only
from jaxserve.server.schema.common import Count, GenerationRequest
from jaxserve.server.schema.tools import MAX_TOOL_CALLS, MAX_TOOLS, FunctionTool, ToolCall, ToolChoice

MAX_TEMPLATE_CHARACTERS = 64 * 1024


class TextPart(Body, frozen=True, kw_only=True):
    """A piece of a message."""

    type: Literal["text"]
    text: str


Content = Annotated[
    str | Annotated[list[TextPart], Meta(min_length=1)],
    Meta(extra=noun("a string or an array of text parts", "strings or arrays of text parts")),
]


class Message(Body, tag_field="role", frozen=True, kw_only=True):
    """What the messages of all roles have."""

    name: Annotated[str, Meta(description="Who speaks; refused where the model's template does not show it.")] | None = None

    @property
    def role(self) -> str:
        """Whose message it is."""
        return str(self.__struct_config__.tag)


class SystemMessage(Message, tag="system", frozen=True, kw_only=True):
    """Instructions."""

    content: Content


class DeveloperMessage(Message, tag="developer", frozen=True, kw_only=True):
    """Instructions."""

    content: Content


class UserMessage(Message, tag="user", frozen=True, kw_only=True):
    """What the user says."""

    content: Content


class AssistantMessage(Message, tag="assistant", frozen=True, kw_only=True):
    """What the model said."""

    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOL_CALLS)] | None = None
    reasoning_content: (
        Annotated[str, Meta(description="What it thought before; many templates show none of earlier turns.")] | None
    ) = None
    annotations: Annotated[Any, only([])] = None
    audio: Refused = None
    function_call: Refused = None
    refusal: Refused = None


class ToolMessage(Message, tag="tool", frozen=True, kw_only=True):
    """What a tool gave."""

    content: Content
    tool_call_id: Annotated[str, Meta(description="The call that it answers.")] | None = None


AnyMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """A body of `/v1/chat/completions`."""

    messages: Annotated[list[AnyMessage], Meta(min_length=1, extra=noun("an array of at least one message", "messages"))]
    max_completion_tokens: Annotated[Count, Meta(description="Output tokens at most; as many as fit if not given.")] | None = (
        None
    )
    max_tokens: Annotated[Count, Meta(description="The old name of max_completion_tokens.")] | None = None
    logprobs: Annotated[bool, Meta(description="Log probabilities of the chosen tokens.")] | None = None
    top_logprobs: (
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS, description="And of so many of the likeliest; needs logprobs.")] | None
    ) = None
    add_generation_prompt: (
        Annotated[bool, Meta(description="End the prompt with what an answer begins with; yes if not given.")] | None
    ) = None
    continue_final_message: (
        Annotated[bool, Meta(description="Go on with the last message; excludes add_generation_prompt.")] | None
    ) = None
    add_special_tokens: (
        Annotated[bool, Meta(description="Begin with BOS where the template does not; no if not given.")] | None
    ) = None
    chat_template: (
        Annotated[str, Meta(max_length=MAX_TEMPLATE_CHARACTERS, description="Only where the server is told to take them.")]
        | None
    ) = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="Variables of the model's own template.")] | None = None
    reasoning_effort: (
        Annotated[
            Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"],
            Meta(description="A variable of the model's own template; refused where the template does not read it."),
        ]
        | None
    ) = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS, description="What the model may call.")] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Annotated[bool, Meta(description="Whether one answer may have several calls.")] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    audio: Refused = None
    echo: Annotated[Any, only(False)] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    functions: Annotated[Any, only([])] = None
    metadata: Annotated[Any, only({})] = None
    modalities: Annotated[Any, only(["text"])] = None
    moderation: Refused = None
    prediction: Refused = None
    prompt_cache_options: Refused = None
    prompt_cache_retention: Refused = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    store: Annotated[Any, only(False)] = None
    verbosity: Annotated[Any, only("medium")] = None
    web_search_options: Refused = None
