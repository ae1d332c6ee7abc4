"""How many replicas there should be: policies as functions of what the fleet looks like, and the schedule's format.

Owns the policies and their thresholds. Does not know requests, nor how replicas start and stop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Load:
    """The fleet at one moment.

    Attributes:
        now: seconds from the start.
        num_replicas: those that work or load, without those that are being drained.
        num_waiting: requests without a first token.
        tokens_in_flight: prompt and output tokens of requests that have not finished.
        utilisation: share of the last interval in which devices were busy, from 0 to 1.
    """

    now: float
    num_replicas: int
    num_waiting: int
    tokens_in_flight: int
    utilisation: float


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What one replica should have: more asks for another, less than `low_share` of it for one less.

    Attributes:
        waiting: requests without a first token.
        tokens: prompt and output tokens in flight.
        utilisation: share of the time, from 0 to 1.
    """

    waiting: float = 4.0
    tokens: float = 50_000.0
    utilisation: float = 0.7
    low_share: float = 0.5


Policy = Callable[[Load], int]
"""How many replicas are wanted; the fleet keeps it within its bounds."""


def by_queue(thresholds: Thresholds) -> Policy:
    """So many that each has no more waiting than the threshold."""
    return lambda load: _proportional(load.num_waiting, thresholds.waiting, load, thresholds)


def by_tokens(thresholds: Thresholds) -> Policy:
    """So many that each has no more tokens in flight than the threshold."""
    return lambda load: _proportional(load.tokens_in_flight, thresholds.tokens, load, thresholds)


def by_utilisation(thresholds: Thresholds) -> Policy:
    """So many that each is as busy as the threshold, if work spreads: what is done where latency is not looked at."""
    return lambda load: _proportional(load.utilisation * load.num_replicas, thresholds.utilisation, load, thresholds)


def _proportional(total: float, per_replica: float, load: Load, thresholds: Thresholds) -> int:
    wanted = math.ceil(total / per_replica)
    if wanted > load.num_replicas:
        return wanted
    # One at a time down, and only well below what the smaller fleet could carry, so that it does not swing.
    if total < (load.num_replicas - 1) * per_replica * thresholds.low_share:
        return load.num_replicas - 1
    return load.num_replicas


def by_schedule(steps: tuple[tuple[float, int], ...]) -> Policy:
    """The count of the last step whose time has come."""

    def wanted(load: Load) -> int:
        return next(count for at, count in reversed(steps) if at <= load.now)

    return wanted


def parse_schedule(text: str) -> tuple[tuple[float, int], ...]:
    """`SECONDS:COUNT,...`, beginning at 0.

    Raises:
        ConfigError: it is something else.
    """
    try:
        steps = tuple((float(at), int(count)) for at, count in (step.split(":") for step in text.split(",")))
    except ValueError:
        raise ConfigError(f"a schedule is SECONDS:COUNT,... such as 0:2,600:4, found {text!r}") from None
    if steps[0][0] != 0 or list(steps) != sorted(steps) or min(count for _, count in steps) < 1:
        raise ConfigError(f"a schedule begins at 0 s, goes on in time and has 1 replica at least, found {text!r}")
    return steps
