"""Which sequence computes how many tokens in the next step, and what a step's result means for each.

Owns live sequences and both cursors of each. Does not know slots (`running`), which pages they share (`memory`), arrays,
text, time or threads.

There are no phases. A sequence is planned while its planned tokens have not caught up with its known tokens, and a
prefill chunk, a decode and the replay after a preemption are the same row with another count.

Several plans may be in flight: submitted and not yet committed. The invariant that makes this safe is that *steps run
on the device in the order of their plans*. So a sequence that finishes, is aborted or is preempted gives back its pages
and its slot at once, although a submitted step may still write to them: whoever gets them is in a later plan, which
writes after that. Two rules keep it true. A plan never gives pages away that a row of the same plan holds: only
sequences after the requester in order of importance are preempted, and rows are made in that order. And a row that
outlived its sequence's hold is not counted when its step is committed: `finish_reason` is set, or `slot` is None,
which it stays while any row is in flight.

A sequence whose prefix another computes at this moment is parked: it leaves the queue, so that it holds up nobody, and is
back in its place when the pages are there or the other gives up.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from jaxserve.errors import InvalidRequest
from jaxserve.host import integrity
from jaxserve.host.admission import validate
from jaxserve.host.fair import deadline_order
from jaxserve.host.finding import Found
from jaxserve.host.heap import SequenceHeap
from jaxserve.host.jump import NO_JUMPS, JumpForward
from jaxserve.host.masks import masks_of
from jaxserve.host.memory import Memory
from jaxserve.host.pace import Pacer
from jaxserve.host.prefix import PrefixTree
from jaxserve.host.rows import (
    Draft,
    add_scores,
    check_can_progress,
    is_known,
    lacks_one,
    make_row,
    new_sequence,
    pages_soon,
    take_token,
    with_prompt,
)
from jaxserve.host.running import Running
from jaxserve.host.tier import HostTier
from jaxserve.plan import Masks, RunnerLimits, StepPlan, StepResult
from jaxserve.request import FinishReason, Request, Sequence, TokenEvent, TokenLogprobs


class Scheduler:
    """Continuous batching by token budget over paged KV. Not thread-safe: one thread calls everything.

    Every plan that `plan` returns must be submitted, and committed in the same order; or all of them given up with
    `fail_in_flight`. `plan` and `commit` cost O(rows), whatever waits or has finished.

    Args:
        prefill_chunk: tokens of one sequence in a step at most.
        eos_token_ids: ids that end every sequence which does not ignore them.
        seed: of the generator that draws seeds for requests without one; None for one that the system seeds.
        clock: seconds, on which requests' deadlines are.
        prefixes: an empty tree to keep and share computed prefixes in; None to share nothing.
        tier: keeps what is evicted from `prefixes`, where the runner's host memory has slots for it; None for nothing.
        jump: chooses who takes forced tokens without sampling them.
        pacer: chooses how many tokens of chunks go into a step beside decodes; None for as many as the limits allow.

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
        prefixes: PrefixTree | None = None,
        tier: HostTier | None = None,
        pacer: Pacer | None = None,
        jump: JumpForward = NO_JUMPS,
    ) -> None:
        check_can_progress(limits, prefill_chunk)
        self._limits = self._usable = limits
        self._prefill_chunk = prefill_chunk
        self._pages_soon = partial(pages_soon, limits=limits, prefill_chunk=prefill_chunk)
        self.eos_token_ids = eos_token_ids
        self._random = random.Random(seed)
        self._clock = clock
        self._pacer = pacer
        self._jump = jump
        self.memory = Memory(limits, prefixes, tier)
        self._live: dict[str, Sequence] = {}
        self._running = Running(limits, self.memory)
        self._waiting = self._running.waiting
        self._expiring = SequenceHeap(deadline_order)  # those with a deadline
        self._in_flight: deque[tuple[StepPlan, list[Sequence]]] = deque()
        self._next_seq_id = self._next_step_id = 0

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
        return self._running.num_waiting

    @property
    def num_preemptions(self) -> int:
        """Times that a sequence lost its pages."""
        return self._running.num_preemptions

    @property
    def num_free_pages(self) -> int:
        """Pages that can be had, those that hold prefixes which nobody uses among them."""
        return self.memory.num_free

    def pin(self, tokens: tuple[int, ...]) -> int:
        """Keep the full pages of a prefix, without a salt, from when they are first computed; how many more those are.

        No request may then need more than the other pages.

        Raises:
            ConfigError: that would be more than half of all pages.
        """
        num_added = self.memory.pin(tokens, "")
        self._usable = replace(self._limits, num_pages=self._limits.num_pages - self.memory.num_pinned)
        return num_added

    # Requests come and go.

    def add(self, request: Request) -> Sequence:
        """Queue a request.

        Raises:
            InvalidRequest: it can never be served, or its id is live.
        """
        validate(request, self._usable)
        if request.request_id in self._live:
            raise InvalidRequest(f"request_id {request.request_id!r} is live already; ids must be unique", param="request_id")
        seed = self._random.getrandbits(64) if request.params.seed is None else request.params.seed
        seq = new_sequence(request, self._next_seq_id, self._usable, self.eos_token_ids, seed=seed)
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
            self._running.preempt(self._running[-1])
        self.memory.clear()
        return events

    def fail_all(self) -> list[TokenEvent]:
        """End every request with ERROR, and give up every plan in flight."""
        self._in_flight.clear()
        events = [self._end(seq, FinishReason.ERROR) for seq in list(self._live.values())]
        self.memory.clear()
        return events

    def _end(self, seq: Sequence, reason: FinishReason) -> TokenEvent:
        self._finish(seq, reason)
        return TokenEvent(seq.request.request_id, (), (), reason, seq.num_prompt, seq.num_output, seq.cached or 0)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        seq.finish_reason = reason
        del self._live[seq.request.request_id]
        if seq.request.deadline is not None:
            self._expiring.discard(seq)
        self._running.remove(seq)

    # A step begins.

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can be planned before a plan in flight is committed or a request added."""
        running = self._running
        running.share_dispatched()
        draft = self._new_draft()
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
        saves, loads = self.memory.take_moves()
        plan = StepPlan(self._next_step_id, tuple(draft.rows), tuple(draft.copies), saves, loads)
        self._next_step_id += 1
        self._in_flight.append((plan, draft.seqs))
        return plan

    def _new_draft(self) -> Draft:
        decodes = [seq.planned for seq in self._running if lacks_one(seq)]
        budget = self._limits.max_step_tokens - len(decodes)
        under_way = [seq.planned for seq in self._running if not lacks_one(seq)]
        if self._pacer is None or not (under_way or self._waiting):
            return Draft(budget)
        paced = self._pacer.chunk_budget(len(decodes), sum(decodes) + len(decodes), max(under_way, default=0))
        return Draft(min(budget, paced.tokens), tokens_per_row=paced.tokens_per_row)

    def _plan_running(self, seq: Sequence, draft: Draft) -> bool:
        """Add a row for a running sequence if it needs and gets one; False if it was preempted for lack of pages."""
        count = len(seq.tokens) + seq.in_flight - seq.planned
        if count == 1:
            if seq.planned == seq.max_positions:  # its last token is in flight
                return True
        else:
            count = min(count, self._prefill_chunk, draft.budget)
            if count == 0:
                return True
            draft.charge(count)
        if not self._running.grow(seq, seq.planned + count):
            return False
        self._add_row(seq, count, draft, fresh=False)
        return True

    def _add_row(self, seq: Sequence, count: int, draft: Draft, *, fresh: bool) -> None:
        row = make_row(seq, count, fresh=fresh)
        draft.rows.append(row)
        draft.seqs.append(seq)
        uncharged = seq.planned - max(row.start, seq.charged)
        if uncharged > 0:  # a replay after a preemption is free
            self._waiting.charge(seq, uncharged)
            seq.charged = seq.planned

    def _admit_before(self, priority: float, draft: Draft) -> int:
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
            if head.rows_in_flight or not (self._running.has_free_slot or self._yields_to(head)):
                break
            if promised < 0:
                promised = sum([self._pages_soon(running) for running in self._running])
            if self.memory.num_free <= promised and not self._yields_to(head):
                break  # it needs a page at least, whatever is found for it
            found = self.memory.find(head)
            if found.computing is not None:
                if draft.num_parked == self._limits.max_seqs:
                    break
                self._running.park(found.computing)
                draft.num_parked += 1
                head = draft.head = self._waiting.peek()
                continue
            needed = self._pages_soon(head) - len(found.nodes) + found.num_idle
            num_preempted = self.num_preemptions
            promised -= self._preempt_for(head, promised + needed, draft)
            if self.num_preemptions > num_preempted:
                continue  # what was found may have changed
            if not self._running.has_free_slot or draft.budget == 0 or self.memory.num_free < promised + needed:
                break
            count = self._start(found, draft)
            promised += self._pages_soon(head)
            self._add_row(head, count, draft, fresh=True)
            num_admitted += 1
            head = draft.head = self._waiting.peek()
        draft.blocked = head is not None and head.request.priority < priority
        if draft.blocked:
            draft.head = None
        return num_admitted

    def _start(self, found: Found, draft: Draft) -> int:
        """Have the first that waits run, with pages for as many tokens as its first row has."""
        seq = self._running.start(found)
        count = min(len(seq.tokens) - seq.planned, self._prefill_chunk, draft.budget)
        draft.charge(count)
        self._running.grow(seq, seq.planned + count)
        self.memory.load(seq, found)
        if found.copied is not None:
            draft.copies.append((found.copied, seq.pages[len(found.nodes)]))
        return count

    def _yields_to(self, seq: Sequence) -> bool:
        """Whether one that runs is less urgent than `seq`."""
        return bool(self._running) and self._running[-1].request.priority > seq.request.priority

    def _preempt_for(self, seq: Sequence, needed: int, draft: Draft) -> int:
        """Preempt less urgent ones until `seq` has a slot and `needed` pages are free, if all of them are enough; the promise
        that they give up."""
        if not self._yields_to(seq) or not (draft.budget or lacks_one(self._running[-1])):
            return 0
        victims = self._running.after(seq.request.priority)
        given_up = sum([self._pages_soon(victim) for victim in victims])
        if self.memory.num_free + self.memory.num_only_of(victims) < needed - given_up:
            return 0
        given_up = 0
        while victims and (not self._running.has_free_slot or self.memory.num_free < needed - given_up):
            victim = victims.pop()
            given_up += self._pages_soon(victim)
            draft.budget += lacks_one(victim)
            self._running.preempt(victim)
        return given_up

    # A step ends.

    def masks(self, plan: StepPlan) -> tuple[Masks, list[TokenEvent]]:
        """What the constrained rows of the oldest plan in flight may sample, now that all before it is committed; and the last
        events of sequences whose constraint cannot say, which end with ERROR."""
        assert plan is self._in_flight[0][0], f"masks of step {plan.step_id} are asked for, which is not the oldest in flight"
        masks, failed = masks_of(plan.rows, self._in_flight[0][1], self._limits.vocab_size)
        return masks, [replace(self._end(seq, FinishReason.ERROR), problem=problem) for seq, problem in failed]

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take in the result of the oldest plan in flight; one event for each sequence that got a token or ended."""
        oldest, seqs = self._in_flight.popleft()
        assert plan is oldest, f"step {plan.step_id} is committed, step {oldest.step_id} is the oldest in flight"
        assert result.step_id == plan.step_id, f"the result of step {result.step_id} is not one of step {plan.step_id}"
        events: dict[Sequence, TokenEvent] = {}
        for seq, row, tokens, logprobs in zip(seqs, plan.rows, result.tokens, result.logprobs, strict=True):
            seq.rows_in_flight -= 1
            if seq.finish_reason is not None:
                continue
            if seq.slot is not None:  # else it was preempted, and its KV is gone
                seq.computed += row.count
            if row.targets:
                add_scores(seq, row, result.scores[seq.seq_id])
            if row.sample and not is_known(seq, row):
                seq.in_flight -= 1
                if seq.max_output:
                    events[seq] = self._commit_token(seq, tokens[0], logprobs)
                else:
                    events[seq] = with_prompt(self._end(seq, FinishReason.LENGTH), seq, result.hidden[seq.seq_id])
        for seq, reason in self._jump.extend(events, len(self._running)):
            self._finish(seq, reason)
        return list(events.values())

    def _commit_token(self, seq: Sequence, token: int, logprobs: tuple[TokenLogprobs, ...]) -> TokenEvent:
        scores = tuple(seq.scores) if seq.scores and not seq.num_output else ()
        reason = take_token(seq, token)
        if reason is not None:
            self._finish(seq, reason)
        request_id, num_prompt = seq.request.request_id, seq.num_prompt
        return TokenEvent(request_id, (token,), logprobs, reason, num_prompt, seq.num_output, seq.cached or 0, scores)

    def check_integrity(self) -> None:
        """Assert everything that holds between any two calls. O(everything): for tests and idle moments."""
        self._running.check_integrity()
        self._expiring.check_integrity()
        waiting = [*self._waiting, *self._running.parked]
        integrity.check_everyone_is_somewhere(self._live.values(), list(self._running), waiting)
        integrity.check_in_flight(self._live.values(), self._in_flight)
