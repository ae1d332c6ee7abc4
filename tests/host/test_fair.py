"""Fair shares between tenants: the bound that the theory promises, no credit for idleness, and the cost of a long queue."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.host import fair
from jaxserve.host.fair import FairQueue
from jaxserve.host.waiting import WaitingQueue
from jaxserve.request import FinishReason, Sequence
from tests.host.driver import make_request

ids = itertools.count()


def make_sequence(tenant: str, weight: float = 1.0, deadline: float | None = None) -> Sequence:
    seq_id = next(ids)
    request = make_request(str(seq_id), tenant=tenant, weight=weight, deadline=deadline)
    return Sequence(seq_id, request, list(request.prompt), max_output=1)


def serve(queue: FairQueue, num_tokens: int) -> str:
    """Let the first run for so many tokens; its tenant."""
    seq = queue.pop()
    queue.charge(seq, num_tokens)
    queue.check_integrity()
    return seq.request.tenant


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=4),
    costs=st.lists(st.integers(1, 100), min_size=1, max_size=150),
)
def test_two_that_both_wait_differ_by_one_request_each_at_most(weights: list[float], costs: list[int]) -> None:
    """Over every interval, as Goyal, Vin and Cheng prove: |W_a / w_a - W_b / w_b| <= l_a / w_a + l_b / w_b."""
    queue = FairQueue()
    for tenant, weight in enumerate(weights):
        for _ in costs:
            queue.push(make_sequence(str(tenant), weight))
    service = dict.fromkeys(map(str, range(len(weights))), 0.0)
    history = [tuple(service.values())]
    for cost in costs:
        tenant = serve(queue, cost)
        service[tenant] += cost / weights[int(tenant)]
        history.append(tuple(service.values()))
    longest = max(costs)
    for a, b in itertools.combinations(range(len(weights)), 2):
        # The worst interval begins where the difference is least and ends where it is greatest.
        differences = [state[a] - state[b] for state in history]
        assert max(differences) - min(differences) <= longest / weights[a] + longest / weights[b] + 1e-6


def test_idleness_gives_no_credit() -> None:
    queue = FairQueue()
    queue.push(make_sequence("late"))
    assert serve(queue, 10) == "late"
    for _ in range(100):
        queue.push(make_sequence("busy"))
    for _ in range(50):
        assert serve(queue, 10) == "busy"
    for _ in range(10):
        queue.push(make_sequence("late"))
    assert [serve(queue, 10) for _ in range(8)].count("late") in (4, 5)


def test_service_is_owed_when_the_tenant_comes_back_at_once() -> None:
    """One request at a time is no way around the share."""
    queue = FairQueue()
    for _ in range(100):
        queue.push(make_sequence("steady"))
    served = []
    for _ in range(20):
        queue.push(make_sequence("sly"))
        served.append(serve(queue, 10))
        served.append(serve(queue, 10))
    assert served.count("sly") <= 21


def test_tokens_that_come_later_count_too() -> None:
    """An answer's length is known only as it is made: it delays the tenant's next request."""
    queue = FairQueue()
    for tenant in ("long", "short") * 20:
        queue.push(make_sequence(tenant))
    talker = queue.pop()
    assert talker.request.tenant == "long"
    queue.charge(talker, 10)
    queue.charge(talker, 90)
    assert [serve(queue, 10) for _ in range(10)] == ["short"] * 10
    assert serve(queue, 10) in ("long", "short")


def test_a_weight_may_change() -> None:
    """It is the request's: one that came before the change is charged as it was."""
    queue = FairQueue()
    for weight in (1.0, 4.0):
        for _ in range(50):
            queue.push(make_sequence("a", weight))
            queue.push(make_sequence("b"))
    order = [serve(queue, 10) for _ in range(150)]
    assert order[:100].count("a") == 50
    assert order[100:].count("a") in (39, 40, 41)


def test_tenants_that_went_away_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair, "MAX_IDLE_TENANTS", 10)
    queue = FairQueue()
    queue.push(make_sequence("stays"))
    for number in range(500):
        queue.push(make_sequence(f"visitor-{number}"))
        serve(queue, 1 + number % 7)
    assert len(queue._tenants) <= 21
    assert [serve(queue, 1) for _ in range(len(queue))].count("stays") <= 1


def calls_made(action: Callable[[], Any]) -> int:
    """Python functions called by `action`."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.slow
def test_a_long_queue_costs_no_more_than_a_short_one() -> None:
    """The heaps are C and logarithmic; what is Python must not depend on how many wait. Counted, not timed."""

    def make_queue(count: int) -> WaitingQueue:
        queue = WaitingQueue()
        for number in range(count):
            queue.push(make_sequence(f"tenant-{number % 20}", 1.0 + number % 3, float(number % 97)))
        return queue

    def work(queue: WaitingQueue) -> None:
        for _ in range(100):
            first, second = queue.pop(), queue.pop()
            queue.charge(first, 17)
            queue.push(second)
            other = queue.peek()
            assert other is not None
            other.finish_reason = FinishReason.ABORT
            queue.discard(other)
            queue.push(make_sequence(f"tenant-{next(ids) % 20}"))

    short, long = make_queue(1_000), make_queue(100_000)
    assert calls_made(lambda: work(long)) <= 1.1 * calls_made(lambda: work(short))
    assert len(long) == 100_000 - 100
