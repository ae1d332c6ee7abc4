"""Products with few columns on CPU, as one reduction that has a sum for each of some rows and each of some columns.

XLA's CPU compiler makes loops of it as the kernel of a matrix product has them: sums stay in registers, what is read of a row
is used for several columns and what is read of a column for several rows, and weights of any dtype are converted on the way.
So weights are read once, in several streams, near the memory's speed: on 2 AVX512 cores a step of the demo model takes 21 and
32 ms for 1 and 8 sequences, and 23 and 38 with the libraries that XLA has for products.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

MOST_COLUMNS = 8
"""More are faster in a library."""

ROWS, COLUMNS = 6, 2
"""At a time. Twelve sums fit sixteen registers. More columns at a time (3 x 8, 4 x 4) or fewer rows (4 x 2) are 3 to 8%
slower at eight columns, and each sum more costs compile time."""


def product_by_sums(weights: Num[Array, "out in"], x: Float[Array, "in T"]) -> Float[Array, "out T"]:
    """`weights @ x` with few columns, weights of any dtype; accumulated in float32."""
    num_rows, (num_in, num_columns) = len(weights), x.shape
    per_group = COLUMNS if num_columns % COLUMNS == 0 else 1
    groups = num_columns // per_group
    # Each column in a row of its own, or else the loop gathers it. Without the barrier XLA would lay it out as it was, and
    # compute what `x` is made of again for each row.
    columns = lax.optimization_barrier(x.astype(jnp.float32).T.reshape(-1)).reshape(groups, per_group, num_in)
    # Parts of the matrix of equal height; the last ones begin within the one before, where the height does not divide.
    height = -(-num_rows // ROWS)
    starts = [min(part * height, num_rows - height) for part in range(ROWS)]
    shape = (height, groups, num_in)
    parts = [jnp.broadcast_to(weights[start : start + height].astype(jnp.float32)[:, None], shape) for start in starts]
    factors = [part * columns[None, :, column] for part in parts for column in range(per_group)]
    sums = lax.reduce(
        factors, [jnp.float32(0)] * len(factors), lambda a, b: [left + right for left, right in zip(a, b, strict=True)], (2,)
    )
    rows = []
    for part, start in enumerate(starts):
        of_part = jnp.stack(sums[part * per_group : (part + 1) * per_group], axis=-1)  # [height, groups, per_group]
        rows.append(of_part.reshape(height, num_columns)[part * height - start :])
    return jnp.concatenate(rows).astype(x.dtype)
