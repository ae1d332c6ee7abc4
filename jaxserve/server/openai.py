"""The OpenAI API's two bodies that generate, as calls. Pure: no sockets, no engine.

Owns what their fields mean. Which there are and what values they may have is in `schema`, the way back in `wire`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxserve.engine.text import Tokenizer
from jaxserve.engine.tools.dialect import Reading
from jaxserve.engine.tools.reasoning import ReasoningFormat
from jaxserve.errors import InvalidRequest
from jaxserve.server.call import (
    MAX_SEQUENCES,
    NO_DEFAULTS,
    Call,
    Defaults,
    Served,
    check_may_fit,
    check_model,
    make_call,
    sampling_params,
)
from jaxserve.server.conversation import encode_conversation, open_variables, template_variables
from jaxserve.server.schema.chat import ChatRequest
from jaxserve.server.schema.common import GenerationRequest
from jaxserve.server.schema.completions import CompletionRequest
from jaxserve.server.schema.decoding import decode, invalid
from jaxserve.server.tools import Offer, output_grammar, read_offer, require_format, require_shown

DEFAULT_COMPLETION_TOKENS = 16
MAX_CONTEXTS_TO_CUT = 16
"""How much longer than the context a prompt may be that is to be cut."""

MAX_OPENING_TOKENS = 32
"""Tokens, from the end of a prompt, that a tag which opens reasoning can take with the white space after it."""

Data = bytes | Mapping[str, Any]


def parse_completion(
    data: Data, tokenizer: Tokenizer, *, model: Served, max_context: int, call_id: str, defaults: Defaults = NO_DEFAULTS
) -> Call:
    """Understand a body of `/v1/completions`, as JSON or parsed.

    Args:
        model: the names that this server answers to.
        max_context: tokens of prompt and output at most; text that cannot fit is refused before it is encoded.
        call_id: requests are called `{call_id}-{index}`.
        defaults: how to sample where the body does not say.

    Raises:
        InvalidRequest: naming the field.
        ModelNotFound: it asks for another model.
    """
    body = decode(data, CompletionRequest)
    check_model(body.model, model)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    params = sampling_params(body, max_tokens=max_tokens, logprobs=body.logprobs, defaults=defaults)
    add_special_tokens = body.add_special_tokens is not False
    most = _most_to_encode(body, max_context)
    texts = encode_prompts("prompt", body.prompt, tokenizer, most, add_special_tokens=add_special_tokens)
    prompts = [_kept(body, ids) for _, ids in texts]
    # What is left of a prompt is no longer the text that came, so its tokens are what is echoed.
    came = [text if len(kept) == len(ids) else None for (text, ids), kept in zip(texts, prompts, strict=True)]
    echoed = came if body.echo else None
    return make_call(body, prompts, params, call_id, num_candidates=_num_candidates(body), echoed=echoed)


def _most_to_encode(body: GenerationRequest, max_context: int) -> int:
    """Tokens of a prompt that are worth encoding: more than fit, where it is to be cut."""
    return max_context if body.truncate_prompt_tokens is None else max_context * MAX_CONTEXTS_TO_CUT


def _kept(body: GenerationRequest, prompt: list[int]) -> list[int]:
    """The end of a prompt, as far as the body wants it."""
    return prompt if body.truncate_prompt_tokens is None else prompt[-body.truncate_prompt_tokens :]


def _num_candidates(body: CompletionRequest) -> int | None:
    n = body.n or 1
    if body.best_of is not None and body.best_of < n:
        raise InvalidRequest(f"best_of must be at least n ({n}), found {body.best_of}", param="best_of")
    if body.best_of not in (None, n) and body.stream:
        raise InvalidRequest(
            f"best_of must be n ({n}) in a stream, since the best are known at the end, found {body.best_of}", param="best_of"
        )
    return body.best_of


def parse_chat(
    data: Data, tokenizer: Tokenizer, *, model: Served, max_context: int, call_id: str, defaults: Defaults = NO_DEFAULTS
) -> Call:
    """Understand a body of `/v1/chat/completions`; as `parse_completion`."""
    body = decode(data, ChatRequest)
    check_model(body.model, model)
    max_tokens, logprobs = _chat_max_tokens(body), _chat_logprobs(body)
    params = sampling_params(body, max_tokens=max_tokens, logprobs=logprobs, defaults=defaults)
    variables = _variables(body, tokenizer)
    offer = read_offer(body.tools, body.tool_choice, body.parallel_tool_calls)
    if offer is not None:
        require_shown(tokenizer, body.chat_template)
        require_format(tokenizer)
        variables["tools"] = offer.for_template()
    prompt = encode_conversation(
        body,
        body.messages,
        tokenizer,
        variables,
        check=lambda text: check_may_fit("messages", text, tokenizer, _most_to_encode(body, max_context)),
    )
    prompt = _kept(body, prompt)
    reading = _reading(body, tokenizer, prompt, offer)
    grammar = output_grammar(params.grammar, offer, tokenizer, opened=reading is not None and reading.opened)
    params = replace(params, grammar=grammar)
    names = {"prompt": "messages"} | ({} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"})
    return replace(make_call(body, [prompt], params, call_id), reading=reading, field_names=names)


def _reading(body: ChatRequest, tokenizer: Tokenizer, prompt: Sequence[int], offer: Offer | None) -> Reading | None:
    """How answers to `prompt` are read; None if there is nothing in them but text."""
    tools, reasoning = tokenizer.dialect.tools if offer else None, tokenizer.dialect.reasoning
    if tools is None and reasoning is None:
        return None
    return Reading(
        tools=tools,
        names=frozenset() if offer is None else offer.callable,
        reasoning=reasoning,
        opened=reasoning is not None and _opens(reasoning, body, tokenizer, prompt),
        # OpenAI's reference: a function that the request names is called without it being why the answer ends.
        ends_with_calls=offer is not None and not offer.named,
        only_calls=offer is not None and offer.required,
    )


def _opens(reasoning: ReasoningFormat, body: ChatRequest, tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Whether the answer begins inside reasoning: a template opens it, or the message that is to be continued."""
    if body.continue_final_message:
        content = body.messages[-1].content or ""
        return reasoning.is_open_after(content if isinstance(content, str) else content[-1].text)
    return reasoning.opened_by(tokenizer.spell(prompt[-MAX_OPENING_TOKENS:]))


def encode_prompts(
    field: str, prompt: str | list[Any], tokenizer: Tokenizer, max_context: int, *, add_special_tokens: bool = True
) -> list[tuple[str | None, list[int]]]:
    """The prompts of any of the four forms: the text of each that came as one, and its token ids.

    Args:
        field: what they are called in errors.
        add_special_tokens: begin texts as the model wants them to.
    """

    def encode(name: str, text: str) -> tuple[str, list[int]]:
        check_may_fit(name, text, tokenizer, max_context)
        return text, tokenizer.encode(text, add_special_tokens=add_special_tokens)

    if isinstance(prompt, str):
        return [encode(field, prompt)]
    kind = type(prompt[0])
    if len(set(map(type, prompt))) > 1:
        odd = next(i for i, item in enumerate(prompt) if type(item) is not kind)
        expected = "of one kind with the others: strings, token ids or arrays of token ids"
        raise invalid(f"{field}[{odd}]", expected, prompt[odd])
    if kind is int:
        return [(None, prompt)]
    if len(prompt) > MAX_SEQUENCES:
        raise InvalidRequest(f"{field}: {len(prompt)} prompts > {MAX_SEQUENCES} sequences a request", param=field)
    if kind is str:
        return [encode(f"{field}[{i}]", item) for i, item in enumerate(prompt)]
    return [(None, ids) for ids in prompt]


def _chat_max_tokens(body: ChatRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"max_tokens ({old}) is the old name of max_completion_tokens ({new}); give one of them", param="max_tokens"
        )
    return old if new is None else new


def _chat_logprobs(body: ChatRequest) -> int | None:
    top = body.top_logprobs or 0
    if body.logprobs:
        return top
    if top:
        raise InvalidRequest(f"top_logprobs is allowed only when logprobs is true, found {top}", param="top_logprobs")
    return None


def _variables(body: ChatRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    variables = template_variables(body, tokenizer)
    effort = body.reasoning_effort
    if effort is None:
        return variables
    if "reasoning_effort" not in open_variables(body, tokenizer):
        raise InvalidRequest(
            f"reasoning_effort is not supported: the model's chat template does not read it, found {effort!r}",
            param="reasoning_effort",
        )
    if variables.setdefault("reasoning_effort", effort) != effort:
        raise InvalidRequest("reasoning_effort is another one in chat_template_kwargs; give one", param="reasoning_effort")
    return variables
