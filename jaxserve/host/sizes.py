"""How many prompt tokens go into a step whose program comes in few sizes: none that makes it pay for the next larger one.

Owns what is known of the sizes of steps with chunks, and the choice between one large step and several smaller ones. Knows
neither sequences nor queues.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxserve.host.cost import Bucket, StepCost, StepWork


@dataclass(frozen=True, slots=True)
class ChunkBudget:
    """What longer rows of a step may have together.

    Attributes:
        tokens: at most.
        tokens_per_row: that each row is charged at least, so that a step with many short ones stays within the bucket that
            its tokens were chosen for.
    """

    tokens: int
    tokens_per_row: int

    def within(self, other: ChunkBudget) -> ChunkBudget:
        """What keeps both."""
        return ChunkBudget(min(self.tokens, other.tokens), max(self.tokens_per_row, other.tokens_per_row))


def tokens_per_row(buckets: Iterable[Bucket]) -> dict[int, int]:
    """For each size of a step with chunks, the smallest first, what a longer row is charged at least: its share of the places,
    unless the size takes as many rows as any."""
    rows = {bucket.num_tokens: bucket.chunk_rows for bucket in buckets if bucket.has_chunks}
    most = max(rows.values(), default=0)
    return {size: 1 if rows[size] == most else -(-size // rows[size]) for size in sorted(rows)}


class StepSizes:
    """Chooses the size of a step by what waits to be computed.

    Args:
        buckets: shapes that steps run in; none for steps as large as the limits allow.
        fixed_places: a step of `n` places takes about as long as `n + fixed_places` places do.
    """

    def __init__(self, buckets: Iterable[Bucket], fixed_places: float) -> None:
        self._tokens_per_row = tokens_per_row(buckets)
        self._cost = {size: size + fixed_places for size in self._tokens_per_row}
        self.row_charge = max(self._tokens_per_row.values(), default=1)

    @property
    def largest(self) -> int:
        """Places of the largest step; 0 where there is no choice."""
        return max(self._cost, default=0)

    def budget(self, num_decodes: int, wanted: int) -> ChunkBudget | None:
        """What longer rows of the next step may have; None for no bound.

        One step that has room for all takes the time of all its places, of which a few tokens too many for a smaller one
        leave most empty. Where several of those take less time together, they have the first token out sooner too, and the
        decodes beside them a token each.

        Args:
            num_decodes: rows of one token in it.
            wanted: tokens that longer rows could have, each row counted as `row_charge` at least.
        """
        sizes = [size for size in self._cost if size > num_decodes]
        fitting = [size for size in sizes if size - num_decodes >= wanted]
        if not sizes:
            return None
        size = fitting[0] if fitting else sizes[-1]
        smaller = [small for small in sizes if small < size]
        if fitting and smaller:
            room = smaller[-1] - num_decodes
            whole, rest = divmod(wanted, room)
            cost = whole * self._cost[smaller[-1]]
            if rest:
                cost += next(self._cost[small] for small in smaller if small - num_decodes >= rest)
            if cost < self._cost[size]:
                size = smaller[-1]
        return ChunkBudget(size - num_decodes, self._tokens_per_row[size])


NO_SIZES = StepSizes((), 0)
"""Steps as large as the limits allow."""


def fixed_places(cost: StepCost, buckets: Iterable[Bucket]) -> float:
    """`StepSizes`' argument, from what empty steps of the smallest and the largest size cost."""
    sizes = list(tokens_per_row(buckets))
    if len(sizes) < 2:
        return 0.0
    low, high = (cost.seconds(StepWork(size, True, 0, 0, 0, 0, 0)) for size in (sizes[0], sizes[-1]))
    return low * (sizes[-1] - sizes[0]) / max(high - low, 1e-9) - sizes[0]
