"""Owns the order in which sequences wait for a slot. Knows neither slots nor pages.

Priority comes first: one that waits at a lower number goes before any at a higher one. Within a priority those that ran
before and were preempted come first, in the order in which they first ran; then fair shares between tenants, and deadlines,
as `fair` has them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from jaxserve.host.fair import FairQueue
from jaxserve.host.heap import SequenceHeap
from jaxserve.request import Sequence


class _Level:
    """What waits at one priority.

    Attributes:
        listed: whether the order of priorities has an entry for it.
    """

    def __init__(self) -> None:
        self.returned = SequenceHeap(lambda seq: (0.0, seq.turn))
        self.fresh = FairQueue()
        self.listed = False

    def __len__(self) -> int:
        return len(self.returned) + len(self.fresh)

    def queue_of(self, seq: Sequence) -> SequenceHeap | FairQueue:
        return self.fresh if seq.turn < 0 else self.returned


class WaitingQueue:
    """Sequences in order of priority, turn, fairness and deadline. Every operation is O(log n), amortised."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []
        self._num_waiting = 0
        self._next_turn = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """Those that wait, in no particular order."""
        return (seq for level in self._levels.values() for queue in (level.returned, level.fresh) for seq in queue)

    def push(self, seq: Sequence) -> None:
        """Add a sequence; one that was popped before is back in its place."""
        priority = seq.request.priority
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
        level.queue_of(seq).push(seq)
        self._num_waiting += 1
        if not level.listed:
            level.listed = True
            heapq.heappush(self._order, priority)

    def peek(self) -> Sequence | None:
        """The first in order, or None when nothing waits."""
        while self._order:
            level = self._levels[self._order[0]]
            seq = level.returned.peek() or level.fresh.peek()
            if seq is not None:
                return seq
            heapq.heappop(self._order)
            level.listed = False
        return None

    def pop(self) -> Sequence:
        """Remove and return what `peek` returns, which must not be None; its turn is set if it never had one."""
        seq = self.peek()
        assert seq is not None, "nothing waits"
        level = self._levels[seq.request.priority]
        level.queue_of(seq).pop()
        self._num_waiting -= 1
        if seq.turn < 0:
            seq.turn = self._next_turn
            self._next_turn += 1
        return seq

    def discard(self, seq: Sequence) -> None:
        """Take note that `seq`, which waits, has just finished."""
        self._levels[seq.request.priority].queue_of(seq).discard(seq)
        self._num_waiting -= 1

    def charge(self, seq: Sequence, num_tokens: int) -> None:
        """Count tokens that `seq`, which runs, was given to its tenant's share of its priority."""
        self._levels[seq.request.priority].fresh.charge(seq, num_tokens)

    def check_integrity(self) -> None:
        """Assert the order of priorities, every part's own, and the count."""
        for index in range(1, len(self._order)):
            assert self._order[(index - 1) // 2] < self._order[index], f"the order of priorities is broken: {self._order}"
        for priority, level in self._levels.items():
            level.returned.check_integrity()
            level.fresh.check_integrity()
            assert level.listed == (priority in self._order), f"priority {priority}: listed is {level.listed}"
            assert level.listed or not len(level), f"priority {priority} waits and is not listed"
        found = sum(map(len, self._levels.values()))
        assert found == self._num_waiting, f"{found} wait, counted {self._num_waiting}"
