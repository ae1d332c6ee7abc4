"""An implementation against the definition on every case, for whoever has the hardware: `check("gpu")`."""

from __future__ import annotations

import jax
import numpy as np

from pallas_kernels.grouped_matmul import grouped_matmul, lay_out
from pallas_kernels.grouped_matmul.cases import CASES, make_inputs

TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}


def check(impl: str) -> dict[str, tuple[float, bool]]:
    """Largest difference by case, and whether it passes. Implementations that take no float32 are given bfloat16."""
    found = {}
    for case in CASES:
        x, weights, sizes = make_inputs(case)
        if impl == "gpu":
            x, weights = x.astype("bfloat16"), weights.astype("bfloat16")
        out = jax.jit(lambda x, weights, sizes: grouped_matmul(x, lay_out(weights, impl=impl), sizes, impl=impl))(
            x, weights, sizes
        )
        expected = grouped_matmul(x, lay_out(weights, impl="reference"), sizes, impl="reference")
        real = sum(case.group_sizes)
        difference = np.abs(np.asarray(out, np.float32) - np.asarray(expected, np.float32))[:real]
        error = float(difference.max(initial=0.0))
        found[case.name] = error, bool(np.isfinite(np.asarray(out, np.float32)).all()) and error <= TOLERANCE[str(x.dtype)]
    return found
