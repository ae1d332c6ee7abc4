from hypothesis import given
from hypothesis import strategies as st

from jaxserve.host.waiting import WaitingQueue
from jaxserve.request import FinishReason, Sequence
from tests.host.driver import make_request


def make_sequence(seq_id, priority=0):
    request = make_request(str(seq_id), priority=priority)
    return Sequence(seq_id, request, list(request.prompt), max_output=1)


def pop_all(queue):
    order = []
    while queue.peek() is not None:
        order.append(queue.pop().seq_id)
    return order


def test_lower_priority_number_then_earlier_arrival_comes_first():
    queue = WaitingQueue()
    for seq_id, priority in enumerate([1, 0, 1, 0, -1]):
        queue.push(make_sequence(seq_id, priority))
    assert pop_all(queue) == [4, 1, 3, 0, 2]


def test_one_that_comes_back_keeps_its_place():
    queue = WaitingQueue()
    first, second = make_sequence(0), make_sequence(1)
    queue.push(second)
    queue.push(first)
    assert pop_all(queue) == [0, 1]


def test_an_empty_queue_has_no_first():
    assert WaitingQueue().peek() is None


def test_dead_entries_do_not_pile_up():
    queue = WaitingQueue()
    queue.push(make_sequence(0))
    for seq_id in range(1, 1000):
        seq = make_sequence(seq_id)
        queue.push(seq)
        seq.finish_reason = FinishReason.ABORT
        queue.discard(seq)
        assert len(queue._heap) <= 4
    assert len(queue) == 1


@given(st.lists(st.tuples(st.sampled_from(["push", "push", "pop", "discard"]), st.integers(0, 20))))
def test_it_agrees_with_a_sorted_list(operations):
    queue = WaitingQueue()
    expected = []
    for seq_id, (name, number) in enumerate(operations):
        if name == "push":
            seq = make_sequence(seq_id, priority=number % 3)
            queue.push(seq)
            expected.append(seq)
            expected.sort(key=lambda seq: (seq.request.priority, seq.seq_id))
        elif name == "pop" and expected:
            assert queue.pop() is expected.pop(0)
        elif name == "discard" and expected:
            seq = expected.pop(number % len(expected))
            seq.finish_reason = FinishReason.STOP
            queue.discard(seq)
        queue.check_integrity()
        assert len(queue) == len(expected)
        assert {seq.seq_id for seq in queue} == {seq.seq_id for seq in expected}
        assert queue.peek() is (expected[0] if expected else None)
