"""What there is to ask a server for: for each route its body, its answers and its errors, as the OpenAPI document has them.

Owns no behaviour. A test holds the routes to this table and what they answer to these types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxserve.server.schema import answers, anthropic_answers, stored
from jaxserve.server.schema.adapters import LoadAdapterRequest, UnloadAdapterRequest
from jaxserve.server.schema.anthropic import CountTokensRequest, MessagesRequest
from jaxserve.server.schema.chat import ChatRequest
from jaxserve.server.schema.completions import CompletionRequest
from jaxserve.server.schema.embeddings import EmbeddingRequest
from jaxserve.server.schema.response_answers import Response, ResponseEvent
from jaxserve.server.schema.responses import ResponsesRequest
from jaxserve.server.schema.tokenization import DetokenizeRequest, TokenizeRequest

STORED_ERRORS = (400, 404)
GENERATION_ERRORS = (400, 403, 404, 408, 413, 415, 422, 429, 503)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One route.

    Attributes:
        body: the struct that the request's JSON is decoded into; None for none.
        form: the parts of a multipart form, in place of a body.
        query: the parameters in the URL, as a struct; None for none.
        answer: the struct of a 200; or the content type of one that is not JSON.
        event: the struct in each event of the stream that it may be asked for; None where there is no such thing.
        event_names: whether events have names, by which the last is known; else that is `[DONE]`.
        unavailable: the struct of a 503, where that is no error object.
        error: the struct of an error.
        errors: statuses beside 401 (of all that need a key) and 500.
        is_open: whether it needs no key.
        is_admin: whether it needs an administrator's.
    """

    summary: str
    body: Any = None
    form: Any = None
    query: Any = None
    answer: Any
    event: Any = None
    event_names: bool = False
    unavailable: Any = None
    error: Any = answers.Error
    errors: tuple[int, ...] = ()
    is_open: bool = False
    is_admin: bool = False


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/completions"): Operation(
        summary="Continue prompts.",
        body=CompletionRequest,
        answer=answers.Completion,
        event=answers.Completion,
        errors=GENERATION_ERRORS,
    ),
    ("POST", "/v1/chat/completions"): Operation(
        summary="Answer a conversation.",
        body=ChatRequest,
        answer=answers.ChatCompletion,
        event=answers.ChatChunk,
        errors=GENERATION_ERRORS,
    ),
    ("POST", "/v1/responses"): Operation(
        summary="Answer a conversation, in items.",
        body=ResponsesRequest,
        answer=Response,
        event=ResponseEvent,
        event_names=True,
        errors=GENERATION_ERRORS,
    ),
    ("POST", "/v1/messages"): Operation(
        summary="Answer a conversation, in Anthropic's form.",
        body=MessagesRequest,
        answer=anthropic_answers.MessageAnswer,
        event=anthropic_answers.MessageEvent,
        event_names=True,
        error=anthropic_answers.MessageError,
        errors=GENERATION_ERRORS,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        summary="How many tokens a conversation takes, in Anthropic's form.",
        body=CountTokensRequest,
        answer=anthropic_answers.TokenCount,
        error=anthropic_answers.MessageError,
        errors=(400, 404, 413, 415, 503),
    ),
    ("POST", "/tokenize"): Operation(
        summary="What a text or a conversation is as tokens.",
        body=TokenizeRequest,
        answer=answers.Tokenized,
        errors=(400, 404, 413, 415, 503),
    ),
    ("POST", "/detokenize"): Operation(
        summary="What tokens are as text.",
        body=DetokenizeRequest,
        answer=answers.Detokenized,
        errors=(400, 404, 413, 415, 503),
    ),
    ("GET", "/tokenizer_info"): Operation(summary="The model's tokenizer.", answer=answers.TokenizerInfo, errors=(503,)),
    ("POST", "/v1/embeddings"): Operation(
        summary="The final hidden state of each input's last token, scaled to length 1.",
        body=EmbeddingRequest,
        answer=answers.Embeddings,
        errors=GENERATION_ERRORS,
    ),
    ("GET", "/v1/models"): Operation(summary="The models that are served.", answer=answers.ModelList, errors=(503,)),
    ("GET", "/v1/models/{model}"): Operation(summary="A model that is served.", answer=answers.Model, errors=(404, 503)),
    ("DELETE", "/v1/cache"): Operation(
        summary="Forget every cached prefix that nothing uses. Takes an administrator's key.",
        answer=answers.CacheDropped,
        errors=(403, 503),
        is_admin=True,
    ),
    ("POST", "/v1/load_lora_adapter"): Operation(
        summary="Load a LoRA adapter, which requests can then have as their model. Takes an administrator's key.",
        body=LoadAdapterRequest,
        answer=answers.AdapterState,
        errors=(400, 403, 409, 413, 415, 503),
        is_admin=True,
    ),
    ("POST", "/v1/unload_lora_adapter"): Operation(
        summary="Unload a LoRA adapter, once the requests that have it are finished. Takes an administrator's key.",
        body=UnloadAdapterRequest,
        answer=answers.AdapterState,
        errors=(400, 403, 404, 413, 415, 503),
        is_admin=True,
    ),
    ("POST", "/v1/files"): Operation(
        summary="Keep a file.", form=stored.FileForm, answer=stored.File, errors=(*STORED_ERRORS, 408, 413, 507)
    ),
    ("GET", "/v1/files"): Operation(
        summary="The files of the API key.", query=stored.FileQuery, answer=stored.FileList, errors=STORED_ERRORS
    ),
    ("GET", "/v1/files/{file_id}"): Operation(summary="What is known of a file.", answer=stored.File, errors=(404,)),
    ("DELETE", "/v1/files/{file_id}"): Operation(
        summary="Delete a file. Batches that read it go on.", answer=stored.FileDeleted, errors=(404, 507)
    ),
    ("GET", "/v1/files/{file_id}/content"): Operation(
        summary="The content of a file.", answer="application/octet-stream", errors=(404,)
    ),
    ("POST", "/v1/batches"): Operation(
        summary="Answer the requests in a file while there is time.",
        body=stored.BatchRequest,
        answer=stored.Batch,
        errors=(*STORED_ERRORS, 408, 413, 415, 429, 503, 507),
    ),
    ("GET", "/v1/batches"): Operation(
        summary="The batches of the API key, newest first.",
        query=stored.BatchQuery,
        answer=stored.BatchList,
        errors=STORED_ERRORS,
    ),
    ("GET", "/v1/batches/{batch_id}"): Operation(summary="A batch as it is now.", answer=stored.Batch, errors=(404,)),
    ("POST", "/v1/batches/{batch_id}/cancel"): Operation(
        summary="Answer no more lines of a batch.", answer=stored.Batch, errors=(404, 409, 503, 507)
    ),
    ("GET", "/health"): Operation(
        summary="Whether the process can still serve, now or once it has loaded.",
        answer=answers.Health,
        unavailable=answers.Health,
        is_open=True,
    ),
    ("GET", "/ready"): Operation(
        summary="Whether requests are served.", answer=answers.Readiness, unavailable=answers.Readiness, is_open=True
    ),
    ("GET", "/metrics"): Operation(summary="Metrics, for Prometheus.", answer="text/plain"),
    ("GET", "/version"): Operation(summary="The server's version.", answer=answers.Version),
    ("GET", "/openapi.json"): Operation(summary="This document.", answer="application/json"),
}
