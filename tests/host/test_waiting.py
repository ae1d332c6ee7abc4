"""The order in which sequences wait, against an oracle that looks at all of them each time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.host.waiting import WaitingQueue
from jaxserve.request import FinishReason, Sequence
from tests.host.driver import make_request

WEIGHTS = {"a": 1.0, "b": 3.0, "c": 0.5}


def make_sequence(seq_id: int, priority: int = 0, tenant: str = "", deadline: float | None = None) -> Sequence:
    request = make_request(str(seq_id), priority=priority, tenant=tenant, weight=WEIGHTS.get(tenant, 1.0), deadline=deadline)
    return Sequence(seq_id, request, list(request.prompt), max_output=1)


def pop_all(queue: WaitingQueue) -> list[int]:
    order = []
    while queue.peek() is not None:
        order.append(queue.pop().seq_id)
        queue.check_integrity()
    return order


def push_all(*sequences: Sequence) -> WaitingQueue:
    queue = WaitingQueue()
    for seq in sequences:
        queue.push(seq)
    return queue


def test_lower_priority_number_then_earlier_arrival_comes_first() -> None:
    queue = push_all(*(make_sequence(seq_id, priority) for seq_id, priority in enumerate([1, 0, 1, 0, -1])))
    assert pop_all(queue) == [4, 1, 3, 0, 2]


def test_an_earlier_deadline_comes_first_within_a_tenant_and_none_comes_last() -> None:
    deadlines = [None, 9.0, 3.0, 9.0, None]
    queue = push_all(*(make_sequence(seq_id, deadline=deadline) for seq_id, deadline in enumerate(deadlines)))
    assert pop_all(queue) == [2, 1, 3, 0, 4]


def test_a_deadline_is_no_claim_on_another_tenant_s_share() -> None:
    queue = push_all(make_sequence(0, tenant="b"), make_sequence(1, tenant="a", deadline=1.0), make_sequence(2, tenant="a"))
    assert pop_all(queue) == [0, 1, 2]


def test_one_that_comes_back_keeps_its_place() -> None:
    """Ahead of all that never ran at its priority, whatever their deadlines and shares; and in its turn."""
    queue = push_all(make_sequence(0, tenant="a"), make_sequence(1, tenant="a"))
    first, second = queue.pop(), queue.pop()
    queue.charge(first, 10**6)
    for seq in (make_sequence(2, tenant="b", deadline=0.0), second, first, make_sequence(3, priority=-1)):
        queue.push(seq)
    assert pop_all(queue) == [3, 0, 1, 2]
    assert (first.turn, second.turn) == (0, 1)


def test_an_empty_queue_has_no_first() -> None:
    assert WaitingQueue().peek() is None


@dataclass
class Oracle:
    """What the queue should do, by looking at everything: the first is the least of all by one long key."""

    waiting: list[Sequence] = field(default_factory=list)
    starts: dict[tuple[int, str], float] = field(default_factory=dict)
    ranks: dict[tuple[int, str], int] = field(default_factory=dict)
    virtual: dict[int, float] = field(default_factory=dict)
    num_turns: int = 0

    def flow(self, seq: Sequence) -> tuple[int, str]:
        return seq.request.priority, seq.request.tenant

    def push(self, seq: Sequence) -> None:
        flow = self.flow(seq)
        if seq.turn < 0:
            idle = not any(self.flow(other) == flow and other.turn < 0 for other in self.waiting)
            self.ranks.setdefault(flow, len(self.ranks))
            start = self.starts.setdefault(flow, 0.0)
            if idle:
                self.starts[flow] = max(start, self.virtual.get(flow[0], 0.0))
        self.waiting.append(seq)

    def first(self) -> Sequence | None:
        def key(seq: Sequence) -> tuple[float, ...]:
            flow = self.flow(seq)
            if seq.turn >= 0:
                return seq.request.priority, 0, seq.turn
            deadline = math.inf if seq.request.deadline is None else seq.request.deadline
            return seq.request.priority, 1, self.starts[flow], self.ranks[flow], deadline, seq.seq_id

        return min(self.waiting, key=key, default=None)

    def pop(self) -> Sequence:
        seq = self.first()
        assert seq is not None
        self.waiting.remove(seq)
        if seq.turn < 0:
            self.virtual[seq.request.priority] = self.starts[self.flow(seq)]
        return seq

    def charge(self, seq: Sequence, num_tokens: int) -> None:
        self.starts[self.flow(seq)] += num_tokens / seq.request.weight


operations = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "push", "pop", "pop", "finish", "charge", "preempt"]),
        st.integers(0, 30),
        st.sampled_from("aabc"),
        st.sampled_from([0, 0, 0, 10, -3]),
        st.sampled_from([None, None, 5.0, 7.5]),
    ),
    max_size=120,
)


@given(operations)
def test_it_agrees_with_an_oracle_that_looks_at_everything(operations: list[tuple[str, int, str, int, float | None]]) -> None:
    queue, oracle = WaitingQueue(), Oracle()
    running: list[Sequence] = []
    for seq_id, (name, number, tenant, priority, deadline) in enumerate(operations):
        if name == "push":
            seq = make_sequence(seq_id, priority, tenant, deadline)
            oracle.push(seq)
            queue.push(seq)
        elif name == "pop" and oracle.waiting:
            expected = oracle.pop()
            assert queue.pop() is expected
            running.append(expected)
        elif name == "finish" and oracle.waiting:
            seq = oracle.waiting.pop(number % len(oracle.waiting))
            seq.finish_reason = FinishReason.ABORT
            queue.discard(seq)
        elif name == "charge" and running:
            seq = running[number % len(running)]
            oracle.charge(seq, number)
            queue.charge(seq, number)
        elif name == "preempt" and running:
            seq = running.pop(number % len(running))
            oracle.push(seq)
            queue.push(seq)
        queue.check_integrity()
        assert len(queue) == len(oracle.waiting)
        assert {seq.seq_id for seq in queue} == {seq.seq_id for seq in oracle.waiting}
        assert queue.peek() is oracle.first()
