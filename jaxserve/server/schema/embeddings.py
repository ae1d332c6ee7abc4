"""The body of `/v1/embeddings`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from jaxserve.server.schema.body import noun
from jaxserve.server.schema.common import MAX_TOKENS, AnyRequest
from jaxserve.server.schema.completions import PROMPT, Prompt


class EmbeddingRequest(AnyRequest, frozen=True, kw_only=True):
    """A body of `/v1/embeddings`."""

    input: Annotated[Prompt, Meta(description=f"What to embed, one or several: {PROMPT}.", extra=noun(PROMPT, PROMPT))]
    encoding_format: (
        Annotated[
            Literal["float", "base64"],
            Meta(description="Numbers, or base64 of them as float32, least byte first; numbers if not given."),
        ]
        | None
    ) = None
    dimensions: (
        Annotated[int, Meta(ge=1, description="Must be the model's own: it was not trained to have its states cut short.")]
        | None
    ) = None
    add_special_tokens: (
        Annotated[bool, Meta(description="Begin texts as the model wants them to; true if not given.")] | None
    ) = None
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, le=MAX_TOKENS, description="Keep so many tokens of an input, the last; -1 for what fits.")]
        | None
    ) = None
