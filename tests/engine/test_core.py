import dataclasses
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.core import MAX_FAILURES_IN_A_ROW, EngineCore
from jaxserve.errors import EngineError, InvalidRequest
from jaxserve.host.scheduler import Scheduler
from jaxserve.request import FinishReason
from tests.fakes import FakeRunner, PlanViolation, expected_output
from tests.host.driver import EOS, make_limits, make_request, output_of

both = pytest.mark.parametrize("overlap", [False, True])


class Engine:
    """An `EngineCore` on a `FakeRunner`, with the log of submits ("s0") and results ("r0")."""

    def __init__(self, *, overlap, limits=None, prefill_chunk=16, wrap=lambda handle: handle, **runner):
        limits = limits or make_limits()
        self.runner = FakeRunner(limits, **{"next_token": lambda tokens, seed: 7, **runner})
        self.scheduler = Scheduler(limits, prefill_chunk=prefill_chunk, eos_token_ids=(EOS,), seed=1)
        self.core = EngineCore(self.scheduler, self, overlap=overlap)
        self.log = []
        self.events = {}

    @property
    def limits(self):
        return self.runner.limits

    def submit(self, plan):
        self.log.append(f"s{plan.step_id}")
        return Logged(self.runner.submit(plan), plan.step_id, self.log)

    def step(self):
        events = self.core.step()
        self.scheduler.check_integrity()
        for event in events:
            self.events.setdefault(event.request_id, []).append(event)
        return events

    def run(self, max_steps=2000):
        for _ in range(max_steps):
            if not self.core.has_work:
                return self.events
            self.step()
        raise AssertionError(f"work is left after {max_steps} steps")


class Logged:
    def __init__(self, handle, step_id, log):
        self.handle, self.step_id, self.log = handle, step_id, log

    def result(self):
        self.log.append(f"r{self.step_id}")
        return self.handle.result()


class TestOrder:
    def test_without_overlap_each_step_is_read_before_the_next(self):
        engine = Engine(overlap=False)
        engine.core.add(make_request(max_tokens=3))
        engine.run()
        assert engine.log == ["s0", "r0", "s1", "r1", "s2", "r2"]

    def test_with_overlap_the_next_step_is_submitted_first(self):
        engine = Engine(overlap=True)
        engine.core.add(make_request(max_tokens=3))
        engine.run()
        assert engine.log == ["s0", "s1", "r0", "s2", "r1", "r2"]

    def test_with_overlap_the_first_call_only_submits(self):
        engine = Engine(overlap=True)
        engine.core.add(make_request())
        assert engine.step() == []
        assert [event.num_output for event in engine.step()] == [1]

    def test_a_step_for_a_finished_sequence_is_still_collected(self):
        engine = Engine(overlap=True, next_token=lambda tokens, seed: EOS)
        engine.core.add(make_request())
        engine.step()
        assert engine.step()[0].finish_reason is FinishReason.STOP
        assert engine.core.has_work
        assert engine.step() == []
        assert not engine.core.has_work
        assert engine.log == ["s0", "s1", "r0", "r1"]

    @both
    def test_without_work_a_step_does_nothing(self, overlap):
        engine = Engine(overlap=overlap)
        assert not engine.core.has_work
        assert engine.step() == []
        assert engine.log == []


class TestAbort:
    @both
    def test_abort_ends_a_request_at_once(self, overlap):
        engine = Engine(overlap=overlap)
        engine.core.add(make_request())
        engine.step()
        event = engine.core.abort("a")
        assert event is not None
        assert event.finish_reason is FinishReason.ABORT
        assert engine.core.stats().free_pages == engine.limits.num_pages
        assert engine.core.abort("a") is None
        assert [e.finish_reason for e in engine.run().get("a", [])] in ([], [None])

    def test_a_refused_request_leaves_nothing(self):
        engine = Engine(overlap=True)
        with pytest.raises(InvalidRequest):
            engine.core.add(make_request(num_prompt=64))
        assert not engine.core.has_work


def mixed_requests(count, seed):
    rng = random.Random(seed)
    return [
        make_request(
            str(number),
            rng.randint(1, 30),
            priority=rng.choice([0, 0, 1]),
            temperature=rng.choice([0.0, 1.0]),
            seed=number,
            max_tokens=rng.choice([1, 5, 20, 33]),
            logprobs=rng.choice([None, 1]),
        )
        for number in range(count)
    ]


small_pool = make_limits(num_pages=18, page_size=4, max_seqs=6, max_step_tokens=24)


@both
@pytest.mark.parametrize("prefill_chunk", [3, 24])
@pytest.mark.parametrize("num_pages", [18, 200])
def test_outputs_are_those_of_each_request_alone(overlap, prefill_chunk, num_pages):
    limits = dataclasses.replace(small_pool, num_pages=num_pages)
    engine = Engine(overlap=overlap, limits=limits, prefill_chunk=prefill_chunk, next_token=None, eos_probability=0.01)
    requests = mixed_requests(40, seed=prefill_chunk)
    for request in requests:
        engine.core.add(request)
    events = engine.run()
    for request in requests:
        expected = expected_output(request, limits, next_token=engine.runner.next_token, eos_token_ids=(EOS,))
        found = events[request.request_id]
        assert (output_of(found), found[-1].finish_reason) == expected
    stats = engine.core.stats()
    assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, num_pages)
    assert (stats.num_preemptions > 0) == (num_pages == 18), "the small pool is there to make it preempt"


@given(
    overlap=st.booleans(),
    seed=st.integers(0, 10**6),
    abort_at=st.dictionaries(st.integers(0, 60), st.integers(0, 11), max_size=6),
    add_at=st.lists(st.integers(0, 40), min_size=12, max_size=12),
    failures=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=2),
)
def test_traffic_with_aborts_and_failures(overlap, seed, abort_at, add_at, failures):
    """Whatever happens, each request ends once, with a prefix of its own output, and everything comes back."""
    engine = Engine(
        overlap=overlap,
        limits=small_pool,
        prefill_chunk=7,
        next_token=None,
        eos_probability=0.02,
        fail_on_submit=[step for step, on_submit in failures if on_submit],
        fail_on_result=[step for step, on_submit in failures if not on_submit],
    )
    requests = mixed_requests(12, seed)
    ended = Counter()
    for step in range(600):
        for request, when in zip(requests, add_at, strict=True):
            if when == step:
                engine.core.add(request)
        event = engine.core.abort(str(abort_at.get(step, "none")))
        if event is not None:
            engine.events.setdefault(event.request_id, []).append(event)
        if step > max(add_at) and not engine.core.has_work:
            break
        engine.step()
    assert not engine.core.has_work
    assert not engine.core.dead
    assert engine.core.stats().free_pages == small_pool.num_pages
    for request in requests:
        events = engine.events[request.request_id]
        ended[request.request_id] = sum(event.finish_reason is not None for event in events)
        tokens, reason = expected_output(request, small_pool, next_token=engine.runner.next_token, eos_token_ids=(EOS,))
        found = events[-1].finish_reason
        if found in (FinishReason.ABORT, FinishReason.ERROR):
            assert output_of(events) == tokens[: len(output_of(events))]
        else:
            assert (output_of(events), found) == (tokens, reason)
    assert set(ended.values()) == {1}


class TestFailure:
    @both
    @pytest.mark.parametrize("where", ["fail_on_submit", "fail_on_result"])
    def test_requests_in_flight_end_with_an_error_and_the_engine_goes_on(self, overlap, where, caplog):
        engine = Engine(overlap=overlap, limits=make_limits(max_seqs=2), **{where: [1]})
        for name in "abc":
            engine.core.add(make_request(name, max_tokens=3))
        events = engine.run()
        assert [events[name][-1].finish_reason for name in "abc"] == [
            FinishReason.ERROR,
            FinishReason.ERROR,
            FinishReason.LENGTH,
        ]
        assert output_of(events["c"]) == (7, 7, 7)
        stats = engine.core.stats()
        assert (stats.num_failures, stats.free_pages) == (1, engine.limits.num_pages)
        assert not engine.core.dead
        assert "the runner failed; 2 requests in flight end with an error" in caplog.text
        assert "InjectedFailure" in caplog.text

    @both
    def test_too_many_failures_in_a_row_kill_it(self, overlap):
        engine = Engine(overlap=overlap, limits=make_limits(max_seqs=1), fail_on_submit=range(100))
        for number in range(5):
            engine.core.add(make_request(str(number)))
        for number in range(MAX_FAILURES_IN_A_ROW):
            assert not engine.core.dead
            assert engine.step()[0].request_id == str(number)
        assert engine.core.dead
        assert {events[-1].finish_reason for events in engine.events.values()} == {FinishReason.ERROR}
        assert len(engine.events) == 5
        assert not engine.core.has_work
        with pytest.raises(EngineError, match="dead after 3 failed steps in a row: InjectedFailure"):
            engine.core.add(make_request("late"))

    def test_a_good_step_between_failures_keeps_it_alive(self):
        engine = Engine(overlap=False, limits=make_limits(max_seqs=1), fail_on_submit=[0, 1, 3, 4, 6, 7])
        for number in range(9):
            engine.core.add(make_request(str(number), max_tokens=1))
        engine.run()
        assert not engine.core.dead
        reasons = [engine.events[str(number)][-1].finish_reason for number in range(9)]
        assert [reason is FinishReason.ERROR for reason in reasons] == [True, True, False] * 3

    @both
    def test_results_of_steps_given_up_are_not_read(self, overlap):
        engine = Engine(overlap=overlap, fail_on_result=[0])
        engine.core.add(make_request())
        engine.run()
        assert engine.log == (["s0", "s1", "r0"] if overlap else ["s0", "r0"])

    def test_a_bug_of_the_host_is_not_taken_for_a_failure_of_the_runner(self, monkeypatch):
        engine = Engine(overlap=False)
        engine.core.add(make_request())
        monkeypatch.setattr(engine.scheduler, "commit", lambda plan, result: pytest.fail("a bug"))
        with pytest.raises(pytest.fail.Exception, match="a bug"):
            engine.step()

    def test_a_plan_out_of_contract_is_not_survived(self, monkeypatch):
        engine = Engine(overlap=False)
        engine.core.add(make_request())
        engine.step()
        engine.runner.forget()
        with pytest.raises(PlanViolation, match="not fresh, yet slot 0 holds no sequence"):
            engine.step()


class TestStats:
    @both
    def test_counts(self, overlap):
        engine = Engine(overlap=overlap, limits=make_limits(max_seqs=2), prefill_chunk=3)
        for name in "abc":
            engine.core.add(make_request(name, 4, max_tokens=2))
        engine.step()
        stats = engine.core.stats()
        assert (stats.running, stats.waiting, stats.free_pages, stats.total_pages) == (2, 1, 62, 64)
        engine.run()
        stats = engine.core.stats()
        assert (stats.num_steps, stats.num_tokens, stats.num_output_tokens) == (6, 15, 6)
        assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, 64)
        assert stats.num_preemptions == stats.num_failures == 0

    @pytest.mark.parametrize(
        ("overlap", "wait", "exposed"),
        [
            # Nothing runs while a step is submitted and while it is committed.
            (False, 10.0, 3 * (1.0 + 0.25)),
            # Only the first submit and the last commit find the device idle.
            (True, 10.0, 1.0 + 0.25),
            # The device is always ready first: all of the host's time shows.
            (True, 0.0, 3 * (1.0 + 0.25)),
        ],
    )
    def test_exposed_host_time(self, monkeypatch, overlap, wait, exposed):
        now = 100.0

        def spend(seconds):
            nonlocal now
            now += seconds

        def slowly(function, seconds):
            def call(*args):
                spend(seconds)
                return function(*args)

            return call

        engine = Engine(overlap=overlap)
        monkeypatch.setattr(engine.core, "_clock", lambda: now)
        monkeypatch.setattr(engine, "submit", slowly(engine.submit, 1.0))
        monkeypatch.setattr(Logged, "result", slowly(Logged.result, wait))
        monkeypatch.setattr(engine.scheduler, "commit", slowly(engine.scheduler.commit, 0.25))
        engine.core.add(make_request(max_tokens=3))
        engine.run()
        stats = engine.core.stats()
        assert stats.exposed_host_seconds == exposed
        assert stats.wait_seconds == 3 * wait

    @pytest.mark.parametrize(
        ("overlap", "wait", "seconds"),
        [
            (False, 10.0, [10.0, 10.0, 10.0]),
            # The next submit and the last commit are hidden behind the step, so they are part of its time.
            (True, 10.0, [1.0 + 10.0, 0.25 + 1.0 + 10.0, 0.25 + 10.0]),
            # Nobody can tell when the device was done.
            (True, 0.0, []),
        ],
    )
    def test_steps_whose_time_can_be_told_are_reported(self, monkeypatch, overlap, wait, seconds):
        now = 100.0

        def slowly(function, spent):
            def call(*args):
                nonlocal now
                now += spent
                return function(*args)

            return call

        engine = Engine(overlap=overlap)
        reported = []
        engine.core.on_step = lambda plan, took: reported.append((plan.step_id, took))
        monkeypatch.setattr(engine.core, "_clock", lambda: now)
        monkeypatch.setattr(engine, "submit", slowly(engine.submit, 1.0))
        monkeypatch.setattr(Logged, "result", slowly(Logged.result, wait))
        monkeypatch.setattr(engine.scheduler, "commit", slowly(engine.scheduler.commit, 0.25))
        engine.core.add(make_request(max_tokens=3))
        engine.run()
        assert reported == list(enumerate(seconds))
