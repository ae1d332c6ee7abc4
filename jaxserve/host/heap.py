"""Owns a heap of sequences from which those that finish drop out by themselves. Knows no order but the one it is given."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from jaxserve.request import Sequence

Key = tuple[float, int]
"""What a heap sorts by; the second part is unique among its sequences."""


class SequenceHeap:
    """Sequences by `key`, the least first, which must not change while they are in. O(log n) each, amortised.

    One that finishes while it is here stays as a dead entry, which is dropped when it comes up or when dead entries
    outnumber the others, so aborts neither cost a search nor pile up.
    """

    def __init__(self, key: Callable[[Sequence], Key]) -> None:
        self._key = key
        self._heap: list[tuple[Key, Sequence]] = []
        self._num_dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_dead

    def __iter__(self) -> Iterator[Sequence]:
        """Those that are in, in no particular order."""
        return (seq for _, seq in self._heap if seq.finish_reason is None)

    def push(self, seq: Sequence) -> None:
        """Add a sequence, which must not be in."""
        heapq.heappush(self._heap, (self._key(seq), seq))

    def peek(self) -> Sequence | None:
        """The first in order, or None when none is in."""
        heap = self._heap
        while heap and heap[0][1].finish_reason is not None:
            heapq.heappop(heap)
            self._num_dead -= 1
        return heap[0][1] if heap else None

    def pop(self) -> Sequence:
        """Remove and return what `peek` returns, which must not be None."""
        seq = self.peek()
        assert seq is not None, "the heap is empty"
        heapq.heappop(self._heap)
        return seq

    def discard(self, seq: Sequence) -> None:
        """Take note that `seq`, which is in, has just finished."""
        assert seq.finish_reason is not None, f"sequence {seq.seq_id} is discarded, yet goes on"
        self._num_dead += 1
        if self._num_dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].finish_reason is None]
            heapq.heapify(self._heap)
            self._num_dead = 0

    def check_integrity(self) -> None:
        """Assert heap order, the count of dead entries, that keys are as they were, and that no sequence is in twice."""
        heap = self._heap
        for index in range(1, len(heap)):
            assert heap[(index - 1) // 2][0] < heap[index][0], f"heap order is broken at entry {index}"
        dead = sum(seq.finish_reason is not None for _, seq in heap)
        assert dead == self._num_dead, f"{dead} dead entries, counted {self._num_dead}"
        for key, seq in heap:
            assert key == self._key(seq), f"sequence {seq.seq_id} was pushed at {key}, and would be at {self._key(seq)} now"
        assert len({seq.seq_id for _, seq in heap}) == len(heap), "a sequence is in twice"
