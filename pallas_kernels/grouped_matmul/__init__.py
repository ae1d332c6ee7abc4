"""Products of rows with their group's matrix: the experts of a mixture, each on the tokens that chose it.

Owns the signature and the choice of implementation; the definition is `reference.py`. There is no kernel of our own, since
what exists suffices where it was looked at:

- TPU: `jax.lax.ragged_dot`, which XLA compiles to a kernel of its own that reads each matrix once and computes no more than
  is asked (64 experts of 2048 x 1408 in bfloat16, 512 rows, ahead of time for v5e: 374 MB read of 371, no temporaries). jax's
  `megablox.gmm` reads 414 MB there and wants the rows in whole tiles.
- GPU: jax's Pallas `ragged_dot_mgpu`. `jax.lax.ragged_dot` becomes one dense product there, with rows masked for every
  expert: 1.07 GB of temporaries at 4096 rows, and 64 times the arithmetic.
- CPU: `jax.lax.ragged_dot` does the same dense product, 20 to 70 times slower than the loop in `xla.py`.

Rows lie outermost here, `[M, in]`, unlike in the models' `linear`: they are gathered by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import gpu, reference, tpu, xla


@dataclass(frozen=True, slots=True)
class Implementation:
    """A `lay_out` and the `grouped_matmul` that reads it, with the signatures of this module less `impl`.

    Attributes:
        order: how `lay_out` permutes the axes of matrices `[X, out, in]`, which is all that it does.
    """

    lay_out: Callable[..., Any]
    grouped_matmul: Callable[..., Any]
    order: tuple[int, int, int] = (0, 1, 2)


IMPLEMENTATIONS = {
    "reference": Implementation(reference.lay_out, reference.grouped_matmul),
    "xla": Implementation(xla.lay_out, xla.grouped_matmul),
    "tpu": Implementation(tpu.lay_out, tpu.grouped_matmul, order=(0, 2, 1)),
    "gpu": Implementation(gpu.lay_out, gpu.grouped_matmul),
}
"""By name. An experiment adds its own in one line; "reference" is the definition, "xla" the fast path on CPU."""


def lay_out(weights: Float[Array, "X out in"], *, impl: str) -> Any:
    """Move the matrices of `X` groups to where `grouped_matmul` of the same `impl` wants them, once, when a model is loaded.

    Raises:
        ValueError: `impl` does not support them.
    """
    return IMPLEMENTATIONS[impl].lay_out(weights)


def grouped_matmul(
    x: Float[Array, "M in"], weights: Any, group_sizes: Int[Array, " X"], *, impl: str
) -> Float[Array, "M out"]:
    """Multiply each row by its group's matrix.

    Args:
        x: rows sorted by group.
        weights: what `lay_out` gave for the same `impl`.
        group_sizes: rows of each group, which add up to `M` at most.

    Returns:
        Sums are accumulated in float32 and come in the dtype of `x`. Rows past the last group's are finite and otherwise
        unspecified.
    """
    return IMPLEMENTATIONS[impl].grouped_matmul(x, weights, group_sizes)
