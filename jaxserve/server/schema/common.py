"""The fields that endpoints which generate have: sampling, stopping, streaming, and whose turn it is.

Those beyond OpenAI's (`top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos`, `stop_token_ids`, `priority`,
`cache_salt`, ...) are vLLM's, but `timeout` and the names of priorities.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from jaxserve.request import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_STOP_TOKEN_IDS,
    MIN_PRIORITY,
)
from jaxserve.server.schema.body import Body, noun, only
from jaxserve.server.schema.constraints import ResponseFormat, StructuredOutputs

MAX_CHOICES = 128
MAX_TOKENS = 2**31 - 1
MAX_SALT_CHARACTERS = 256
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256

Count = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, extra=noun("a token id", "token ids"))]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[
    int,
    Meta(
        ge=-(2**63),
        description="The same seed gives the same tokens, alone and in any batch. Choice j has the seed plus j.",
        extra=noun("a 64-bit integer", "64-bit integers"),
        extra_json_schema={"maximum": 2**64 - 1},
    ),
]
Bias = Annotated[
    dict[
        Annotated[str, Meta(pattern="^(0|[1-9][0-9]{0,8})$", extra=noun("a token id", "token ids"))],
        Annotated[float, Meta(ge=-100, le=100)],
    ],
    Meta(
        max_length=MAX_LOGIT_BIAS,
        description="Added to the logits of these token ids.",
        extra=noun(f"an object of at most {MAX_LOGIT_BIAS} token ids with numbers from -100 to 100", "such objects"),
    ),
]
Priority = (
    Literal["interactive", "batch"]
    | Annotated[
        int,
        Meta(
            ge=MIN_PRIORITY,
            le=MAX_PRIORITY,
            description="The lowest number runs first; from 10, which is batch, a request takes what others leave.",
        ),
    ]
)
Timeout = Annotated[
    float,
    Meta(
        gt=0,
        description="Seconds that the whole answer may take.",
        extra=noun("a number of seconds above 0", "numbers of seconds above 0"),
    ),
]


class StreamOptions(Body, frozen=True, kw_only=True):
    """What a stream says beside its text."""

    include_usage: (
        Annotated[bool, Meta(description="Ends the stream with a chunk that has the usage and no choices.")] | None
    ) = None
    continuous_usage_stats: Annotated[bool, Meta(description="Puts the usage so far into every chunk.")] | None = None
    include_obfuscation: (
        Annotated[bool, Meta(description="Fills chunks up to lengths that say little of their text; no if not given.")] | None
    ) = None


class AnyRequest(Body, frozen=True, kw_only=True):
    """What all share that the engine works on."""

    model: Annotated[str, Meta(description="The name that the server has for its model.")]

    priority: Priority | None = None
    timeout: Timeout | None = None
    cache_salt: (
        Annotated[
            str,
            Meta(max_length=MAX_SALT_CHARACTERS, description="Cached prefixes are shared with requests of the same one only."),
        ]
        | None
    ) = None
    user: Annotated[str, Meta(description="Who asks; the answer does not depend on it.")] | None = None


class AnyGenerationRequest(AnyRequest, frozen=True, kw_only=True):
    """What all of them share that generate."""

    stream: Annotated[bool, Meta(description="Answer with server-sent events.")] | None = None

    min_tokens: (
        Annotated[
            int,
            Meta(ge=0, le=MAX_TOKENS, description="Before so many, no stop token and no end of sequence can be sampled."),
        ]
        | None
    ) = None
    temperature: Annotated[float, Meta(ge=0, le=100, description="0 is greedy; the model's own or 1 if not given.")] | None = (
        None
    )
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS, description="Tokens to keep; 0 and -1 keep all.")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1, description="Probability to keep; 1 keeps all.")] | None = None
    min_p: (
        Annotated[float, Meta(ge=0, le=1, description="Keep tokens so probable beside the likeliest; 0 keeps all.")] | None
    ) = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100, description="Over prompt and output; 1 is none.")] | None = None
    logit_bias: Bias | None = None
    stop: (
        StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS, description="Strings that end the output.")] | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: Annotated[bool, Meta(description="What stopped the output stays in it.")] | None = None
    skip_special_tokens: (
        Annotated[bool, Meta(description="If false, special tokens are shown in the text; true if not given.")] | None
    ) = None
    ignore_eos: Annotated[bool, Meta(description="Go on after the end of the sequence.")] | None = None

    structured_outputs: Annotated[StructuredOutputs, Meta(description="What the output has to be.")] | None = None
    allowed_token_ids: (
        Annotated[
            list[TokenId],
            Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS, description="No other token is sampled, nor an end."),
        ]
        | None
    ) = None
    bad_words: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]],
            Meta(max_length=MAX_BAD_WORDS, description="None of these comes, as the tokenizer spells it."),
        ]
        | None
    ) = None

    spaces_between_special_tokens: Annotated[Any, only(True)] = None


class GenerationRequest(AnyGenerationRequest, frozen=True, kw_only=True):
    """What completions and chat completions share."""

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES, description="Choices for each prompt; 1 if not given.")] | None = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: Annotated[Count, Meta(description="Keep so many tokens of a prompt, the last.")] | None = None
    response_format: Annotated[ResponseFormat, Meta(description="What the output has to be.")] | None = None
    prompt_logprobs: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=MAX_LOGPROBS,
                description="Log probabilities of the prompt's tokens and so many likeliest, at each place; not in a stream.",
            ),
        ]
        | None
    ) = None

    length_penalty: Annotated[Any, only(1)] = None
    use_beam_search: Annotated[Any, only(False)] = None
