"""Whose turn it is among tenants of one priority: weighted fair shares of the tokens that the engine computes.

Owns each tenant's sequences that have not run yet, and the virtual time up to which it has been served. Does not know
priorities, slots, pages or what a token costs.

The order is start-time fair queueing (Goyal, Vin and Cheng, 1996), with service counted as it is given rather than when a
request arrives, since nobody knows then how long the answer will be (as the virtual token counter of Sheng et al., 2024).
A tenant's *start* is the virtual time at which its next sequence would begin. Each token that it gets moves its start by
1 / weight; the tenant with the least start is next; and virtual time is the start of the last one chosen. A tenant that
comes back from idleness starts at the virtual time of that moment at the earliest: it gets no credit for the past. So over
any time in which two tenants both wait, tokens / weight of the two differ by no more than what they had under way.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxserve.host.heap import Key, SequenceHeap
from jaxserve.request import Sequence

MAX_IDLE_TENANTS = 1024
"""Starts that are remembered of tenants which have nothing waiting; beyond that, those that owe least are forgotten."""


def deadline_order(seq: Sequence) -> Key:
    """Sorts the earliest deadline first, those without one last, then by arrival."""
    deadline = seq.request.deadline
    return math.inf if deadline is None else deadline, seq.seq_id


@dataclass(slots=True, eq=False)
class _Tenant:
    """One tenant of one priority.

    Attributes:
        rank: breaks ties between equal starts; the order in which tenants were first seen.
        listed: whether the order of tenants has an entry for it, be it one of an earlier start.
    """

    name: str
    rank: int
    start: float
    listed: bool = False
    waiting: SequenceHeap = field(default_factory=lambda: SequenceHeap(deadline_order))


class FairQueue:
    """Sequences that have not run yet, in fair order between tenants and by deadline, then arrival, within each.

    Every operation is O(log n), amortised, but that a tenant's entry may be out of date once for each time that it was
    served; such are put right when they come up.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._order: list[tuple[float, int, _Tenant]] = []
        self._virtual = 0.0
        self._next_rank = 0
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """Those that wait, in no particular order."""
        return (seq for tenant in self._tenants.values() for seq in tenant.waiting)

    def push(self, seq: Sequence) -> None:
        """Add a sequence."""
        tenant = self._tenant(seq.request.tenant)
        tenant.waiting.push(seq)
        self._num_waiting += 1
        if not tenant.listed:
            tenant.start = max(tenant.start, self._virtual)
            tenant.listed = True
            heapq.heappush(self._order, (tenant.start, tenant.rank, tenant))

    def peek(self) -> Sequence | None:
        """The first in order, or None when nothing waits."""
        tenant = self._first_tenant()
        return None if tenant is None else tenant.waiting.peek()

    def pop(self) -> Sequence:
        """Remove and return what `peek` returns, which must not be None."""
        tenant = self._first_tenant()
        assert tenant is not None, "nothing waits"
        self._virtual = tenant.start
        self._num_waiting -= 1
        return tenant.waiting.pop()

    def discard(self, seq: Sequence) -> None:
        """Take note that `seq`, which waits here, has just finished."""
        self._tenants[seq.request.tenant].waiting.discard(seq)
        self._num_waiting -= 1

    def charge(self, seq: Sequence, num_tokens: int) -> None:
        """Count `num_tokens` of service, at the request's weight, to the tenant of `seq`, which was popped earlier."""
        tenant = self._tenant(seq.request.tenant)
        tenant.start += num_tokens / seq.request.weight

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= 2 * MAX_IDLE_TENANTS:
                self._forget_idle()
            tenant = self._tenants[name] = _Tenant(name, self._next_rank, self._virtual)
            self._next_rank += 1
        return tenant

    def _first_tenant(self) -> _Tenant | None:
        order = self._order
        while order:
            start, rank, tenant = order[0]
            if not len(tenant.waiting):
                heapq.heappop(order)
                tenant.listed = False
            elif start < tenant.start:
                heapq.heapreplace(order, (tenant.start, rank, tenant))
            else:
                return tenant
        return None

    def _forget_idle(self) -> None:
        idle = sorted((tenant for tenant in self._tenants.values() if not tenant.listed), key=lambda tenant: tenant.start)
        for tenant in idle[: max(0, len(idle) - MAX_IDLE_TENANTS)]:
            del self._tenants[tenant.name]

    def check_integrity(self) -> None:
        """Assert that whoever waits is listed, once, no later than its start and no earlier than the virtual time."""
        order = self._order
        for index in range(1, len(order)):
            assert order[(index - 1) // 2][:2] < order[index][:2], f"the order of tenants is broken at entry {index}"
        listed = {tenant.name: start for start, _, tenant in order}
        assert len(listed) == len(order), f"a tenant is listed twice: {sorted(tenant.name for _, _, tenant in order)}"
        for tenant in self._tenants.values():
            tenant.waiting.check_integrity()
            assert tenant.listed == (tenant.name in listed), f"tenant {tenant.name!r}: listed is {tenant.listed}"
            assert tenant.listed or not len(tenant.waiting), f"tenant {tenant.name!r} waits and is not listed"
            if tenant.listed:
                where = f"tenant {tenant.name!r}: virtual time {self._virtual}, listed at {listed[tenant.name]}"
                assert self._virtual <= listed[tenant.name] <= tenant.start, f"{where}, start {tenant.start}"
        found = sum(len(tenant.waiting) for tenant in self._tenants.values())
        assert found == self._num_waiting, f"{found} wait, counted {self._num_waiting}"
