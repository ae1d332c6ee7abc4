"""What the scheduler makes of one sequence: the sequence of a request, its place in order, its next row, its end.

Pure of the scheduler's state: knows neither slots nor pages of others.
"""

from __future__ import annotations

from jaxserve.host.admission import output_limit
from jaxserve.plan import PlanRow, RunnerLimits
from jaxserve.request import FinishReason, Request, Sequence


def importance(seq: Sequence) -> tuple[int, int]:
    """Sorts sequences that have run, the most important first: lower `priority`, then the earlier to run first."""
    return seq.request.priority, seq.turn


def new_sequence(
    request: Request, seq_id: int, limits: RunnerLimits, eos_token_ids: tuple[int, ...], *, seed: int
) -> Sequence:
    """The sequence of a valid `request`. `seed` may be any integer of 64 bits, signed or not."""
    params = request.params
    max_output = output_limit(request, limits)
    return Sequence(
        seq_id,
        request,
        list(request.prompt),
        max_output,
        seed=seed % 2**64,
        stop_ids=params.stop_token_ids if params.ignore_eos else (*eos_token_ids, *params.stop_token_ids),
        max_positions=len(request.prompt) + max_output - 1,
    )


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
    assert seq.slot is not None
    return PlanRow(
        seq.seq_id, seq.slot, start, count, tokens, seq.pages, sample,
        len(request.prompt), request.params, seq.seed, seq.stop_ids, fresh,
    )  # fmt: skip


def reason_to_finish(seq: Sequence) -> FinishReason | None:
    """Why the output token that was just added ends `seq`, or None if it goes on."""
    num_output = len(seq.tokens) - len(seq.request.prompt)
    if seq.tokens[-1] in seq.stop_ids and num_output > seq.request.params.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_output == seq.max_output else None
