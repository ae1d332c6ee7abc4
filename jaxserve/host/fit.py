"""Fits a `FittedCost` to measured steps: least squares with coefficients that are not negative. Knows no runner.

Relative errors are what counts, since a step of 500 ms that is 1 ms off is right and one of 2 ms is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxserve.errors import ConfigError
from jaxserve.host.cost import FittedCost, KindCost, StepCost, StepWork

NUM_REWEIGHTINGS = 3
NUM_SPREAD = 40


@dataclass(frozen=True, slots=True)
class Sample:
    """A step that was measured."""

    work: StepWork
    seconds: float


def fit_cost(samples: Sequence[Sample]) -> FittedCost:
    """The model that is nearest to `samples`.

    Raises:
        ConfigError: there is no sample of one kind of program, or one took no time.
    """
    return FittedCost(
        decode=_fit_kind([sample for sample in samples if not sample.work.chunked], "decodes alone"),
        chunked=_fit_kind([sample for sample in samples if sample.work.chunked], "chunks"),
    )


def relative_errors(cost: StepCost, samples: Sequence[Sample]) -> list[float]:
    """|predicted - measured| / measured of each sample, ascending."""
    return sorted(abs(cost.seconds(sample.work) / sample.seconds - 1) for sample in samples)


def spread_of(cost: StepCost, samples: Sequence[Sample]) -> tuple[float, ...]:
    """How much steps vary: measured over predicted, in order, as means of equal parts, so that rare ones keep their weight.

    Quantiles would not do: the slowest step of thousands would be drawn as often as any other.
    """
    ratios = sorted(sample.seconds / cost.seconds(sample.work) for sample in samples)
    count = min(NUM_SPREAD, len(ratios))
    bounds = [index * len(ratios) // count for index in range(count + 1)]
    return tuple(sum(ratios[low:high]) / (high - low) for low, high in pairwise(bounds))


def _fit_kind(samples: Sequence[Sample], what: str) -> KindCost:
    if not samples:
        raise ConfigError(f"no step with {what} was measured, so there is nothing to fit")
    if min(sample.seconds for sample in samples) <= 0:
        raise ConfigError(f"a step with {what} took no time; the clock is too coarse to fit anything")
    places = sorted({sample.work.places for sample in samples})
    columns = [_columns(sample.work, places) for sample in samples]
    # Errors are relative to what is predicted: relative to what was measured, a slow step would count less than a fast one.
    expected = [sample.seconds for sample in samples]
    for _ in range(1 + NUM_REWEIGHTINGS):
        rows = [[value / scale for value in row] for row, scale in zip(columns, expected, strict=True)]
        targets = [sample.seconds / scale for sample, scale in zip(samples, expected, strict=True)]
        solution = non_negative_least_squares(rows, targets)
        predicted = [sum(value * x for value, x in zip(row, solution, strict=True)) for row in columns]
        expected = [value if value > 0 else scale for value, scale in zip(predicted, expected, strict=True)]
    rises, (per_row, per_chunk, per_context, per_chunk_context, per_product) = solution[: len(places)], solution[len(places) :]
    return KindCost(
        places=tuple(places),
        seconds=tuple(sum(rises[: index + 1]) for index in range(len(places))),
        per_row=per_row,
        per_chunk=per_chunk,
        per_context=per_context,
        per_chunk_context=per_chunk_context,
        per_product=per_product,
    )


def _columns(work: StepWork, places: Sequence[int]) -> list[float]:
    # The empty step's time is a sum of rises from the smallest size up, so that it cannot fall.
    up = [float(work.places >= size) for size in places]
    return [*up, work.num_rows, work.num_chunks, work.context_read, work.chunk_context, work.chunk_products]


def non_negative_least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """The x >= 0 that minimises |rows @ x - targets|, by active sets (Lawson and Hanson, 1974, chapter 23).

    For a handful of unknowns: it works on the normal equations. Unknowns that nothing determines are 0.
    """
    size = len(rows[0])
    scales = [max(abs(row[i]) for row in rows) or 1.0 for i in range(size)]
    gram = [[sum(row[i] * row[j] for row in rows) / (scales[i] * scales[j]) for j in range(size)] for i in range(size)]
    right = [sum(row[i] * target for row, target in zip(rows, targets, strict=True)) / scales[i] for i in range(size)]
    x = [0.0] * size
    passive: list[int] = []
    for _ in range(10 * size):
        gradient = [right[i] - sum(gram[i][j] * x[j] for j in range(size)) for i in range(size)]
        best = max((i for i in range(size) if i not in passive), key=lambda i: gradient[i], default=None)
        if best is None or gradient[best] <= 1e-10 * max(right):
            break
        passive.append(best)
        while True:
            solved = _solve([[gram[i][j] for j in passive] for i in passive], [right[i] for i in passive])
            if all(value > 0 for value in solved):
                break
            # Go from x towards the solution as far as all stay positive; whichever is 0 there leaves.
            moves = [(x[i] / (x[i] - value), i) for i, value in zip(passive, solved, strict=True) if value <= 0]
            share, _leaving = min(moves)
            for i, value in zip(passive, solved, strict=True):
                x[i] += share * (value - x[i])
            gone = {i for distance, i in moves if distance <= share}
            passive = [i for i in passive if i not in gone]
            x = [x[i] if i in passive else 0.0 for i in range(size)]
        x = [0.0] * size
        for i, value in zip(passive, solved, strict=True):
            x[i] = value
    return [value / scale for value, scale in zip(x, scales, strict=True)]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination with pivoting; a dependent unknown is 0."""
    size = len(right)
    a = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for k in range(size):
        pivot = max(range(k, size), key=lambda i: abs(a[i][k]))
        a[k], a[pivot] = a[pivot], a[k]
        for i in range(k + 1, size):
            factor = a[i][k] / a[k][k] if abs(a[k][k]) > 1e-12 else 0.0
            for j in range(k, size + 1):
                a[i][j] -= factor * a[k][j]
    x = [0.0] * size
    for k in reversed(range(size)):
        rest = a[k][size] - sum(a[k][j] * x[j] for j in range(k + 1, size))
        x[k] = rest / a[k][k] if abs(a[k][k]) > 1e-12 else 0.0
    return x
