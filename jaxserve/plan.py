"""The bridge: the two values that pass between the towers in a step, and the protocol of what carries them.

`StepPlan` goes to the device, `StepResult` comes back. Standard library only; knows neither requests' text nor arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from jaxserve.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One sequence's part in a step: compute KV for positions `[start, start + count)`.

    A prefill chunk and a decode are the same row with another count. Ids for the leading `len(tokens)` positions come
    from the host; the rest (at most the last one) the device already holds, since it sampled it.

    Attributes:
        slot: the sequence's per-slot device state, `0 <= slot < max_seqs`; no two rows of a plan share one.
        pages: block table covering at least what the row sees and writes: page `first_page` of the sequence and those after,
            up to position `start + count`. The runner reads it within `submit` only.
        sample: whether to sample the token at position `start + count` from the last position's logits.
        num_prompt: prompt tokens in the sequence, from which penalties and `min_tokens` tell output tokens.
        seed: 64 bits; with the position it determines the random draw.
        stop_ids: ids that `min_tokens` forbids (end of sequence and stop tokens).
        fresh: first row since the sequence took this slot; per-slot state is initialised from `params`.
        history: of a fresh row that starts after others' cached tokens, those tokens: ids of positions `[0, start)`.
        targets: the known ids that follow the row's first `len(targets)` positions, if their log probabilities are wanted.
        masked: the row samples, and only among the tokens of a mask that comes later, by `StepHandle.constrain`.
        first_page: pages before those of `pages`, which the sequence has given back: no layer sees them from `start` on.
        local_pages, first_local_page: the same of the pool of local pages, where there is one.
        adapter: slot of the adapter whose weights its tokens are computed with; -1 for the model's own alone.
    """

    seq_id: int
    slot: int
    start: int
    count: int
    tokens: tuple[int, ...]
    pages: list[int]
    sample: bool
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    fresh: bool
    history: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()
    masked: bool = False
    first_page: int = 0
    local_pages: Sequence[int] = ()
    first_local_page: int = 0
    adapter: int = -1


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Rows of one step; at most `max_seqs` rows and `max_step_tokens` tokens.

    Attributes:
        copies: (source, destination) pages, at most `max_seqs`. They are copied whole, in this order, before any row writes.
            The source was written by earlier steps only.
        saves: (page, host slot) pairs; no two share either. The pages, written by earlier steps, are copied out whole before
            anything else of this step.
        loads: (host slot, page) pairs; no two share a page. They are copied back whole after `saves` and `copies` and before
            any row writes; their slots were saved by this step or earlier ones.
    """

    step_id: int
    rows: tuple[PlanRow, ...]
    copies: tuple[tuple[int, int], ...] = ()
    saves: tuple[tuple[int, int], ...] = ()
    loads: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepStats:
    """Seconds spent on one step: packing and dispatching it, and waiting for its result."""

    submit_seconds: float
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step sampled, and what else its rows asked for.

    Attributes:
        tokens: for each row of the plan, in order, the sampled ids: one where `sample` was set, else none.
        logprobs: likewise; empty tuples for rows that did not ask.
        scores: log probabilities of the targets of each row that has any, by `seq_id`.
        hidden: final hidden states at the last positions of rows that sample for requests without output (`max_tokens` is 0),
            by `seq_id`.
    """

    step_id: int
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprobs, ...], ...]
    stats: StepStats
    scores: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    hidden: Mapping[int, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """What a runner can hold: the scheduler plans within it.

    Attributes:
        num_pages: pages in the pool, ids `0 .. num_pages - 1`, all of them usable.
        page_size: tokens per page.
        max_seqs: slots, and rows in a step.
        max_step_tokens: tokens in a step.
        max_context: prompt plus output tokens of one sequence.
        vocab_size: ids `0 .. vocab_size - 1`.
        host_pages: slots for pages in host memory, ids `0 .. host_pages - 1`.
        hidden_size: numbers in a final hidden state.
        window: newest positions that a token sees in any layer, its own among them, at least `MIN_WINDOW`; None where a layer
            sees all.
        local_pages: pages of a second pool, for the layers with a window where others see all; 0 where there is none, and all
            layers have theirs in the first. At least `enough_local_pages`.
        local_window: of the layers that have it, as `window`.
        max_adapters, max_adapter_rank: slots for adapters, and the largest rank that one of them may have.
    """

    num_pages: int
    page_size: int
    max_seqs: int
    max_step_tokens: int
    max_context: int
    vocab_size: int
    host_pages: int = 0
    hidden_size: int = 0
    window: int | None = None
    local_pages: int = 0
    local_window: int | None = None
    max_adapters: int = 0
    max_adapter_rank: int = 0

    @property
    def local(self) -> RunnerLimits | None:
        """Limits of the pool of local pages alone; None where there is none."""
        if not self.local_pages:
            return None
        return replace(self, num_pages=self.local_pages, window=self.local_window, local_pages=0, local_window=None)

    def first_seen_page(self, position: int) -> int:
        """The first page that the token at `position`, or any after it, sees in any layer."""
        return 0 if self.window is None else max(0, position + 1 - self.window) // self.page_size

    def pages_for(self, num_positions: int, row_tokens: int = 0) -> int:
        """Pages that a sequence holds at once, at most, while it computes so many positions.

        Args:
            row_tokens: of it in a step at most; 0 for as many as there are in a step.
        """
        num_pages = -(-num_positions // self.page_size)
        if self.window is None:
            return num_pages
        # A row sees and writes as many positions in a row as this, and the first may be the last of its page.
        num_seen = self.window - 1 + (row_tokens or self.max_step_tokens)
        return min(num_pages, (num_seen - 2) // self.page_size + 2)

    @property
    def max_tokens(self) -> int:
        """Prompt plus output tokens of the longest sequence: what context and pool allow."""
        # The last output token is never an input, so it needs no place in a page.
        if self.pages_for(self.max_context - 1) <= self.num_pages:
            return self.max_context
        return self.num_pages * self.page_size + 1

    @property
    def pool_tokens(self) -> int:
        """Tokens of sequences that the pool holds at once, of the longest ones: with a window more than it has places for."""
        longest = self.pages_for(self.max_context)
        return self.num_pages * max(self.page_size, self.max_context // longest)


MIN_WINDOW = 8
"""Of `RunnerLimits.window`, which may be wider than the layers' windows, not narrower. More than tokens are in flight: so
pages that are given back have always been shared before."""


def enough_local_pages(limits: RunnerLimits, window: int) -> int:
    """Local pages that all sequences which run can hold together, at most; with them the pool is never short.

    A row of `c` tokens sees and writes `window - 1 + c` positions, which lie in `(window - 3 + c) // B + 2` pages at most; the
    rows of a step have `max_step_tokens` tokens together; what a row has left is given back before the next step is planned.
    Nor is it short where there are as many as in the other pool: who holds one here holds one there.
    """
    of_each = (window - 3) // limits.page_size + 3
    return min(limits.num_pages, limits.max_seqs * of_each + limits.max_step_tokens // limits.page_size)


Masks = tuple[bytes | None, ...]
"""For each row of a plan the tokens that it may sample, never none, as `jaxserve.constraint` has masks; or None for a row that
is not masked or whose token nobody will read."""


class StepHandle(Protocol):
    """A dispatched step."""

    def constrain(self, masks: Masks) -> None:
        """Let the plan's masked rows sample, each among the tokens of its mask. Does not wait.

        Called at most once, before `result`, and before any later plan is submitted: that may compute the tokens.
        """
        ...

    def result(self) -> StepResult:
        """Wait for the step and read what it sampled. Called once."""
        ...


class Runner(Protocol):
    """Runs plans on a device, in the order submitted. Not thread-safe: one thread drives it."""

    @property
    def limits(self) -> RunnerLimits: ...

    def submit(self, plan: StepPlan) -> StepHandle:
        """Pack and dispatch `plan` without waiting for it. `plan.rows` is not empty."""
        ...
