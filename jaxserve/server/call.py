"""One body, understood: the requests to the engine that it comes to, and how to answer it.

Pure. Owns what the endpoints that generate share; `openai` and its like make calls of their bodies. What a caller may ask
for is in `terms`, the way back in `wire`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from jaxserve.engine.text import Tokenizer
from jaxserve.engine.tools.dialect import Reading
from jaxserve.errors import ContextExceeded, InvalidRequest, ModelNotFound
from jaxserve.request import INTERACTIVE_PRIORITY, PRIORITY_NAMES, Request, SamplingParams
from jaxserve.server.constraining import grammar_of
from jaxserve.server.schema.common import GenerationRequest, StreamOptions

MAX_SEQUENCES = 2048

SAMPLING_FIELDS = (
    *("min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("include_stop_str_in_output", "skip_special_tokens"),
)
"""Fields that mean to the engine what they mean in a body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One body, understood.

    Attributes:
        requests: by prompt, then by candidate. Where as many are generated as are given, the index is that of the choice.
        num_prompt_tokens: of all prompts, each counted once.
        num_candidates: requests for each prompt.
        num_choices: how many of them are given, the best by mean log probability.
        shows_logprobs: whether log probabilities are part of the answer.
        include_usage: whether a stream ends with a usage chunk.
        continuous_usage: whether each chunk of a stream has the usage so far.
        obfuscates: whether chunks are filled up to lengths that say little of their text.
        priority: of the requests if the body has one, else None.
        timeout: seconds that the whole answer may take, or None.
        reading: how answers are read as reasoning, text and calls; None for text alone.
        echo: what the answer repeats of the body.
        echoes: whether each output begins with its prompt, with the log probabilities of its tokens where those are shown.
        prompt_texts: of each prompt its text, if it came as one, where prompts are echoed.
        prompt_logprobs: how many of the likeliest tokens at each place of a prompt are shown beside its own; None for nothing.
        embeds_as: how embeddings are spelled, where they are what is asked for.
        dimensions: numbers in each that the body wants, or None.
        model: whose answer the body wants; "" for the server's model.
        field_names: what the body calls what the engine knows under another name, by that.
    """

    call_id: str
    requests: tuple[Request, ...]
    num_prompt_tokens: int
    num_candidates: int
    num_choices: int
    shows_logprobs: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool = False
    obfuscates: bool = False
    priority: int | None = None
    timeout: float | None = None
    reading: Reading | None = None
    echo: Mapping[str, Any] = field(default_factory=dict)
    echoes: bool = False
    prompt_texts: tuple[str | None, ...] = ()
    prompt_logprobs: int | None = None
    embeds_as: str = ""
    dimensions: int | None = None
    model: str = ""
    field_names: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """The token ids of each prompt."""
        return [request.prompt for request in self.requests[:: self.num_candidates]]

    @property
    def shows_prompts(self) -> bool:
        """Whether anything of its prompts is in the answer."""
        return self.echoes or self.prompt_logprobs is not None


@contextmanager
def naming_fields_of(call: Call) -> Iterator[None]:
    """Have errors about what the engine is asked for speak of the fields of the body that asked."""
    try:
        yield
    except InvalidRequest as error:
        said = re.sub(r"^prompt\b|\bmax_tokens\b", lambda match: call.field_names.get(match[0], match[0]), str(error))
        error.args = (said,)
        error.param = call.field_names.get(error.param or "", error.param)
        raise


Served = str | tuple[str, ...]
"""The names that a server answers to: its model's, or that and those of adapters."""


def check_model(wanted: str, served: Served) -> None:
    """Refuse a request for another model than the server's.

    Raises:
        ModelNotFound: it is none of `served`.
    """
    names = (served,) if isinstance(served, str) else served
    if wanted not in names:
        raise ModelNotFound(
            f"the model {wanted!r:.200} does not exist; this server has {', '.join(map(repr, names))}", param="model"
        )


def check_may_fit(name: str, text: str, tokenizer: Tokenizer, max_context: int) -> None:
    """Refuse what is too long by far at once: encoding megabytes takes seconds."""
    fewest = tokenizer.fewest_tokens(text)
    if fewest >= max_context:
        raise ContextExceeded(
            f"{name} has {len(text)} characters, which take at least {fewest} tokens", max_context=max_context, param=name
        )


Defaults = Mapping[str, float]
"""Fields of `SamplingParams` for bodies that leave them out."""

NO_DEFAULTS: Defaults = MappingProxyType({})


def sampling_params(
    body: GenerationRequest, *, max_tokens: int | None, logprobs: int | None, defaults: Defaults
) -> SamplingParams:
    """How to sample, by the fields that all bodies have and the two that differ.

    Args:
        defaults: of these fields; what the body says wins.

    Raises:
        InvalidRequest: naming a field that is at odds with another.
    """
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    given = {**defaults, **given}
    stop = body.stop or ()
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=tuple((int(key), bias) for key, bias in (body.logit_bias or {}).items()),
        grammar=grammar_of(body, body.response_format),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        bad_words=tuple(body.bad_words or ()),
        **given,
    )


def make_call(
    body: GenerationRequest,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    call_id: str,
    *,
    num_candidates: int | None = None,
    echoed: Sequence[str | None] | None = None,
) -> Call:
    """The call for `prompts`, each with as many choices as the body asks for.

    Args:
        call_id: requests are called `{call_id}-{index}`.
        num_candidates: what to generate for each prompt, to give the best of them; None for as many as are given.
        echoed: the text of each prompt that has one, if they are to be echoed.

    Raises:
        InvalidRequest: naming the field.
    """
    n = body.n or 1
    each = n if num_candidates is None else num_candidates
    if len(prompts) * each > MAX_SEQUENCES:
        asked = f"{len(prompts)} prompts x {'n' if each == n else 'best_of'} {each}"
        raise InvalidRequest(f"prompt: {asked} > {MAX_SEQUENCES} sequences a request", param="prompt")
    ranked = params if params.logprobs is not None or each == n else replace(params, logprobs=0)
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs are not part of a stream; echo with logprobs is", param="prompt_logprobs")
    wanted = [body.prompt_logprobs, params.logprobs if echoed is not None else None]
    num_scores = max((count for count in wanted if count is not None), default=None)
    priority = PRIORITY_NAMES[body.priority] if isinstance(body.priority, str) else body.priority
    options = _stream_options(body)
    candidates = [_with_choice_seed(ranked, j) for j in range(each)]
    # What is computed of a prompt is the same for all of them.
    candidates[0] = replace(candidates[0], prompt_logprobs=num_scores)
    requests = tuple(
        Request(
            request_id=f"{call_id}-{i * each + j}",
            prompt=prompt,
            params=candidate,
            priority=INTERACTIVE_PRIORITY if priority is None else priority,
            cache_salt=body.cache_salt or "",
        )
        for i, prompt in enumerate(map(tuple, prompts))
        for j, candidate in enumerate(candidates)
    )
    return Call(
        call_id=call_id,
        requests=requests,
        num_prompt_tokens=sum(map(len, prompts)),
        num_candidates=each,
        num_choices=n,
        shows_logprobs=params.logprobs is not None,
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        obfuscates=bool(options.include_obfuscation),
        priority=priority,
        timeout=body.timeout,
        echoes=echoed is not None,
        prompt_texts=tuple(echoed or ()),
        prompt_logprobs=body.prompt_logprobs,
        model=body.model,
    )


def _stream_options(body: GenerationRequest) -> StreamOptions:
    if body.stream_options is None:
        return StreamOptions()
    if not body.stream:
        raise InvalidRequest("stream_options is allowed only when stream is true", param="stream_options")
    return body.stream_options


def _with_choice_seed(params: SamplingParams, choice: int) -> SamplingParams:
    """The same for every choice but for the seed, or n choices would be n copies."""
    if params.seed is None or choice == 0:
        return params
    seed = params.seed + choice
    return replace(params, seed=seed if seed < 2**64 else seed - 2**64)
