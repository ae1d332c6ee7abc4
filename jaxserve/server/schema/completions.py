"""The body of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from jaxserve.request import MAX_LOGPROBS
from jaxserve.server.schema.body import noun, only
from jaxserve.server.schema.common import MAX_CHOICES, MAX_TOKENS, GenerationRequest, TokenId

PROMPT = "a string, an array of strings, an array of token ids, or an array of arrays of token ids"

Prompt = (
    str
    | Annotated[
        list[
            Annotated[
                str | TokenId | Annotated[list[TokenId], Meta(extra_json_schema={"minItems": 1})],
                Meta(extra=noun("a string, a token id or an array of token ids", "prompts")),
            ]
        ],
        Meta(min_length=1),
    ]
)


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """A body of `/v1/completions`."""

    prompt: Annotated[Prompt, Meta(description=f"A prompt or several: {PROMPT}.", extra=noun(PROMPT, PROMPT))]
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS, description="Output tokens at most; 16 if not given.")] | None = None
    echo: (
        Annotated[bool, Meta(description="The text begins with the prompt, and logprobs with those of its tokens.")] | None
    ) = None
    logprobs: (
        Annotated[
            int, Meta(ge=0, le=MAX_LOGPROBS, description="Log probabilities of the chosen and so many likeliest tokens.")
        ]
        | None
    ) = None
    best_of: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=MAX_CHOICES,
                description="Choices to generate for each prompt; the n of the highest mean log probability are given.",
            ),
        ]
        | None
    ) = None
    suffix: Annotated[Any, only("")] = None
    add_special_tokens: (
        Annotated[bool, Meta(description="Begin with BOS where the model wants one; yes if not given.")] | None
    ) = None
    metadata: Annotated[Any, only({})] = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Annotated[Any, only()] = None
    safety_identifier: str | None = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    store: Annotated[Any, only(False)] = None
