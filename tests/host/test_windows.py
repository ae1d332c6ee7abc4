"""Sequences of models all of whose layers have a window: what they give back, what is found again, and random traffic."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.host.admission import Admission, output_limit
from jaxserve.host.finding import find_beginning
from jaxserve.host.prefix import PrefixTree
from jaxserve.plan import MIN_WINDOW, RunnerLimits, enough_local_pages
from jaxserve.request import Request, SamplingParams, Sequence
from tests.host.driver import Driver, make_limits, make_request, output_of
from tests.host.test_scheduler_machine import SchedulerMachine, first_page_seen, most_pages_seen

WINDOW = 10


def windowed(*, prefixes: bool = True, prefill_chunk: int = 4, **changes: int) -> Driver:
    """Pages of 4 tokens and a window of two and a half."""
    values = {"num_pages": 16, "max_context": 400, "window": WINDOW, "max_step_tokens": 8, **changes}
    return Driver(make_limits(**values), prefixes=prefixes, prefill_chunk=prefill_chunk, eos_token_ids=())


def ask(driver: Driver, prompt: tuple[int, ...], max_tokens: int = 1) -> int:
    """Run a prompt alone; how much of it was cached."""
    request_id = f"{driver.scheduler._next_seq_id}"
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    driver.scheduler.add(Request(request_id=request_id, prompt=prompt, params=params))
    events = driver.run()[request_id]
    assert output_of(events) == (7,) * max_tokens
    return events[-1].num_cached


def text(length: int, first: int = 0) -> tuple[int, ...]:
    return tuple((first + i * i) % 50 for i in range(length))


# --- the arithmetic ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.none() | st.integers(MIN_WINDOW, 40), st.integers(1, 30), st.integers(1, 120), st.integers(1, 40))
def test_pages_are_those_that_the_hungriest_row_sees(
    page_size: int, window: int | None, row_tokens: int, num_positions: int, num_pages: int
) -> None:
    limits = RunnerLimits(num_pages, page_size, 1, row_tokens, max_context=num_positions + 1, vocab_size=9, window=window)
    assert all(limits.first_seen_page(place) == first_page_seen(place, limits) for place in range(num_positions))
    # What is counted may be a page more than there is, where no row begins at the place of a page that would need it.
    found, most = limits.pages_for(num_positions), most_pages_seen(num_positions, limits)
    assert most <= found <= most + 1
    assert found == most or num_positions < 2 * page_size * (window or 0) + row_tokens
    assert limits.pages_for(num_positions, 1) <= limits.pages_for(num_positions)
    assert limits.max_tokens == (num_positions + 1 if found <= num_pages else num_pages * page_size + 1)


def test_a_pool_of_windows_has_room_for_more_tokens_than_places() -> None:
    limits = make_limits(num_pages=10, page_size=4, max_context=400)
    assert limits.pool_tokens == 40
    limits = dataclasses.replace(limits, window=10, max_step_tokens=8)
    assert limits.pages_for(400) == 5
    assert limits.pool_tokens == 10 * (400 // 5)
    admission = Admission(limits, max_queue_requests=9, max_queue_tokens=0)
    assert admission.max_queue_tokens == 4 * limits.pool_tokens


def test_a_window_smaller_than_what_is_in_flight_is_refused() -> None:
    with pytest.raises(ConfigError, match="window must be at least 8, found 7"):
        windowed(window=7)


# --- what is given back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefixes", [False, True])
def test_a_long_sequence_runs_in_a_small_pool(prefixes: bool) -> None:
    driver = windowed(num_pages=5, prefixes=prefixes)
    assert output_limit(make_request("a", 300), driver.limits) == 100
    ask(driver, text(300), 100)
    assert driver.runner.max_pages_used <= 5
    assert driver.scheduler.num_preemptions == 0
    assert driver.scheduler.num_free_pages == 5


def test_a_pool_that_is_too_small_for_the_window_is_no_larger_than_it_is() -> None:
    driver = windowed(num_pages=4)
    with pytest.raises(InvalidRequest, match=r"need 5 pages of 4 tokens > the pool's 4"):
        driver.add("a", 17)
    driver.add("b", 16, max_tokens=1)
    driver.run()


def test_pages_go_as_the_window_leaves_them() -> None:
    driver = windowed(prefixes=False)
    driver.add("a", 12, max_tokens=30)
    held = []
    while driver.scheduler.num_live:
        row = driver.plan()["s0"]
        held.append((row.start, row.first_page, len(row.pages)))
        driver.commit()
    assert held[:4] == [(0, 0, 1), (4, 0, 2), (8, 0, 3), (12, 0, 4)]
    assert held[4:10] == [(13, 1, 3), (14, 1, 3), (15, 1, 3), (16, 1, 4), (17, 2, 3), (18, 2, 3)]


def test_several_share_a_pool_that_one_alone_would_fill_without_a_window() -> None:
    driver = windowed(num_pages=20, prefixes=False)
    for name in "abcd":
        driver.add(name, 60, max_tokens=20)
    driver.run()
    assert driver.scheduler.num_preemptions == 0
    assert driver.runner.max_pages_used <= 20


# --- what is found ----------------------------------------------------------------------------------------------------


def test_the_next_turn_needs_the_last_window_only() -> None:
    driver = windowed(num_pages=16)
    assert ask(driver, text(60)) == 0
    assert ask(driver, (*text(60), 1, 2, 3)) == 60
    row = driver.runner.last_plan.rows[0]
    assert (row.start, row.first_page) == (60, 12)


def test_a_prefix_with_a_hole_is_found_before_it_and_behind_it() -> None:
    driver = windowed(num_pages=16)
    ask(driver, text(60))  # fifteen pages, the first of which are given back first
    assert ask(driver, (*text(12), 1, 2)) == 12
    ask(driver, (49,) * 24)
    tree = driver.scheduler.memory._tree
    assert tree is not None
    node, there = tree.root(""), []
    for index in range(15):
        node = node.children[tree.key(text(60), index)]
        there.append(node.page is not None)
    assert there == [True] * 3 + [False] * 5 + [True] * 7
    assert ask(driver, (*text(12), 3, 4)) == 12
    assert ask(driver, (*text(60), 1)) == 60


def test_the_hole_is_filled_when_it_is_computed_again() -> None:
    driver = windowed(num_pages=16)
    ask(driver, text(60))
    ask(driver, (49,) * 36)
    assert ask(driver, text(44)) < 44
    assert ask(driver, (*text(44), 9)) == 44


def test_a_page_is_copied_from_one_that_has_not_given_it_back() -> None:
    driver = windowed()
    driver.add("a", 23, max_tokens=30)
    for _ in range(6):
        driver.step()
    driver.add("b", 23, max_tokens=1)
    row = driver.plan()["s1"]
    assert (row.start, row.first_page) == (22, 3)
    assert driver.runner.num_copies == 1


def test_no_page_is_copied_of_a_sequence_that_has_given_it_back() -> None:
    """Where it lay, in the sequence's table, is another page by now."""
    tree = PrefixTree(4)
    end = tree.path(text(8), "")[-1]
    seq = Sequence(0, make_request("b", 12), list(text(12)), 9)
    other = Sequence(1, make_request("a", 40), list(text(40)), 9, pages=list(range(10)), dispatched=40)
    end.tail = other
    assert find_beginning(tree, end, seq, 2) == (2, 3)
    other.first_page, other.pages = 2, other.pages[2:]
    assert find_beginning(tree, end, seq, 2) == (2, 3)
    other.first_page, other.pages = 3, other.pages[1:]
    assert find_beginning(tree, end, seq, 2) == (None, 0)


def test_pinned_pages_stay_though_no_layer_of_their_sequence_sees_them() -> None:
    driver = windowed(num_pages=20)
    assert driver.scheduler.pin(text(40)) == 10
    ask(driver, (*text(40), 1))
    ask(driver, (49,) * 60)
    assert driver.scheduler.num_free_pages == 10
    assert ask(driver, (*text(13), 48, 47)) == 13
    assert ask(driver, (*text(40), 2)) == 40


def test_what_comes_back_from_the_host_is_the_last_window() -> None:
    limits = make_limits(num_pages=8, host_pages=40, max_context=400, window=WINDOW, max_step_tokens=8)
    driver = Driver(limits, prefixes=True, prefill_chunk=4, eos_token_ids=())
    ask(driver, text(80))
    for first in range(1, 6):
        ask(driver, (first,) * 16)
    loaded = driver.runner.num_loads
    assert ask(driver, (*text(80), 1)) == 80
    assert 0 < driver.runner.num_loads - loaded <= 4


# --- local pages beside those of layers that see all --------------------------------------------------------------------


def mixed(*, prefixes: bool = True, **changes: int) -> Driver:
    """As `windowed`, in some layers; with so many local pages as must be."""
    limits = make_limits(**{"num_pages": 100, "max_context": 400, "max_step_tokens": 8, **changes})
    limits = dataclasses.replace(limits, local_pages=enough_local_pages(limits, WINDOW), local_window=WINDOW)
    return Driver(limits, prefixes=prefixes, prefill_chunk=4, eos_token_ids=())


def test_there_are_enough_local_pages() -> None:
    """A row of one token sees 10 positions, in 4 pages at most; 8 more tokens in a step are in 2 pages more."""
    limits = make_limits(num_pages=100, max_seqs=3, max_step_tokens=8)
    assert 3 * 4 + 2 <= enough_local_pages(limits, WINDOW) == 3 * 4 + 2
    assert enough_local_pages(dataclasses.replace(limits, num_pages=5), WINDOW) == 5


@pytest.mark.parametrize("prefixes", [False, True])
def test_long_sequences_hold_few_local_pages(prefixes: bool) -> None:
    driver = mixed(prefixes=prefixes)
    for first in range(4):
        params = SamplingParams(temperature=0.0, max_tokens=30)
        driver.scheduler.add(Request(request_id=str(first), prompt=text(70, first), params=params))
    driver.run()
    assert driver.scheduler.num_preemptions == 0
    assert driver.runner.max_pages_used > 70
    assert driver.runner.max_local_used <= driver.limits.local_pages == 18
    assert driver.scheduler.num_free_pages == 100


def test_a_prefix_is_found_where_both_pools_have_it() -> None:
    driver = mixed()
    assert ask(driver, text(60)) == 0
    assert ask(driver, (*text(60), 1)) == 60
    row = driver.runner.last_plan.rows[0]
    assert (row.start, row.first_page, row.first_local_page, len(row.local_pages)) == (60, 0, 12, 4)
    for first in range(1, 10):  # local pages are fewer, and are wanted for other prefixes
        ask(driver, (first,) * 24)
    assert ask(driver, (*text(60), 2)) < 60
    assert ask(driver, (*text(60), 3)) == 60, "they are there again"


def test_after_a_failure_no_local_page_is_known() -> None:
    driver = mixed()
    ask(driver, text(60))
    driver.add("b", 4)
    driver.plan()
    driver.in_flight.clear()
    driver.runner.forget()
    driver.scheduler.fail_in_flight()
    driver.scheduler.check_integrity()
    assert ask(driver, text(60)) == 0


def test_no_prefix_is_pinned_beside_local_pages() -> None:
    with pytest.raises(ConfigError, match="no prefix can be pinned"):
        mixed().scheduler.pin(text(40))


# --- random traffic ---------------------------------------------------------------------------------------------------


class WindowedMachine(SchedulerMachine):
    """Random traffic with windows, in contexts of up to four pools, with prefixes or not, over a host tier or not."""

    def choose(self, limits: RunnerLimits, prefixes: bool) -> tuple[RunnerLimits, bool]:
        window = MIN_WINDOW + (limits.vocab_size + limits.max_seqs) % 7
        max_context = min(240, limits.max_context * (1 + limits.max_step_tokens % 4))
        return dataclasses.replace(limits, window=window, max_context=max_context), prefixes


class LocalMachine(SchedulerMachine):
    """Random traffic with local pages beside the others, as few as must be."""

    def choose(self, limits: RunnerLimits, prefixes: bool) -> tuple[RunnerLimits, bool]:
        window = MIN_WINDOW + (limits.vocab_size + limits.max_seqs) % 7
        limits = dataclasses.replace(limits, num_pages=limits.num_pages * 3, max_context=min(240, 3 * limits.max_context))
        local_pages = enough_local_pages(limits, window)
        return dataclasses.replace(limits, host_pages=0, local_pages=local_pages, local_window=window), prefixes


TestWindowedMachine = pytest.mark.slow(WindowedMachine.TestCase)
TestLocalMachine = pytest.mark.slow(LocalMachine.TestCase)
# Few examples of each, since the machine without windows has many.
TestWindowedMachine.settings = TestLocalMachine.settings = settings(stateful_step_count=100, max_examples=30)
