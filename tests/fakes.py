"""A deterministic `Runner` without a device, and the slow, obvious oracle for one request alone. No JAX.

`FakeRunner` keeps what a device would keep (per-slot token history, page contents) and refuses every plan that a device
would silently compute garbage from. What it samples is a pure function of the whole token prefix and the seed, so any
dependence of outputs on batching, chunking, overlap or preemption is a bug of the host.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from jaxserve.constraint import is_empty, mask_size, without
from jaxserve.plan import Masks, PlanRow, RunnerLimits, StepPlan, StepResult, StepStats
from jaxserve.request import FinishReason, Request, SamplingParams, TokenLogprobs

NextToken = Callable[[Seq[int], int], int]
"""(all tokens so far, seed; 0 when greedy) -> the next token id."""

FAKE_HIDDEN_SIZE = 8
Sample = tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]
"""Of one row: tokens and their log probabilities."""

UNCHOSEN = -1
"""In place of a token whose mask has not come."""

_MASK = 2**64 - 1
_ROOT = 0x9E3779B97F4A7C15


class PlanViolation(BaseException):
    """A plan that breaks the contract of `jaxserve.plan`.

    Not an `Exception`, so that an engine which survives failing runners cannot swallow it.
    """


class InjectedFailure(RuntimeError):
    """A failure that a test asked for."""


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise PlanViolation(message)


def _mix(state: int, value: int) -> int:
    """One round of splitmix64 over `state` and `value`."""
    z = (state ^ (value + 1) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 30)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def hash_next_token(vocab_size: int, *, eos_token_id: int = 0, eos_probability: float = 0.0) -> NextToken:
    """A `NextToken` that hashes its arguments; it gives `eos_token_id` with about `eos_probability`, else any id."""

    def next_token(tokens: Seq[int], seed: int) -> int:
        state = _mix(_ROOT, seed)
        for token in tokens:
            state = _mix(state, token)
        if (state >> 32) / 2**32 < eos_probability:
            return eos_token_id
        return state % vocab_size

    return next_token


def fake_logprobs(token: int, top: int, vocab_size: int) -> TokenLogprobs:
    """The log probabilities that `FakeRunner` gives with `token`; `top` most likely ones, first `token` itself."""
    own = -0.25 - token % 8
    return TokenLogprobs(own, tuple(((token + i) % vocab_size, own - i) for i in range(min(top, vocab_size))))


def fake_prompt_logprobs(prompt: Seq[int], num_top: int, vocab_size: int) -> tuple[TokenLogprobs, ...]:
    """The log probabilities that `FakeRunner` gives of every token of `prompt` but the first."""
    scores, state = [], _ROOT
    for token, target in pairwise(prompt):
        state = _mix(state, token)
        scores.append(_score(state, target, num_top, vocab_size))
    return tuple(scores)


def _score(state: int, target: int, num_top: int, vocab_size: int) -> TokenLogprobs:
    """Of `target` after tokens that hash to `state`; every other time it is the likeliest, else the id after it is."""
    rank = 1 + _mix(state, target) % 2
    top = tuple(((target + rank - 1 + i) % vocab_size, -0.5 - i) for i in range(min(num_top, vocab_size)))
    return TokenLogprobs(0.5 - rank - (rank - 1) * (state % 64) / 64, top, rank)


def fake_hidden(tokens: Seq[int]) -> tuple[float, ...]:
    """The final hidden state that `FakeRunner` has after `tokens`: `FAKE_HIDDEN_SIZE` numbers from -1 to 1."""
    state = _ROOT
    for token in tokens:
        state = _mix(state, token)
    return tuple((_mix(state, i) % 257 - 128) / 128 for i in range(FAKE_HIDDEN_SIZE))


def choose_token(
    next_token: NextToken,
    tokens: Seq[int],
    *,
    num_prompt: int,
    params: SamplingParams,
    seed: int,
    stop_ids: Collection[int],
    vocab_size: int,
    mask: bytes | None = None,
) -> int:
    """The token after `tokens`: what `next_token` says, or the next id that neither `mask` nor, without one, `min_tokens`
    forbids."""
    token = next_token(tokens, 0 if params.greedy else seed)
    if mask is not None:
        _require(not is_empty(mask), "a mask that allows nothing")
        while not mask[token >> 3] >> (token & 7) & 1:
            token = (token + 1) % vocab_size
    elif len(tokens) - num_prompt < params.min_tokens:
        while token in stop_ids:
            token = (token + 1) % vocab_size
    return token


@dataclass
class _Slot:
    """What the device holds for one sequence. `hashes[i]` stands for the KV of position i: all of `tokens[: i + 1]`."""

    seq_id: int
    params: SamplingParams
    seed: int
    num_prompt: int
    stop_ids: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    target: int | None = None  # what the last row said would be the next token


@dataclass
class _Table:
    """A row's pages in one pool, from page `first` of its sequence on, and what the pool's pages hold."""

    limits: RunnerLimits
    pool: list[list[int | None]]
    pages: Seq[int]
    first: int

    def first_seen(self, position: int) -> int:
        """The first position that the one at `position` sees."""
        return 0 if self.limits.window is None else max(0, position - self.limits.window + 1)


def _begin(row: PlanRow) -> _Slot:
    """A sequence whose history others have computed."""
    slot = _Slot(row.seq_id, row.params, row.seed, row.num_prompt, row.stop_ids, list(row.history))
    state = _ROOT
    for token in row.history:
        state = _mix(state, token)
        slot.hashes.append(state)
    return slot


class FakeHandle:
    """A step that is ready at the time `ready_at` (`time.monotonic`); `finish` gives its result then, or raises.

    Args:
        constrain: lets its masked rows sample; None for a step that has none.
    """

    def __init__(
        self, finish: Callable[[], StepResult], ready_at: float, constrain: Callable[[Masks], None] | None = None
    ) -> None:
        self._finish: Callable[[], StepResult] | None = finish
        self._ready_at = ready_at
        self._constrain = constrain

    def constrain(self, masks: Masks) -> None:
        _require(self._finish is not None, "constrain() after result()")
        if self._constrain is None:
            raise PlanViolation("constrain() was called twice on one step, or on one without masked rows")
        constrain, self._constrain = self._constrain, None
        constrain(masks)

    def result(self) -> StepResult:
        if self._finish is None:
            raise PlanViolation("result() was called twice on one step")
        finish, self._finish = self._finish, None
        started = time.monotonic()
        if self._ready_at > started:
            time.sleep(self._ready_at - started)
        result = finish()
        waited = time.monotonic() - started
        return replace(result, stats=StepStats(result.stats.submit_seconds, waited))


class FakeRunner:
    """Implements `jaxserve.plan.Runner` on plain lists, and raises `PlanViolation` for every plan out of contract.

    Args:
        next_token: what to sample; by default a hash of tokens and seed, which gives `eos_token_id` with about
            `eos_probability`.
        step_seconds: how long a step takes; steps queue up behind each other and `submit` returns at once.
        fail_on_submit, fail_on_result: numbers (from 0, in order of submission) of steps whose `submit` or `result`
            raises `InjectedFailure`. All slots and pages are lost with it. Steps submitted between the failure of a
            result and its reading fail too, as on a device whose buffers are gone.
        fail_on_constrain: which call of `constrain` raises, as if `submit` did.

    Attributes:
        num_steps: plans submitted.
        num_constrained: calls of `constrain`.
        last_plan: the newest plan.
        max_pages_used, max_local_used: most distinct pages, and local pages, that rows of one plan have named.
        num_copies, num_saves, num_loads: pages copied, copied to the host, and back.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        *,
        next_token: NextToken | None = None,
        eos_token_id: int = 0,
        eos_probability: float = 0.0,
        step_seconds: float = 0.0,
        fail_on_submit: Collection[int] = (),
        fail_on_result: Collection[int] = (),
        fail_on_constrain: int | None = None,
    ) -> None:
        self._fail_on_constrain = fail_on_constrain
        self.num_constrained = 0
        self._limits = limits
        self.next_token = next_token or hash_next_token(
            limits.vocab_size, eos_token_id=eos_token_id, eos_probability=eos_probability
        )
        self._step_seconds = step_seconds
        self._fail_on_submit = frozenset(fail_on_submit)
        self._fail_on_result = frozenset(fail_on_result)
        self._failure: InjectedFailure | None = None
        self._ready_at = 0.0
        self._last_step_id = -1
        self.num_steps = 0
        self.last_plan: StepPlan | None = None
        self.max_pages_used = self.max_local_used = 0
        self.num_copies = self.num_saves = self.num_loads = 0
        # What the host holds outlives a failure of the device, and is then as wrong as what a wrong plan makes of it.
        self._host: list[list[int | None]] = [[None] * limits.page_size for _ in range(limits.host_pages)]
        self.forget()

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    def submit(self, plan: StepPlan) -> FakeHandle:
        """Check and run `plan`; its result is what `FakeHandle.result` gives later."""
        number = self.num_steps
        self.num_steps += 1
        self.last_plan = plan
        if number in self._fail_on_submit:
            self.forget()
            raise InjectedFailure(f"submit of step number {number}")
        self._ready_at = max(self._ready_at, time.monotonic()) + self._step_seconds
        if self._failure is None:
            self._check_plan(plan)
            if number in self._fail_on_result:
                self._failure = InjectedFailure(f"result of step number {number}")
        if self._failure is not None:
            return FakeHandle(partial(self._raise, self._failure), self._ready_at, lambda masks: None)
        self._move_pages(plan)
        for row in plan.rows:
            self._write_row(row)
        scores = {row.seq_id: self._score(row) for row in plan.rows if row.targets}
        silent = [row for row in plan.rows if row.sample and row.params.max_tokens == 0]
        hidden = {row.seq_id: fake_hidden(self._slots[row.slot].tokens) for row in silent}
        samples = [self._sample(row) for row in plan.rows]

        def finish() -> StepResult:
            tokens, logprobs = zip(*samples, strict=True)
            return StepResult(plan.step_id, tokens, logprobs, StepStats(0.0, 0.0), scores, hidden)

        if not any(row.masked for row in plan.rows):
            return FakeHandle(finish, self._ready_at)
        return FakeHandle(finish, self._ready_at, partial(self._constrain, plan, samples))

    def _constrain(self, plan: StepPlan, samples: list[Sample], masks: Masks) -> None:
        """Sample the masked rows of the newest plan."""
        if self._fail_on_constrain == self.num_constrained:
            self.num_constrained += 1
            self.forget()
            raise InjectedFailure("constrain")
        self.num_constrained += 1
        _require(self.last_plan is plan, f"step {plan.step_id} is constrained after step {self._last_step_id} was submitted")
        _require(len(masks) == len(plan.rows), f"{len(masks)} masks for {len(plan.rows)} rows")
        for place, (row, mask) in enumerate(zip(plan.rows, masks, strict=True)):
            if mask is not None:
                _require(row.masked, f"sequence {row.seq_id} has a mask, yet its row is not masked")
                _require(len(mask) == mask_size(self._limits.vocab_size), f"a mask of {len(mask)} bytes")
                self._slots[row.slot].tokens.pop()
                samples[place] = self._choose(row, mask)

    def _move_pages(self, plan: StepPlan) -> None:
        for page, host_slot in plan.saves:
            self._host[host_slot] = list(self._pages[page])
        for source, destination in plan.copies:
            self._pages[destination] = list(self._pages[source])
        for host_slot, page in plan.loads:
            self._pages[page] = list(self._host[host_slot])
        self.num_copies += len(plan.copies)
        self.num_saves += len(plan.saves)
        self.num_loads += len(plan.loads)

    def _raise(self, failure: InjectedFailure) -> StepResult:
        if self._failure is failure:
            self.forget()
        raise failure

    def forget(self) -> None:
        """Lose all slots and pages, as a device does whose pool was lost in a failure."""
        self._slots: dict[int, _Slot] = {}
        self._failure = None
        self._pages: list[list[int | None]] = [[None] * self._limits.page_size for _ in range(self._limits.num_pages)]
        self._local: list[list[int | None]] = [[None] * self._limits.page_size for _ in range(self._limits.local_pages)]

    def _check_plan(self, plan: StepPlan) -> None:
        limits = self._limits
        _require(plan.step_id > self._last_step_id, f"step id {plan.step_id} does not follow {self._last_step_id}")
        self._last_step_id = plan.step_id
        _require(bool(plan.rows), "a plan without rows")
        _require(len(plan.rows) <= limits.max_seqs, f"{len(plan.rows)} rows > max_seqs {limits.max_seqs}")
        _require(plan.num_tokens <= limits.max_step_tokens, f"{plan.num_tokens} tokens > {limits.max_step_tokens}")
        for name in ("slot", "seq_id"):
            values = [getattr(row, name) for row in plan.rows]
            _require(len(set(values)) == len(values), f"two rows share a {name}: {values}")
        written: dict[tuple[int, int], int] = {}  # by pool and page
        for row in plan.rows:
            self._check_row(row)
            first, end = row.start // limits.page_size, -(-(row.start + row.count) // limits.page_size)
            for pool, table in enumerate(self._tables(row)):
                for page in table.pages[first - table.first : end - table.first]:
                    other = written.setdefault((pool, page), row.seq_id)
                    _require(other == row.seq_id, f"page {page} is written by sequences {other} and {row.seq_id} in one step")
        for row in plan.rows:
            for pool, table in enumerate(self._tables(row)):
                for page in table.pages:
                    writer = written.get((pool, page), row.seq_id)
                    _require(writer == row.seq_id, f"page {page}, which sequence {row.seq_id} reads, is written by {writer}")
        self._check_copies(plan)
        self._check_moves(plan)
        self.max_pages_used = max(self.max_pages_used, len({page for row in plan.rows for page in row.pages}))
        self.max_local_used = max(self.max_local_used, len({page for row in plan.rows for page in row.local_pages}))

    def _tables(self, row: PlanRow) -> list[_Table]:
        """The row's table of each pool."""
        tables = [_Table(self._limits, self._pages, row.pages, row.first_page)]
        if self._limits.local is not None:
            tables.append(_Table(self._limits.local, self._local, row.local_pages, row.first_local_page))
        return tables

    def _check_copies(self, plan: StepPlan) -> None:
        num_pages, size = self._limits.num_pages, self._limits.page_size
        _require(len(plan.copies) <= self._limits.max_seqs, f"{len(plan.copies)} copies in one step")
        begun = {row.pages[row.start // size - row.first_page] for row in plan.rows if row.fresh and row.start % size}
        for source, destination in plan.copies:
            _require(0 <= source < num_pages, f"page id out of range in a copy: {source}")
            _require(destination in begun, f"page {destination} is copied to, yet no row starts in the middle of it")
            begun.remove(destination)
        _require(not begun, f"pages {begun} are started in the middle of, yet nothing was copied there")

    def _check_moves(self, plan: StepPlan) -> None:
        limits = self._limits
        saved_to = [host_slot for _, host_slot in plan.saves]
        _require(len(set(saved_to)) == len(saved_to), f"two pages are saved to one host slot: {plan.saves}")
        _require(len({page for page, _ in plan.saves}) == len(saved_to), f"a page is saved twice: {plan.saves}")
        loaded_from = [host_slot for host_slot, _ in plan.loads]
        _require(all(0 <= slot < limits.host_pages for slot in saved_to + loaded_from), f"host slot out of range: {plan}")
        _require(all(0 <= page < limits.num_pages for page, _ in plan.saves), f"page id out of range in a save: {plan.saves}")
        begun = [
            page for row in plan.rows if row.fresh for page in row.pages[: row.start // limits.page_size - row.first_page]
        ]
        for _, page in plan.loads:
            _require(begun.count(page) == 1, f"page {page} is loaded, yet it is not one that a new row alone starts after")

    def _check_row(self, row: PlanRow) -> None:
        limits = self._limits
        where = f"sequence {row.seq_id}"
        end = row.start + row.count
        _require(0 <= row.slot < limits.max_seqs, f"{where}: slot {row.slot} is outside 0..{limits.max_seqs - 1}")
        _require(row.count >= 1, f"{where}: count {row.count} < 1")
        room = limits.max_context - (row.sample and row.params.max_tokens != 0)
        _require(end <= room, f"{where}: position {end} > max_context {limits.max_context}")
        _require(row.num_prompt >= 1, f"{where}: num_prompt {row.num_prompt} < 1")
        _require(not row.sample or end >= row.num_prompt, f"{where}: samples inside its prompt")
        _require(0 <= row.seed <= _MASK, f"{where}: seed {row.seed} is not 64 bits")
        _require(len(row.tokens) <= row.count, f"{where}: {len(row.tokens)} tokens for {row.count} positions")
        _require(all(0 <= t < limits.vocab_size for t in row.tokens), f"{where}: token outside the vocabulary: {row.tokens}")
        _require(
            bool(limits.local_pages) or not row.local_pages, f"{where}: local pages {row.local_pages}, and no pool of them"
        )
        for table in self._tables(row):
            first, pages = table.first, table.pages
            num_covered = (first + len(pages)) * limits.page_size
            _require(num_covered >= end, f"{where}: {len(pages)} pages do not cover {end} positions")
            first_seen = table.first_seen(row.start) // limits.page_size
            _require(0 <= first <= first_seen, f"{where}: pages from {first} on, position {row.start} sees page {first_seen}")
            _require(all(0 <= p < table.limits.num_pages for p in pages), f"{where}: page id out of range: {pages}")
            _require(len(set(pages)) == len(pages), f"{where}: a page twice in one block table: {pages}")
        _require(len(row.targets) <= row.count, f"{where}: {len(row.targets)} targets for {row.count} positions")
        _require(not row.targets or row.params.prompt_logprobs is not None, f"{where}: targets that it did not ask for")
        if row.fresh:
            _require(row.start == len(row.history), f"{where}: starts at {row.start}, its history is {row.history}")
        else:
            _require(not row.history, f"{where}: not fresh, yet it has the history {row.history}")
            self._check_continues(row)

    def _check_continues(self, row: PlanRow) -> None:
        where = f"sequence {row.seq_id}"
        slot = self._slots.get(row.slot)
        if slot is None or slot.seq_id != row.seq_id:
            holder = "no sequence" if slot is None else f"sequence {slot.seq_id}"
            raise PlanViolation(f"{where}: not fresh, yet slot {row.slot} holds {holder}")
        _require(row.start == len(slot.hashes), f"{where}: starts at {row.start}, {len(slot.hashes)} positions are computed")
        for name in ("params", "seed", "num_prompt", "stop_ids"):
            _require(getattr(row, name) == getattr(slot, name), f"{where}: {name} changed since its fresh row")

    def _write_row(self, row: PlanRow) -> None:
        if row.fresh:
            self._slots[row.slot] = _begin(row)
        slot = self._slots[row.slot]
        self._check_page_contents(row, slot)
        self._take_tokens(row, slot)
        for position in range(row.start, row.start + row.count):
            state = _mix(slot.hashes[-1] if slot.hashes else _ROOT, slot.tokens[position])
            slot.hashes.append(state)
            for table in self._tables(row):
                page = table.pages[position // self._limits.page_size - table.first]
                table.pool[page][position % self._limits.page_size] = state

    def _check_page_contents(self, row: PlanRow, slot: _Slot) -> None:
        size = self._limits.page_size
        for table in self._tables(row):
            first_seen = table.first_seen(row.start)  # by the row's first token, so by all of it
            for position in range(first_seen // size * size, row.start, size):
                page = table.pages[position // size - table.first]
                expected = slot.hashes[position : min(position + size, row.start)]
                seen = slice(max(0, first_seen - position), len(expected))
                holds = table.pool[page][seen] == expected[seen]
                _require(holds, f"sequence {row.seq_id}: page {page} no longer holds its KV")

    def _take_tokens(self, row: PlanRow, slot: _Slot) -> None:
        """Write the host's tokens into the history; the rest of the row must be there already."""
        where = f"sequence {row.seq_id}"
        known = slot.tokens[row.start : row.start + len(row.tokens)]
        _require(known == list(row.tokens[: len(known)]), f"{where}: host says {row.tokens}, the device sampled {known}")
        slot.tokens.extend(row.tokens[len(known) :])
        inside = slot.tokens[row.start + 1 :][: len(row.targets)]
        _require(list(row.targets[: len(inside)]) == inside, f"{where}: targets {row.targets} do not follow its tokens")
        _require(slot.target in (None, slot.tokens[row.start]), f"{where}: the target {slot.target} was not the next token")
        slot.target = row.targets[-1] if len(row.targets) == row.count else None
        _require(UNCHOSEN not in slot.tokens, f"{where}: computes a token whose mask has not come")
        missing = row.count - len(row.tokens)
        _require(missing <= 1, f"{where}: {missing} tokens are left to the device, which knows at most the last")
        _require(
            len(slot.tokens) == row.start + row.count,
            f"{where}: row ends at {row.start + row.count}, the device holds {len(slot.tokens)} tokens",
        )

    def _score(self, row: PlanRow) -> tuple[TokenLogprobs, ...]:
        hashes, num_top = self._slots[row.slot].hashes, row.params.prompt_logprobs or 0
        after = hashes[row.start : row.start + len(row.targets)]
        pairs = zip(after, row.targets, strict=True)
        return tuple(_score(state, target, num_top, self._limits.vocab_size) for state, target in pairs)

    def _sample(self, row: PlanRow) -> Sample:
        _require(row.sample or not row.masked, f"sequence {row.seq_id}: masked, and does not sample")
        if not row.sample:
            return (), ()
        if row.masked:  # until its mask comes
            self._slots[row.slot].tokens.append(UNCHOSEN)
            return (UNCHOSEN,), ()
        return self._choose(row, None)

    def _choose(self, row: PlanRow, mask: bytes | None) -> Sample:
        slot = self._slots[row.slot]
        token = choose_token(
            self.next_token,
            slot.tokens,
            num_prompt=row.num_prompt,
            params=row.params,
            seed=row.seed,
            stop_ids=row.stop_ids,
            vocab_size=self._limits.vocab_size,
            mask=mask,
        )
        slot.tokens.append(token)
        if row.params.logprobs is None:
            return (token,), ()
        return (token,), (fake_logprobs(token, row.params.logprobs, self._limits.vocab_size),)


def expected_output(
    request: Request,
    limits: RunnerLimits,
    *,
    next_token: NextToken,
    eos_token_ids: Collection[int] = (),
) -> tuple[tuple[int, ...], FinishReason]:
    """What `request` must give alone or in any batch, one token at a time. Its seed must be set unless it is greedy."""
    matcher = None if request.constraint is None else request.constraint.start()
    params = request.params
    assert params.greedy or params.seed is not None, "the oracle cannot guess a seed that the scheduler draws"
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    # The last token's KV is never needed, so a pool holds one token more than it has positions.
    # One with a window holds what its longest row sees and writes, and that from any place of a page on.
    seen = math.inf if limits.window is None else limits.window - 1 + limits.max_step_tokens
    pool = limits.num_pages * limits.page_size
    room = min(limits.max_context, pool + 1 if pool < seen + limits.page_size - 1 else math.inf) - len(request.prompt)
    max_output = room if params.max_tokens is None else min(room, params.max_tokens)
    tokens = list(request.prompt)
    for num_output in range(max_output):
        mask = None if matcher is None else matcher.mask()
        if mask is not None and num_output < params.min_tokens and not is_empty(without(mask, stop_ids)):
            mask = without(mask, stop_ids)
        token = choose_token(
            next_token,
            tokens,
            num_prompt=len(request.prompt),
            params=params,
            seed=(params.seed or 0) & _MASK,
            stop_ids=stop_ids,
            vocab_size=limits.vocab_size,
            mask=mask,
        )
        tokens.append(token)
        if matcher is not None:
            matcher.advance(token)
        if token in stop_ids and (num_output >= params.min_tokens or (matcher is not None and matcher.done)):
            return tuple(tokens[len(request.prompt) :]), FinishReason.STOP
    return tuple(tokens[len(request.prompt) :]), FinishReason.LENGTH
