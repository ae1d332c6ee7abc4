"""One rule of the scheduler per test. Rows are named "s0", "s1", ... in order of arrival."""

import pytest

from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.host.scheduler import Scheduler
from jaxserve.host.waiting import WaitingQueue
from jaxserve.request import FinishReason
from tests.fakes import fake_logprobs
from tests.host.driver import EOS, Driver, make_limits, make_request, make_result, output_of


def counts(rows):
    return {name: row.count for name, row in rows.items()}


class TestTokenBudget:
    def test_a_prompt_is_computed_in_chunks_and_sampled_at_its_end(self):
        driver = Driver(prefill_chunk=4)
        driver.add(num_prompt=10)
        seen = []
        for _ in range(4):
            row = driver.plan()["s0"]
            driver.commit()
            seen.append((row.start, row.count, row.tokens, row.sample))
        assert seen == [
            (0, 4, (1, 2, 3, 4), False),
            (4, 4, (5, 6, 7, 8), False),
            (8, 2, (9, 10), True),
            (10, 1, (7,), True),
        ]

    def test_decodes_come_before_chunks_even_of_more_important_ones(self):
        driver = Driver(make_limits(max_step_tokens=6))
        driver.add("a", 2)
        driver.add("b", 2)
        driver.step()
        driver.add("c", 9, priority=-1)
        assert counts(driver.plan()) == {"s0": 1, "s1": 1, "s2": 4}
        driver.commit()
        assert counts(driver.plan()) == {"s2": 4, "s0": 1, "s1": 1}

    def test_what_is_left_of_the_budget_goes_to_chunks_in_order_and_then_to_new_ones(self):
        driver = Driver(make_limits(max_step_tokens=10), prefill_chunk=6)
        driver.add("a", 20)
        driver.add("b", 20)
        driver.add("c", 20)
        assert counts(driver.plan()) == {"s0": 6, "s1": 4}
        driver.commit()
        assert counts(driver.plan()) == {"s0": 6, "s1": 4}
        driver.commit()
        driver.abort("a")
        assert counts(driver.plan()) == {"s1": 6, "s2": 4}

    def test_no_more_run_than_there_are_slots(self):
        driver = Driver(make_limits(max_seqs=2))
        for name in "abc":
            driver.add(name)
        assert counts(driver.plan()) == {"s0": 4, "s1": 4}
        assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (2, 1)

    def test_admission_is_by_priority_then_arrival(self):
        driver = Driver(make_limits(max_seqs=1), next_token=lambda tokens, seed: EOS)
        for name, priority in [("a", 1), ("b", 0), ("c", 0), ("d", -1)]:
            driver.add(name, priority=priority)
        assert list(driver.run()) == ["d", "b", "c", "a"]

    def test_nothing_to_do_gives_no_plan(self):
        assert Driver().scheduler.plan() is None

    @pytest.mark.parametrize(
        ("changes", "prefill_chunk", "message"),
        [({"max_step_tokens": 3}, 4, r"max_step_tokens \(3\) must be at least max_seqs \(4\)"), ({}, 0, "prefill_chunk")],
    )
    def test_limits_that_cannot_make_progress_are_refused(self, changes, prefill_chunk, message):
        with pytest.raises(ConfigError, match=message):
            Scheduler(make_limits(**changes), prefill_chunk=prefill_chunk)

    def test_a_step_looks_at_no_more_waiting_ones_than_it_admits_and_one(self, monkeypatch):
        driver = Driver()
        for number in range(50):
            driver.add(str(number))
        peeks = []
        monkeypatch.setattr(WaitingQueue, "__iter__", lambda queue: pytest.fail("a step walked through the queue"))
        peek = WaitingQueue.peek
        monkeypatch.setattr(WaitingQueue, "peek", lambda queue: peeks.append(queue) or peek(queue))
        plan = driver.scheduler.plan()
        driver.scheduler.commit(plan, make_result(plan, 7, 7, 7, 7))
        assert len(plan.rows) == 4
        # One to look at the first, then one to pop and one to look further for each.
        assert len(peeks) == 9


class TestOverlap:
    def test_a_decode_is_planned_before_the_token_it_takes_is_read(self):
        driver = Driver()
        driver.add(num_prompt=4)
        driver.plan()
        row = driver.plan()["s0"]
        assert (row.start, row.count, row.tokens, row.sample, row.fresh) == (4, 1, (), True, False)
        driver.commit()
        row = driver.plan()["s0"]
        assert (row.start, row.count, row.tokens) == (5, 1, ())

    def test_without_overlap_the_host_sends_the_token(self):
        driver = Driver()
        driver.add(num_prompt=4)
        driver.step()
        assert driver.plan()["s0"].tokens == (7,)

    def test_cursors_follow_submission_and_commit(self):
        driver = Driver(prefill_chunk=3)
        seq = driver.add(num_prompt=5)
        driver.plan()
        assert (seq.planned, seq.computed, seq.in_flight, seq.num_tokens) == (3, 0, 0, 5)
        driver.plan()
        assert (seq.planned, seq.computed, seq.in_flight, seq.num_tokens) == (5, 0, 1, 6)
        driver.commit()
        assert (seq.planned, seq.computed, seq.in_flight) == (5, 3, 1)
        driver.commit()
        assert (seq.planned, seq.computed, seq.in_flight, seq.tokens[-1]) == (5, 5, 0, 7)

    def test_nothing_is_planned_beyond_the_output_that_is_in_flight(self):
        driver = Driver()
        driver.add(max_tokens=2)
        assert driver.plan()
        assert driver.plan()
        assert not driver.plan()
        assert driver.commit()[0].finish_reason is None
        assert not driver.plan()
        assert driver.commit()[0].finish_reason is FinishReason.LENGTH

    def test_a_row_in_flight_of_a_finished_sequence_is_discarded(self):
        driver = Driver(next_token=lambda tokens, seed: EOS)
        driver.add()
        driver.plan()
        driver.plan()
        (event,) = driver.commit()
        assert (event.tokens, event.finish_reason) == ((EOS,), FinishReason.STOP)
        assert driver.scheduler.num_free_pages == driver.limits.num_pages
        assert driver.commit() == []

    def test_a_row_in_flight_of_an_aborted_sequence_is_discarded(self):
        driver = Driver()
        driver.add()
        driver.plan()
        driver.plan()
        event = driver.abort("a")
        assert (event.tokens, event.finish_reason, event.num_output) == ((), FinishReason.ABORT, 0)
        assert driver.scheduler.num_free_pages == driver.limits.num_pages
        assert driver.commit() == []
        assert driver.commit() == []

    def test_slot_and_pages_go_to_another_while_the_old_row_is_in_flight(self):
        driver = Driver(make_limits(max_seqs=1, num_pages=2), next_token=lambda tokens, seed: 9 if len(tokens) > 5 else EOS)
        driver.add("a", 4)
        driver.add("b", 5, max_tokens=2)
        old = driver.plan()["s0"]
        driver.plan()  # a's second row, which its first token makes void
        assert driver.commit()[0].finish_reason is FinishReason.STOP
        new = driver.plan()["s1"]
        assert (new.slot, new.fresh, set(new.pages) & set(old.pages)) == (old.slot, True, set(old.pages))
        assert driver.commit() == []
        assert output_of(driver.commit()) == (EOS,)

    def test_an_id_is_free_again_while_rows_of_its_old_owner_are_in_flight(self):
        driver = Driver()
        driver.add("a", 4)
        driver.plan()
        driver.abort("a")
        driver.add("a", 6, max_tokens=1)
        driver.plan()
        assert driver.commit() == []
        (event,) = driver.commit()
        assert (event.num_prompt, event.tokens) == (6, (7,))

    def test_steps_are_committed_in_order(self):
        driver = Driver()
        driver.add()
        driver.plan()
        driver.plan()
        plan, handle = driver.in_flight[1]
        with pytest.raises(AssertionError, match="step 1 is committed, step 0 is the oldest"):
            driver.scheduler.commit(plan, handle.result())

    def test_a_result_belongs_to_its_plan(self):
        driver = Driver()
        driver.add()
        plan = driver.scheduler.plan()
        result = make_result(plan, 7)
        driver.scheduler.commit(plan, result)
        with pytest.raises(AssertionError, match="the result of step 0 is not one of step 1"):
            driver.scheduler.commit(driver.scheduler.plan(), result)


class TestFresh:
    def test_only_the_first_row_in_a_slot_is_fresh(self):
        driver = Driver(prefill_chunk=3)
        driver.add(num_prompt=5)
        flags = [driver.plan()["s0"].fresh for _ in range(4)]
        assert flags == [True, False, False, False]

    def test_the_first_row_after_a_preemption_is_fresh(self):
        driver, _ = make_preempted()
        while driver.in_flight:
            driver.commit()
        driver.abort("a")
        flags = [driver.plan()["s1"].fresh for _ in range(2)]
        assert flags == [True, False]


class TestFinish:
    def finish(self, *tokens, eos_token_ids=(EOS,), **params):
        """Events of a request of 4 prompt tokens that samples `tokens`, whatever the plan forbids."""
        scheduler = Scheduler(make_limits(), prefill_chunk=16, eos_token_ids=eos_token_ids)
        scheduler.add(make_request(**params))
        events = []
        for token in tokens:
            plan = scheduler.plan()
            assert plan is not None, f"finished before {token}"
            events += scheduler.commit(plan, make_result(plan, token))
        return events

    def test_end_of_sequence_stops_and_is_part_of_the_output(self):
        events = self.finish(7, EOS)
        assert [event.finish_reason for event in events] == [None, FinishReason.STOP]
        assert output_of(events) == (7, EOS)
        assert (events[-1].num_prompt, events[-1].num_output) == (4, 2)

    @pytest.mark.parametrize("token", [EOS, 3])
    def test_any_of_several_end_of_sequence_ids_stops(self, token):
        assert self.finish(token, eos_token_ids=(EOS, 3))[-1].finish_reason is FinishReason.STOP

    def test_ignore_eos_goes_on(self):
        assert self.finish(EOS, EOS, ignore_eos=True)[-1].finish_reason is None

    def test_stop_token_ids_stop_though_eos_is_ignored(self):
        events = self.finish(EOS, 5, ignore_eos=True, stop_token_ids=(5,))
        assert [event.finish_reason for event in events] == [None, FinishReason.STOP]

    def test_no_stop_token_counts_among_the_first_min_tokens(self):
        events = self.finish(EOS, 5, EOS, min_tokens=2, stop_token_ids=(5,))
        assert [event.finish_reason for event in events] == [None, None, FinishReason.STOP]

    def test_max_tokens_ends_it(self):
        events = self.finish(7, 7, 7, max_tokens=3)
        assert [event.finish_reason for event in events] == [None, None, FinishReason.LENGTH]

    def test_a_stop_token_at_the_length_limit_is_a_stop(self):
        assert self.finish(7, EOS, max_tokens=2)[-1].finish_reason is FinishReason.STOP

    def test_the_context_ends_it(self):
        driver = Driver(make_limits(max_context=9))
        driver.add(num_prompt=4)
        events = driver.run()["a"]
        assert (len(events), events[-1].finish_reason) == (5, FinishReason.LENGTH)

    def test_the_pool_ends_it_where_it_is_smaller_than_the_context(self):
        driver = Driver(make_limits(num_pages=2))
        driver.add(num_prompt=4)
        events = driver.run()["a"]
        assert (len(events), events[-1].finish_reason) == (5, FinishReason.LENGTH)

    def test_a_prompt_may_fill_the_context_but_for_one_token(self):
        driver = Driver(make_limits(max_context=9))
        driver.add(num_prompt=8)
        assert [event.finish_reason for event in driver.run()["a"]] == [FinishReason.LENGTH]

    def test_what_ended_gave_everything_back(self):
        driver = Driver()
        driver.add(max_tokens=3)
        driver.run()
        assert driver.scheduler.num_free_pages == driver.limits.num_pages
        assert driver.scheduler.num_live == driver.scheduler.num_running == driver.scheduler.num_waiting == 0

    def test_abort_of_one_that_waits(self):
        driver = Driver(make_limits(max_seqs=1))
        driver.add("a")
        driver.add("b")
        driver.step()
        assert driver.abort("b").finish_reason is FinishReason.ABORT
        assert driver.scheduler.num_waiting == 0

    def test_abort_of_nothing_known(self):
        assert Driver().abort("a") is None

    def test_abort_tells_how_much_there_was(self):
        driver = Driver()
        driver.add()
        driver.step()
        driver.step()
        event = driver.abort("a")
        assert (event.num_prompt, event.num_output) == (4, 2)

    def test_logprobs_are_passed_through(self):
        driver = Driver()
        driver.add("a", logprobs=2, max_tokens=1)
        driver.add("b", max_tokens=1)
        events = driver.run()
        assert events["a"][0].logprobs == (fake_logprobs(7, 2, 50),)
        assert events["b"][0].logprobs == ()


class TestRequests:
    def test_what_can_never_fit_is_refused_and_leaves_nothing(self):
        driver = Driver()
        with pytest.raises(InvalidRequest, match=r"prompt 64 \+ 1 output token > context 64"):
            driver.add(num_prompt=64)
        assert driver.scheduler.num_live == 0

    def test_a_live_id_is_refused(self):
        driver = Driver()
        driver.add("a")
        with pytest.raises(InvalidRequest, match="request_id 'a' is live already") as caught:
            driver.add("a")
        assert caught.value.param == "request_id"

    def test_rows_carry_what_the_device_needs(self):
        driver = Driver()
        seq = driver.add(num_prompt=3, temperature=1.0, seed=11, stop_token_ids=(5,), min_tokens=2)
        row = driver.plan()["s0"]
        assert (row.num_prompt, row.seed, row.stop_ids) == (3, 11, (EOS, 5))
        assert row.params is seq.request.params

    def test_ids_that_do_not_end_it_are_not_forbidden(self):
        driver = Driver()
        driver.add(ignore_eos=True, stop_token_ids=(5,), min_tokens=2)
        assert driver.plan()["s0"].stop_ids == (5,)

    @pytest.mark.parametrize(("seed", "expected"), [(5, 5), (-1, 2**64 - 1), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1)])
    def test_a_seed_becomes_64_unsigned_bits(self, seed, expected):
        assert Driver().add(seed=seed).seed == expected

    def test_a_missing_seed_is_drawn_fresh_and_reproducibly(self):
        drawn = []
        for _ in range(2):
            scheduler = Scheduler(make_limits(), prefill_chunk=16, seed=3)
            drawn.append([scheduler.add(make_request(name)).seed for name in "abc"])
        assert drawn[0] == drawn[1]
        assert len(set(drawn[0])) == 3
        assert max(drawn[0]) > 2**60

    def test_without_a_scheduler_seed_draws_differ(self):
        seeds = [Scheduler(make_limits(), prefill_chunk=16).add(make_request()).seed for _ in range(2)]
        assert seeds[0] != seeds[1]


def make_preempted(**params):
    """a (older) and b fill a pool of 4 pages of 2 tokens, and a's next decode takes b's pages.

    Three plans are in flight then: two with a row of b, then one without.
    """
    driver = Driver(make_limits(num_pages=4, page_size=2, max_context=9), next_token=lambda tokens, seed: 10 + len(tokens))
    driver.add("a", 2)
    second = driver.add("b", 2, **params)
    driver.plan()
    driver.plan()
    driver.commit()
    driver.plan()
    assert driver.scheduler.num_free_pages == 0
    assert list(driver.plan()) == ["s0"]
    assert second.num_preemptions == 1
    return driver, second


class TestPreemption:
    def fill(self, *priorities, num_pages):
        """Sequences of 2 prompt tokens that hold 2 pages of 2 tokens each, full."""
        driver = Driver(make_limits(num_pages=num_pages, page_size=2, max_context=2 * num_pages + 1))
        seqs = [driver.add(str(number), 2, priority=priority) for number, priority in enumerate(priorities)]
        for _ in range(3):
            driver.step()
        assert [len(seq.pages) for seq in seqs] == [2] * len(priorities)
        return driver, seqs

    @pytest.mark.parametrize(
        ("priorities", "victim"),
        [((0, 0, 0), 2), ((0, 1, 0), 1), ((2, 1, 0), 0), ((1, 1, 0), 1), ((0, 0, -1), 1)],
    )
    def test_the_victim_is_the_youngest_of_the_lowest_priority(self, priorities, victim):
        driver, seqs = self.fill(*priorities, num_pages=6)
        rows = driver.plan()
        assert [seq.num_preemptions for seq in seqs] == [int(number == victim) for number in range(3)]
        assert set(rows) == {f"s{number}" for number in range(3) if number != victim}
        assert driver.scheduler.num_preemptions == 1

    def test_the_requester_itself_may_be_the_victim(self):
        driver, seqs = self.fill(0, 0, num_pages=5)
        rows = driver.plan()  # one page is left: the older gets it, the younger finds none
        assert list(rows) == ["s0"]
        assert [seq.num_preemptions for seq in seqs] == [0, 1]

    def test_a_chunk_takes_pages_from_a_less_important_decode(self):
        driver = Driver(make_limits(num_pages=8, page_size=2, max_context=17), prefill_chunk=1)
        young = driver.add("decodes", 2, priority=1)
        driver.step()
        driver.step()
        old = driver.add("prefills", 8, priority=0)
        while not young.num_preemptions:
            driver.step()
            assert old.num_preemptions == 0
        assert old.planned < 8

    def test_the_victim_waits_in_its_place_of_arrival(self):
        driver, victim = make_preempted()
        assert (victim.slot, victim.pages, victim.planned, victim.computed) == (None, [], 0, 0)
        driver.add("c", 1, max_tokens=1)
        driver.add("d", 1, max_tokens=1, priority=-1)
        driver.abort("a")
        while driver.in_flight:
            driver.commit()
        assert list(driver.run()) == ["d", "b", "c"]

    def test_several_are_preempted_if_one_does_not_free_enough(self):
        limits = make_limits(num_pages=27, page_size=1, max_seqs=6, max_context=28)
        driver = Driver(limits, prefill_chunk=4)
        driver.add("a", 16)
        others = [driver.add(name, 1) for name in "bcdef"]
        for _ in range(3):
            driver.step()
        assert driver.scheduler.num_free_pages == 0
        assert [len(seq.pages) for seq in others] == [3] * 5
        # a's chunk wants 4 pages, so both youngest go; of their 6, the others take 2, and then d finds none.
        assert list(driver.plan()) == ["s0", "s1", "s2"]
        assert [seq.num_preemptions for seq in others] == [0, 0, 1, 1, 1]

    def test_a_more_important_one_that_waits_may_take_what_a_victim_leaves(self):
        driver = Driver(make_limits(num_pages=6, page_size=2, max_context=13))
        driver.add("a", 2)
        victim = driver.add("b", 2, priority=1)
        for _ in range(5):
            driver.step()
        driver.add("c", 1, max_tokens=1)
        assert driver.scheduler.num_free_pages == 0
        assert list(driver.plan()) == ["s0", "s2"]
        assert victim.num_preemptions == 1

    def test_a_victim_is_not_admitted_again_in_the_same_step(self):
        driver, (_, victim) = self.fill(0, 0, num_pages=4)
        assert list(driver.plan()) == ["s0"]
        assert (victim.rows_in_flight, victim.slot) == (0, None)

    def test_a_preempted_sequence_gives_the_same_output(self):
        driver, victim = make_preempted()
        while driver.in_flight:
            driver.commit()
        assert victim.tokens[2:] == [12, 13, 14]
        assert output_of(driver.run()["b"]) == (15, 16, 17, 18)

    def test_tokens_in_flight_when_preempted_still_count(self):
        driver, victim = make_preempted()
        assert (victim.in_flight, victim.rows_in_flight) == (2, 2)
        assert {event.request_id: event.tokens for event in driver.commit()} == {"a": (13,), "b": (13,)}
        assert {event.request_id: event.tokens for event in driver.commit()} == {"a": (14,), "b": (14,)}
        assert (victim.in_flight, victim.rows_in_flight, victim.computed) == (0, 0, 0)
        assert victim.tokens[2:] == [12, 13, 14]

    def test_a_preempted_sequence_is_not_planned_while_a_row_of_it_is_in_flight(self):
        driver, victim = make_preempted()
        driver.abort("a")  # all pages are free: only its rows in flight hold b back
        for _ in range(2):
            assert driver.plan() == {}
            driver.commit()
        row = driver.plan()["s1"]
        assert (row.start, row.tokens, row.fresh) == (0, tuple(victim.tokens), True)

    def test_a_chunk_in_flight_when_preempted_holds_it_back_too(self):
        driver = Driver(make_limits(num_pages=14, page_size=1, max_context=15), prefill_chunk=1)
        driver.add("old", 1)
        driver.step()
        driver.step()
        victim = driver.add("young", 8)
        driver.plan()
        while driver.plan().keys() == {"s0", "s1"}:
            driver.commit()
        assert (victim.num_preemptions, victim.in_flight, victim.rows_in_flight) == (1, 0, 1)
        driver.abort("old")
        assert driver.plan() == {}
        driver.commit()
        assert victim.computed == 0
        assert driver.plan()["s1"].fresh

    def test_nobody_overtakes_one_that_waits_for_its_row(self):
        driver, _ = make_preempted()
        driver.abort("a")
        driver.add("c", 1, max_tokens=1)
        assert driver.plan() == {}

    def test_one_that_waits_may_finish_by_its_token_in_flight(self):
        driver, _ = make_preempted(stop_token_ids=(14,))
        driver.commit()
        reasons = {event.request_id: event.finish_reason for event in driver.commit()}
        assert reasons == {"a": None, "b": FinishReason.STOP}
        assert driver.scheduler.num_waiting == 0

    def test_abort_of_one_that_was_preempted(self):
        driver, _ = make_preempted()
        assert driver.abort("b").finish_reason is FinishReason.ABORT
        assert driver.scheduler.num_waiting == 0
        assert [event.request_id for event in driver.commit()] == ["a"]

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_a_pool_for_one_full_sequence_serves_many(self, depth):
        """No livelock: each of them needs the whole pool in the end."""
        limits = make_limits(num_pages=8, page_size=2, max_context=17, max_seqs=4)
        driver = Driver(limits, next_token=None, prefill_chunk=3)
        seqs = [driver.add(str(number), 2 + number, ignore_eos=True, priority=number % 2) for number in range(6)]
        steps = 0
        while driver.scheduler.num_live:
            planned = bool(driver.plan())
            steps += planned
            if len(driver.in_flight) == depth or not planned:
                driver.commit()
            assert steps <= 2 * sum(seq.max_positions for seq in seqs)
        assert all(seq.finish_reason is FinishReason.LENGTH and len(seq.tokens) == 17 for seq in seqs)
        assert driver.scheduler.num_preemptions > 0


class TestAdmissionByPages:
    def test_one_is_admitted_only_if_pages_for_all_of_it_are_free(self):
        driver = Driver(make_limits(num_pages=6, page_size=2, max_context=13), prefill_chunk=2)
        driver.add("a", 3)
        driver.step()
        driver.step()
        # a holds 2 of 6 pages and will soon want a third. b needs 3, and one to go on: one too many.
        driver.add("b", 6)
        assert list(driver.plan()) == ["s0"]
        driver.commit()
        driver.abort("b")
        driver.add("c", 3, max_tokens=2)
        assert list(driver.plan()) == ["s0", "s2"]

    def test_pages_that_a_running_prompt_still_needs_are_promised_to_it(self):
        driver = Driver(make_limits(num_pages=10, page_size=2, max_context=21), prefill_chunk=2)
        driver.add("a", 16)
        driver.step()
        assert driver.scheduler.num_free_pages == 9
        driver.add("b", 2)
        assert list(driver.plan()) == ["s0"]

    def test_pages_that_one_just_admitted_still_needs_are_promised_to_it(self):
        driver = Driver(make_limits(num_pages=10, page_size=2, max_context=21), prefill_chunk=2)
        driver.add("a", 12)  # will need 7 pages, takes 1
        driver.add("b", 6)  # would need 4
        assert list(driver.plan()) == ["s0"]
        driver.abort("b")
        driver.add("c", 4)  # needs 3
        assert list(driver.plan()) == ["s0", "s2"]

    def test_no_page_is_held_back_for_output_that_cannot_come(self):
        driver = Driver(make_limits(num_pages=2, page_size=4, max_context=9))
        driver.add("a", 4, max_tokens=1)
        driver.add("b", 4, max_tokens=1)
        assert list(driver.plan()) == ["s0", "s1"]

    def test_an_idle_pool_admits_whatever_was_accepted(self):
        limits = make_limits(num_pages=4, page_size=4)
        for num_prompt in range(1, 17):
            driver = Driver(limits)
            driver.add(num_prompt=num_prompt)
            assert list(driver.plan()) == ["s0"]

    def test_a_small_one_does_not_overtake_a_large_one_that_waits_for_pages(self):
        driver = Driver(make_limits(num_pages=6, page_size=2, max_context=13))
        driver.add("a", 3)
        driver.step()
        driver.add("large", 8)
        driver.add("small", 1, max_tokens=1)
        assert list(driver.plan()) == ["s0"]

    def test_pages_are_allocated_as_sequences_grow(self):
        driver = Driver(make_limits(page_size=2), prefill_chunk=3)
        seq = driver.add(num_prompt=5)
        held = []
        for _ in range(5):
            driver.step()
            held.append(len(seq.pages))
        assert held == [2, 3, 3, 4, 4]


class TestFailure:
    def test_those_in_flight_fail_and_others_are_recomputed(self):
        driver = Driver(make_limits(max_step_tokens=4, max_seqs=4), prefill_chunk=4)
        driver.add("a", 4)
        driver.step()
        driver.add("b", 9)
        driver.step()  # a decodes, b starts
        driver.add("c", 3)
        plan = driver.scheduler.plan()
        assert [row.seq_id for row in plan.rows] == [0, 1]
        events = driver.scheduler.fail_in_flight()
        driver.scheduler.check_integrity()
        assert [(event.request_id, event.finish_reason) for event in events] == [
            ("a", FinishReason.ERROR),
            ("b", FinishReason.ERROR),
        ]
        assert [event.num_output for event in events] == [2, 0]
        assert driver.scheduler.num_free_pages == driver.limits.num_pages
        driver.runner.forget()
        assert len(output_of(driver.run()["c"])) == 61

    def test_one_that_holds_pages_without_a_row_in_flight_is_recomputed(self):
        driver = Driver()
        seq = driver.add(max_tokens=3)
        driver.step()
        assert driver.scheduler.fail_in_flight() == []
        driver.scheduler.check_integrity()
        assert (seq.slot, seq.num_preemptions) == (None, 1)
        driver.runner.forget()
        assert output_of(driver.run()["a"]) == (7, 7)

    def test_one_with_rows_in_several_steps_fails_once(self):
        driver = Driver()
        driver.add()
        driver.plan()
        driver.plan()
        assert len(driver.scheduler.fail_in_flight()) == 1

    def test_one_preempted_with_a_row_in_flight_fails(self):
        driver, _ = make_preempted()
        events = driver.scheduler.fail_in_flight()
        assert {event.request_id for event in events} == {"a", "b"}
        driver.scheduler.check_integrity()

    def test_all_fail(self):
        driver = Driver(make_limits(max_seqs=1))
        driver.add("a")
        driver.add("b")
        driver.plan()
        events = driver.scheduler.fail_all()
        assert {event.request_id for event in events} == {"a", "b"}
        assert driver.scheduler.num_live == 0
        driver.scheduler.check_integrity()
        driver.in_flight.clear()
        driver.runner.forget()
        driver.add("a", max_tokens=1)
        assert output_of(driver.run()["a"]) == (7,)


class TestIntegrity:
    """The check must be able to fail, or the tests that call it prove nothing."""

    @pytest.mark.parametrize(
        "damage",
        [
            lambda driver, seq: seq.pages.pop(),
            lambda driver, seq: seq.pages.append(driver.scheduler.memory._pool.allocate(1)[0]),
            lambda driver, seq: driver.scheduler.memory._pool.allocate(1),
            lambda driver, seq: driver.scheduler._running._free_slots.append(seq.slot),
            lambda driver, seq: setattr(seq, "slot", 1 - seq.slot),
            lambda driver, seq: setattr(seq, "computed", seq.planned + 1),
            lambda driver, seq: setattr(seq, "in_flight", 0),
            lambda driver, seq: setattr(seq, "rows_in_flight", 0),
            lambda driver, seq: setattr(seq, "finish_reason", FinishReason.STOP),
            lambda driver, seq: driver.scheduler._running._seqs.reverse(),
            lambda driver, seq: driver.scheduler._running._seqs.pop(),
            lambda driver, seq: driver.scheduler._waiting.push(seq),
            lambda driver, seq: driver.scheduler._waiting.pop(),
            lambda driver, seq: next(iter(driver.scheduler._waiting)).pages.append(0),
            lambda driver, seq: driver.scheduler._live.pop("a"),
        ],
    )
    def test_damage_is_found(self, damage):
        driver = Driver(make_limits(max_seqs=2))
        seq = driver.add("a")
        driver.add("b")
        driver.add("c")
        driver.plan()
        damage(driver, seq)
        with pytest.raises(AssertionError):
            driver.scheduler.check_integrity()
