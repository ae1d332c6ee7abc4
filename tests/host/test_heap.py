from hypothesis import given
from hypothesis import strategies as st

from jaxserve.host.heap import SequenceHeap
from jaxserve.request import FinishReason, Sequence
from tests.host.driver import make_request


def make_heap():
    return SequenceHeap(lambda seq: (seq.request.priority, seq.seq_id))


def make_sequence(seq_id, priority=0):
    request = make_request(str(seq_id), priority=priority)
    return Sequence(seq_id, request, list(request.prompt), max_output=1)


def test_an_empty_heap_has_no_first():
    assert make_heap().peek() is None


def test_dead_entries_do_not_pile_up():
    heap = make_heap()
    heap.push(make_sequence(0))
    for seq_id in range(1, 1000):
        seq = make_sequence(seq_id)
        heap.push(seq)
        seq.finish_reason = FinishReason.ABORT
        heap.discard(seq)
        assert len(heap._heap) <= 4
    assert len(heap) == 1


@given(st.lists(st.tuples(st.sampled_from(["push", "push", "pop", "discard"]), st.integers(0, 20))))
def test_it_agrees_with_a_sorted_list(operations):
    heap = make_heap()
    expected = []
    for seq_id, (name, number) in enumerate(operations):
        if name == "push":
            seq = make_sequence(seq_id, priority=number % 3)
            heap.push(seq)
            expected.append(seq)
            expected.sort(key=lambda seq: (seq.request.priority, seq.seq_id))
        elif name == "pop" and expected:
            assert heap.pop() is expected.pop(0)
        elif name == "discard" and expected:
            seq = expected.pop(number % len(expected))
            seq.finish_reason = FinishReason.STOP
            heap.discard(seq)
        heap.check_integrity()
        assert len(heap) == len(expected)
        assert {seq.seq_id for seq in heap} == {seq.seq_id for seq in expected}
        assert heap.peek() is (expected[0] if expected else None)
