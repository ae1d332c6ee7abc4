"""How the scheduler shares prefixes: one rule a test. Rows are named "s0", "s1", ... by arrival; pages have 4 tokens."""

from __future__ import annotations

import time

import pytest

from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.host.memory import Memory
from jaxserve.host.prefix import PrefixTree
from jaxserve.host.scheduler import Scheduler
from jaxserve.request import FinishReason
from tests.host.driver import EOS, Driver, make_limits, make_request, make_result, output_of


def starts(rows):
    return {name: (row.start, row.count) for name, row in rows.items()}


def sharing(**changes) -> Driver:
    limits = {key: changes.pop(key) for key in list(changes) if key in make_limits().__dataclass_fields__}
    return Driver(make_limits(**limits), prefixes=True, **changes)


class TestHits:
    def test_a_prompt_that_comes_again_starts_after_its_full_pages(self):
        driver = sharing()
        driver.add("a", 10, max_tokens=1)
        driver.run()
        driver.add("b", 10, max_tokens=1)
        row = driver.plan()["s1"]
        assert (row.start, row.count, row.tokens, row.history) == (8, 2, (9, 10), (1, 2, 3, 4, 5, 6, 7, 8))
        assert driver.commit()[0].num_cached == 8

    def test_of_a_prompt_that_fills_its_pages_the_last_is_copied_and_one_token_computed(self):
        driver = sharing()
        driver.add("a", 8, max_tokens=1)
        driver.run()
        driver.add("b", 8, max_tokens=1)
        assert starts(driver.plan()) == {"s1": (7, 1)}
        assert driver.runner.num_copies == 1
        assert driver.commit()[0].num_cached == 7

    def test_the_next_turn_finds_the_answer_too(self):
        driver = sharing()
        first = driver.add("a", 6, max_tokens=7)
        driver.run()
        request = make_request("b", 6)
        driver.scheduler.add(type(request)(request_id="b", prompt=(*first.tokens, 30, 31), params=request.params))
        assert starts(driver.plan()) == {"s1": (12, 3)}

    def test_budget_that_hits_leave_goes_to_others(self):
        driver = sharing(max_step_tokens=12)
        driver.add("a", 10, max_tokens=1)
        driver.run()
        driver.add("b", 10)
        driver.add("c", 10)
        assert starts(driver.plan()) == {"s1": (8, 2), "s2": (8, 2)}

    def test_tenants_are_not_charged_for_hits(self):
        driver = sharing()
        driver.add("a", 10, max_tokens=1)
        driver.run()
        seq = driver.add("b", 10)
        charged = []
        driver.scheduler._waiting.charge = lambda seq, count: charged.append(count)
        driver.plan()
        assert charged == [2]
        assert seq.charged == 10

    def test_cached_pages_count_as_free(self):
        driver = sharing(num_pages=4)
        driver.add("a", 12, max_tokens=1)
        driver.run()
        assert (driver.scheduler.num_free_pages, driver.scheduler.memory.num_cached) == (4, 3)
        other = make_request("b", 12)
        driver.scheduler.add(type(other)(request_id="b", prompt=(40,) * 13, params=make_request(max_tokens=1).params))
        assert starts(driver.plan()) == {"s1": (0, 13)}
        assert driver.scheduler.memory.num_evicted == 3

    def test_one_that_was_preempted_finds_its_pages_again(self):
        driver = sharing(num_pages=64)
        seq = driver.add("a", 10)
        driver.step()
        driver.step()
        driver.scheduler._running.preempt(seq)
        row = driver.plan()["s0"]
        assert (row.start, row.count, row.fresh, seq.num_preemptions) == (8, 4, True, 1)
        assert driver.commit()[0].num_cached == 0, "usage tells what was cached when it first ran"

    def test_a_failure_forgets_everything(self):
        driver = sharing()
        driver.add("a", 10, max_tokens=1)
        driver.run()
        driver.add("b", 4)
        driver.plan()
        driver.in_flight.clear()
        driver.runner.forget()
        driver.scheduler.fail_in_flight()
        driver.scheduler.check_integrity()
        driver.add("c", 10, max_tokens=1)
        assert starts(driver.plan()) == {"s2": (0, 10)}

    def test_a_page_is_found_by_the_plan_after_the_one_that_computes_it(self):
        driver = sharing(max_step_tokens=64)
        driver.add("a", 10)
        driver.plan()
        driver.add("b", 10)
        assert starts(driver.plan())["s1"] == (9, 1), "also the beginning of a page that is being written"


class TestWaiting:
    def test_the_second_waits_for_the_first_and_nobody_else_does(self):
        driver = sharing(max_step_tokens=16, prefill_chunk=4)
        driver.add("a", 12)
        driver.add("b", 12)
        other = make_request("c", 5)
        driver.scheduler.add(type(other)(request_id="c", prompt=(40,) * 5, params=other.params))
        assert starts(driver.plan()) == {"s0": (0, 4), "s2": (0, 4)}
        assert driver.scheduler.num_waiting == 1
        assert starts(driver.plan()) == {"s0": (4, 4), "s2": (4, 1)}
        assert starts(driver.plan())["s1"] == (8, 4)

    def test_one_that_waits_goes_on_by_itself_when_the_first_is_aborted(self):
        driver = sharing(prefill_chunk=4)
        driver.add("a", 12)
        driver.add("b", 12)
        driver.plan()
        driver.abort("a")
        assert starts(driver.plan()) == {"s1": (4, 4)}

    def test_one_that_waits_can_be_aborted(self):
        driver = sharing(prefill_chunk=4)
        driver.add("a", 12)
        driver.add("b", 12)
        driver.plan()
        assert driver.abort("b").finish_reason is FinishReason.ABORT
        assert driver.scheduler.num_waiting == 0
        for _ in range(3):
            driver.plan()
        driver.scheduler.check_integrity()

    def test_one_that_waits_fails_with_nobody(self):
        driver = sharing(prefill_chunk=4)
        driver.add("a", 12)
        driver.add("b", 12, max_tokens=1)
        driver.plan()
        driver.in_flight.clear()
        driver.runner.forget()
        events = driver.scheduler.fail_in_flight()
        assert [event.request_id for event in events] == ["a"]
        assert output_of(driver.run()["b"]) == (7,)

    def test_it_comes_back_to_its_place(self):
        driver = sharing(max_seqs=2, prefill_chunk=4)
        driver.add("a", 8)
        driver.add("b", 8)
        driver.plan()
        for name, token in ("c", 41), ("d", 42):
            other = make_request(name)
            driver.scheduler.add(type(other)(request_id=name, prompt=(token,) * 4, params=other.params))
        driver.plan()
        rows = driver.plan()
        assert "s1" not in driver.scheduler._live or rows.keys() >= {"s0"}
        driver.abort("c")
        assert "s1" in driver.plan()

    def test_a_more_important_one_does_not_wait(self):
        driver = sharing(prefill_chunk=4, max_step_tokens=8)
        driver.add("a", 12, priority=1)
        driver.plan()
        driver.add("b", 12, priority=0)
        assert starts(driver.plan())["s1"] == (4, 4)

    def test_a_step_parks_no_more_than_it_has_slots(self):
        driver = sharing(max_seqs=2, prefill_chunk=4)
        for number in range(6):
            driver.add(str(number), 12)
        driver.plan()
        assert len(driver.scheduler._running.parked) == 2
        driver.plan()
        assert len(driver.scheduler._running.parked) <= 4


class TestForks:
    def test_choices_of_one_prompt_share_its_pages_and_copy_the_one_they_write(self):
        driver = sharing(max_step_tokens=32, next_token=lambda tokens, seed: 7)
        seqs = [driver.add(name, 11, max_tokens=4) for name in "abcd"]
        driver.plan()
        rows = driver.plan()
        assert starts(rows) == {"s0": (11, 1), "s1": (10, 1), "s2": (10, 1), "s3": (10, 1)}
        assert driver.runner.num_copies == 3
        assert all(seq.pages[:2] == seqs[0].pages[:2] for seq in seqs)
        assert len({seq.pages[2] for seq in seqs}) == 4
        driver.commit()
        driver.commit()
        driver.run()

    def test_a_plan_carries_the_copies(self):
        driver = sharing(max_step_tokens=32)
        first = driver.add("a", 7)
        driver.plan()
        second = driver.add("b", 7)
        driver.plan()
        assert driver.runner.last_plan.copies == ((first.pages[1], second.pages[1]),)


class TestPins:
    def test_pinned_pages_are_taken_from_what_requests_may_need(self):
        driver = sharing(num_pages=8)
        assert driver.scheduler.pin(tuple(range(1, 11))) == 2
        with pytest.raises(InvalidRequest, match=r"need 7 pages of 4 tokens > the pool's 6"):
            driver.add("a", 25)
        driver.add("a", 24, max_tokens=1)
        driver.run()
        assert driver.scheduler.num_free_pages == 6

    def test_more_than_half_cannot_be_pinned(self):
        driver = sharing(num_pages=8)
        with pytest.raises(ConfigError, match="more than half of the pool's 8"):
            driver.scheduler.pin(tuple(range(20)))


def test_a_collision_of_hashes_gives_no_wrong_page():
    """Children are found by a dictionary, which compares whole keys; were all hashes equal, nothing else would change."""

    class Colliding(bytes):
        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            return bytes.__eq__(self, other)

    class CollidingTree(PrefixTree):
        def key(self, tokens, index):
            return Colliding(super().key(tokens, index))

    driver = sharing()
    driver.scheduler.memory._tree = CollidingTree(4)
    for number, first in enumerate((1, 11, 21, 1, 11, 21)):
        other = make_request(str(number), max_tokens=1)
        prompt = tuple(range(first, first + 9))
        driver.scheduler.add(type(other)(request_id=str(number), prompt=prompt, params=other.params))
        assert starts(driver.plan()) == {f"s{number}": (0, 9) if number < 3 else (8, 1)}
        driver.commit()


@pytest.mark.slow
def test_a_step_costs_the_same_whatever_waits_or_has_finished():
    """Medians, and a factor that only growth with the queue would pass: it would be hundreds."""

    def seconds_a_step(num_waiting: int, num_finished: int) -> float:
        limits = make_limits(num_pages=4096, max_seqs=64, max_step_tokens=256, max_context=512)
        scheduler = Scheduler(limits, prefill_chunk=64, eos_token_ids=(EOS,), prefixes=PrefixTree(4))
        for number in range(num_finished):
            scheduler.add(make_request(f"f{number}", 1 + number % 3, max_tokens=1))
            plan = scheduler.plan()
            scheduler.commit(plan, make_result(plan, 7))
        for number in range(64 + num_waiting):
            scheduler.add(make_request(str(number), 30 + number % 7, max_tokens=400))
        seconds = []
        for _ in range(200):
            started = time.perf_counter()
            plan = scheduler.plan()
            scheduler.commit(plan, make_result(plan, *[7] * sum(row.sample for row in plan.rows)))
            seconds.append(time.perf_counter() - started)
        return sorted(seconds)[len(seconds) // 2]

    alone = seconds_a_step(0, 0)
    assert seconds_a_step(100_000, 5_000) < 3 * alone


def test_memory_and_tree_must_agree_on_pages():
    with pytest.raises(AssertionError, match="pages of 8 tokens"):
        Memory(make_limits(page_size=8), PrefixTree(4))
