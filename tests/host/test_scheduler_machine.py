"""Random traffic against the scheduler, with a fake runner that refuses every wrong plan and an oracle for every output."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.device.buckets import enumerate_buckets
from jaxserve.errors import InvalidRequest
from jaxserve.host.scheduler import Scheduler
from jaxserve.host.sizes import NO_SIZES, StepSizes
from jaxserve.host.tier import Pays
from jaxserve.plan import PlanRow, RunnerLimits
from jaxserve.request import FinishReason, Request, SamplingParams, Sequence, TokenEvent
from tests.fakes import expected_output, fake_hidden, fake_logprobs, fake_prompt_logprobs
from tests.host.driver import Driver

EOS_IDS = (0, 3)

limits_strategy = st.builds(
    lambda page_size, num_pages, max_seqs, spare, context_percent, vocab_size: RunnerLimits(
        num_pages=num_pages,
        page_size=page_size,
        max_seqs=max_seqs,
        max_step_tokens=max_seqs + spare,
        max_context=2 + num_pages * page_size * context_percent // 100,
        vocab_size=vocab_size,
    ),
    page_size=st.sampled_from([1, 2, 3, 5]),
    num_pages=st.sampled_from([12, 20, 8, 4, 1]),
    max_seqs=st.sampled_from([4, 6, 3, 2, 1]),
    spare=st.integers(0, 12),
    context_percent=st.sampled_from([100, 60, 30, 120]),
    vocab_size=st.sampled_from([1000, 30, 8]),
)

request_ids = st.integers(0, 9).map(str)

# Lengths are in percent of the context, and sometimes too long; 0 is 1 token.
percent_strategy = st.sampled_from([0, 5, 10, 20, 40, 60, 90, 110])

NO_OUTPUT = -1
"""In place of a length of the output: the request ends after its prompt."""

params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.none() | st.sampled_from([-(2**63), -1, 0, 5, 2**64 - 1]),
    stop_token_ids=st.sampled_from([(), (), (5,), (1, 6)]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, 0, 2]),
    prompt_logprobs=st.sampled_from([None, None, None, 0, 2]),
)


text_strategy = st.tuples(st.integers(0, 1), st.sampled_from([100, 100, 70, 40]), st.sampled_from(["", "", "", "salt"]))
"""Which text a prompt is of, percent of it after which a request goes its own way, and its salt."""


def always(start: int, num_pages: int, num_tokens: int) -> bool:
    return True


def never(start: int, num_pages: int, num_tokens: int) -> bool:
    return False


def only_long(start: int, num_pages: int, num_tokens: int) -> bool:
    """As on a machine where a load costs as much as two pages' tokens at once."""
    return num_pages > 2


@dataclass
class Tracked:
    """One accepted request, and what came of it."""

    seq: Sequence
    events: list[TokenEvent] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return bool(self.events) and self.events[-1].finish_reason is not None


def importance(seq: Sequence) -> tuple[int, float, int]:
    """Of one tenant's: lower priority, then the earlier turn, then those that never ran by arrival."""
    return seq.request.priority, math.inf if seq.turn < 0 else seq.turn, seq.seq_id


def first_page_seen(position: int, limits: RunnerLimits) -> int:
    """Of all pages the first with a position that the token at `position` sees."""
    seen = range(position + 1) if limits.window is None else range(max(0, position - limits.window + 1), position + 1)
    return seen[0] // limits.page_size


def most_pages_seen(num_positions: int, limits: RunnerLimits) -> int:
    """Pages that the hungriest row of so many positions sees and writes."""
    if limits.window is None:
        return -(-num_positions // limits.page_size)
    ends = ((start, min(start + limits.max_step_tokens, num_positions)) for start in range(num_positions))
    return max((end - 1) // limits.page_size - first_page_seen(start, limits) + 1 for start, end in ends)


@dataclass
class CachedPrefixes:
    """The full pages that plans have computed so far, each by all tokens up to its end: the plainest record."""

    page_size: int
    enabled: bool
    dropped: bool = False
    pages: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)

    def add(self, seq: Sequence) -> None:
        """Take note of what plans so far compute for `seq`, as far as its tokens are known."""
        for end in range(self.page_size, min(seq.planned, len(seq.tokens)) + 1, self.page_size):
            self.pages.add((seq.request.cache_salt, tuple(seq.tokens[:end])))

    def num_pages(self, seq: Sequence) -> int:
        """Leading pages of `seq` that are there."""
        size, salt = self.page_size, seq.request.cache_salt
        count = 0
        while (
            self.enabled
            and (count + 1) * size <= seq.num_skippable
            and (salt, tuple(seq.tokens[: (count + 1) * size])) in self.pages
        ):
            count += 1
        return count


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, aborts, plans, commits and device failures. Ids are few, so they are soon used again."""

    @initialize(
        limits=limits_strategy,
        prefill_chunk=st.integers(1, 12),
        max_in_flight=st.integers(1, 3),
        eos_probability=st.sampled_from([0.0, 0.02, 0.2]),
        prefixes=st.booleans(),
        host_pages=st.sampled_from([0, 0, 1, 3, 8, 1000]),
        pays=st.sampled_from([always, always, never, only_long]),
        sized=st.booleans(),
    )
    def start(
        self,
        limits: RunnerLimits,
        prefill_chunk: int,
        max_in_flight: int,
        eos_probability: float,
        prefixes: bool,
        host_pages: int,
        pays: Pays,
        sized: bool,
    ) -> None:
        limits, prefixes = self.choose(dataclasses.replace(limits, host_pages=host_pages), prefixes)
        self.pays = pays
        self.prefill_chunk = prefill_chunk
        self.max_in_flight = max_in_flight
        self.driver = Driver(
            limits,
            prefill_chunk=prefill_chunk,
            eos_token_ids=EOS_IDS,
            prefixes=prefixes,
            sizes=StepSizes(enumerate_buckets(limits), fixed_places=3) if sized else NO_SIZES,
            pays=pays,
            next_token=None,
            eos_probability=eos_probability,
        )
        self.cached = CachedPrefixes(limits.page_size, prefixes)
        self.live: dict[str, Tracked] = {}
        self.finished: list[Tracked] = []

    def choose(self, limits: RunnerLimits, prefixes: bool) -> tuple[RunnerLimits, bool]:
        """What a narrower machine makes of what was drawn."""
        return limits, prefixes

    @property
    def scheduler(self) -> Scheduler:
        return self.driver.scheduler

    @rule(
        request_id=request_ids,
        prompt_percent=percent_strategy,
        output_percent=st.none() | percent_strategy | st.just(NO_OUTPUT),
        embed=st.booleans(),
        min_percent=st.sampled_from([0, 0, 0, 50, 100]),
        params=params_strategy,
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        text=text_strategy,
        tenant=st.sampled_from(["", "", "a", "b"]),
        seconds=st.sampled_from([None, None, None, 2, 5, 30]),
    )
    def add(self, **arguments: Any) -> None:
        self.add_request(**arguments)

    def add_request(
        self,
        request_id: str,
        prompt_percent: int,
        output_percent: int | None,
        min_percent: int,
        params: SamplingParams,
        priority: int,
        text: tuple[int, int, str],
        tenant: str = "",
        seconds: int | None = None,
        embed: bool = False,
    ) -> None:
        limits = self.driver.limits
        num_prompt = max(1, limits.max_context * prompt_percent // 100)
        max_tokens = None if output_percent is None else max(1, limits.max_context * output_percent // 100)
        if output_percent == NO_OUTPUT:
            max_tokens = min_percent = 0
        params = dataclasses.replace(params, max_tokens=max_tokens, min_tokens=(max_tokens or 2) * min_percent // 100)
        first, parting_percent, salt = text
        parting = num_prompt * parting_percent // 100
        prompt = tuple((first + i * i + (i >= parting) * int(request_id)) % 8 for i in range(num_prompt))
        request = Request(
            request_id=request_id,
            prompt=prompt,
            params=params,
            priority=priority,
            cache_salt=salt,
            tenant=tenant,
            weight=3.0 if tenant == "b" else 1.0,
            deadline=None if seconds is None else self.driver.now + seconds,
            embed=embed and max_tokens == 0,
        )
        needed = num_prompt + max(1 if max_tokens is None else max_tokens, params.min_tokens)
        num_positions = max(num_prompt, needed - 1)
        fits = needed <= limits.max_context and most_pages_seen(num_positions, limits) <= limits.num_pages
        if fits and request_id not in self.live:
            self.live[request_id] = Tracked(self.scheduler.add(request))
        else:
            with pytest.raises(InvalidRequest):
                self.scheduler.add(request)

    @rule(
        count=st.integers(2, 6),
        prompt_percent=st.sampled_from([5, 10, 20, 40]),
        output_percent=st.sampled_from([60, 40, 20]),
        params=params_strategy,
        priorities=st.sampled_from([(0,), (1, 0), (1, -1, 0)]),
        text=text_strategy,
    )
    def add_several(
        self,
        count: int,
        prompt_percent: int,
        output_percent: int,
        params: SamplingParams,
        priorities: tuple[int, ...],
        text: tuple[int, int, str],
    ) -> None:
        """Alike but for priorities and what follows their common prefix, and long enough to fill the pool together."""
        free_ids = [str(i) for i in range(10) if str(i) not in self.live]
        for request_id, priority in zip(free_ids[:count], itertools.cycle(priorities), strict=False):
            self.add_request(request_id, prompt_percent, output_percent, 0, params, priority, text)

    @rule(request_id=request_ids)
    def abort(self, request_id: str) -> None:
        event = self.scheduler.abort(request_id)
        assert (event is not None) == (request_id in self.live)
        if event is not None:
            assert event.finish_reason is FinishReason.ABORT
            self.take([event])

    @rule(seconds=st.sampled_from([0, 1, 3]))
    def expire(self, seconds: int) -> None:
        now = self.driver.now + seconds
        deadlines = {i: tracked.seq.request.deadline for i, tracked in self.live.items()}
        expected = {i for i, deadline in deadlines.items() if deadline is not None and deadline <= now}
        events = self.driver.expire(now)
        assert {event.request_id for event in events} == expected
        assert all(event.finish_reason is FinishReason.TIMEOUT for event in events)
        self.take(events)

    @rule(steps=st.integers(1, 12))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.advance()

    @precondition(lambda self: len(self.driver.in_flight) < self.max_in_flight)
    @rule()
    def plan(self) -> None:
        self.plan_checked()

    def advance(self) -> None:
        """Plan while the device has room, then commit: what an engine does."""
        planned = len(self.driver.in_flight) < self.max_in_flight and self.plan_checked()
        if self.driver.in_flight and (len(self.driver.in_flight) == self.max_in_flight or not planned):
            self.commit()

    def plan_checked(self) -> bool:
        """Plan and submit; whether there was something to plan."""
        running_before = [t.seq for t in self.live.values() if t.seq.slot is not None]
        unfinished = [seq for seq in running_before if seq.num_output + seq.in_flight < max(1, seq.max_output)]
        decoding = {seq for seq in unfinished if seq.num_tokens - seq.planned == 1}
        preempted_before = {t.seq.seq_id: t.seq.num_preemptions for t in self.live.values()}
        pages_before = {seq.seq_id: len(seq.pages) for seq in running_before}
        never_ran = [t.seq for t in self.live.values() if t.seq.turn < 0]
        parked_before = set(self.scheduler._running.parked)
        for tracked in self.live.values():
            self.cached.add(tracked.seq)
        rows = list(self.driver.plan().values())

        seqs = {t.seq.seq_id: t.seq for t in self.live.values()}
        running = [seq for seq in seqs.values() if seq.slot is not None]
        parked = (
            parked_before | self.scheduler._running.parked | {seq for seq in never_ran if seq.turn >= 0 and seq.slot is None}
        )
        waiting = [seq for seq in seqs.values() if seq.slot is None and seq not in parked]
        victims = [seq for seq in seqs.values() if seq.num_preemptions > preempted_before[seq.seq_id]]
        self.check_rows(rows, seqs)
        fresh = [seqs[row.seq_id] for row in rows if row.fresh]
        if victims:
            self.check_victims(victims, running, fresh, pages_before)
        assert not any(seq in victims for seq in fresh), "a sequence was admitted in the step that preempts it"
        if fresh and waiting:
            assert max(map(importance, fresh)) < min(map(importance, waiting)), "one that waits was overtaken"
        planned = {row.seq_id for row in rows}
        # Decodes always have their token; whose chunk found no room is less important than one whose chunk did.
        left_out = [seq for seq in unfinished if seq.seq_id not in planned and seq not in victims]
        assert not decoding & set(left_out), "a running sequence got no row for its next token"
        chunks = [importance(seqs[row.seq_id]) for row in rows if seqs[row.seq_id] not in decoding]
        assert not left_out or min(chunks) < min(map(importance, left_out)), "a running sequence got no row"
        if not rows and not self.driver.in_flight:
            assert not self.live, "nothing is in flight and nothing was planned, yet requests live: they are stuck"
        return bool(rows)

    def check_rows(self, rows: list[PlanRow], seqs: dict[int, Sequence]) -> None:
        size = self.driver.limits.page_size
        for row in rows:
            assert row.count <= self.prefill_chunk
            first, num_pages = first_page_seen(row.start, self.driver.limits), -(-(row.start + row.count) // size)
            assert row.first_page == first, "a page that no layer sees was kept, or one that a layer sees was not"
            assert len(row.pages) == num_pages - first, "not as many pages as the row needs"
            assert row.seq_id in seqs, "a finished sequence was planned"
            if row.fresh:
                self.check_start(row, seqs[row.seq_id])
            else:
                assert row.start > 0

    def check_start(self, row: PlanRow, seq: Sequence) -> None:
        """It starts after the pages that earlier plans computed, whoever for; all of them, if none was lost."""
        size = self.driver.limits.page_size
        expected = self.cached.num_pages(seq)
        assert row.start // size <= expected, "a page was shared that nobody has computed"
        tier = self.driver.tier
        none_lost = tier.num_lost == 0 and self.pays is always if tier is not None else False
        if (self.scheduler.memory.num_evicted == 0 or none_lost) and not self.cached.dropped:
            assert row.start // size == expected, "a page that is there was not found"

    def check_victims(
        self, victims: list[Sequence], running: list[Sequence], fresh: list[Sequence], pages_before: dict[int, int]
    ) -> None:
        if running:
            assert max(map(importance, running)) < min(map(importance, victims)), "a less important one kept its pages"
        if fresh and min(map(importance, fresh))[0] < max(map(importance, victims))[0]:
            return  # it made room for a more urgent one's slot, or all of its prompt
        # Had the last victim kept its pages, the requester (another, or the victim itself) would have lacked some.
        freed_last = pages_before[min(victims, key=importance).seq_id]
        most_wanted = self.prefill_chunk // self.driver.limits.page_size + 2
        assert self.scheduler.num_free_pages - freed_last < most_wanted, "more were preempted than needed"

    @rule(chance=st.integers(0, 4))
    def drop_cache(self, chance: int) -> None:
        if chance:
            return
        memory = self.scheduler.memory
        num_free, num_cached = memory.num_free, memory.num_cached
        num_on_host = len(memory.tier) if memory.tier else 0
        assert memory.drop_idle() == num_cached + num_on_host
        assert (memory.num_free, memory.num_cached) == (num_free, 0)
        assert not memory.tier
        self.cached.dropped |= num_cached + num_on_host > 0

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def commit(self) -> None:
        self.take(self.driver.commit())

    @precondition(lambda self: self.driver.in_flight)
    @rule(chance=st.integers(0, 9))
    def fail(self, chance: int) -> None:
        if chance:
            return
        in_flight = {row.seq_id for plan, _ in self.driver.in_flight for row in plan.rows}
        self.driver.in_flight.clear()
        self.driver.runner.forget()
        expected = {i for i, tracked in self.live.items() if tracked.seq.seq_id in in_flight}
        events = self.scheduler.fail_in_flight()
        assert {event.request_id for event in events} == expected
        assert all(event.finish_reason is FinishReason.ERROR for event in events)
        self.take(events)
        self.cached.pages.clear()
        assert not self.scheduler.memory.tier
        assert self.scheduler.num_free_pages == self.driver.limits.num_pages

    def take(self, events: list[TokenEvent]) -> None:
        for event in events:
            tracked = self.live[event.request_id]
            tracked.events.append(event)
            if event.finish_reason is not None:
                self.finished.append(self.live.pop(event.request_id))
                self.cached.add(tracked.seq)
            check_events(tracked, self.driver)

    @invariant()
    def holds_together(self) -> None:
        if hasattr(self, "live"):
            self.scheduler.check_integrity()
            assert self.scheduler.num_live == len(self.live)
            assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)

    def teardown(self) -> None:
        """Arrivals stop: everything finishes, soon, and everything comes back.

        The most important running sequence gets a row in every plan and is preempted only when a more important one
        was admitted. After that it waits behind every more important one, so this happens to it once at most: the
        plans that are needed are at most twice the positions of all sequences, and one for each that waits for a
        commit.
        """
        if not hasattr(self, "live"):
            return
        plans = 2 * sum(t.seq.max_positions for t in self.live.values()) + len(self.live) + self.max_in_flight
        for _ in range(plans):
            if not self.live:
                break
            self.advance()
        assert not self.live, f"still live: {[t.seq for t in self.live.values()]}"
        while self.driver.in_flight:
            assert self.driver.commit() == []
        assert self.scheduler.num_free_pages == self.driver.limits.num_pages
        for tracked in self.finished:
            check_finished(tracked, self.driver)


def oracle(tracked: Tracked, driver: Driver) -> tuple[tuple[int, ...], FinishReason]:
    request = tracked.seq.request
    params = dataclasses.replace(request.params, seed=tracked.seq.seed)
    return expected_output(
        dataclasses.replace(request, params=params), driver.limits, next_token=driver.runner.next_token, eos_token_ids=EOS_IDS
    )


def check_events(tracked: Tracked, driver: Driver) -> None:
    """What the newest event says agrees with those before it and with what was asked."""
    event = tracked.events[-1]
    request = tracked.seq.request
    num_logprobs = request.params.logprobs
    assert event.num_prompt == len(tracked.seq.request.prompt)
    assert event.num_output == sum(len(e.tokens) for e in tracked.events)
    expected = () if num_logprobs is None else tuple(all_logprobs(event, num_logprobs, driver.limits.vocab_size))
    assert event.logprobs == expected
    done = bool(event.tokens) or event.finish_reason is FinishReason.LENGTH
    first = len(tracked.events) == 1 and done
    num_scores = request.params.prompt_logprobs
    scores = fake_prompt_logprobs(request.prompt, num_scores or 0, driver.limits.vocab_size)
    assert event.prompt_logprobs == (scores if first and num_scores is not None else ())
    assert event.hidden == (fake_hidden(request.prompt) if first and request.embed else ())
    assert all(earlier.finish_reason is None for earlier in tracked.events[:-1])


def all_logprobs(event: TokenEvent, top: int, vocab_size: int) -> Iterator[object]:
    return (fake_logprobs(token, top, vocab_size) for token in event.tokens)


def check_finished(tracked: Tracked, driver: Driver) -> None:
    output = tuple(token for event in tracked.events for token in event.tokens)
    expected, reason = oracle(tracked, driver)
    found = tracked.events[-1].finish_reason
    if found in (FinishReason.ABORT, FinishReason.ERROR, FinishReason.TIMEOUT):
        assert output == expected[: len(output)]
        assert len(output) < max(1, len(expected)), "it had finished already"
    else:
        assert (output, found) == (expected, reason)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(stateful_step_count=100)
