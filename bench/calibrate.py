"""Measures what steps of the engine cost here and fits a model to it: `python -m bench.calibrate --help`.

Owns the command. What is measured is `jaxserve.engine.calibration`'s, the fit `jaxserve.host.fit`'s.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from bench import ours
from bench.report import environment
from jaxserve.device.buckets import choose_bucket, enumerate_buckets
from jaxserve.engine.calibration import Calibrator, Point, thorough_points
from jaxserve.errors import JaxserveError
from jaxserve.flags import add_engine_flags, add_model_flags, serve_config_from_args
from jaxserve.host.cost import BucketFor, FittedCost
from jaxserve.host.cost_file import CostOrigin, format_cost
from jaxserve.host.fit import Sample, fit_cost, relative_errors
from jaxserve.plan import Runner

DESCRIPTION = """\
Run steps of every shape that the engine has, over short and long contexts, and fit seconds to what is in them. The file is
what the simulator and --slo-itl-ms predict with. Takes under 90 s for the demo model on two cores; run it while nothing else
does.
"""


def measure(
    runner: Runner,
    *,
    rounds: int,
    quantile: float = 0.5,
    progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[Point], list[Sample]]:
    """Measure the lattice of `runner`'s limits.

    Args:
        quantile: of the visits to a point; 0 for the fastest.
        progress: called with visits done and in all.
    """
    buckets = enumerate_buckets(runner.limits)
    bucket_for: BucketFor = partial(choose_bucket, buckets)
    points = thorough_points(runner.limits, buckets, bucket_for)
    return points, Calibrator(runner, bucket_for, clock=clock).measure(
        points, rounds=rounds, quantile=quantile, progress=progress
    )


def origin_of(model: str, cost: FittedCost, samples: Sequence[Sample], kv_bytes_per_token: float) -> CostOrigin:
    """Where the fit comes from: this machine, today."""
    errors = relative_errors(cost, samples)
    here = environment()
    return CostOrigin(
        model=model,
        machine=f"{here['cpu']}, {here['cores']} cores",
        date=datetime.date.today().isoformat(),
        num_steps=len(samples),
        median_error=errors[len(errors) // 2],
        p95_error=errors[-(-len(errors) * 95 // 100) - 1],
        kv_bytes_per_token=kv_bytes_per_token,
    )


def worst(points: Sequence[Point], samples: Sequence[Sample], cost: FittedCost, count: int) -> str:
    """The points that the fit misses by most, a line each."""
    ranked = sorted(zip(points, samples, strict=True), key=lambda pair: -abs(cost.seconds(pair[1].work) / pair[1].seconds - 1))
    return "\n".join(
        f"  {1e3 * sample.seconds:8.2f} ms measured, {1e3 * cost.seconds(sample.work):8.2f} predicted: {point}"
        for point, sample in ranked[:count]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrate; 2 where a flag or model is at fault."""
    args = _parse(argv)
    try:
        config = serve_config_from_args(args)
        engine = ours.build(config)
        started = time.perf_counter()
        points, samples = measure(
            cast(Runner, engine.runner), rounds=args.rounds, quantile=args.quantile, progress=partial(ours.tenths(), "measure")
        )
        cost = fit_cost(samples)
    except JaxserveError as error:
        print(f"bench.calibrate: error: {error}", file=sys.stderr)
        return 2
    limits = cast(Runner, engine.runner).limits
    kv_bytes_per_token = engine.runner.kv_bytes / (limits.num_pages * limits.page_size)
    origin = replace(origin_of(config.model, cost, samples, kv_bytes_per_token), window=limits.window or 0)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(format_cost(cost, origin))
    print(f"{len(points)} kinds of step in {time.perf_counter() - started:.0f} s")
    print(f"error of the fit: median {origin.median_error:.1%}, p95 {origin.p95_error:.1%}; the worst:")
    print(worst(points, samples, cost, 5))
    print(f"written to {args.out}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.calibrate", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_flags(parser)
    parser.add_argument("--out", type=Path, default=Path("results/cost.toml"), metavar="FILE", help="default: %(default)s")
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="times that each kind is measured; default: %(default)s"
    )
    parser.add_argument(
        "--quantile",
        type=float,
        default=0.5,
        metavar="Q",
        help="which of the rounds counts: 0 for the fastest, where others disturb; default: %(default)s, the median",
    )
    add_engine_flags(parser)
    args = parser.parse_args(argv)
    if args.rounds < 1 or not 0 <= args.quantile <= 1:
        parser.error(f"--rounds must be at least 1 and --quantile from 0 to 1, found {args.rounds} and {args.quantile}")
    return args


if __name__ == "__main__":
    sys.exit(main())
