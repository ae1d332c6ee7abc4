"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, as Anthropic's API has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from jaxserve.server.schema.body import Body, Refused, noun, only
from jaxserve.server.schema.common import MAX_SALT_CHARACTERS, MAX_STOPS, Count, Priority, Seed, StopString, Timeout
from jaxserve.server.schema.tools import MAX_TOOLS, FunctionName


class CacheControl(Body, frozen=True, kw_only=True):
    """Where a prefix ends that is to be cached. All of them are, so it changes nothing."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Text(Body, frozen=True, kw_only=True):
    """Text."""

    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[Any, only([])] = None


class OnlyTextBlock(Text, frozen=True, kw_only=True):
    """Text, where there is nothing else."""

    type: Literal["text"]


class Block(Body, tag_field="type", frozen=True, kw_only=True):
    """A piece of a message."""

    cache_control: CacheControl | None = None


class TextBlock(Text, tag_field="type", tag="text", frozen=True, kw_only=True):
    """Text."""


class ToolUseBlock(Block, tag="tool_use", frozen=True, kw_only=True):
    """A call that the model made."""

    id: Annotated[str, Meta(min_length=1)]
    name: FunctionName
    input: dict[str, Any]
    caller: Any = None


class ToolResultBlock(Block, tag="tool_result", frozen=True, kw_only=True):
    """What a tool gave."""

    tool_use_id: Annotated[str, Meta(min_length=1, description="The call that it answers.")]
    content: str | list[OnlyTextBlock] | None = None
    is_error: Annotated[bool, Meta(description="The model sees the content after the word Error.")] | None = None


class ThinkingBlock(Body, tag_field="type", tag="thinking", frozen=True, kw_only=True):
    """What the model thought."""

    thinking: str
    signature: str | None = None


class UserTurn(Body, tag_field="role", tag="user", frozen=True, kw_only=True):
    """What the user says, and what tools gave."""

    content: str | Annotated[list[TextBlock | ToolResultBlock], Meta(min_length=1)]


class AssistantTurn(Body, tag_field="role", tag="assistant", frozen=True, kw_only=True):
    """What the model said. If it is last, the answer goes on with it."""

    content: str | Annotated[list[TextBlock | ToolUseBlock | ThinkingBlock], Meta(min_length=1)]


class SystemTurn(Body, tag_field="role", tag="system", frozen=True, kw_only=True):
    """Instructions."""

    content: str | Annotated[list[OnlyTextBlock], Meta(min_length=1)]


class Tool(Body, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: FunctionName
    input_schema: Annotated[dict[str, Any], Meta(description="The JSON Schema of its arguments.")]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class AutoChoice(Body, tag_field="type", tag="auto", frozen=True, kw_only=True):
    """The model may call tools."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(Body, tag_field="type", tag="any", frozen=True, kw_only=True):
    """The model must call a tool."""

    disable_parallel_tool_use: bool | None = None


class NamedChoice(Body, tag_field="type", tag="tool", frozen=True, kw_only=True):
    """The model must call this tool."""

    name: Annotated[str, Meta(min_length=1)]
    disable_parallel_tool_use: bool | None = None


class NoChoice(Body, tag_field="type", tag="none", frozen=True, kw_only=True):
    """The model must not call tools."""


class ThinkingDisabled(Body, tag_field="type", tag="disabled", frozen=True, kw_only=True):
    """The model answers at once. Refused where its template cannot say so."""


class ThinkingAdaptive(Body, tag_field="type", tag="adaptive", frozen=True, kw_only=True):
    """The model thinks as long as it likes. Refused where it does not think."""

    display: Annotated[Any, only("summarized")] = None


class ThinkingEnabled(Body, tag_field="type", tag="enabled", frozen=True, kw_only=True):
    """The model thinks, in a budget that is not implemented."""

    budget_tokens: Refused = None
    display: Annotated[Any, only("summarized")] = None


class JsonSchemaFormat(Body, frozen=True, kw_only=True):
    """The answer is JSON of this schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Body, frozen=True, kw_only=True):
    """How to answer."""

    effort: Annotated[Literal["low", "medium", "high", "xhigh", "max"], Meta(description="As reasoning_effort.")] | None = None
    format: JsonSchemaFormat | None = None
    task_budget: Refused = None


class Metadata(Body, frozen=True, kw_only=True):
    """Who asks; the answer does not depend on it."""

    user_id: Annotated[str, Meta(max_length=512)] | None = None


class CountTokensRequest(Body, frozen=True, kw_only=True):
    """A body of `/v1/messages/count_tokens`."""

    model: Annotated[str, Meta(description="The name that the server has for its model.")]
    messages: Annotated[
        list[UserTurn | AssistantTurn | SystemTurn],
        Meta(min_length=1, extra=noun("an array of at least one message", "messages")),
    ]
    system: str | list[OnlyTextBlock] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoChoice | None = None
    thinking: ThinkingDisabled | ThinkingAdaptive | ThinkingEnabled | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    context_management: Refused = None
    mcp_servers: Annotated[Any, only([])] = None
    speed: Annotated[Any, only("standard")] = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """A body of `/v1/messages`."""

    max_tokens: Count
    stream: Annotated[bool, Meta(description="Answer with server-sent events.")] | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    metadata: Metadata | None = None
    service_tier: Annotated[Any, only("auto", "standard_only")] = None

    seed: Seed | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARACTERS)] | None = None

    container: Refused = None
    diagnostics: Refused = None
    inference_geo: Refused = None
    user_profile_id: Refused = None
    workspace_id: Refused = None
