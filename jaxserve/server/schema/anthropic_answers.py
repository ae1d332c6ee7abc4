"""What `/v1/messages` answers, for the OpenAPI document and for tests. `server.anthropic_form` writes it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from jaxserve.server.schema.answers import Answer

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(Answer, frozen=True, kw_only=True):
    """Token counts. Those of the prompt that were found in the cache are not among `input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextContent(Answer, tag_field="type", tag="text", frozen=True, kw_only=True):
    """Text."""

    text: str


class ThinkingContent(Answer, tag_field="type", tag="thinking", frozen=True, kw_only=True):
    """What the model thought."""

    thinking: str
    signature: str


class ToolUseContent(Answer, tag_field="type", tag="tool_use", frozen=True, kw_only=True):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


MessageContent = TextContent | ThinkingContent | ToolUseContent


class MessageAnswer(Answer, frozen=True, kw_only=True):
    """An answer of `/v1/messages`; in a stream what it begins with."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageContent]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Answer, frozen=True, kw_only=True):
    """How many tokens a conversation takes."""

    input_tokens: int


class MessageErrorObject(Answer, frozen=True, kw_only=True):
    """What was wrong."""

    type: str
    message: str
    param: Annotated[str, Meta(description="The field at fault, by its path.")] | None
    code: str | None


class MessageError(Answer, tag_field="type", tag="error", frozen=True, kw_only=True):
    """An error, also as an event of a stream."""

    error: MessageErrorObject
    request_id: str | None = None


# --- events of a stream -----------------------------------------------------------------------------------------------


class MessageStart(Answer, tag_field="type", tag="message_start", frozen=True, kw_only=True):
    """The first event."""

    message: MessageAnswer


class BlockStart(Answer, tag_field="type", tag="content_block_start", frozen=True, kw_only=True):
    """A piece begins."""

    index: int
    content_block: MessageContent


class TextDelta(Answer, tag_field="type", tag="text_delta", frozen=True, kw_only=True):
    """Further text."""

    text: str


class ThinkingDelta(Answer, tag_field="type", tag="thinking_delta", frozen=True, kw_only=True):
    """Further thoughts."""

    thinking: str


class SignatureDelta(Answer, tag_field="type", tag="signature_delta", frozen=True, kw_only=True):
    """Ends thoughts."""

    signature: str


class InputDelta(Answer, tag_field="type", tag="input_json_delta", frozen=True, kw_only=True):
    """Further text of a call's input."""

    partial_json: str


class BlockDelta(Answer, tag_field="type", tag="content_block_delta", frozen=True, kw_only=True):
    """What is added to a piece."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Answer, tag_field="type", tag="content_block_stop", frozen=True, kw_only=True):
    """A piece ends."""

    index: int


class StopDelta(Answer, frozen=True, kw_only=True):
    """Why the answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Answer, tag_field="type", tag="message_delta", frozen=True, kw_only=True):
    """The answer has ended."""

    delta: StopDelta
    usage: MessageUsage


class MessageStop(Answer, tag_field="type", tag="message_stop", frozen=True, kw_only=True):
    """The last event."""


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessageError
