"""When each step of a served engine was dispatched and read, as a file: what costs of a server are fitted to.

Owns the record and its format. Knows neither loads nor fits. Times are `time.perf_counter`'s, which all processes of a machine
share, so that a client's times can be held against them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.host.cost import BucketFor, StepWork, work_of
from jaxserve.host.fit import Sample
from jaxserve.plan import Masks, Runner, RunnerLimits, StepHandle, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One step.

    Attributes:
        submitted: when it was handed to the runner.
        ready: when its result had been read.
        seconds: that it added: from then on, or from when the result before it had been read if that was later. The time of
            a host that comes late for a result is in it, for nobody else would count it.
    """

    submitted: float
    ready: float
    seconds: float
    work: StepWork


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """A server's steps in order, and what a cost file says of its model."""

    steps: tuple[LoggedStep, ...]
    kv_bytes_per_token: float = 0.0
    window: int = 0

    def samples(self, spans: Sequence[tuple[float, float]]) -> list[Sample]:
        """Steps that were submitted within one of the spans of time."""
        return [
            Sample(step.work, step.seconds)
            for step in self.steps
            if any(start <= step.submitted < end for start, end in spans)
        ]

    def write(self, path: Path) -> None:
        """Write it; `read_log` reads it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)) + "\n")


def read_log(path: Path) -> StepLog:
    """Read what a server wrote in the end.

    Raises:
        ConfigError: there is no such file, or it is not one.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        steps = tuple(LoggedStep(**{**step, "work": StepWork(**step["work"])}) for step in values.pop("steps"))
        return StepLog(steps=steps, **values)
    except OSError as error:
        raise ConfigError(f"step log {path}: {error.strerror}; a server writes it when it has been told to stop") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is not a step log: {error!r}") from None


@dataclass(slots=True)
class RecordedRunner:
    """`plan.Runner`: the one within, and a note of each step. What steps do is looked at in the end, not between them."""

    runner: Runner
    clock: Callable[[], float] = time.perf_counter
    noted: list[tuple[float, float, float, StepPlan]] = field(default_factory=list)
    last_ready: float = 0.0

    @property
    def limits(self) -> RunnerLimits:
        return self.runner.limits

    def submit(self, plan: StepPlan) -> RecordedHandle:
        submitted = self.clock()
        return RecordedHandle(self, self.runner.submit(plan), plan, submitted)

    def steps(self, bucket_for: BucketFor) -> tuple[LoggedStep, ...]:
        """Those that have been read."""
        return tuple(LoggedStep(sent, ready, seconds, work_of(plan, bucket_for)) for sent, ready, seconds, plan in self.noted)


@dataclass(frozen=True, slots=True)
class RecordedHandle:
    """A step in flight."""

    record: RecordedRunner
    handle: StepHandle
    plan: StepPlan
    submitted: float

    def constrain(self, masks: Masks) -> None:
        self.handle.constrain(masks)

    def result(self) -> StepResult:
        result = self.handle.result()
        record, ready = self.record, self.record.clock()
        record.noted.append((self.submitted, ready, ready - max(self.submitted, record.last_ready), self.plan))
        record.last_ready = ready
        return result
