"""Who runs, and on what: a slot and pages each; and who waits, in the queue or parked.

Owns slots, the order of those that run, and the moves between running, waiting and parked. Does not know plans, budgets or
results.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from jaxserve.host import integrity
from jaxserve.host.finding import Found
from jaxserve.host.memory import Memory
from jaxserve.host.prefix import Node
from jaxserve.host.rows import importance
from jaxserve.host.waiting import WaitingQueue
from jaxserve.plan import RunnerLimits
from jaxserve.request import Sequence


class Running:
    """Sequences that hold a slot, the most important first, and those that wait for one.

    Attributes:
        waiting: the queue.
        parked: those that wait for pages which another computes now.
        num_preemptions: times that a sequence lost its pages.
    """

    def __init__(self, limits: RunnerLimits, memory: Memory) -> None:
        max_seqs = limits.max_seqs
        self._max_seqs = max_seqs
        self._limits = limits
        self._page_size = limits.page_size
        self._memory = memory
        self._seqs: list[Sequence] = []
        self._free_slots = list(range(max_seqs - 1, -1, -1))
        self.waiting = WaitingQueue()
        self.parked: set[Sequence] = set()
        self.num_preemptions = 0

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    def __getitem__(self, index: int) -> Sequence:
        return self._seqs[index]

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold nothing, new or preempted."""
        return len(self.waiting) + len(self.parked)

    def after(self, priority: int) -> list[Sequence]:
        """Those that run at less urgent priorities, the most important first."""
        first = bisect.bisect_right(self._seqs, priority, key=lambda seq: seq.request.priority)
        return self._seqs[first:]

    def start(self, found: Found) -> Sequence:
        """Give the first that waits a slot, which must be free, and what was found for it."""
        seq = self.waiting.pop()
        seq.slot = self._free_slots.pop()
        bisect.insort(self._seqs, seq, key=importance)
        self._memory.open(seq, found)
        return seq

    def grow(self, seq: Sequence, num_positions: int) -> bool:
        """Make the block table cover `num_positions`, preempting the least important; False if `seq` itself was."""
        missing = -(-num_positions // self._page_size) - seq.first_page - len(seq.pages)
        if missing <= 0:
            return True
        while self._memory.num_free < missing:
            victim = self._seqs[-1]
            self.preempt(victim)
            if victim is seq:
                return False
        self._memory.grow(seq, missing)
        return True

    def preempt(self, seq: Sequence) -> None:
        """Take everything from `seq`, which then waits again."""
        self._release(seq)
        seq.planned = seq.computed = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(seq)

    def park(self, node: Node) -> None:
        """Set the first that waits aside until `node` has been computed or is given up."""
        seq = self.waiting.pop()
        self.parked.add(seq)
        self._memory.wait(seq, node)

    def share_dispatched(self) -> None:
        """Let others find what the plans so far compute, and take what no layer will see again."""
        size = self._page_size
        for seq in self._seqs:
            seq.dispatched = seq.planned
            if seq.planned >= (seq.num_shared + 1) * size:
                self._unpark(self._memory.share(seq))
        if self._limits.window is not None or self._limits.local_pages:
            for seq in self._seqs:
                self._memory.give_back_unseen(seq)

    def remove(self, seq: Sequence) -> None:
        """Take note that `seq`, which runs or waits, has just finished."""
        if seq.slot is not None:
            self._release(seq)
        elif seq in self.parked:
            self.parked.remove(seq)
        else:
            self.waiting.discard(seq)

    def _release(self, seq: Sequence) -> None:
        """Take slot and pages from a running sequence."""
        assert seq.slot is not None
        del self._seqs[bisect.bisect_left(self._seqs, importance(seq), key=importance)]
        self._free_slots.append(seq.slot)
        seq.slot = None
        self._unpark(self._memory.close(seq))

    def _unpark(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            if seq in self.parked:  # else it has ended
                self.parked.remove(seq)
                self.waiting.push(seq)

    def check_integrity(self) -> None:
        """Assert that slots and pages are held once, and that those that wait hold none. O(everything)."""
        self.waiting.check_integrity()
        self._memory.check_integrity(self._seqs)
        slots = self._free_slots + [seq.slot for seq in self._seqs if seq.slot is not None]
        assert sorted(slots) == list(range(self._max_seqs)), f"slots are not each free or held once: {slots}"
        integrity.check_running(self._seqs, self._limits)
        integrity.check_waiting([*self.waiting, *self.parked])
