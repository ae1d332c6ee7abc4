"""Owns the order in which sequences wait for a slot. Knows neither slots nor pages."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from jaxserve.request import Sequence


class WaitingQueue:
    """Sequences in (priority, arrival) order. Every operation is O(log n), amortised.

    A sequence that finishes while it waits stays as a dead entry, which is dropped when it comes up or when dead
    entries outnumber the others, so aborts neither cost a search nor pile up.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Sequence]] = []
        self._num_dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_dead

    def __iter__(self) -> Iterator[Sequence]:
        """Those that wait, in no particular order."""
        return (seq for _, _, seq in self._heap if seq.finish_reason is None)

    def push(self, seq: Sequence) -> None:
        """Add a sequence, at the place that its priority and arrival give it."""
        heapq.heappush(self._heap, (seq.request.priority, seq.seq_id, seq))

    def peek(self) -> Sequence | None:
        """The first in order, or None when nothing waits."""
        heap = self._heap
        while heap and heap[0][2].finish_reason is not None:
            heapq.heappop(heap)
            self._num_dead -= 1
        return heap[0][2] if heap else None

    def pop(self) -> Sequence:
        """Remove and return what `peek` returns, which must not be None."""
        seq = self.peek()
        assert seq is not None, "nothing waits"
        heapq.heappop(self._heap)
        return seq

    def discard(self, seq: Sequence) -> None:
        """Take note that `seq`, which waits, has just finished."""
        assert seq.finish_reason is not None, f"sequence {seq.seq_id} is discarded, yet goes on"
        self._num_dead += 1
        if self._num_dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].finish_reason is None]
            heapq.heapify(self._heap)
            self._num_dead = 0

    def check_integrity(self) -> None:
        """Assert heap order, the count of dead entries, and that no sequence is in twice."""
        heap = self._heap
        for index in range(1, len(heap)):
            assert heap[(index - 1) // 2][:2] < heap[index][:2], f"heap order is broken at entry {index}"
        dead = sum(entry[2].finish_reason is not None for entry in heap)
        assert dead == self._num_dead, f"{dead} dead entries, counted {self._num_dead}"
        ids = [seq_id for _, seq_id, _ in heap]
        assert len(set(ids)) == len(ids), f"a sequence waits twice: {sorted(ids)}"
