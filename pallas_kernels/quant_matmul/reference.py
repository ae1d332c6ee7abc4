"""The definition of `quant_matmul`: dequantise everything, multiply in float32. Obvious, not fast."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quant_matmul.weights import (
    QuantActivations,
    QuantWeights,
    check_rows,
    dequantize_activations,
    dequantize_weights,
    form_of,
)


def lay_out(weights: QuantWeights) -> QuantWeights:
    """See `pallas_kernels.quant_matmul.lay_out`. Nothing to move."""
    form_of(weights)
    return weights


def quant_matmul(x: Float[Array, "in T"] | QuantActivations, weights: QuantWeights) -> Float[Array, "out T"]:
    """See `pallas_kernels.quant_matmul.quant_matmul`."""
    wide = dequantize_activations(x) if isinstance(x, QuantActivations) else x.astype(jnp.float32)
    return jnp.matmul(dequantize_weights(weights), wide, precision="highest").astype(x.dtype)


def take_rows(weights: QuantWeights, rows: Int[Array, " R"]) -> Float[Array, "R in"]:
    """See `pallas_kernels.quant_matmul.take_rows`."""
    check_rows(form_of(weights))
    return dequantize_weights(weights)[rows]
