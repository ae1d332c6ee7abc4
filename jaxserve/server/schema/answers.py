"""What answers look like, for the OpenAPI document and for tests. `server.wire` writes them, without these structs.

A field that is not in every answer has a default.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

FinishReason = Literal["stop", "length", "tool_calls", "timeout", "abort", "error"]


class Answer(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A JSON object of an answer."""


class ErrorObject(Answer, frozen=True, kw_only=True):
    """What was wrong."""

    message: str
    type: str
    param: Annotated[str, Meta(description="The field at fault, by its path.")] | None
    code: str | None


class Error(Answer, frozen=True, kw_only=True):
    """An error."""

    error: ErrorObject


# --- what generates ---------------------------------------------------------------------------------------------------


class PromptTokensDetails(Answer, frozen=True, kw_only=True):
    """Of the prompt's tokens."""

    cached_tokens: Annotated[int, Meta(description="Those that were found in the cache and not computed.")]


class CompletionTokensDetails(Answer, frozen=True, kw_only=True):
    """Of the outputs' tokens."""

    reasoning_tokens: Annotated[int, Meta(description="Those that begin before the end of reasoning, its tags included.")]


class Usage(Answer, frozen=True, kw_only=True):
    """Token counts: of each prompt once, and of all outputs that were generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class PromptLogprob(Answer, frozen=True, kw_only=True):
    """A token that is, or might have been, at a place of a prompt."""

    logprob: float
    rank: Annotated[int, Meta(description="Its place by likelihood, from 1.")]
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None],
    Meta(description="By token of the prompt, null for the first: its own and the likeliest, by token id."),
]


class CompletionLogprobs(Answer, frozen=True, kw_only=True):
    """Log probabilities of a completion, by token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer, frozen=True, kw_only=True):
    """One output. Its index is the prompt's times n, plus which of the prompt's outputs it is."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Answer, frozen=True, kw_only=True):
    """An answer of `/v1/completions`, whole or an event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    obfuscation: str | UnsetType = UNSET


class TokenLogprob(Answer, frozen=True, kw_only=True):
    """A token that might have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenTokenLogprob(TokenLogprob, frozen=True, kw_only=True):
    """A token of the output, and the likeliest at its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer, frozen=True, kw_only=True):
    """Log probabilities of a message."""

    content: list[ChosenTokenLogprob] | None
    refusal: None = None


class AnswerFunction(Answer, frozen=True, kw_only=True):
    """A function that the model calls."""

    name: str
    arguments: Annotated[str, Meta(description="JSON, as the model wrote it; it may be cut short.")]


class AnswerCall(Answer, frozen=True, kw_only=True):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: AnswerFunction


class AnswerMessage(Answer, frozen=True, kw_only=True):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class ChatChoice(Answer, frozen=True, kw_only=True):
    """One output."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Answer, frozen=True, kw_only=True):
    """A whole answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(Answer, frozen=True, kw_only=True):
    """What an event adds to a called function: its name first, then its arguments."""

    name: str | UnsetType = UNSET
    arguments: str


class CallDelta(Answer, frozen=True, kw_only=True):
    """What an event adds to the call of this index."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(Answer, frozen=True, kw_only=True):
    """What an event adds to a message: its role first, then its reasoning, content and calls."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(Answer, frozen=True, kw_only=True):
    """What an event says of one output."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(Answer, frozen=True, kw_only=True):
    """An event of a stream of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    obfuscation: str | UnsetType = UNSET


# --- embeddings -------------------------------------------------------------------------------------------------------


class Embedding(Answer, frozen=True, kw_only=True):
    """What stands for one input."""

    object: Literal["embedding"]
    index: int
    embedding: Annotated[
        list[float] | str, Meta(description="Of length 1; as base64 of little-endian float32 if that was asked for.")
    ]


class EmbeddingUsage(Answer, frozen=True, kw_only=True):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(Answer, frozen=True, kw_only=True):
    """An answer of `/v1/embeddings`."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


# --- the server itself ------------------------------------------------------------------------------------------------


class Tokenized(Answer, frozen=True, kw_only=True):
    """What a text or a conversation is as tokens."""

    count: int
    max_model_len: Annotated[int, Meta(description="Tokens of prompt and output that the server takes.")]
    tokens: list[int]
    token_strs: Annotated[list[str], Meta(description="As the vocabulary spells them, if asked for.")] | None


class Detokenized(Answer, frozen=True, kw_only=True):
    """What tokens are as text."""

    prompt: str


class TokenizerInfo(Answer, frozen=True, kw_only=True):
    """The tokenizer, under the names of a `tokenizer_config.json` where that has one."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    add_bos_token: bool
    bos_token: str | None
    bos_token_id: int | None
    eos_token: str | None
    eos_token_id: int | None
    special_tokens: Annotated[dict[str, str], Meta(description="Names of the control tokens, by id.")]
    chat_template: str | None


class Model(Answer, frozen=True, kw_only=True):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str | None = None
    parent: str | None = None


class ModelList(Answer, frozen=True, kw_only=True):
    """The models that are served."""

    object: Literal["list"]
    data: list[Model]


class AdapterState(Answer, frozen=True, kw_only=True):
    """Whether an adapter is loaded now."""

    object: Literal["adapter"]
    id: str
    loaded: bool


class CacheDropped(Answer, frozen=True, kw_only=True):
    """What was forgotten."""

    object: Literal["cache"]
    dropped_pages: int


class Health(Answer, frozen=True, kw_only=True):
    """Whether the process can still serve."""

    status: Literal["ok", "failed", "hung"]
    reason: str | UnsetType = UNSET


class Readiness(Answer, frozen=True, kw_only=True):
    """Whether requests are served now."""

    status: Literal["loading", "ready", "draining", "hung", "failed"]


class Version(Answer, frozen=True, kw_only=True):
    """The server's version."""

    version: str
