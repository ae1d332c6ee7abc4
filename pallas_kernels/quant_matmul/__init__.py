"""Products with weights of 8 or 4 bits, dequantised on the way; activations in floats, or 8 bits per token.

Owns the signature and the choice of implementation; the definition is `reference.py`, and what the numbers mean is in
`weights.py`.

Activations are `[in, T]` and weights `[out, in]`, as in the models' `linear`. The orientation serves more than the CPU: a
GPU's tensor cores take the operand that is dequantised in registers only as the left one, with its rows along `out`.

How an implementation wants the weights in memory is its own affair: `lay_out` moves them there once, when a model is
loaded, and `quant_matmul` reads what that gave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.late import late
from pallas_kernels.quant_matmul import reference, xla
from pallas_kernels.quant_matmul.weights import QuantActivations, QuantWeights, quantize_activations, quantize_weights

__all__ = [
    "IMPLEMENTATIONS",
    "Implementation",
    "QuantActivations",
    "QuantWeights",
    "lay_out",
    "quant_matmul",
    "quantize_activations",
    "quantize_weights",
    "take_rows",
]


@dataclass(frozen=True, slots=True)
class Implementation:
    """A `lay_out`, and the `quant_matmul` and `take_rows` that read it, with the signatures of this module less `impl`."""

    lay_out: Callable[..., Any]
    quant_matmul: Callable[..., Any]
    take_rows: Callable[..., Any]


def _kernel(name: str) -> Implementation:
    return Implementation(*(late(f"{__name__}.{name}", function) for function in ("lay_out", "quant_matmul", "take_rows")))


IMPLEMENTATIONS = {
    "reference": Implementation(reference.lay_out, reference.quant_matmul, reference.take_rows),
    "xla": Implementation(xla.lay_out, xla.quant_matmul, xla.take_rows),
    "tpu": _kernel("tpu"),
    "gpu": _kernel("gpu"),
}
"""By name. An experiment adds its own in one line; "reference" is the definition, "xla" the fast path without a kernel."""


def _implementation(impl: str) -> Implementation:
    if impl not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"quant_matmul has no implementation {impl!r}; there are {known} (xla runs anywhere)")
    return IMPLEMENTATIONS[impl]


def lay_out(weights: QuantWeights, *, impl: str, **options: int) -> Any:
    """Move the weights to where `quant_matmul` of the same `impl` wants them.

    Where weights are split over devices, each device lays out its own part; a part holds whole groups.

    Args:
        impl: a key of `IMPLEMENTATIONS`.
        options: sizes that the implementation may be tuned by; its module lists them, and `bench.kernels` tries them.

    Returns:
        A pytree that only the same `impl` reads.

    Raises:
        ValueError: no such quantisation, or `impl` does not support it.
    """
    return _implementation(impl).lay_out(weights, **options)


def quant_matmul(x: Float[Array, "in T"] | QuantActivations, weights: Any, *, impl: str) -> Float[Array, "out T"]:
    """`weights @ x`, accumulated in float32.

    Args:
        x: float32 or bfloat16, or 8 bits per token.
        weights: what `lay_out` gave for the same `impl`.

    Returns:
        The product in the dtype of `x`, or what `x` was before it was quantised.
    """
    return _implementation(impl).quant_matmul(x, weights)


def take_rows(weights: Any, rows: Int[Array, " R"], *, impl: str) -> Float[Array, "R in"]:
    """Some rows of the matrix in float32, as an embedding is looked up.

    Args:
        weights: what `lay_out` gave for the same `impl`, of 8 bits with a scale a row and no offsets.
        rows: all of them there.

    Raises:
        ValueError: other weights.
    """
    return _implementation(impl).take_rows(weights, rows)
