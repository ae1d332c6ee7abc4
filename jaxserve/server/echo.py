"""Prompts as parts of their answers: `echo`, with log probabilities of the prompt's tokens if those are wanted, and
`prompt_logprobs`.

Pure. Owns what is shown of a prompt, and that no choice of it is shown before the log probabilities are there which only the
first of its requests computes. Knows no wire format.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxserve.engine.output import OutputDelta, ShownToken
from jaxserve.engine.text import Tokenizer
from jaxserve.engine.text_stream import TextStream
from jaxserve.request import Request, TokenEvent, TokenLogprobs
from jaxserve.server.call import Call

PromptLogprobs = tuple[TokenLogprobs | None, ...]
"""Of each token of a prompt; None for the first."""


class ShownPrompts:
    """What is shown of a call's prompts.

    Attributes:
        scores: of each prompt, by its index, what its first request computed, once it has.
    """

    def __init__(self, call: Call, tokenizer: Tokenizer) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self.scores: dict[int, tuple[TokenLogprobs, ...]] = {}
        self._echoes: dict[int, _Echo] = {}
        self._begun: set[int] = set()

    def add(self, index: int, delta: OutputDelta) -> OutputDelta:
        """`delta` of the request `index`, with the prompt before the first if it is echoed."""
        if not self._call.echoes:
            return delta
        prompt = index // self._call.num_candidates
        if prompt not in self._echoes:
            self._echoes[prompt] = self._echo(prompt)
        echo = self._echoes[prompt]
        tokens = tuple(replace(token, offset=token.offset + len(echo.text)) for token in delta.tokens)
        if index in self._begun:
            return replace(delta, tokens=tokens)
        self._begun.add(index)
        return replace(delta, text=echo.text + delta.text, tokens=echo.tokens + tokens)

    def logprobs(self, prompt: int) -> PromptLogprobs | None:
        """For each token of a prompt, by its index, what `prompt_logprobs` shows; None where nobody asked."""
        count = self._call.prompt_logprobs
        return None if count is None else (None, *_cut(self.scores[prompt], count))

    def _echo(self, prompt: int) -> _Echo:
        call = self._call
        request = call.requests[prompt * call.num_candidates]
        text, offsets = echoed_text(request, call.prompt_texts[prompt], self._tokenizer)
        count = request.params.logprobs
        if count is None or not call.shows_logprobs:
            return _Echo(text)
        logprobs = (None, *_cut(self.scores[prompt], count))
        return _Echo(text, tuple(ShownToken(*token) for token in zip(request.prompt, logprobs, offsets, strict=True)))


class HeldEvents:
    """Events of a call's requests, held back until the scores of their prompt are there."""

    def __init__(self, num_candidates: int, scores: dict[int, tuple[TokenLogprobs, ...]]) -> None:
        self._num_candidates = num_candidates
        self._scores = scores
        self._held: dict[int, TokenEvent] = {}

    def release(self, events: Iterable[tuple[int, TokenEvent]]) -> list[tuple[int, TokenEvent]]:
        """Of `events`, by index of the request, and those held back before, the ones that can be shown now."""
        each = self._num_candidates
        for index, event in events:
            before = self._held.get(index)
            self._held[index] = event if before is None else before.merged(event)
            if index % each == 0:
                self._scores.setdefault(index // each, event.prompt_logprobs)
        ready = [index for index in self._held if index // each in self._scores]
        return [(index, self._held.pop(index)) for index in ready]


@dataclass(frozen=True, slots=True)
class _Echo:
    text: str
    tokens: tuple[ShownToken, ...] = ()


def _cut(scores: tuple[TokenLogprobs, ...], count: int) -> tuple[TokenLogprobs, ...]:
    return tuple(replace(score, top=score.top[:count]) for score in scores)


def echoed_text(request: Request, text: str | None, tokenizer: Tokenizer) -> tuple[str, tuple[int, ...]]:
    """A prompt's text, and how many characters of it come before each token.

    Args:
        text: the prompt if it came as text, which is echoed as it came; else its tokens are decoded.
    """
    ids = request.prompt
    shown = tokenizer.special_ids if text is not None or not request.params.skip_special_tokens else frozenset[int]()
    added = text is not None and tokenizer.is_special(ids[0]) and not text.startswith(tokenizer.token_bytes(ids[0]).decode())
    stream = TextStream(tokenizer, shown_special=shown)
    parts = [stream.push(ids[added:]), stream.flush()]
    decoded, offsets = "".join(part.text for part in parts), [offset for part in parts for offset in part.offsets]
    if added:
        offsets.insert(0, 0)
    if text is None:
        return decoded, tuple(offsets)
    # Some tokenizers put a space before a text; some change characters, and then offsets are no more than near.
    extra = len(decoded) - len(text) if decoded.endswith(text) else 0
    return text, tuple(min(max(offset - extra, 0), len(text)) for offset in offsets)
