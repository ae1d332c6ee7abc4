"""Virtual time, and a runner that does nothing but let it pass."""

from __future__ import annotations

import random
from dataclasses import dataclass

from jaxserve.host.cost import BucketFor, StepCost, work_of
from jaxserve.plan import Masks, RunnerLimits, StepPlan, StepResult, StepStats

SAMPLED_ID = 0
"""What every sequence samples. Prompts have other ids."""

_SAMPLED: tuple[int, ...] = (SAMPLED_ID,)
_NOTHING: tuple[()] = ()


class VirtualClock:
    """Seconds that pass when somebody says so."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def pass_until(self, time: float) -> None:
        """Let time pass until `time`, unless it has."""
        self.now = max(self.now, time)


@dataclass(slots=True)
class CostHandle:
    """A step that is done at `ready_at`; asking for its result lets time pass until then."""

    clock: VirtualClock
    result_then: StepResult
    ready_at: float

    def constrain(self, masks: Masks) -> None:
        """All tokens are alike here."""

    def result(self) -> StepResult:
        self.clock.pass_until(self.ready_at)
        return self.result_then


class CostRunner:
    """`plan.Runner`: steps take what `cost` says, one after the other.

    Args:
        spread: factors on that, of which each step draws one; empty for none.

    Attributes:
        busy_seconds: spent in steps.
        num_steps: submitted so far.
    """

    def __init__(
        self, limits: RunnerLimits, cost: StepCost, bucket_for: BucketFor, clock: VirtualClock, spread: tuple[float, ...] = ()
    ) -> None:
        self._limits = limits
        self._cost = cost
        self._bucket_for = bucket_for
        self._clock = clock
        self._spread = spread
        self._random = random.Random(0)
        self._ready_at = 0.0
        self.busy_seconds = 0.0
        self.num_steps = 0

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    def submit(self, plan: StepPlan) -> CostHandle:
        seconds = self._cost.seconds(work_of(plan, self._bucket_for))
        if self._spread:
            seconds *= self._spread[self._random.randrange(len(self._spread))]
        self._ready_at = max(self._ready_at, self._clock.now) + seconds
        self.busy_seconds += seconds
        self.num_steps += 1
        rows = plan.rows
        tokens = tuple([_SAMPLED if row.sample else _NOTHING for row in rows])
        result = StepResult(plan.step_id, tokens, (_NOTHING,) * len(rows), StepStats(0.0, seconds))
        return CostHandle(self._clock, result, self._ready_at)
