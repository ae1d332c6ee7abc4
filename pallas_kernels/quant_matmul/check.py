"""An implementation against the definition on every case, for whoever has the hardware: `check("tpu")`."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from pallas_kernels.quant_matmul import lay_out, quant_matmul
from pallas_kernels.quant_matmul.cases import CASES, Case, make_inputs

TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "int8": 3e-2}
"""Outputs are about standard normal; bfloat16 ones are rounded to 8 bits, and perhaps weights with a scale a group too."""
FIFTEEN_BITS = 3e-4
"""Where `xla.py` writes float32 activations with two digits: each is off by up to half of some 4 over 2^15, and their errors
add up as the products do, to about 3e-5; this is ten of those."""


def writes_digits(impl: str, case: Case) -> bool:
    """Whether `FIFTEEN_BITS` holds of a case, and not what its dtype leaves."""
    return impl == "xla" and case.bits == 8 and case.group in (None, case.num_in) and case.activations == "float32"


def check(impl: str) -> dict[str, tuple[float, bool]]:
    """Largest difference by case, and whether it passes. An implementation that takes no float32 is given bfloat16."""
    found = {}
    for case in CASES:
        if impl == "gpu" and case.activations == "float32":
            case = replace(case, activations="bfloat16")
        x, weights = make_inputs(case)
        out = jax.jit(lambda x, weights: quant_matmul(x, lay_out(weights, impl=impl), impl=impl))(x, weights)
        expected = quant_matmul(x, lay_out(weights, impl="reference"), impl="reference")
        error = float(np.abs(np.asarray(out, np.float32) - np.asarray(expected, np.float32)).max())
        found[case.name] = error, error <= (FIFTEEN_BITS if writes_digits(impl, case) else TOLERANCE[case.activations])
    return found
