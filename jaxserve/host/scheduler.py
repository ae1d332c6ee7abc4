"""From requests to steps and back: who is there, which plans are in flight, and what a step's result means for each.

Owns live sequences and their computed cursors. Does not know what goes into a step (`planning`), slots (`running`), which
pages they share (`memory`), arrays, text, time or threads.

Several plans may be in flight: submitted and not yet committed. The invariant that makes this safe is that *steps run
on the device in the order of their plans*. So a sequence that finishes, is aborted or is preempted gives back its pages
and its slot at once, although a submitted step may still write to them: whoever gets them is in a later plan, which
writes after that. Two rules keep it true. A plan never gives pages away that a row of the same plan holds: only
sequences after the requester in order of importance are preempted, and rows are made in that order. And a row that
outlived its sequence's hold is not counted when its step is committed: `finish_reason` is set, or `slot` is None,
which it stays while any row is in flight.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from jaxserve.errors import InvalidRequest
from jaxserve.host import integrity
from jaxserve.host.admission import validate
from jaxserve.host.fair import deadline_order
from jaxserve.host.heap import SequenceHeap
from jaxserve.host.jump import NO_JUMPS, JumpForward
from jaxserve.host.masks import masks_of
from jaxserve.host.memory import Memory
from jaxserve.host.pace import Pacer
from jaxserve.host.planning import Planner
from jaxserve.host.prefix import PrefixTree
from jaxserve.host.rows import add_scores, check_can_progress, is_known, new_sequence, take_token, with_prompt
from jaxserve.host.running import Running
from jaxserve.host.sizes import NO_SIZES, StepSizes
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
        sizes: of steps with chunks, where a larger one takes longer.

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
        sizes: StepSizes = NO_SIZES,
    ) -> None:
        check_can_progress(limits, prefill_chunk)
        self._limits = self._usable = limits
        self.eos_token_ids = eos_token_ids
        self._random = random.Random(seed)
        self._clock = clock
        self._jump = jump
        self.memory = Memory(limits, prefixes, tier)
        self._live: dict[str, Sequence] = {}
        self._running = Running(limits, self.memory)
        self._waiting = self._running.waiting
        self._planner = Planner(limits, self._running, self.memory, prefill_chunk=prefill_chunk, pacer=pacer, sizes=sizes)
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
        draft = self._planner.draft()
        if not draft.rows:
            return None
        saves, loads = self.memory.take_moves()
        plan = StepPlan(self._next_step_id, tuple(draft.rows), tuple(draft.copies), saves, loads)
        self._next_step_id += 1
        self._in_flight.append((plan, draft.seqs))
        return plan

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
