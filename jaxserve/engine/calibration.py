"""Measures what steps cost, by running made-up plans through a runner as the loop does: one ahead of what is read.

Owns which steps are measured and how. Knows no model; `host.fit` fits what is found. No sequence may be live meanwhile:
the plans write over pages and slots.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxserve.config import EngineConfig
from jaxserve.host.cost import Bucket, BucketFor, StepCost, work_of
from jaxserve.host.cost_file import read_cost
from jaxserve.host.fit import Sample, fit_cost
from jaxserve.host.pace import Pacer
from jaxserve.plan import PlanRow, Runner, RunnerLimits, StepPlan
from jaxserve.request import SamplingParams

logger = logging.getLogger(__name__)

TOKEN_ID = 1
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Point:
    """A step to measure.

    Attributes:
        num_decodes: rows of one token.
        context: positions that each of them attends to.
        chunks: tokens of each longer row.
        start: positions before each of those.
    """

    num_decodes: int
    context: int
    chunks: tuple[int, ...] = ()
    start: int = 0


def thorough_points(limits: RunnerLimits, buckets: Sequence[Bucket], bucket_for: BucketFor) -> list[Point]:
    """Steps in every bucket: full and half full, over short and long contexts, chunks in one row and in many."""
    points: list[Point] = []
    for bucket in buckets:
        candidates = _chunk_points(bucket, limits) if bucket.has_chunks else _decode_points(bucket, limits)
        points += [point for point in candidates if bucket_of(point, bucket_for) == bucket]
    return list(dict.fromkeys(points))


def quick_points(limits: RunnerLimits, buckets: Sequence[Bucket], bucket_for: BucketFor) -> list[Point]:
    """Of each bucket the first and the last of the thorough points: enough to start from where steps correct it later."""
    by_bucket: dict[Bucket, list[Point]] = {}
    for point in thorough_points(limits, buckets, bucket_for):
        by_bucket.setdefault(bucket_of(point, bucket_for), []).append(point)
    return list(dict.fromkeys(point for points in by_bucket.values() for point in (points[0], points[-1])))


def bucket_of(point: Point, bucket_for: BucketFor) -> Bucket:
    """The bucket that `point` runs in."""
    return bucket_for(point.num_decodes, sum(point.chunks), len(point.chunks))


def _decode_points(bucket: Bucket, limits: RunnerLimits) -> Iterator[Point]:
    for num_rows in dict.fromkeys((bucket.num_single, bucket.num_single // 2 + 1)):
        longest = _longest(num_rows, limits)
        for context in (min(limits.page_size, longest), longest // 2, longest):
            if context:
                yield Point(num_rows, context)


def _chunk_points(bucket: Bucket, limits: RunnerLimits) -> Iterator[Point]:
    for num_decodes in dict.fromkeys((0, bucket.num_single // 2, bucket.num_single)):
        longest = _longest(num_decodes + 1, limits)
        tokens = min(bucket.num_tokens - num_decodes, longest)
        num_rows = min(bucket.chunk_rows, limits.max_seqs - num_decodes)
        if tokens < 2 or num_rows < 1:
            continue
        context = min(limits.page_size, longest)
        yield Point(num_decodes, context, (tokens,))
        yield Point(num_decodes, context, (tokens // 2,))  # few prompts fill a step
        if tokens >= 32 and num_rows > 1:
            rows = min(num_rows, tokens // 16)
            yield Point(num_decodes, context, (tokens // rows,) * rows)
        yield Point(num_decodes, longest // 2, (tokens,), (longest - tokens) // 2)
        yield Point(num_decodes, longest, (tokens,), longest - tokens)


def _longest(num_rows: int, limits: RunnerLimits) -> int:
    """Positions that each of `num_rows` sequences can have at once."""
    return replace(limits, num_pages=limits.num_pages // max(1, num_rows)).max_tokens - 1


def _pages(limits: RunnerLimits, start: int, count: int, page: int) -> tuple[int, list[int]]:
    """What a row holds of a pool: the number of its first page, and so many ids as it needs from `page` on."""
    first = limits.first_seen_page(start)
    end = -(-(start + count) // limits.page_size)
    return first, [(page + index) % limits.num_pages for index in range(end - first)]


class Calibrator:
    """Runs points on `runner` and times them.

    Args:
        clock: seconds.
    """

    def __init__(self, runner: Runner, bucket_for: BucketFor, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._runner = runner
        self._bucket_for = bucket_for
        self._clock = clock
        self._next_step_id = 0

    def measure(
        self,
        points: Sequence[Point],
        *,
        rounds: int,
        quantile: float = 0.5,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Sample]:
        """A sample of each point, from `rounds` visits in turn, so that a slow moment does not hit one alone.

        A pass over all of them comes first, untimed, to fault in what is lazy.

        Args:
            quantile: which of the visits counts: 0.5 for the median, 0 for the fastest, which others disturbed least.
            progress: called with visits done and in all.
        """
        for point in points:
            self._runner.submit(self._plan(point)).result()
        seconds: dict[Point, list[float]] = {point: [] for point in points}
        for number in range(rounds):
            for index, point in enumerate(points, start=number * len(points) + 1):
                seconds[point].append(self._seconds(point))
                if progress is not None:
                    progress(index, rounds * len(points))
        return [
            Sample(work_of(self._plan(point), self._bucket_for), sorted(found)[int(quantile * (rounds - 1) + 0.5)])
            for point, found in seconds.items()
        ]

    def _seconds(self, point: Point) -> float:
        """Between the results of two steps of which the second was dispatched before the first was read."""
        first = self._runner.submit(self._plan(point))
        second = self._runner.submit(self._plan(point))
        first.result()
        started = self._clock()
        second.result()
        return self._clock() - started

    def _plan(self, point: Point) -> StepPlan:
        limits = self._runner.limits
        shapes = [(point.context - 1, 1)] * point.num_decodes + [(point.start, count) for count in point.chunks]
        rows, next_page, next_local = [], 0, 0
        for slot, (start, count) in enumerate(shapes):
            first_page, pages = _pages(limits, start, count, next_page)
            next_page += len(pages)
            first_local, local_pages = (0, []) if limits.local is None else _pages(limits.local, start, count, next_local)
            next_local += len(local_pages)
            rows.append(
                PlanRow(
                    seq_id=slot,
                    slot=slot,
                    start=start,
                    count=count,
                    tokens=(TOKEN_ID,) * count,
                    pages=pages,
                    sample=True,
                    num_prompt=start + count,
                    params=GREEDY,
                    seed=0,
                    stop_ids=(),
                    fresh=True,
                    first_page=first_page,
                    local_pages=local_pages,
                    first_local_page=first_local,
                )
            )
        self._next_step_id += 1
        return StepPlan(self._next_step_id, tuple(rows))


def find_cost(engine: EngineConfig, runner: Runner, buckets: Sequence[Bucket], bucket_for: BucketFor) -> StepCost:
    """What steps cost on a warm runner: from the file that `step_cost` names, or measured here, roughly, in a few seconds.

    Raises:
        ConfigError: the file cannot be read.
    """
    if engine.step_cost:
        cost, origin = read_cost(Path(engine.step_cost))
        logger.info("step costs from %s: %s", engine.step_cost, origin)
        return cost
    points = quick_points(runner.limits, buckets, bucket_for)
    fitted = fit_cost(Calibrator(runner, bucket_for).measure(points, rounds=1))
    logger.info("step costs, measured on %d kinds of step: %s", len(points), fitted)
    return fitted


def build_pacer(
    engine: EngineConfig,
    runner: Runner,
    buckets: Sequence[Bucket],
    bucket_for: BucketFor,
    *,
    cost: StepCost | None = None,
) -> Pacer | None:
    """What keeps `slo_itl_ms` on a warm runner; None where there is no such target.

    Args:
        cost: where it is known already what steps cost; else it is found here.

    Raises:
        ConfigError: the file that `step_cost` names cannot be read.
    """
    if not engine.slo_itl_ms:
        return None
    if cost is None:
        cost = find_cost(engine, runner, buckets, bucket_for)
    return Pacer(cost, buckets, bucket_for, target_seconds=engine.slo_itl_ms / 1000)
