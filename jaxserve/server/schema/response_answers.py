"""What answers of `/v1/responses` look like, for the OpenAPI document and for tests. `server.responses_form` writes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from jaxserve.server.schema.answers import Answer, ChosenTokenLogprob, CompletionTokensDetails

Status = Literal["in_progress", "completed", "incomplete"]


class AnswerText(Answer, tag_field="type", tag="output_text", frozen=True, kw_only=True):
    """The text of a message, and the log probabilities of its tokens if they were asked for."""

    text: str
    annotations: list[Any]
    logprobs: list[ChosenTokenLogprob]


class Thought(Answer, tag_field="type", tag="reasoning_text", frozen=True, kw_only=True):
    """The text of reasoning."""

    text: str


class AnswerMessageItem(Answer, tag_field="type", tag="message", frozen=True, kw_only=True):
    """What the model says."""

    id: str
    status: Status
    role: Literal["assistant"]
    content: list[AnswerText]


class AnswerReasoningItem(Answer, tag_field="type", tag="reasoning", frozen=True, kw_only=True):
    """What the model thought before what follows."""

    id: str
    status: Status
    summary: list[Any]
    content: list[Thought]


class AnswerCallItem(Answer, tag_field="type", tag="function_call", frozen=True, kw_only=True):
    """A function that the model calls."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: Annotated[str, Meta(description="JSON, which the model wrote.")]


class IncompleteDetails(Answer, frozen=True, kw_only=True):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseError(Answer, frozen=True, kw_only=True):
    """Why a response failed."""

    code: Literal["server_error"]
    message: str


class InputTokensDetails(Answer, frozen=True, kw_only=True):
    """Of the input's tokens."""

    cached_tokens: Annotated[int, Meta(description="Those that were found in the cache and not computed.")]
    cache_write_tokens: int


class ResponseUsage(Answer, frozen=True, kw_only=True):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class Response(Answer, frozen=True, kw_only=True):
    """An answer of `/v1/responses`: what was said, and what was asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "failed", "in_progress", "incomplete"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[AnswerMessageItem | AnswerReasoningItem | AnswerCallItem]
    usage: ResponseUsage | None = None

    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None = None


class ResponseEvent(Answer, forbid_unknown_fields=False, frozen=True, kw_only=True):
    """An event of a stream; what else it has is by its type. The last one has the whole response."""

    type: str
    sequence_number: int
