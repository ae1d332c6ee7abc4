"""`/v1/embeddings`: the final hidden state of each input's last token, scaled to length 1.

Pure. Owns what a body means and what its answer looks like. The model is one that generates: what its states are worth as
embeddings is for their user to judge.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.engine.text import Tokenizer
from jaxserve.errors import ContextExceeded, EngineError, InvalidRequest
from jaxserve.plan import RunnerLimits
from jaxserve.request import INTERACTIVE_PRIORITY, PRIORITY_NAMES, Request, SamplingParams
from jaxserve.server.call import MAX_SEQUENCES, Call, Served, check_model
from jaxserve.server.form import Events
from jaxserve.server.joining import Begun
from jaxserve.server.openai import MAX_CONTEXTS_TO_CUT, encode_prompts
from jaxserve.server.schema.decoding import decode, invalid
from jaxserve.server.schema.embeddings import EmbeddingRequest


def parse_embeddings(
    data: bytes | Mapping[str, Any], tokenizer: Tokenizer, *, model: Served, max_context: int, call_id: str
) -> Call:
    """Understand a body of `/v1/embeddings`; as `openai.parse_completion`."""
    body = decode(data, EmbeddingRequest)
    check_model(body.model, model)
    add_special_tokens = body.add_special_tokens is not False
    kept = body.truncate_prompt_tokens
    if kept == 0:
        raise invalid("truncate_prompt_tokens", "at least 1, or -1 for as many as fit", kept)
    most = max_context if kept is None else max_context * MAX_CONTEXTS_TO_CUT
    texts = encode_prompts("input", body.input, tokenizer, most, add_special_tokens=add_special_tokens)
    if kept is not None:
        texts = [(text, ids[-(max_context if kept == -1 else kept) :]) for text, ids in texts]
    if len(texts) > MAX_SEQUENCES:
        raise InvalidRequest(f"input: {len(texts)} inputs > {MAX_SEQUENCES} a request", param="input")
    for index, (_, ids) in enumerate(texts):
        where = "input" if len(texts) == 1 else f"input[{index}]"
        if not ids:
            raise InvalidRequest(f"{where} must have at least 1 token, found 0", param="input")
        if len(ids) > max_context:
            raise ContextExceeded(f"{where} has {len(ids)} tokens", max_context=max_context, param="input")
        for token_id in (min(ids), max(ids)):
            if not 0 <= token_id < tokenizer.vocab_size:
                expected = f"token ids from 0 to {tokenizer.vocab_size - 1}"
                raise InvalidRequest(f"{where} must have {expected}, found {token_id}", param="input")
    priority = PRIORITY_NAMES[body.priority] if isinstance(body.priority, str) else body.priority
    requests = tuple(
        Request(
            request_id=f"{call_id}-{index}",
            prompt=tuple(ids),
            params=SamplingParams(max_tokens=0),
            priority=INTERACTIVE_PRIORITY if priority is None else priority,
            cache_salt=body.cache_salt or "",
            embed=True,
        )
        for index, (_, ids) in enumerate(texts)
    )
    return Call(
        call_id=call_id,
        requests=requests,
        num_prompt_tokens=sum(len(request.prompt) for request in requests),
        num_candidates=1,
        num_choices=1,
        shows_logprobs=False,
        stream=False,
        include_usage=False,
        priority=priority,
        timeout=body.timeout,
        embeds_as=body.encoding_format or "float",
        dimensions=body.dimensions,
        model=body.model,
        field_names={"prompt": "input"},
    )


def check_dimensions(call: Call, limits: RunnerLimits) -> None:
    """Refuse embeddings of another size than the model's states have.

    Raises:
        InvalidRequest: `dimensions` is another.
    """
    if call.dimensions not in (None, limits.hidden_size):
        raise InvalidRequest(
            f"dimensions must be {limits.hidden_size}, as this model's states have, found {call.dimensions}",
            param="dimensions",
        )


class EmbeddingForm:
    """Answers of `/v1/embeddings`; a `form.Form`."""

    def __init__(self, tokenizer: Tokenizer, model_name: str) -> None:
        self._model_name = model_name

    async def whole(self, begun: Begun) -> dict[str, Any]:
        call, source = begun.call, begun.source
        embeddings: dict[int, str | list[float]] = {}
        while deltas := await source.read():
            for index, delta in deltas:
                embeddings[index] = spell(normalise(delta.hidden), call.embeds_as)
        return {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": embeddings[i]} for i in range(len(call.requests))],
            "model": self._model_name,
            "usage": {"prompt_tokens": call.num_prompt_tokens, "total_tokens": call.num_prompt_tokens},
        }

    def events(self, begun: Begun) -> Events:
        raise AssertionError("embeddings are not streamed")


def normalise(values: Sequence[float]) -> list[float]:
    """`values` scaled to length 1; zeros stay zeros.

    Raises:
        EngineError: they overflowed, as those of a broken adapter may.
    """
    length = math.sqrt(math.sumprod(values, values)) or 1.0
    if not math.isfinite(length):
        raise EngineError("the final hidden state is not finite: the model, or the request's adapter, overflows")
    return [value / length for value in values]


def spell(values: list[float], encoding: str) -> str | list[float]:
    """An embedding as `encoding_format` has it."""
    if encoding == "float":
        return values
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
