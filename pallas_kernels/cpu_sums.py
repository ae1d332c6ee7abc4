"""Products with few columns on CPU, as one reduction that has a sum for each of some rows and each column.

XLA's CPU compiler makes a loop of it whose sums stay in registers, as the kernel of a matrix product has them: what is read
of a row is used for all columns, what is read of a column for all of these rows, and weights of any dtype are converted on the
way. So weights are read once, in several streams, near the memory's speed: on 2 AVX512 cores a step of the demo model took
20.3, 29.8 and 34.0 ms for 1, 4 and 8 sequences, where two rows or one at a time took 21.1, 38.1 and 46.5, and the libraries
that XLA has for products 22.6, 34.8 and 38.4.
"""

from __future__ import annotations

import contextlib
import functools
import platform
from pathlib import Path

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

ROWS = 3
"""Rows at a time, at most: more win nothing, and each sum more costs compile time."""

_MOST_SUMS = {32: 24, 16: 8}
_MOST_COLUMNS = {32: 8, 16: 4}
"""At a time, and at all, by how many vector registers there are: some must be left for what is multiplied."""


def most_columns() -> int:
    """Columns that are better summed than given to a library."""
    return _MOST_COLUMNS[_num_vector_registers()]


def product_by_sums(weights: Num[Array, "out in"], x: Float[Array, "in T"]) -> Float[Array, "out T"]:
    """`weights @ x` with few columns, weights of any dtype; accumulated in float32."""
    num_rows, (num_in, num_columns) = len(weights), x.shape
    rows = max(1, min(ROWS, _MOST_SUMS[_num_vector_registers()] // num_columns))
    # Each column in a row of its own, or else the loop gathers it. Without the barrier XLA would lay it out as it was, and
    # compute what `x` is made of again for each row.
    flat = lax.optimization_barrier(x.astype(jnp.float32).T.reshape(-1))
    columns = [flat[first : first + num_in] for first in range(0, flat.size, num_in)]
    # Parts of the matrix of equal height; the last begins within the one before, where the height does not divide.
    height = -(-num_rows // rows)
    starts = [min(part * height, num_rows - height) for part in range(rows)]
    wide = weights.astype(jnp.float32)
    factors = [wide[start : start + height] * column for start in starts for column in columns]
    sums = lax.reduce(
        factors, [jnp.float32(0)] * len(factors), lambda a, b: [left + right for left, right in zip(a, b, strict=True)], (1,)
    )
    parts = []
    for part, start in enumerate(starts):
        of_part = jnp.stack(sums[part * num_columns : (part + 1) * num_columns], axis=1)
        parts.append(of_part[part * height - start :])
    return jnp.concatenate(parts).astype(x.dtype)


@functools.cache
def _num_vector_registers() -> int:
    """Of this processor, as far as it is known: 32 with AVX512, and of ARM's 64-bit processors."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return 32
    with contextlib.suppress(OSError):
        return 32 if " avx512f" in Path("/proc/cpuinfo").read_text() else 16
    return 16
