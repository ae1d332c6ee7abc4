"""How many prompt tokens may go into a step, so that the sequences that decode in it get their next token in time.

Owns the target, the prediction that it is held against, and the correction of that prediction by steps as they are
measured. Knows neither sequences nor queues; the scheduler asks, and the engine's loop reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from jaxserve.errors import ConfigError
from jaxserve.host.cost import Bucket, BucketFor, StepCost, StepWork, chunk_products, work_of
from jaxserve.host.sizes import ChunkBudget, tokens_per_row
from jaxserve.plan import StepPlan

TARGET_SHARE = 0.9
"""Of the target, what a predicted step may take: steps vary, and the target is for all but the slowest of them."""

CORRECTION_WEIGHT = 0.05
"""Of a step just measured, in the moving average that corrects predictions: twenty steps make most of it."""

MAX_SURPRISE = 2.0
"""A single step counts at most as so many times what was expected, or as little: one pause must not stop prefill."""


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
        self._tokens_per_row = tokens_per_row(buckets)
        self._sizes = sorted(self._tokens_per_row, reverse=True)
        self._correction = 1.0

    def floor(self, num_decodes: int) -> int:
        """Chunk tokens that a step may always have, so that prompts get on whatever the target: what the smallest bucket has
        room for beside so many decodes."""
        return self._sizes[-1] - num_decodes

    def chunk_budget(self, num_decodes: int, context_read: int, chunk_start: int) -> ChunkBudget:
        """What longer rows of a step may have.

        Args:
            num_decodes: rows of one token in it.
            context_read: positions that they attend to, in all.
            chunk_start: where the longest prompt that is under way goes on.
        """
        if num_decodes == 0:
            return self._budget(self._sizes[0], self._sizes[0])
        target = self._target / self._correction
        for size, smaller in pairwise(self._sizes):
            empty = StepWork(size, True, num_decodes + 1, 1, context_read, chunk_start, 0)
            count = self._largest(empty, chunk_start, size - num_decodes, target)
            if count > smaller - num_decodes:
                return self._budget(size, count)
        return self._budget(self._sizes[-1], self.floor(num_decodes))

    def _budget(self, size: int, tokens: int) -> ChunkBudget:
        return ChunkBudget(tokens, self._tokens_per_row[size])

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
