"""`/tokenize`, `/detokenize` and `/tokenizer_info`: the model's tokenizer and chat template for whoever has to count tokens.

Answers are shaped as vLLM's. What a conversation is as tokens is `conversation`'s matter, as for chat.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web

from jaxserve.engine.text import Tokenizer
from jaxserve.errors import InvalidRequest
from jaxserve.server.access import SERVICE
from jaxserve.server.call import check_model
from jaxserve.server.conversation import encode_conversation, template_variables
from jaxserve.server.endpoints import understand
from jaxserve.server.schema.decoding import decode
from jaxserve.server.schema.tokenization import DetokenizeRequest, TokenizeRequest
from jaxserve.server.service import Model
from jaxserve.server.tools import read_offer, require_shown

MAX_CHARACTERS = 2_000_000
"""Text that is encoded at once, which takes seconds."""

CHAT_ONLY = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools")


async def tokenize(request: web.Request) -> web.Response:
    """`POST /tokenize`: what a prompt or a conversation is as tokens."""
    return await _answer(request, _tokenize)


async def detokenize(request: web.Request) -> web.Response:
    """`POST /detokenize`: the text of tokens, in which special tokens have their names."""
    return await _answer(request, _detokenize)


async def tokenizer_info(request: web.Request) -> web.Response:
    """`GET /tokenizer_info`: what a client needs to render conversations itself, named as in `tokenizer_config.json`."""
    model = request.app[SERVICE].require_model()
    tokenizer = model.tokenizer
    return web.json_response(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",  # what `transformers` would read such a vocabulary with
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": model.terms.limits.max_context,
            "add_bos_token": tokenizer.add_bos,
            "bos_token": _name(tokenizer, tokenizer.bos_token_id),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token": _name(tokenizer, tokenizer.eos_token_id),
            "eos_token_id": tokenizer.eos_token_id,
            "special_tokens": {str(token_id): _name(tokenizer, token_id) for token_id in sorted(tokenizer.special_ids)},
            "chat_template": None if tokenizer.template is None else tokenizer.template.source,
        }
    )


def _name(tokenizer: Tokenizer, token_id: int | None) -> str | None:
    return None if token_id is None else tokenizer.token_name(token_id)


async def _answer(request: web.Request, answer: Callable[[bytes, Model], dict[str, Any]]) -> web.Response:
    model = request.app[SERVICE].require_model()
    data = await request.read()
    return web.json_response(await understand(data, lambda: answer(data, model)))


def _tokenize(data: bytes, model: Model) -> dict[str, Any]:
    body = decode(data, TokenizeRequest)
    tokenizer = model.tokenizer
    if body.model is not None:
        check_model(body.model, model.adapters.names)
    if (body.prompt is None) == (body.messages is None):
        found = "neither" if body.prompt is None else "both"
        raise InvalidRequest(f"prompt must be given, or messages instead of it, found {found}", param="prompt")
    if body.prompt is not None:
        for name in CHAT_ONLY:
            if getattr(body, name) is not None:
                raise InvalidRequest(f"{name} goes with messages, and there is a prompt", param=name)
        _check_length("prompt", body.prompt)
        ids = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        assert body.messages is not None
        variables = template_variables(body, tokenizer)
        if (offer := read_offer(body.tools, None, None)) is not None:
            require_shown(tokenizer, body.chat_template)
            variables["tools"] = offer.for_template()
        ids = encode_conversation(body, body.messages, tokenizer, variables, check=partial(_check_length, "messages"))
    return {
        "count": len(ids),
        "max_model_len": model.terms.limits.max_context,
        "tokens": ids,
        "token_strs": list(map(tokenizer.token_name, ids)) if body.return_token_strs else None,
    }


def _check_length(name: str, text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(
            f"{name} must have at most {MAX_CHARACTERS} characters to be tokenized at once, found {len(text)}", param=name
        )


def _detokenize(data: bytes, model: Model) -> dict[str, Any]:
    body = decode(data, DetokenizeRequest)
    if body.model is not None:
        check_model(body.model, model.adapters.names)
    size = model.tokenizer.vocab_size
    outside = next((i for i, token_id in enumerate(body.tokens) if token_id >= size), None)
    if outside is not None:
        name = f"tokens[{outside}]"
        raise InvalidRequest(f"{name} must be a token id from 0 to {size - 1}, found {body.tokens[outside]}", param=name)
    return {"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)}
