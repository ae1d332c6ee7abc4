"""Groups that every implementation of `grouped_matmul` is tested on. Benchmarks take them too. Knows no implementation."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Attributes:
    group_sizes: rows of each group.
    padding: rows past the last group's.
    """

    name: str
    num_out: int
    num_in: int
    group_sizes: tuple[int, ...]
    padding: int = 0
    dtype: str = "bfloat16"


CASES = (
    Case(name="one_row", num_out=128, num_in=128, group_sizes=(0, 0, 1, 0), dtype="float32"),
    Case(name="empty_groups", num_out=128, num_in=256, group_sizes=(0, 3, 0, 0, 9, 1, 0), padding=3),
    Case(name="around_tile_ends", num_out=256, num_in=128, group_sizes=(7, 8, 9, 64, 65, 1), dtype="float32"),
    Case(name="all_in_one", num_out=128, num_in=128, group_sizes=(0, 0, 200, 0)),
    Case(name="padding_alone", num_out=128, num_in=64, group_sizes=(0, 0, 0), padding=8),
    Case(name="many_groups", num_out=128, num_in=64, group_sizes=(1, 0, 2, 1) * 16, padding=5),
)


def make_inputs(case: Case, seed: int = 0) -> tuple[Array, Array, Array]:
    """Rows, matrices and group sizes; outputs are about standard normal."""
    rng = np.random.default_rng(seed)
    num_rows = sum(case.group_sizes) + case.padding
    x = rng.standard_normal((num_rows, case.num_in))
    weights = rng.standard_normal((len(case.group_sizes), case.num_out, case.num_in)) / case.num_in**0.5
    return jnp.asarray(x, case.dtype), jnp.asarray(weights, case.dtype), jnp.asarray(case.group_sizes, jnp.int32)
