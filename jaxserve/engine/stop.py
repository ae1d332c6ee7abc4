"""Finding stop strings in text that arrives in pieces.

Owns one automaton over all stop strings of a request. Knows characters only.

Source: Aho and Corasick, "Efficient string matching", CACM 18(6), 1975.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache


class StopAutomaton:
    """Matches several strings at once, one character at a time, in constant amortised time.

    A state stands for the longest suffix of the text so far that begins some stop string. Immutable; share it between
    streams, each of which keeps its own state, from `START`.

    Attributes:
        depth: for each state the length of that suffix: what must be held back, since it may become a stop string.
        matched: for each state the longest stop string that ends here, or "".
    """

    START = 0

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        self.matched = [""]
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = self.START
        for character in stop:
            child = self._next[state].get(character)
            if child is None:
                child = len(self._next)
                self._next[state][character] = child
                self._next.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.matched.append("")
            state = child
        self.matched[state] = stop

    def _link(self) -> None:
        queue = deque(self._next[self.START].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                self._fail[child] = self.advance(self._fail[state], character)
                self.matched[child] = self.matched[child] or self.matched[self._fail[child]]
                queue.append(child)

    def advance(self, state: int, character: str) -> int:
        """The state after one more character."""
        transitions = self._next
        while True:
            child = transitions[state].get(character)
            if child is not None:
                return child
            if state == self.START:
                return state
            state = self._fail[state]


@lru_cache(maxsize=32)
def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton for `stops`, built once for all choices of a request."""
    return StopAutomaton(stops)
