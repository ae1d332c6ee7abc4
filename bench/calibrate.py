"""Measures what steps of the engine cost here and fits a model to it: `python -m bench.calibrate --help`.

Owns the command. What is measured is `jaxserve.engine.calibration`'s, the fit `jaxserve.host.fit`'s.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from bench import ours, served
from bench.costs import kv_bytes_per_token, origin_of
from bench.step_log import read_log
from jaxserve.config import ServeConfig
from jaxserve.device.buckets import choose_bucket, enumerate_buckets
from jaxserve.engine.calibration import Calibrator, Point, thorough_points
from jaxserve.errors import JaxserveError
from jaxserve.flags import add_engine_flags, add_model_flags, serve_config_from_args
from jaxserve.host.cost import BucketFor, FittedCost
from jaxserve.host.cost_file import CostOrigin, format_cost
from jaxserve.host.fit import Sample, fit_cost
from jaxserve.plan import Runner

DESCRIPTION = """\
Run steps of every shape that the engine has, over short and long contexts, and fit seconds to what is in them. The file is
what the simulator and --slo-itl-ms predict with. Takes under 90 s for the demo model on two cores; run it while nothing else
does.

A bare engine is measured so. --served puts a server under load over HTTP instead, and fits the same to its steps: what a
deployment is to be predicted with, for the server's own work and its clients' take their part of the same cores.
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


def worst(points: Sequence[Point], samples: Sequence[Sample], cost: FittedCost, count: int) -> str:
    """The points that the fit misses by most, a line each."""
    ranked = sorted(zip(points, samples, strict=True), key=lambda pair: -abs(cost.seconds(pair[1].work) / pair[1].seconds - 1))
    return "\n".join(
        f"  {1e3 * sample.seconds:8.2f} ms measured, {1e3 * cost.seconds(sample.work):8.2f} predicted: {point}"
        for point, sample in ranked[:count]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrate; 2 where a flag, a model or the server is at fault."""
    args, engine_flags = _parse(argv)
    started = time.perf_counter()
    try:
        config = serve_config_from_args(args)
        if args.served:
            cost, origin = measure_served(config, engine_flags, seconds=args.seconds)
            missed = ""
        else:
            cost, origin, missed = _measure_bare(args, config)
    except (JaxserveError, RuntimeError) as error:
        print(f"bench.calibrate: error: {error}", file=sys.stderr)
        return 2
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(format_cost(cost, origin))
    print(f"{origin.num_steps} {'steps' if args.served else 'kinds of step'} in {time.perf_counter() - started:.0f} s")
    print(f"error of the fit: median {origin.median_error:.1%}, p95 {origin.p95_error:.1%}{missed}")
    print(f"written to {args.out}")
    return 0


def _measure_bare(args: argparse.Namespace, config: ServeConfig) -> tuple[FittedCost, CostOrigin, str]:
    engine = ours.build(config)
    runner = cast(Runner, engine.runner)
    points, samples = measure(runner, rounds=args.rounds, quantile=args.quantile, progress=partial(ours.tenths(), "measure"))
    cost = fit_cost(samples)
    origin = origin_of(config.model, cost, samples, kv_bytes_per_token(engine.runner.kv_bytes, runner.limits))
    origin = replace(origin, window=runner.limits.window or 0)
    return cost, origin, f"; the worst:\n{worst(points, samples, cost, 5)}"


def measure_served(config: ServeConfig, engine_flags: Sequence[str], *, seconds: float) -> tuple[FittedCost, CostOrigin]:
    """Costs of a server with these flags, which are those that `config` was made of, under load for about so long.

    Raises:
        RuntimeError: the server was not ready in time, or did not answer a request.
        ConfigError: too little was served.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.json"
        with served.recorded(engine_flags, path) as url:
            phases = asyncio.run(served.load(url, config.engine, seconds=seconds, seed=0))
        return served.learn(config.model, read_log(path), phases)


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The arguments, and those of them that the server takes too."""
    own = argparse.ArgumentParser(add_help=False)
    group = own.add_argument_group("calibration")
    group.add_argument("--out", type=Path, default=Path("results/cost.toml"), metavar="FILE", help="default: %(default)s")
    group.add_argument("--rounds", type=int, default=3, metavar="N", help="visits to each kind of step; default: %(default)s")
    group.add_argument(
        "--quantile",
        type=float,
        default=0.5,
        metavar="Q",
        help="which of the visits counts: 0 for the fastest, where others disturb; default: %(default)s, the median",
    )
    group.add_argument("--served", action="store_true", help="fit to the steps of a server under load")
    group.add_argument(
        "--seconds", type=float, default=served.LOAD_SECONDS, metavar="S", help="of that load; default: %(default)g"
    )
    parser = argparse.ArgumentParser(
        prog="python -m bench.calibrate",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[own],
    )
    add_model_flags(parser)
    add_engine_flags(parser)
    args = parser.parse_args(argv)
    if args.rounds < 1 or not 0 <= args.quantile <= 1 or args.seconds <= 0:
        parser.error(
            "--rounds must be at least 1, --quantile from 0 to 1 and --seconds positive, "
            f"found {args.rounds}, {args.quantile} and {args.seconds}"
        )
    return args, own.parse_known_args(argv)[1]


if __name__ == "__main__":
    sys.exit(main())
