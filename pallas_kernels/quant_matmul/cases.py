"""Shapes that every implementation of `quant_matmul` is tested on, and inputs for them. Benchmarks take them too.

Knows no implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np

from pallas_kernels.quant_matmul.weights import QuantActivations, QuantWeights, quantize_activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One product.

    Attributes:
        group: inputs that share a scale; None for all of a row.
        activations: dtype of `x`; "int8" are 8 bits per token of bfloat16 ones.
    """

    num_out: int
    num_in: int
    num_tokens: int
    bits: int = 8
    group: int | None = None
    offsets: bool = False
    activations: Literal["float32", "bfloat16", "int8"] = "bfloat16"

    @property
    def name(self) -> str:
        group = "" if self.group is None else f"_g{self.group}"
        offsets = "_offsets" if self.offsets else ""
        shape = f"{self.num_out}x{self.num_in}x{self.num_tokens}"
        return f"w{self.bits}{group}{offsets}_{self.activations}_{shape}"


CASES = (
    Case(num_out=256, num_in=512, num_tokens=1, activations="float32"),
    Case(num_out=256, num_in=512, num_tokens=3),
    Case(num_out=256, num_in=512, num_tokens=40),
    Case(num_out=384, num_in=256, num_tokens=130, activations="float32"),
    Case(num_out=256, num_in=512, num_tokens=1, activations="int8"),
    Case(num_out=256, num_in=512, num_tokens=17, activations="int8"),
    Case(num_out=256, num_in=512, num_tokens=9, group=32),
    Case(num_out=256, num_in=512, num_tokens=2, group=64, offsets=True, activations="float32"),
    Case(num_out=256, num_in=512, num_tokens=1, bits=4, group=32, offsets=True, activations="float32"),
    Case(num_out=256, num_in=512, num_tokens=33, bits=4, group=32, offsets=True),
    Case(num_out=256, num_in=512, num_tokens=4, bits=4, group=64),
    Case(num_out=256, num_in=512, num_tokens=1, bits=4, group=128, activations="float32"),
    Case(num_out=384, num_in=1024, num_tokens=16, bits=4, group=128),
    Case(num_out=256, num_in=512, num_tokens=5, bits=4, group=64, activations="int8"),
    Case(num_out=256, num_in=512, num_tokens=18, bits=4, group=128, offsets=True, activations="int8"),
)

ODD_CASES = (
    Case(num_out=576, num_in=576, num_tokens=1, activations="float32"),
    Case(num_out=960, num_in=576, num_tokens=7, activations="float32"),
    Case(num_out=576, num_in=1536, num_tokens=5, bits=4, group=32, offsets=True, activations="float32"),
    Case(num_out=101, num_in=192, num_tokens=2, bits=4, group=64, activations="float32"),
    Case(num_out=101, num_in=20, num_tokens=2, activations="float32"),
    Case(num_out=101, num_in=20, num_tokens=9, activations="int8"),
)
"""Not multiples of a kernel's tile; a kernel may refuse them."""


def make_inputs(case: Case, seed: int = 0) -> tuple[jnp.ndarray | QuantActivations, QuantWeights]:
    """Normal activations; values of the whole range, extremes included; scales that differ tenfold, about `1/sqrt(in)`."""
    rng = np.random.default_rng(seed)
    num_groups = 1 if case.group is None else case.num_in // case.group
    most = 2 ** (case.bits - 1)
    values = rng.integers(-most, most, (case.num_out, case.num_in)).astype(np.int8)
    scales = np.exp(rng.uniform(-1, 1, (case.num_out, num_groups))) / most / case.num_in**0.5
    offsets = rng.standard_normal(scales.shape) / case.num_in**0.5 if case.offsets else None
    weights = QuantWeights(
        values=jnp.asarray(values),
        scales=jnp.asarray(scales, jnp.float32),
        offsets=None if offsets is None else jnp.asarray(offsets, jnp.float32),
        bits=case.bits,
    )
    dtype = "bfloat16" if case.activations == "int8" else case.activations
    x = jnp.asarray(rng.standard_normal((case.num_in, case.num_tokens)), dtype)
    return (quantize_activations(x) if case.activations == "int8" else x), weights
