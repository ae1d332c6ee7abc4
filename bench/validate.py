"""Holds the simulator against a real server on this machine: `python -m bench.validate --help`.

Owns the order of things and what is compared. Loads, costs and simulations are `bench.served`'s and `bench.simulation`'s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from bench import served
from bench.serve_load import Job, Outcome
from bench.serve_load import run_open as send_open
from bench.simulation.record import Record, percentiles
from bench.simulation.replica import Setting, run_open, setting_of
from bench.simulation.traces import Arrival, clip, read_trace
from bench.step_log import StepLog, read_log
from bench.workloads import FIRST_TOKEN_ID, LAST_TOKEN_ID
from jaxserve.config import ServeConfig
from jaxserve.errors import JaxserveError
from jaxserve.flags import add_engine_flags, add_model_flags, serve_config_from_args
from jaxserve.host.cost import StepCost
from jaxserve.host.cost_file import CostOrigin, format_cost, read_cost
from jaxserve.host.fit import fit_cost, spread_of

DESCRIPTION = """\
Replay a trace against a real server process over HTTP, simulate the same, and compare p50 and p95 of the time to the first
token and between tokens. What steps cost is learnt in the same server from another load, half of it before the trace and half
after (see `python -m bench.calibrate --served`). Choose --rate for about 60% of what the machine can do.

Beside the prediction stand two others that say where its error comes from: with costs of the very steps that the trace ran,
which leaves only what is no matter of costs, and, with --bare, with costs of an engine without a server around it.
"""
TOLERANCE = 0.2
PREDICTED, OWN_STEPS, BARE = "as predicted", "with costs of the trace's own steps", "with costs of a bare engine"


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure, in seconds, measured and predicted."""

    name: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        return (
            f"{self.name:<10} measured {1e3 * self.measured:>8.1f} ms   predicted {1e3 * self.predicted:>8.1f} ms   "
            f"{self.error:>+7.1%}  {'within' if abs(self.error) <= TOLERANCE else 'OUTSIDE'} {TOLERANCE:.0%}"
        )


@dataclass(frozen=True, slots=True)
class Run:
    """What happened: a trace's outcomes and when they did, the loads around it, and every step of it all."""

    outcomes: list[Outcome]
    span: tuple[float, float]
    phases: list[served.Phase]
    log: StepLog


def make_jobs(arrivals: Sequence[Arrival], seed: int) -> list[Job]:
    """The trace's arrivals with random prompts of its lengths."""
    draw = random.Random(seed)
    return [
        Job(arrival.at, draw.choices(range(FIRST_TOKEN_ID, LAST_TOKEN_ID), k=arrival.num_prompt), arrival.num_output)
        for arrival in arrivals
    ]


async def replay(url: str, jobs: Sequence[Job], warm_up: Sequence[Job]) -> tuple[list[Outcome], tuple[float, float]]:
    """Send `jobs` at their times, after `warm_up` one by one; also from when to when that was."""
    async with served.connected(url) as (client, _):
        for job in warm_up:
            await client.send(job, time.perf_counter())
        start = time.perf_counter()
        outcomes = await send_open(jobs, client)
        return outcomes, (start, time.perf_counter())


def run_for_real(
    config: ServeConfig, engine_flags: Sequence[str], jobs: Sequence[Job], warm_up: Sequence[Job], *, seconds: float, log: Path
) -> Run:
    """Serve `jobs`, between two loads of `seconds` together; 0 leaves these out.

    Raises:
        RuntimeError: the server was not ready in time, or refused some of the load.
    """
    phases: list[served.Phase] = []
    with served.recorded(engine_flags, log) as url:

        def load(seed: int) -> None:
            if seconds:
                phases.extend(asyncio.run(served.load(url, config.engine, seconds=seconds / 2, seed=seed)))

        load(1)
        outcomes, span = asyncio.run(replay(url, jobs, warm_up))
        load(2)
    return Run(outcomes, span, phases, read_log(log))


def compare(outcomes: Sequence[Outcome], record: Record) -> list[Compared]:
    """p50 and p95 of what was measured, and of what was predicted."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    simulated = [outcome for outcome in record.outcomes.values() if outcome.first is not None]
    pairs = {
        "TTFT": (
            [outcome.ttft for outcome in good if outcome.ttft is not None],
            [outcome.first - outcome.arrived for outcome in simulated if outcome.first is not None],
        ),
        "ITL": ([gap for outcome in good for gap in outcome.gaps], record.gaps),
        "E2E": (
            [outcome.latency for outcome in good if outcome.latency is not None],
            [outcome.last - outcome.arrived for outcome in simulated],
        ),
    }
    return [
        Compared(f"{name} {which}", percentiles(measured)[which], percentiles(predicted)[which])
        for name, (measured, predicted) in pairs.items()
        for which in ("p50", "p95")
    ]


def steps_compared(cost: StepCost, log: StepLog, span: tuple[float, float]) -> list[Compared]:
    """Means over the steps of a span of time, by kind of program, and what `cost` says of the very same steps."""
    samples = log.samples([span])
    kinds = {
        "decodes": [one for one in samples if not one.work.chunked],
        "chunks": [one for one in samples if one.work.chunked],
    }
    return [
        Compared(
            f"{len(of_kind)} {name}", fmean(one.seconds for one in of_kind), fmean(cost.seconds(one.work) for one in of_kind)
        )
        for name, of_kind in kinds.items()
        if of_kind
    ]


def costs_of(run: Run, predicted: Path, bare: Path | None) -> dict[str, tuple[StepCost, CostOrigin]]:
    """By name what to simulate with; the first is what is held to the tolerance.

    Raises:
        ConfigError: a file cannot be read, or the trace had no steps of one kind.
    """
    cost, origin = read_cost(predicted)
    samples = run.log.samples([run.span])
    own = fit_cost(samples)
    costs = {PREDICTED: (cost, origin), OWN_STEPS: (own, replace(origin, spread=spread_of(own, samples)))}
    return costs if bare is None else {**costs, BARE: read_cost(bare)}


def main(argv: Sequence[str] | None = None) -> int:
    """Validate; 1 if a figure is off by more than the tolerance, 2 where a flag, a file or the server is at fault."""
    args, engine_flags = _parse(argv)
    try:
        config = serve_config_from_args(args)
        arrivals = clip(
            read_trace(args.trace, rate=args.rate, seed=args.seed)[: args.requests],
            max_prompt=args.max_prompt,
            max_output=args.max_output,
        )
        bare = args.results / "bare.toml" if args.bare else None
        if bare:
            # In a process of its own, whose memory is gone when the server starts.
            subprocess.run([sys.executable, "-m", "bench.calibrate", *engine_flags, "--out", str(bare)], check=True)
        run = run_for_real(
            config,
            engine_flags,
            make_jobs(arrivals, args.seed),
            make_jobs(arrivals[:3], args.seed + 1),
            seconds=0.0 if args.cost else args.seconds,
            log=args.results / "steps.json",
        )
        if args.cost is None:
            args.cost = args.results / "served.toml"
            args.cost.write_text(format_cost(*served.learn(config.model, run.log, run.phases)))
        costs = costs_of(run, args.cost, bare)
    except (JaxserveError, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"bench.validate: error: {error}", file=sys.stderr)
        return 2
    found = {name: report(name, setting_of(config, *cost), arrivals, run) for name, cost in costs.items()}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        figures = {name: [{**asdict(one), "error": one.error} for one in compared] for name, compared in found.items()}
        args.json.write_text(json.dumps({"argv": sys.argv[1:], "figures": figures}, indent=1) + "\n")
    return int(any(abs(one.error) > TOLERANCE for one in found[PREDICTED] if not one.name.startswith("E2E")))


def report(name: str, setting: Setting, arrivals: Sequence[Arrival], run: Run) -> list[Compared]:
    """Simulate with one kind of cost, and say how it compares."""
    record = Record()
    replica = run_open(setting, arrivals, record)
    compared = compare(run.outcomes, record)
    num_gaps, num_failed = sum(len(one.gaps) for one in run.outcomes), sum(one.error is not None for one in run.outcomes)
    print(f"\n{name}: device busy {replica.runner.busy_seconds / replica.clock.now:.0%} of the time")
    print(f"  {len(run.outcomes)} requests, {num_failed} failed; {num_gaps} gaps measured, {len(record.gaps)} predicted")
    print(
        f"  outside the engine {1e3 * setting.request_seconds:.1f} ms on the way in, {1e3 * setting.reply_seconds:.1f} ms out"
    )
    for one in [*steps_compared(setting.cost, run.log, run.span), *compared]:
        print(f"  {one}")
    return compared


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The arguments, and those of them that the server and the calibration take too."""
    own = argparse.ArgumentParser(add_help=False)
    group = own.add_argument_group("validation")
    group.add_argument("--trace", type=Path, required=True, metavar="FILE", help="as for bench.simulate")
    group.add_argument("--cost", type=Path, metavar="FILE", help="predict with these costs, instead of learning them here")
    group.add_argument("--bare", action="store_true", help="show too what a bare engine's costs predict; 90 s more")
    group.add_argument("--rate", type=float, metavar="R", help="requests a second at random, instead of the trace's times")
    group.add_argument("--requests", type=int, default=200, metavar="N", help="the first N; default: %(default)s")
    group.add_argument("--max-prompt", type=int, default=0, metavar="N", help="cut longer prompts")
    group.add_argument("--max-output", type=int, default=0, metavar="N", help="cut longer answers")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals and prompts; default: 0")
    group.add_argument(
        "--seconds",
        type=float,
        default=served.LOAD_SECONDS,
        metavar="S",
        help="of load from which costs are learnt; default: %(default)g",
    )
    group.add_argument(
        "--results", type=Path, default=Path("results"), metavar="DIR", help="for costs and the step log; default: results"
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser = argparse.ArgumentParser(
        prog="python -m bench.validate",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[own],
    )
    add_model_flags(parser)
    add_engine_flags(parser)
    args = parser.parse_args(argv)
    return args, own.parse_known_args(argv)[1]


if __name__ == "__main__":
    sys.exit(main())
