"""vLLM's `prompt_logprobs` in whole answers: at each place of a prompt its own token's and the likeliest's. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.request import TokenLogprobs
from jaxserve.server.call import Call
from jaxserve.server.echo import PromptLogprobs
from jaxserve.server.wire import CompletionShape, Shape, number

Entry = dict[str, dict[str, Any]]


def add_prompt_logprobs(
    body: dict[str, Any], call: Call, shape: Shape, logprobs_of: Callable[[int], PromptLogprobs | None]
) -> None:
    """Put them into a whole answer, if `call` asked for them: into each choice of completions, or beside the choice of a chat.

    Args:
        logprobs_of: what is known of a prompt, by its index.
    """
    if call.prompt_logprobs is None:
        return
    values = [spell(shape, ids, logprobs_of(index) or ()) for index, ids in enumerate(call.prompts)]
    if not isinstance(shape, CompletionShape):
        body["prompt_logprobs"] = values[0]
        return
    for index, choice in enumerate(body["choices"]):
        choice["prompt_logprobs"] = values[index // call.num_choices]


def spell(shape: Shape, token_ids: Sequence[int], logprobs: PromptLogprobs) -> list[Entry | None]:
    """The log probabilities of one prompt: null for its first token, and an object by token id for each other."""
    pairs = zip(token_ids, logprobs, strict=True)
    return [None if entry is None else _entry(shape, token_id, entry) for token_id, entry in pairs]


def _entry(shape: Shape, own_id: int, logprobs: TokenLogprobs) -> Entry:
    top = [(token_id, logprob, place) for place, (token_id, logprob) in enumerate(logprobs.top, start=1)]
    entry: Entry = {}
    for token_id, logprob, rank in [(own_id, logprobs.logprob, logprobs.rank), *top]:
        text = shape.token_text(token_id)
        entry.setdefault(str(token_id), {"logprob": number(logprob), "rank": rank, "decoded_token": text})
    return entry
