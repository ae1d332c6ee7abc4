"""The OpenAI API's request bodies, as plain requests to the engine. Pure: no sockets, no engine.

Owns which fields there are, and the rule that each either works or is refused with an error that names it. Fields beyond
OpenAI's (`top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos`, `stop_token_ids`, `priority`, `cache_salt`,
`chat_template_kwargs`) are vLLM's, but `timeout` and the names of priorities. What a caller may ask for is in `terms`, the
way back in `wire`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.engine.text import Tokenizer
from jaxserve.errors import InvalidRequest, ModelNotFound
from jaxserve.request import (
    INTERACTIVE_PRIORITY,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MIN_PRIORITY,
    PRIORITY_NAMES,
    Request,
    SamplingParams,
)
from jaxserve.server.body import Body, check_text, invalid
from jaxserve.server.messages import check_shown, parse_messages

DEFAULT_COMPLETION_TOKENS = 16
MAX_CHOICES = 128
MAX_SEQUENCES = 2048
MAX_SALT_CHARACTERS = 256
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_TOKENS = 2**31 - 1

SAMPLING_FIELDS = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs"),
)
COMMON_FIELDS = ("model", "n", "stream", "stream_options", "priority", "timeout", "cache_salt", *SAMPLING_FIELDS)

# They say who asks, or which requests are alike; answers do not depend on them.
LABEL_FIELDS = ("user", "safety_identifier", "prompt_cache_key")

# Values, beside null, at which fields that are not implemented change nothing.
COMMON_NO_OPS: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0, 1),
    "metadata": ({},),
    "prompt_cache_retention": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
COMPLETION_NO_OPS: dict[str, tuple[Any, ...]] = {**COMMON_NO_OPS, "suffix": ("",), "add_special_tokens": (True,)}
CHAT_NO_OPS: dict[str, tuple[Any, ...]] = {
    **COMMON_NO_OPS,
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "prompt_cache_options": (),
    "reasoning_effort": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
COMPLETION_FIELDS = (*COMMON_FIELDS, "prompt", "best_of", *LABEL_FIELDS, *COMPLETION_NO_OPS)
CHAT_FIELDS = (
    *(*COMMON_FIELDS, "messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"),
    *(*LABEL_FIELDS, *CHAT_NO_OPS),
)
TEMPLATE_VARIABLES_NOT_OPEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One body, understood.

    Attributes:
        requests: by choice index, which is prompt index * n + j.
        num_prompt_tokens: of all prompts, each counted once.
        num_choices: for each prompt.
        include_usage: whether a stream ends with a usage chunk.
        priority: of the requests if the body has one, else None.
        timeout: seconds that the whole answer may take, or None.
    """

    call_id: str
    requests: tuple[Request, ...]
    num_prompt_tokens: int
    num_choices: int
    stream: bool
    include_usage: bool
    priority: int | None = None
    timeout: float | None = None


def parse_completion(value: Any, tokenizer: Tokenizer, *, model: str, max_context: int, call_id: str) -> Call:
    """Understand a body of `/v1/completions`.

    Args:
        model: the name that this server answers to.
        max_context: tokens of prompt and output at most; text that cannot fit is refused before it is encoded.
        call_id: requests are called `{call_id}-{index}`.

    Raises:
        InvalidRequest: naming the field.
        ModelNotFound: it asks for another model.
    """
    body = Body(value, COMPLETION_FIELDS)
    _check_common(body, model, COMPLETION_NO_OPS)
    n = body.integer("n", 1, low=1, high=MAX_CHOICES)
    body.refuse_unless("best_of", (n,))
    params = _sampling(
        body,
        max_tokens=body.integer("max_tokens", DEFAULT_COMPLETION_TOKENS, low=1, high=MAX_TOKENS),
        logprobs=body.integer("logprobs", low=0, high=MAX_LOGPROBS),
    )
    return _call(body, _parse_prompts(body, tokenizer, max_context), n, params, call_id)


def parse_chat(value: Any, tokenizer: Tokenizer, *, model: str, max_context: int, call_id: str) -> Call:
    """Understand a body of `/v1/chat/completions`; as `parse_completion`."""
    body = Body(value, CHAT_FIELDS)
    _check_common(body, model, CHAT_NO_OPS)
    params = _sampling(body, max_tokens=_chat_max_tokens(body), logprobs=_chat_logprobs(body))
    messages = parse_messages(body.require("messages", "an array of messages"))
    for i, message in enumerate(messages):
        _check_may_fit(f"messages[{i}].content", message["content"], tokenizer, max_context)
    variables = _template_variables(body, tokenizer)
    check_shown(messages, lambda probe: tokenizer.render_chat(probe, **variables))
    prompt = tokenizer.encode_chat(messages, **variables)
    return _call(body, [prompt], body.integer("n", 1, low=1, high=MAX_CHOICES), params, call_id)


def _check_common(body: Body, model: str, no_ops: Mapping[str, tuple[Any, ...]]) -> None:
    body.require("model", "a string")
    wanted = body.string("model")
    if wanted != model:
        raise ModelNotFound(f"the model {wanted!r:.200} does not exist; this server has {model!r}", param="model")
    for name, accepted in no_ops.items():
        body.refuse_unless(name, accepted)
    for name in LABEL_FIELDS:
        body.string(name)


def _call(body: Body, prompts: list[list[int]], n: int, params: SamplingParams, call_id: str) -> Call:
    if len(prompts) * n > MAX_SEQUENCES:
        raise InvalidRequest(f"prompt: {len(prompts)} prompts x n {n} > {MAX_SEQUENCES} sequences a request", param="prompt")
    stream = body.boolean("stream")
    priority = _priority(body)
    salt = _cache_salt(body)
    choices = [_with_choice_seed(params, j) for j in range(n)]
    requests = tuple(
        Request(
            request_id=f"{call_id}-{i * n + j}",
            prompt=prompt,
            params=choice,
            priority=INTERACTIVE_PRIORITY if priority is None else priority,
            cache_salt=salt,
        )
        for i, prompt in enumerate(map(tuple, prompts))
        for j, choice in enumerate(choices)
    )
    return Call(
        call_id=call_id,
        requests=requests,
        num_prompt_tokens=sum(map(len, prompts)),
        num_choices=n,
        stream=stream,
        include_usage=_include_usage(body, stream),
        priority=priority,
        timeout=_timeout(body),
    )


def _priority(body: Body) -> int | None:
    value = body.get("priority")
    if isinstance(value, str):
        if value not in PRIORITY_NAMES:
            expected = f"{', '.join(map(repr, PRIORITY_NAMES))} or an integer from {MIN_PRIORITY} to {MAX_PRIORITY}"
            raise invalid("priority", expected, value)
        return PRIORITY_NAMES[value]
    priority: int | None = body.integer("priority", low=MIN_PRIORITY, high=MAX_PRIORITY)
    return priority


def _timeout(body: Body) -> float | None:
    seconds = body.number("timeout", 0.0)
    if body.get("timeout") is None:
        return None
    if seconds <= 0.0:
        raise invalid("timeout", "a number of seconds above 0", body.get("timeout"))
    return seconds


def _cache_salt(body: Body) -> str:
    salt = body.string("cache_salt") or ""
    if len(salt) > MAX_SALT_CHARACTERS:
        raise InvalidRequest(
            f"cache_salt must have at most {MAX_SALT_CHARACTERS} characters, found {len(salt)}", param="cache_salt"
        )
    return salt


def _include_usage(body: Body, stream: bool) -> bool:
    value = body.get("stream_options")
    if value is None:
        return False
    options = Body(value, ("include_usage", "include_obfuscation"), where="stream_options")
    if not stream:
        raise InvalidRequest("stream_options is allowed only when stream is true", param="stream_options")
    options.refuse_unless("include_obfuscation", (False,))
    return options.boolean("include_usage")


def _check_may_fit(name: str, text: str, tokenizer: Tokenizer, max_context: int) -> None:
    """Refuse what is too long by far at once: encoding megabytes takes seconds."""
    fewest = tokenizer.fewest_tokens(text)
    if fewest >= max_context:
        raise InvalidRequest(
            f"{name} has {len(text)} characters, which take at least {fewest} tokens; the context is {max_context}", param=name
        )


def _parse_prompts(body: Body, tokenizer: Tokenizer, max_context: int) -> list[list[int]]:
    expected = "a string, an array of strings, an array of token ids, or an array of arrays of token ids"
    prompt = body.require("prompt", expected)

    def encode(name: str, text: str) -> list[int]:
        check_text(name, text)
        _check_may_fit(name, text, tokenizer, max_context)
        return tokenizer.encode(text)

    if isinstance(prompt, str):
        return [encode("prompt", prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise invalid("prompt", expected, prompt)
    if len(prompt) > MAX_SEQUENCES and not _are_ids(prompt):
        raise InvalidRequest(f"prompt: {len(prompt)} prompts > {MAX_SEQUENCES} sequences a request", param="prompt")
    if all(isinstance(item, str) for item in prompt):
        return [encode(f"prompt[{i}]", item) for i, item in enumerate(prompt)]
    if _are_ids(prompt):
        return [prompt]
    for i, item in enumerate(prompt):
        if not isinstance(item, list):
            raise invalid(f"prompt[{i}]", "of one kind with the others: strings, token ids or arrays of token ids", item)
        if not _are_ids(item):
            raise invalid(f"prompt[{i}]", "an array of token ids", item)
    return prompt


def _are_ids(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


def _sampling(body: Body, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.integer("min_tokens", 0, low=0, high=MAX_TOKENS),
        temperature=body.number("temperature", 1.0),
        top_k=body.integer("top_k", 0),
        top_p=body.number("top_p", 1.0),
        min_p=body.number("min_p", 0.0),
        seed=body.integer("seed"),
        presence_penalty=body.number("presence_penalty", 0.0),
        frequency_penalty=body.number("frequency_penalty", 0.0),
        repetition_penalty=body.number("repetition_penalty", 1.0),
        logit_bias=_logit_bias(body),
        logprobs=logprobs,
        stop=_stop_strings(body),
        stop_token_ids=_stop_token_ids(body),
        ignore_eos=body.boolean("ignore_eos"),
    )


def _with_choice_seed(params: SamplingParams, choice: int) -> SamplingParams:
    """The same for every choice but for the seed, or n choices would be n copies."""
    if params.seed is None or choice == 0:
        return params
    seed = params.seed + choice
    return replace(params, seed=seed if seed < 2**64 else seed - 2**64)


def _chat_max_tokens(body: Body) -> int | None:
    old, new = (body.integer(name, low=1, high=MAX_TOKENS) for name in ("max_tokens", "max_completion_tokens"))
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"max_tokens ({old}) is the old name of max_completion_tokens ({new}); give one of them", param="max_tokens"
        )
    return old if new is None else new


def _chat_logprobs(body: Body) -> int | None:
    top = body.integer("top_logprobs", 0, low=0, high=MAX_LOGPROBS)
    if body.boolean("logprobs"):
        return top
    if top:
        raise InvalidRequest(f"top_logprobs is allowed only when logprobs is true, found {top}", param="top_logprobs")
    return None


def _template_variables(body: Body, tokenizer: Tokenizer) -> dict[str, Any]:
    value = body.get("chat_template_kwargs")
    if value is None:
        return {}
    known = (tokenizer.template.variables if tokenizer.template else frozenset()) - TEMPLATE_VARIABLES_NOT_OPEN
    Body(value, known, where="chat_template_kwargs")
    return dict(value)


def _logit_bias(body: Body) -> tuple[tuple[int, float], ...]:
    value = body.get("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise invalid("logit_bias", "an object from token ids to numbers", value)
    bias = Body(value, value, where="logit_bias")
    for key in value:
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and str(int(key)) == key):
            raise InvalidRequest(f"logit_bias must have token ids as keys, found {key!r:.60}", param="logit_bias")
    return tuple((int(key), bias.number(key, 0.0)) for key in value)


def _stop_strings(body: Body) -> tuple[str, ...]:
    value = body.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise invalid("stop", f"a string or an array of at most {MAX_STOPS} strings", value)
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise invalid("stop", f"strings of 1 to {MAX_STOP_CHARACTERS} characters", stop)
        check_text("stop", stop)
    return tuple(stops)


def _stop_token_ids(body: Body) -> tuple[int, ...]:
    value = body.get("stop_token_ids")
    if value is None:
        return ()
    if not isinstance(value, list) or not _are_ids(value):
        raise invalid("stop_token_ids", "an array of token ids", value)
    return tuple(value)
