"""What the scheduler makes of one sequence: the sequence of a request, its place in order, its next row, its end; and the
plan that rows come to.

Pure of the scheduler's state: knows neither slots nor pages of others.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jaxserve.errors import ConfigError
from jaxserve.host.admission import output_limit
from jaxserve.plan import MIN_WINDOW, PlanRow, RunnerLimits
from jaxserve.request import FinishReason, Request, Sequence, TokenEvent, TokenLogprobs


@dataclass(slots=True)
class Draft:
    """A plan in the making.

    Attributes:
        budget: tokens that are left for chunks. A decode's token was set aside for every running sequence that lacks one.
        head: the first that waits; None if nothing does or once it is blocked.
        num_parked: how many were parked on the way.
        blocked: whether the first that waits cannot be admitted in this plan; nobody overtakes it.
        tokens_per_row: tokens that each chunk is charged at least.
    """

    budget: int
    head: Sequence | None = None
    blocked: bool = False
    num_parked: int = 0
    tokens_per_row: int = 1
    rows: list[PlanRow] = field(default_factory=list)
    seqs: list[Sequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def charge(self, count: int) -> None:
        """Take a chunk of `count` tokens from the budget."""
        self.budget = max(0, self.budget - max(count, self.tokens_per_row))


def check_can_progress(limits: RunnerLimits, prefill_chunk: int) -> None:
    """Raise `ConfigError` if a scheduler within `limits` could get stuck."""
    if prefill_chunk < 1:
        raise ConfigError(f"prefill_chunk must be at least 1, found {prefill_chunk}")
    if limits.max_step_tokens < limits.max_seqs:
        raise ConfigError(
            f"max_step_tokens ({limits.max_step_tokens}) must be at least max_seqs ({limits.max_seqs}), "
            "so that every running sequence can decode in a step"
        )
    if limits.window is not None and limits.window < MIN_WINDOW:
        raise ConfigError(f"window must be at least {MIN_WINDOW}, found {limits.window}; a wider one than the layers' will do")


def importance(seq: Sequence) -> tuple[int, int]:
    """Sorts sequences that have run, the most important first: lower `priority`, then the earlier to run first."""
    return seq.request.priority, seq.turn


def new_sequence(
    request: Request, seq_id: int, limits: RunnerLimits, eos_token_ids: tuple[int, ...], *, seed: int
) -> Sequence:
    """The sequence of a valid `request`. `seed` may be any integer of 64 bits, signed or not."""
    params = request.params
    assert request.constraint is not None or not params.restricts_tokens, "a restriction that nobody compiled"
    max_output = output_limit(request, limits)
    return Sequence(
        seq_id,
        request,
        list(request.prompt),
        max_output,
        seed=seed % 2**64,
        stop_ids=params.stop_token_ids if params.ignore_eos else (*eos_token_ids, *params.stop_token_ids),
        max_positions=len(request.prompt) + max(1, max_output) - 1,
        matcher=None if request.constraint is None else request.constraint.start(),
    )


def lacks_one(seq: Sequence) -> bool:
    """Whether `seq`, which runs, lacks one token: a decode, whose share of the budget comes before that of any chunk."""
    return len(seq.tokens) + seq.in_flight - seq.planned == 1


def pages_soon(seq: Sequence, limits: RunnerLimits, prefill_chunk: int) -> int:
    """Pages that `seq` lacks for its known tokens and a page of further ones."""
    num_tokens = len(seq.tokens) + seq.in_flight
    num_positions = min(num_tokens + limits.page_size, seq.max_positions)
    if limits.window is None:
        return -(-num_positions // limits.page_size) - len(seq.pages)
    row_tokens = max(1, min(num_tokens - seq.planned, prefill_chunk, limits.max_step_tokens))
    return max(0, limits.pages_for(num_positions, row_tokens) - len(seq.pages))


def make_row(seq: Sequence, count: int, *, fresh: bool) -> PlanRow:
    """The row for the next `count` tokens, whose pages are there; moves the planned cursor."""
    start = seq.planned
    end = start + count
    sample = end == len(seq.tokens) + seq.in_flight
    tokens = tuple(seq.tokens[start:end])
    seq.planned = end
    seq.rows_in_flight += 1
    if sample:
        seq.in_flight += 1
    request = seq.request
    params = request.params
    assert seq.slot is not None
    return PlanRow(
        seq.seq_id, seq.slot, start, count, tokens, seq.pages, sample,
        len(request.prompt), params, seq.seed, seq.stop_ids, fresh,
        tuple(seq.tokens[:start]) if fresh else (),
        request.prompt[start + 1 : end + 1] if params.prompt_logprobs is not None and seq.lacks_scores else (),
        sample and seq.matcher is not None,
        seq.first_page, seq.local_pages, seq.first_local_page,
        -1 if request.adapter is None else request.adapter.slot,
    )  # fmt: skip


def add_scores(seq: Sequence, row: PlanRow, scores: tuple[TokenLogprobs, ...]) -> None:
    """Take in log probabilities of the prompt that `row` brought; those that a row before a preemption brought are kept."""
    num_known = len(seq.scores) - row.start
    assert num_known >= 0, f"sequence {seq.seq_id}: a row starts at {row.start}, scores end at {len(seq.scores)}"
    seq.scores += scores[num_known:]


def with_prompt(event: TokenEvent, seq: Sequence, hidden: tuple[float, ...]) -> TokenEvent:
    """`event`, which ends `seq` after its prompt, with all that was wanted of the prompt."""
    return replace(event, prompt_logprobs=tuple(seq.scores), hidden=hidden if seq.request.embed else ())


def take_token(seq: Sequence, token: int) -> FinishReason | None:
    """Add an output token; why `seq` ends with it, or None if it goes on."""
    seq.tokens.append(token)
    if seq.matcher is not None:
        seq.matcher.advance(token)
    return reason_to_finish(seq)


def is_known(seq: Sequence, row: PlanRow) -> bool:
    """Whether the token that `row` samples, or will have sampled, is one that `seq` has taken as known."""
    return row.start + row.count < len(seq.tokens)


def reason_to_finish(seq: Sequence) -> FinishReason | None:
    """Why the output token that was just added ends `seq`, or None if it goes on."""
    num_output = len(seq.tokens) - len(seq.request.prompt)
    if seq.tokens[-1] in seq.stop_ids and (num_output > seq.request.params.min_tokens or _is_complete(seq)):
        return FinishReason.STOP
    return FinishReason.LENGTH if num_output == seq.max_output else None


def _is_complete(seq: Sequence) -> bool:
    """Whether its constraint lets nothing but an end follow."""
    return seq.matcher is not None and seq.matcher.done
