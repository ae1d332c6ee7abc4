"""What is said of a fit of step costs: where it comes from, and what it misses.

Knows neither how steps were measured nor what predicts with them.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from bench.report import environment
from jaxserve.host.cost import FittedCost
from jaxserve.host.cost_file import CostOrigin
from jaxserve.host.fit import Sample, relative_errors
from jaxserve.plan import RunnerLimits


def kv_bytes_per_token(kv_bytes: int, limits: RunnerLimits) -> float:
    """K and V of one position in all layers, of pools that take `kv_bytes`."""
    return kv_bytes / (limits.num_pages * limits.page_size)


def origin_of(model: str, cost: FittedCost, samples: Sequence[Sample], kv_bytes_per_token: float) -> CostOrigin:
    """Where the fit comes from: this machine, today."""
    errors = relative_errors(cost, samples)
    here = environment()
    return CostOrigin(
        model=model,
        machine=f"{here['cpu']}, {here['cores']} cores",
        date=datetime.date.today().isoformat(),
        num_steps=len(samples),
        median_error=errors[len(errors) // 2],
        p95_error=errors[-(-len(errors) * 95 // 100) - 1],
        kv_bytes_per_token=kv_bytes_per_token,
    )
