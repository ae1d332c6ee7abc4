"""Which sequence computes how many tokens in the next step: who goes on, who starts, and who gives way.

Owns the planned cursors, a step's token budget and the order of its rows. Does not know plans in flight or results
(`scheduler`), nor how slots and pages are held (`running`, `memory`).

There are no phases. A sequence is planned while its planned tokens have not caught up with its known tokens, and a
prefill chunk, a decode and the replay after a preemption are the same row with another count.

A sequence whose prefix another computes at this moment is parked: it leaves the queue, so that it holds up nobody, and is
back in its place when the pages are there or the other gives up.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import chain, islice

from jaxserve.host.finding import Found
from jaxserve.host.memory import Memory
from jaxserve.host.pace import Pacer
from jaxserve.host.rows import Draft, lacks_one, make_row, pages_soon
from jaxserve.host.running import Running
from jaxserve.host.sizes import ChunkBudget, StepSizes
from jaxserve.plan import RunnerLimits
from jaxserve.request import Sequence


class Planner:
    """Makes drafts of plans. Each must be taken on as a plan: its rows have moved their sequences' planned cursors.

    Args:
        prefill_chunk: tokens of one sequence in a step at most.
        pacer: chooses how many tokens of chunks go into a step beside decodes; None for as many as the limits allow.
        sizes: of steps with chunks.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        running: Running,
        memory: Memory,
        *,
        prefill_chunk: int,
        pacer: Pacer | None,
        sizes: StepSizes,
    ) -> None:
        self._limits = limits
        self._running = running
        self._waiting = running.waiting
        self._memory = memory
        self._prefill_chunk = prefill_chunk
        self._pacer = pacer
        self._sizes = sizes
        self._pages_soon = partial(pages_soon, limits=limits, prefill_chunk=prefill_chunk)

    def draft(self) -> Draft:
        """The rows of the next step; none when there is nothing that can be computed now."""
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
        return draft

    def _new_draft(self) -> Draft:
        decodes = [seq.planned for seq in self._running if lacks_one(seq)]
        budget = ChunkBudget(self._limits.max_step_tokens - len(decodes), 1)
        under_way = [seq for seq in self._running if not lacks_one(seq)]
        if under_way or self._waiting:
            sized = self._sizes.budget(len(decodes), self._wanted(under_way))
            budget = budget if sized is None else budget.within(sized)
            if self._pacer is not None:
                start = max([seq.planned for seq in under_way], default=0)
                budget = budget.within(self._pacer.chunk_budget(len(decodes), sum(decodes) + len(decodes), start))
        return Draft(budget.tokens, tokens_per_row=budget.tokens_per_row)

    def _wanted(self, under_way: list[Sequence]) -> int:
        """Tokens that longer rows could have, as `StepSizes.budget` has them, up to what fills any step. Of those that wait
        as many as there are slots for are counted, with what the cache may turn out to have of them."""
        wanted, most = 0, self._sizes.largest
        num_free = self._limits.max_seqs - len(self._running)
        waiting = islice(self._waiting, num_free) if most and num_free else ()
        for seq in chain(under_way, waiting):
            if wanted >= most:
                break
            left = len(seq.tokens) + seq.in_flight - seq.planned
            wanted += max(min(left, self._prefill_chunk), self._sizes.row_charge) if left else 0
        return wanted

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
            if self._memory.num_free <= promised and not self._yields_to(head):
                break  # it needs a page at least, whatever is found for it
            found = self._memory.find(head)
            if found.computing is not None:
                if draft.num_parked == self._limits.max_seqs:
                    break
                self._running.park(found.computing)
                draft.num_parked += 1
                head = draft.head = self._waiting.peek()
                continue
            needed = self._pages_soon(head) - len(found.nodes) + found.num_idle
            num_preempted = self._running.num_preemptions
            promised -= self._preempt_for(head, promised + needed, draft)
            if self._running.num_preemptions > num_preempted:
                continue  # what was found may have changed
            if not self._running.has_free_slot or draft.budget == 0 or self._memory.num_free < promised + needed:
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
        self._memory.load(seq, found)
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
        if self._memory.num_free + self._memory.num_only_of(victims) < needed - given_up:
            return 0
        given_up = 0
        while victims and (not self._running.has_free_slot or self._memory.num_free < needed - given_up):
            victim = victims.pop()
            given_up += self._pages_soon(victim)
            draft.budget += lacks_one(victim)
            self._running.preempt(victim)
        return given_up
