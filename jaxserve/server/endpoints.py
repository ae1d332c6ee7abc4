"""The endpoints that the engine works for: how each reads a body, and how a body is answered, with or without a connection.

Owns the way from bytes to a call that the engine works on. Does not know what bodies mean (`openai`), routes or retries
(`handlers`), or how an answer is streamed (`answers`).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.server import wire
from jaxserve.server.anthropic import parse_messages
from jaxserve.server.anthropic_form import MessagesForm
from jaxserve.server.call import Call, naming_fields_of
from jaxserve.server.constraining import constrain
from jaxserve.server.embeddings import EmbeddingForm, check_dimensions, parse_embeddings
from jaxserve.server.form import MakeForm
from jaxserve.server.generation import Generation
from jaxserve.server.joining import Begun
from jaxserve.server.keys import Caller
from jaxserve.server.metrics import TokenCounter
from jaxserve.server.openai import parse_chat, parse_completion
from jaxserve.server.openai_form import form_of
from jaxserve.server.responses import parse_responses
from jaxserve.server.responses_form import ResponsesForm
from jaxserve.server.service import Model, Service
from jaxserve.server.terms import grant

LARGE_BODY = 32 * 1024
"""Bytes from which a body is read in another thread, since encoding its text would hold up every stream."""

_LARGE_BODIES = ThreadPoolExecutor(1, "jaxserve-bodies")
"""That thread. One at a time: several would not be faster, and each would take its turn from the streams."""


@dataclass(frozen=True)
class Endpoint:
    """What makes an endpoint: how to read a body, and the form of its answer.

    Attributes:
        samples: whether there is an output, and so a way to sample it where the body does not say.
    """

    name: str
    id_prefix: str
    parse: Callable[..., Call]
    form: MakeForm
    samples: bool = True


COMPLETIONS = Endpoint("completions", "cmpl-", parse_completion, form_of(wire.CompletionShape))
CHAT = Endpoint("chat_completions", "chatcmpl-", parse_chat, form_of(wire.ChatShape))
RESPONSES = Endpoint("responses", "resp_", parse_responses, ResponsesForm)
MESSAGES = Endpoint("messages", "msg_", parse_messages, MessagesForm)
EMBEDDINGS = Endpoint("embeddings", "embd-", parse_embeddings, EmbeddingForm, samples=False)

BATCH_ENDPOINTS = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/embeddings": EMBEDDINGS,
}
"""What the lines of a batch may be for, by path."""


async def read_call(data: bytes, endpoint: Endpoint, model: Model) -> Call:
    """What the body `data` asks `model` for.

    Raises:
        InvalidRequest, ModelNotFound: naming the field.
    """

    def parse() -> Call:
        call_id = endpoint.id_prefix + uuid.uuid4().hex
        where = {"model": model.adapters.names, "max_context": model.terms.limits.max_context, "call_id": call_id}
        if endpoint.samples:
            where["defaults"] = model.sampling_defaults
        return endpoint.parse(data, model.tokenizer, **where)

    call = await understand(data, parse)
    check_dimensions(call, model.terms.limits)
    if any(request.params.restricts_tokens for request in call.requests):
        # A grammar may take long to compile.
        return replace(call, requests=await asyncio.to_thread(constrain, call.requests, model.constraints))
    return call


async def understand[T](data: bytes, parse: Callable[[], T]) -> T:
    """What `parse` makes of the body `data`, without holding up every stream."""
    if len(data) < LARGE_BODY:
        return parse()
    return await asyncio.get_running_loop().run_in_executor(_LARGE_BODIES, parse)


@contextmanager
def generating(call: Call, service: Service, model: Model, clock: TokenCounter) -> Iterator[Begun]:
    """Have the engine work on `call`, until it is done or nobody wants it any more."""
    given = model.adapters.given(call.model, call.requests)
    with naming_fields_of(call), given as requests, model.engine.open(*requests) as stream:
        clock.admit(call.num_prompt_tokens)
        generation = Generation(call, stream, model.tokenizer, clock, service.metrics)
        yield Begun(call, int(time.time()), generation)


async def answer_body(data: bytes, endpoint: Endpoint, caller: Caller, service: Service) -> dict[str, Any]:
    """The whole answer to a body that came without a connection, as one that did come over HTTP would get it.

    The server's limit on the time of an answer does not hold, since nobody waits for it; the body's own does.

    Raises:
        JaxserveError: what is wrong with it, or with the server.
    """
    model = service.require_model()
    clock = TokenCounter(service.metrics, caller.label)
    call = await read_call(data, endpoint, model)
    if call.stream:
        raise InvalidRequest("stream must be false where there is no connection to stream to", param="stream")
    call = grant(call, caller, replace(model.terms, max_seconds=0.0), now=clock.arrived)
    with generating(call, service, model, clock) as begun:
        return await endpoint.form(model.tokenizer, begun.call.model or model.name).whole(begun)
