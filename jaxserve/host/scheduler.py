"""Which sequence computes how many tokens in the next step, and what a step's result means for each.

Owns live sequences, their slots and block tables, and both cursors of each. Does not know arrays, text, time or threads.

There are no phases. A sequence is planned while its planned tokens have not caught up with its known tokens, and a
prefill chunk, a decode and the replay after a preemption are the same row with another count.

Several plans may be in flight: submitted and not yet committed. The invariant that makes this safe is that *steps run
on the device in the order of their plans*. So a sequence that finishes, is aborted or is preempted gives back its pages
and its slot at once, although a submitted step may still write to them: whoever gets them is in a later plan, which
writes after that. Two rules keep it true. A plan never gives pages away that a row of the same plan holds: only
sequences after the requester in order of importance are preempted, and rows are made in that order. And a row that
outlived its sequence's hold is not counted when its step is committed: `finish_reason` is set, or `slot` is None,
which it stays while any row is in flight.
"""

from __future__ import annotations

import bisect
import math
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.host import integrity
from jaxserve.host.admission import validate
from jaxserve.host.fair import deadline_order
from jaxserve.host.heap import SequenceHeap
from jaxserve.host.pages import PagePool
from jaxserve.host.rows import importance, make_row, new_sequence, reason_to_finish
from jaxserve.host.waiting import WaitingQueue
from jaxserve.plan import PlanRow, RunnerLimits, StepPlan, StepResult
from jaxserve.request import FinishReason, Request, Sequence, TokenEvent, TokenLogprobs


@dataclass(slots=True)
class _Draft:
    """A plan in the making.

    Attributes:
        budget: tokens that are left for chunks. A decode's token was set aside for every running sequence that lacks one.
        head: the first that waits; None if nothing does or once it is blocked.
        blocked: whether the first that waits cannot be admitted in this plan; nobody overtakes it.
    """

    budget: int
    head: Sequence | None = None
    blocked: bool = False
    rows: list[PlanRow] = field(default_factory=list)
    seqs: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Continuous batching by token budget over paged KV. Not thread-safe: one thread calls everything.

    Every plan that `plan` returns must be submitted, and committed in the same order; or all of them given up with
    `fail_in_flight`. `plan` and `commit` cost O(rows), whatever waits or has finished.

    Args:
        prefill_chunk: tokens of one sequence in a step at most.
        eos_token_ids: ids that end every sequence which does not ignore them.
        seed: of the generator that draws seeds for requests without one; None for one that the system seeds.
        clock: seconds, on which requests' deadlines are.

    Raises:
        ConfigError: `limits` or `prefill_chunk` cannot make progress.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        *,
        prefill_chunk: int,
        eos_token_ids: tuple[int, ...] = (),
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk must be at least 1, found {prefill_chunk}")
        if limits.max_step_tokens < limits.max_seqs:
            raise ConfigError(
                f"max_step_tokens ({limits.max_step_tokens}) must be at least max_seqs ({limits.max_seqs}), "
                "so that every running sequence can decode in a step"
            )
        self._limits = limits
        self._prefill_chunk = prefill_chunk
        self._eos_token_ids = eos_token_ids
        self._random = random.Random(seed)
        self._clock = clock
        self._pool = PagePool(limits.num_pages)
        self._free_slots = list(range(limits.max_seqs - 1, -1, -1))
        self._live: dict[str, Sequence] = {}
        self._running: list[Sequence] = []  # the most important first
        self._waiting = WaitingQueue()
        self._expiring = SequenceHeap(deadline_order)  # those with a deadline
        self._in_flight: deque[tuple[StepPlan, list[Sequence]]] = deque()
        self._next_seq_id = 0
        self._next_step_id = 0
        self.num_preemptions = 0

    @property
    def num_live(self) -> int:
        """Requests that have not finished."""
        return len(self._live)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold nothing, new or preempted."""
        return len(self._waiting)

    @property
    def num_free_pages(self) -> int:
        return self._pool.num_free

    # Requests come and go.

    def add(self, request: Request) -> Sequence:
        """Queue a request.

        Raises:
            InvalidRequest: it can never be served, or its id is live.
        """
        validate(request, self._limits)
        if request.request_id in self._live:
            raise InvalidRequest(f"request_id {request.request_id!r} is live already; ids must be unique", param="request_id")
        drawn_seed = self._random.getrandbits(64) if request.params.seed is None else request.params.seed
        seq = new_sequence(request, self._next_seq_id, self._limits, self._eos_token_ids, seed=drawn_seed)
        self._next_seq_id += 1
        self._live[request.request_id] = seq
        self._waiting.push(seq)
        if request.deadline is not None:
            self._expiring.push(seq)
        return seq

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request now; its last event, or None when no such request is live."""
        seq = self._live.get(request_id)
        return None if seq is None else self._end(seq, FinishReason.ABORT)

    def expire(self) -> list[TokenEvent]:
        """End every request whose deadline has come, waiting or running, with TIMEOUT; their last events."""
        events = []
        while (seq := self._expiring.peek()) is not None and deadline_order(seq)[0] <= self._clock():
            events.append(self._end(seq, FinishReason.TIMEOUT))
        return events

    def fail_in_flight(self) -> list[TokenEvent]:
        """Give up every plan in flight, of which nothing is known any more, nor of anything that the device held.

        Sequences with a row in flight end with ERROR; others that hold pages are preempted.
        """
        events = [
            self._end(seq, FinishReason.ERROR)
            for _, seqs in self._in_flight
            for seq in seqs
            if seq.finish_reason is None  # an earlier plan's row may have ended it
        ]
        self._in_flight.clear()
        while self._running:
            self._preempt(self._running[-1])
        return events

    def fail_all(self) -> list[TokenEvent]:
        """End every request with ERROR, and give up every plan in flight."""
        self._in_flight.clear()
        return [self._end(seq, FinishReason.ERROR) for seq in list(self._live.values())]

    def _end(self, seq: Sequence, reason: FinishReason) -> TokenEvent:
        self._finish(seq, reason)
        return TokenEvent(seq.request.request_id, (), (), reason, seq.num_prompt, seq.num_output)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        seq.finish_reason = reason
        del self._live[seq.request.request_id]
        if seq.request.deadline is not None:
            self._expiring.discard(seq)
        if seq.slot is None:
            self._waiting.discard(seq)
        else:
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        """Take slot and pages from a running sequence."""
        assert seq.slot is not None
        del self._running[bisect.bisect_left(self._running, importance(seq), key=importance)]
        self._free_slots.append(seq.slot)
        seq.slot = None
        self._pool.release(seq.pages)
        seq.pages = []

    def _preempt(self, seq: Sequence) -> None:
        self._release(seq)
        seq.planned = seq.computed = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.push(seq)

    # A step begins.

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can be planned before a plan in flight is committed or a request added."""
        draft = _Draft(self._limits.max_step_tokens - self._count_decodes())
        running = self._running
        draft.head = self._waiting.peek() if running else None
        index = 0
        while index < len(running):  # preemption shortens it from the end
            if draft.head is not None:
                index += self._admit_before(running[index].request.priority, draft)
            if index < len(running) and self._plan_running(running[index], draft):
                index += 1
        if not draft.blocked:
            draft.head = self._waiting.peek()
            self._admit_before(math.inf, draft)
        if not draft.rows:
            return None
        plan = StepPlan(self._next_step_id, tuple(draft.rows))
        self._next_step_id += 1
        self._in_flight.append((plan, draft.seqs))
        return plan

    def _plan_running(self, seq: Sequence, draft: _Draft) -> bool:
        """Add a row for a running sequence if it needs and gets one; False if it was preempted for lack of pages."""
        count = len(seq.tokens) + seq.in_flight - seq.planned
        if count == 1:
            if seq.planned == seq.max_positions:  # its last token is in flight
                return True
        else:
            count = min(count, self._prefill_chunk, draft.budget)
            if count == 0:
                return True
            draft.budget -= count
        if not self._grow(seq, seq.planned + count):
            return False
        self._add_row(seq, count, draft, fresh=False)
        return True

    def _add_row(self, seq: Sequence, count: int, draft: _Draft, *, fresh: bool) -> None:
        row = make_row(seq, count, fresh=fresh)
        draft.rows.append(row)
        draft.seqs.append(seq)
        uncharged = seq.planned - max(row.start, seq.charged)
        if uncharged > 0:  # a replay after a preemption is free
            self._waiting.charge(seq, uncharged)
            seq.charged = seq.planned

    def _count_decodes(self) -> int:
        """Running sequences that lack one token: their share of the budget comes before that of any chunk."""
        return sum([len(seq.tokens) + seq.in_flight - seq.planned == 1 for seq in self._running])

    @staticmethod
    def _lacks_one(seq: Sequence) -> bool:
        return len(seq.tokens) + seq.in_flight - seq.planned == 1

    def _grow(self, seq: Sequence, num_positions: int) -> bool:
        """Make the block table cover `num_positions`, preempting the least important; False if `seq` itself was."""
        missing = -(-num_positions // self._limits.page_size) - len(seq.pages)
        if missing <= 0:
            return True
        while self._pool.num_free < missing:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        seq.pages += self._pool.allocate(missing)
        return True

    def _admit_before(self, priority: float, draft: _Draft) -> int:
        """Admit those that wait at more urgent priorities than `priority`, strictly in order; how many they were.

        While there is budget, a slot, and pages. Those that run at less urgent priorities than one that waits make room
        for it, and they have no row in this plan yet: rows are made in order of importance. Of others none is preempted.

        Pages must suffice for all of a sequence's known tokens and one more page, after what those that run need for
        the same: so that what is admitted is not preempted at once, before it has repaid its prefill. This also keeps
        out what this plan preempted: it wants at least what it held, and of that a more important one took a part.
        """
        head = draft.head
        if head is None or head.request.priority >= priority:
            return 0
        num_admitted = 0
        promised = -1  # the sum is worth its while only if there may be room
        while head is not None and head.request.priority < priority:
            # A preempted sequence with a row in flight is not ready, and nobody overtakes it.
            if head.rows_in_flight or not (self._free_slots or self._yields_to(head)):
                break
            if promised < 0:
                promised = sum([self._pages_soon(running) for running in self._running])
            promised -= self._preempt_for(head, promised, draft)
            if not self._free_slots or draft.budget == 0 or self._pool.num_free < promised + self._pages_soon(head):
                break
            self._waiting.pop()
            count = self._start(head, draft)
            promised += self._pages_soon(head)
            self._add_row(head, count, draft, fresh=True)
            num_admitted += 1
            head = draft.head = self._waiting.peek()
        draft.blocked = head is not None and head.request.priority < priority
        if draft.blocked:
            draft.head = None
        return num_admitted

    def _start(self, seq: Sequence, draft: _Draft) -> int:
        """Give `seq`, which waited, a slot, and pages for as many tokens as its first row has."""
        seq.slot = self._free_slots.pop()
        bisect.insort(self._running, seq, key=importance)
        count = min(len(seq.tokens), self._prefill_chunk, draft.budget)
        draft.budget -= count
        self._grow(seq, count)
        return count

    def _yields_to(self, seq: Sequence) -> bool:
        """Whether one that runs is less urgent than `seq`."""
        return bool(self._running) and self._running[-1].request.priority > seq.request.priority

    def _preempt_for(self, seq: Sequence, promised: int, draft: _Draft) -> int:
        """Preempt less urgent ones until `seq` has a slot and pages, if all of them are enough; the promise they give up."""
        if not self._yields_to(seq) or not (draft.budget or self._lacks_one(self._running[-1])):
            return 0
        first = bisect.bisect_right(self._running, seq.request.priority, key=lambda running: running.request.priority)
        victims = self._running[first:]
        needed = promised + self._pages_soon(seq)
        given_up = sum([self._pages_soon(victim) for victim in victims])
        if self._pool.num_free + sum([len(victim.pages) for victim in victims]) < needed - given_up:
            return 0
        given_up = 0
        while victims and (not self._free_slots or self._pool.num_free < needed - given_up):
            victim = victims.pop()
            given_up += self._pages_soon(victim)
            draft.budget += self._lacks_one(victim)
            self._preempt(victim)
        return given_up

    def _pages_soon(self, seq: Sequence) -> int:
        """Pages that `seq` lacks for its known tokens and a page of further ones."""
        size = self._limits.page_size
        num_positions = min(len(seq.tokens) + seq.in_flight + size, seq.max_positions)
        return -(-num_positions // size) - len(seq.pages)

    # A step ends.

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take in the result of the oldest plan in flight; one event for each sequence that got a token."""
        oldest, seqs = self._in_flight.popleft()
        assert plan is oldest, f"step {plan.step_id} is committed, step {oldest.step_id} is the oldest in flight"
        assert result.step_id == plan.step_id, f"the result of step {result.step_id} is not one of step {plan.step_id}"
        events = []
        for seq, row, tokens, logprobs in zip(seqs, plan.rows, result.tokens, result.logprobs, strict=True):
            seq.rows_in_flight -= 1
            if seq.finish_reason is not None:
                continue
            if seq.slot is not None:  # else it was preempted, and its KV is gone
                seq.computed += row.count
            if row.sample:
                seq.in_flight -= 1
                events.append(self._commit_token(seq, tokens[0], logprobs))
        return events

    def _commit_token(self, seq: Sequence, token: int, logprobs: tuple[TokenLogprobs, ...]) -> TokenEvent:
        seq.tokens.append(token)
        reason = reason_to_finish(seq)
        if reason is not None:
            self._finish(seq, reason)
        return TokenEvent(seq.request.request_id, (token,), logprobs, reason, seq.num_prompt, seq.num_output)

    def check_integrity(self) -> None:
        """Assert everything that holds between any two calls. O(everything): for tests and idle moments."""
        self._waiting.check_integrity()
        self._expiring.check_integrity()
        self._pool.check_integrity(seq.pages for seq in self._running)
        slots = self._free_slots + [seq.slot for seq in self._running if seq.slot is not None]
        assert sorted(slots) == list(range(self._limits.max_seqs)), f"slots are not each free or held once: {slots}"
        integrity.check_everyone_is_somewhere(self._live.values(), self._running, list(self._waiting))
        integrity.check_running(self._running, self._limits.page_size)
        integrity.check_waiting(self._waiting)
        integrity.check_in_flight(self._live.values(), self._in_flight)
