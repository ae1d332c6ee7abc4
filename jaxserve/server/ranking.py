"""Which of the outputs that were generated are given, and in which order. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxserve.engine.output import ShownToken
from jaxserve.engine.tools.parts import Part
from jaxserve.request import FinishReason
from jaxserve.server.call import Call

Content = str | Sequence[Part]
"""An output's text, or what it is made of if it is read for that."""

Choice = tuple[Content, Sequence[ShownToken], FinishReason]
"""An output: its content, its tokens if they have log probabilities, and why it ended."""

ShownChoice = tuple[Content, Sequence[ShownToken] | None, FinishReason]
"""The same as it is given: None in place of log probabilities that nobody asked for."""


def shown_choices(call: Call, outputs: Sequence[Choice]) -> list[ShownChoice]:
    """Of the outputs of a call's requests those that it asked for: prompt by prompt the best, where there are more.

    The best are those of the highest mean log probability a token, by the model's own distribution. One without text has no
    mean and comes last.
    """
    each, n = call.num_candidates, call.num_choices
    kept = [] if each > n else list(outputs)
    if each > n:
        groups = [outputs[start : start + each] for start in range(0, len(outputs), each)]
        for prompt, group in zip(call.prompts, groups, strict=True):
            num_echoed = len(prompt) if call.echoes and call.shows_logprobs else 0
            ranked = sorted(group, key=lambda output: _mean_logprob(output[1][num_echoed:]), reverse=True)
            kept += ranked[:n]
    return [(content, tokens if call.shows_logprobs else None, reason) for content, tokens, reason in kept]


def _mean_logprob(tokens: Sequence[ShownToken]) -> float:
    values = [token.logprobs.logprob for token in tokens if token.logprobs is not None]
    return sum(values) / len(values) if values else -math.inf
