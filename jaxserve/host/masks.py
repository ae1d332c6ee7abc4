"""Which tokens the constrained rows of a step may sample, once every token before them is known.

Pure of the scheduler's state: knows neither plans in flight nor who ends for what.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.constraint import is_empty, mask_of, without
from jaxserve.errors import EngineError
from jaxserve.host.rows import is_known
from jaxserve.plan import Masks, PlanRow
from jaxserve.request import Sequence


def masks_of(rows: Iterable[PlanRow], seqs: Iterable[Sequence], vocab_size: int) -> tuple[Masks, list[tuple[Sequence, str]]]:
    """A mask for each row that wants one and whose sequence lives, None for others; and those whose constraint cannot
    say, with the reason."""
    masks: list[bytes | None] = []
    failed = []
    for row, seq in zip(rows, seqs, strict=True):
        mask = None
        if row.masked and seq.finish_reason is None:
            try:
                known = seq.tokens[row.start + row.count] if is_known(seq, row) else None
                mask = _next_mask(seq) if known is None else mask_of([known], vocab_size)
            except EngineError as error:
                failed.append((seq, str(error)))
        masks.append(mask)
    return tuple(masks), failed


def _next_mask(seq: Sequence) -> bytes:
    """The tokens that a constrained `seq`, whose tokens are all committed, may sample next: not those that end it before
    `min_tokens`, unless nothing else is left.

    Raises:
        EngineError: as `Matcher.mask`.
    """
    assert seq.matcher is not None
    mask = seq.matcher.mask()
    assert not is_empty(mask), "a constraint that allows no token"
    if seq.num_output < seq.request.params.min_tokens:
        longer = without(mask, seq.stop_ids)
        return mask if is_empty(longer) else longer
    return mask
