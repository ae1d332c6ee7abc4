"""How many prompt tokens may go into a step, so that the sequences that decode in it get their next token in time.

Owns the target, the prediction that it is held against, and the correction of that prediction by steps as they are
measured. Knows neither sequences nor queues; the scheduler asks, and the engine's loop reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxserve.errors import ConfigError
from jaxserve.host.cost import Bucket, BucketFor, StepCost, StepWork, chunk_products, work_of
from jaxserve.plan import StepPlan

TARGET_SHARE = 0.9
"""Of the target, what a predicted step may take: steps vary, and the target is for all but the slowest of them."""

CORRECTION_WEIGHT = 0.05
"""Of a step just measured, in the moving average that corrects predictions: twenty steps make most of it."""

MAX_SURPRISE = 2.0
"""A single step counts at most as so many times what was expected, or as little: one pause must not stop prefill."""


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


class Pacer:
    """Chooses the chunk budget of a step. One thread calls everything.

    Args:
        cost: predicts a step's seconds.
        buckets: shapes that steps run in.
        bucket_for: chooses one of them.
        target_seconds: between two tokens of a sequence.
    """

    def __init__(self, cost: StepCost, buckets: Sequence[Bucket], bucket_for: BucketFor, *, target_seconds: float) -> None:
        if target_seconds <= 0:
            raise ConfigError(f"the inter-token target must be positive, found {target_seconds} s")
        self._cost = cost
        self._bucket_for = bucket_for
        self._target = target_seconds * TARGET_SHARE
        chunked = [bucket for bucket in buckets if bucket.chunk_tokens]
        rows: dict[int, int] = {}
        for bucket in chunked:
            rows[bucket.chunk_tokens] = min(bucket.chunk_rows, rows.get(bucket.chunk_tokens, bucket.chunk_rows))
        self._sizes = sorted(rows, reverse=True)
        most = max(rows.values())
        self._budgets = {size: ChunkBudget(size, 1 if count == most else -(-size // count)) for size, count in rows.items()}
        self._correction = 1.0

    @property
    def floor(self) -> int:
        """Chunk tokens that a step may always have, so that prompts get on whatever the target: the smallest bucket's."""
        return self._sizes[-1]

    def chunk_budget(self, num_decodes: int, context_read: int, chunk_start: int) -> ChunkBudget:
        """What longer rows of a step may have.

        Args:
            num_decodes: rows of one token in it.
            context_read: positions that they attend to, in all.
            chunk_start: where the longest prompt that is under way goes on.
        """
        if num_decodes == 0:
            return self._budgets[self._sizes[0]]
        target = self._target / self._correction
        for index, size in enumerate(self._sizes[:-1]):
            places = self._bucket_for(num_decodes, size, 1).num_tokens
            empty = StepWork(places, True, num_decodes + 1, 1, context_read, chunk_start, 0)
            count = self._largest(empty, chunk_start, size, target)
            if count > self._sizes[index + 1]:
                return replace(self._budgets[size], tokens=count)
        return self._budgets[self.floor]

    def _largest(self, empty: StepWork, start: int, size: int, target: float) -> int:
        """The largest chunk of at most `size` tokens whose step keeps the target; 0 if none does."""
        if self._cost.seconds(empty) > target:
            return 0
        low, high = 0, size
        while low < high:
            middle = (low + high + 1) // 2
            work = replace(empty, chunk_context=start + middle, chunk_products=chunk_products(start, middle))
            if self._cost.seconds(work) <= target:
                low = middle
            else:
                high = middle - 1
        return low

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Take note that the device took `seconds` for `plan`."""
        work = work_of(plan, self._bucket_for)
        predicted = self._cost.seconds(work)
        if not work.chunked or predicted <= 0:
            return
        before = self._correction
        ratio = min(before * MAX_SURPRISE, max(before / MAX_SURPRISE, seconds / predicted))
        self._correction = before + CORRECTION_WEIGHT * (ratio - before)
