"""Where outputs of decodes and of chunks come together, for implementations that compute them apart."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def joined(
    decoded: Float[Array, "S *shape"] | None, chunked: Float[Array, "T *shape"] | None, num_decodes: Int[Array, ""]
) -> Float[Array, "T *shape"]:
    """Outputs of a step's tokens; either argument may be absent.

    Args:
        decoded: of rows of one token, of which the first `num_decodes` own one.
        chunked: of all tokens; what it has of the first `num_decodes` is ignored.
    """
    if chunked is None or decoded is None:
        out = decoded if chunked is None else chunked
        assert out is not None, "a step without rows"
        return out
    num_single = decoded.shape[0]
    is_decode = (jnp.arange(num_single) < num_decodes).reshape(-1, *(1,) * (decoded.ndim - 1))
    return jnp.concatenate([jnp.where(is_decode, decoded, chunked[:num_single]), chunked[num_single:]])
