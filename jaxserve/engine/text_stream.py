"""Text of an output as its tokens come: whole characters only, and nothing that may yet be part of a stop string.

Owns `TextStream`. Knows neither requests nor sockets.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from jaxserve.engine.stop import StopAutomaton, stop_automaton
from jaxserve.engine.text import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one push added.

    Attributes:
        text: new text, never part of a stop string that is left out.
        stop: the stop string that was found, now or before, and ends the output with this delta; else None.
        offsets: for each token, in order, that this delta accounts for: how many characters of the output come before it.
            A token is accounted for once a character after that offset is out, or the output has ended.
    """

    text: str
    stop: str | None
    offsets: tuple[int, ...]

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stop is not None


class TextStream:
    """Text of one output as its tokens come, cut at the first stop string.

    Joined deltas are `b"".join(text bytes of all tokens).decode("utf-8", "replace")`, cut just before the stop string that
    is complete first (of several that end at the same character, the longest), or just after it. That does not depend on how
    tokens are grouped into pushes, nor on where they split the text. Held back: bytes that may still become a character, and
    the longest suffix that may still become a stop string which is left out.

    The output continues a prompt, so a leading space is part of it, also where decoding from the start would strip one.

    Args:
        stop: strings that end the output; none of them empty.
        min_tokens: stop strings count only in text of tokens after these.
        include_stop: the stop string is the end of the text, and not what follows it.
        shown_special: ids of special tokens whose names are text: `tokenizer.special_ids` for all of them.

    Attributes:
        num_tokens: tokens read, the one that completed a stop string included.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        shown_special: frozenset[int] = frozenset(),
    ) -> None:
        assert "" not in stop, "an empty stop string"
        self._text_bytes = tokenizer.text_bytes_with(shown_special) if shown_special else tokenizer.text_bytes
        self._include_stop = include_stop
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._automaton = stop_automaton(stop) if stop else None
        self._state = StopAutomaton.START
        self._min_tokens = min_tokens
        self._held = ""
        self._num_decoded = 0
        self._num_released = 0
        self._starts: deque[int] = deque()
        self._stop: str | None = None
        self.num_tokens = 0

    @property
    def num_characters(self) -> int:
        """Of the text that has been given out."""
        return self._num_released

    def push(self, token_ids: Iterable[int]) -> TextDelta:
        """Read tokens; those after a stop string are ignored."""
        for token_id in token_ids:
            if self._stop is not None:
                break
            self.num_tokens += 1
            self._starts.append(self._num_decoded)
            self._read(self._decoder.decode(self._text_bytes(token_id)))
        return self._release(self._num_uncertain())

    def _num_uncertain(self) -> int:
        """Characters at the end that may yet be cut."""
        return 0 if self._automaton is None or self._include_stop else self._automaton.depth[self._state]

    def flush(self) -> TextDelta:
        """The output has ended: give out what was held back. Half a character becomes U+FFFD."""
        if self._stop is None:
            self._read(self._decoder.decode(b"", final=True))
        return self._release_all()

    def cut(self) -> TextDelta:
        """The output was cut short: as `flush`, but half a character is left out, since its other half would have come.

        So the text of fewer tokens is the beginning of the text of more.
        """
        self._decoder.reset()
        return self._release_all()

    def _release_all(self) -> TextDelta:
        delta = self._release(0)
        rest = tuple(self._starts)
        self._starts.clear()
        return TextDelta(delta.text, delta.stop, delta.offsets + rest)

    def _read(self, text: str) -> None:
        self._held += text
        if self._automaton is not None and self.num_tokens > self._min_tokens:
            self._match(text)
        self._num_decoded += len(text)

    def _match(self, text: str) -> None:
        automaton = self._automaton
        assert automaton is not None
        state = self._state
        for position, character in enumerate(text, self._num_decoded + 1):
            state = automaton.advance(state, character)
            if automaton.matched[state]:
                self._stop_at(position, automaton.matched[state], self._num_decoded + len(text))
                return
        self._state = state

    def _stop_at(self, position: int, stop: str, num_decoded: int) -> None:
        self._stop = stop
        self._state = StopAutomaton.START
        end = position if self._include_stop else position - len(stop)
        self._held = self._held[: len(self._held) - (num_decoded - end)]
        while self._starts and self._starts[-1] >= end:
            self._starts.pop()

    def _release(self, num_held: int) -> TextDelta:
        split = len(self._held) - num_held
        text, self._held = self._held[:split], self._held[split:]
        self._num_released += len(text)
        offsets = []
        while self._starts and self._starts[0] < self._num_released:
            offsets.append(self._starts.popleft())
        return TextDelta(text, self._stop, tuple(offsets))
