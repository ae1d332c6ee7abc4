"""The bodies of `/tokenize` and `/detokenize`, which are vLLM's."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from jaxserve.server.schema.body import Body, Refused, noun
from jaxserve.server.schema.chat import MAX_TEMPLATE_CHARACTERS, AnyMessage
from jaxserve.server.schema.common import TokenId
from jaxserve.server.schema.tools import MAX_TOOLS, FunctionTool


class TokenizeRequest(Body, frozen=True, kw_only=True):
    """A body of `/tokenize`: a prompt as completions have it, or messages as chat has them."""

    model: Annotated[str, Meta(description="The name that the server has for its model, or nothing.")] | None = None
    prompt: Annotated[str, Meta(description="This, or messages.")] | None = None
    messages: (
        Annotated[list[AnyMessage], Meta(min_length=1, extra=noun("an array of at least one message", "messages"))] | None
    ) = None
    return_token_strs: Annotated[bool, Meta(description="Also each token as the vocabulary spells it.")] | None = None
    add_special_tokens: (
        Annotated[
            bool,
            Meta(description="Begin with BOS where the model wants one; if not given, yes for a prompt and no for messages."),
        ]
        | None
    ) = None
    add_generation_prompt: Annotated[bool, Meta(description="As in chat; goes with messages.")] | None = None
    continue_final_message: Annotated[bool, Meta(description="As in chat; goes with messages.")] | None = None
    chat_template: (
        Annotated[str, Meta(max_length=MAX_TEMPLATE_CHARACTERS, description="As in chat; goes with messages.")] | None
    ) = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="As in chat; goes with messages.")] | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS, description="As in chat; goes with messages.")] | None = (
        None
    )
    media_io_kwargs: Refused = None
    mm_processor_kwargs: Refused = None


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    """A body of `/detokenize`."""

    model: Annotated[str, Meta(description="The name that the server has for its model, or nothing.")] | None = None
    tokens: list[TokenId]
