"""One request's token events as text: what the caller of a completion sees.

Owns the rule for what ends an output and what of it is shown: a stop token is not text, a stop string and all after it is
cut (unless the request wants what stopped it), half a character at the length limit is left out, and a token's log
probability comes with its text. Does not know wire formats or streams of requests.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from jaxserve.engine.text import Tokenizer
from jaxserve.engine.text_stream import TextDelta, TextStream
from jaxserve.engine.tools.dialect import Reading, ReasoningCounter
from jaxserve.engine.tools.parts import Part
from jaxserve.request import FinishReason, Request, TokenEvent, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token of a text with its log probabilities.

    Attributes:
        logprobs: None for the first token of all, a prompt's, which nothing comes before.
        offset: characters of the text before it.
    """

    token_id: int
    logprobs: TokenLogprobs | None
    offset: int


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one event added.

    Attributes:
        text: may be empty, while text is held back.
        tokens: those whose text has come out, if the request asked for log probabilities.
        finish_reason: set on the last delta. After a stop string the engine still has to be told to abort.
        parts: what the text is made of, if it is read for that; the text is then as the model wrote it.
        hidden: on that delta, the final hidden state that an embedding asked for; else empty.
        stopped_by: on that delta, the stop string or the id of the stop token that ended the output; None for anything else.
    """

    text: str
    tokens: tuple[ShownToken, ...]
    finish_reason: FinishReason | None
    stopped_by: str | int | None = None
    parts: tuple[Part, ...] | None = None
    hidden: tuple[float, ...] = ()


class Output:
    """Reads the events of one request.

    Args:
        reading: how the text is read as reasoning, answer and calls; None to leave it as it is.
        lists_stop_token: whether a stop token is among the tokens with log probabilities also where it is not text.

    Attributes:
        num_tokens: output tokens so far, with the one that ended it, as usage counts them.
        finish_reason: None while it goes on.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer, reading: Reading | None = None, *, lists_stop_token: bool = False
    ) -> None:
        params = request.params
        self._reader = None if reading is None else _Reader(reading, request.request_id)
        shown_special = frozenset() if reading is None else frozenset(tokenizer.special_ids_by_name(reading.markers).values())
        self._stream = TextStream(
            tokenizer,
            params.stop,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
            shown_special=shown_special if params.skip_special_tokens else tokenizer.special_ids,
        )
        self._shows_stop_token = params.include_stop_str_in_output
        self._lists_stop_token = lists_stop_token
        self._wants_logprobs = params.logprobs is not None
        self._unshown: deque[tuple[int, TokenLogprobs]] = deque()
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    def push(self, event: TokenEvent) -> OutputDelta:
        """Read one event. After the end there is nothing more to read."""
        if self.finish_reason is not None:
            return OutputDelta("", (), self.finish_reason)
        if event.hidden:
            self.finish_reason = event.finish_reason
            return OutputDelta("", (), event.finish_reason, hidden=event.hidden)
        tokens = event.tokens
        # The engine says STOP for one reason only: the last token is a stop token.
        stop_token = tokens[-1] if event.finish_reason is FinishReason.STOP else None
        left_out = stop_token is not None and not self._shows_stop_token
        if left_out:
            tokens = tokens[:-1]
        if self._wants_logprobs:
            self._unshown.extend(zip(tokens, event.logprobs[: len(tokens)], strict=True))
        delta = self._stream.push(tokens)
        text, shown, offsets = delta.text, self._show(delta), delta.offsets
        stopped_by: str | int | None = delta.stop
        if delta.stopped:
            self.finish_reason = FinishReason.STOP
        elif event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            rest = self._stream.cut() if event.finish_reason is FinishReason.LENGTH else self._stream.flush()
            stopped_by = rest.stop or stop_token
            if rest.stopped:  # half a character became U+FFFD, which completed a stop string
                self.finish_reason = FinishReason.STOP
            text, shown, offsets = text + rest.text, shown + self._show(rest), offsets + rest.offsets
        if stop_token is not None and left_out and self._lists_stop_token and event.logprobs and not delta.stopped:
            shown += (ShownToken(stop_token, event.logprobs[-1], self._stream.num_characters),)
        self.num_tokens = self._stream.num_tokens + (left_out and not delta.stopped)
        if self._reader is None:
            return OutputDelta(text, shown, self.finish_reason, stopped_by)
        parts = self._reader.read(text, offsets, ended=self.finish_reason is not None)
        if self.finish_reason is FinishReason.STOP and self._reader.ended_with_calls:
            self.finish_reason = FinishReason.TOOL_CALLS
        return OutputDelta(text, shown, self.finish_reason, stopped_by, parts)

    @property
    def num_reasoning_tokens(self) -> int | None:
        """How many of the tokens so far are reasoning; None if the output is not read for it."""
        return None if self._reader is None else self._reader.num_reasoning_tokens

    def _show(self, delta: TextDelta) -> tuple[ShownToken, ...]:
        if not self._wants_logprobs:
            return ()
        return tuple(ShownToken(*self._unshown.popleft(), offset) for offset in delta.offsets)


class _Reader:
    """Reads one output's text as parts, and counts its tokens of reasoning."""

    def __init__(self, reading: Reading, seed: str) -> None:
        self._reading = reading
        self._parser = reading.parser(seed)
        self._counter = ReasoningCounter(self._parser)

    def read(self, text: str, offsets: tuple[int, ...], *, ended: bool) -> tuple[Part, ...]:
        """Further text, and the offsets of the tokens that it accounts for."""
        parts = self._parser.push(text)
        if ended:
            parts += self._parser.finish()
        self._counter.push(offsets)
        return parts

    @property
    def ended_with_calls(self) -> bool:
        return self._reading.ends_with_calls and self._parser.num_calls > 0

    @property
    def num_reasoning_tokens(self) -> int | None:
        return None if self._reading.reasoning is None else self._counter.num_tokens
