"""Holds the simulator against a real server on this machine: `python -m bench.validate --help`.

Owns the order of things: measure step costs, serve the trace over HTTP for real, simulate the same, compare. The three are
`bench.calibrate`, `bench.serve_load` and `bench.simulation`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import aiohttp

from bench.serve_load import Client, Job, Outcome, run_open
from bench.simulation.record import Record, percentiles
from bench.simulation.replica import Replica, Setting
from bench.simulation.replica import run_open as simulate_open
from bench.simulation.traces import Arrival, clip, read_trace
from bench.workloads import FIRST_TOKEN_ID, LAST_TOKEN_ID
from jaxserve.errors import JaxserveError
from jaxserve.flags import add_engine_flags, add_model_flags, serve_config_from_args
from jaxserve.host.cost_file import read_cost

DESCRIPTION = """\
Measure what steps cost here, replay a trace against a real server process over HTTP, simulate the same trace with these costs,
and compare p50 and p95 of the time to the first token and between tokens. Choose --rate for about 60% of what the machine can
do. On a machine that others use too the parts meet different machines; --from-run then fits the costs to the steps that the
server itself has run, which leaves everything but the costs to be held against it.
"""
READY_SECONDS = 300.0
TOLERANCE = 0.2


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


@contextlib.contextmanager
def serving(command: Sequence[str]) -> Iterator[str]:
    """A server process of this command, to which a port is added, once it is ready; its address.

    Raises:
        RuntimeError: it ended or was not ready in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([sys.executable, "-m", *command, "--port", str(port)])
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server was not ready within {READY_SECONDS:g} s, or ended: code {process.poll()}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def _is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/ready", timeout=5) as answer:
            return answer.status == 200
    except (URLError, OSError):
        return False


def make_jobs(arrivals: Sequence[Arrival], seed: int) -> list[Job]:
    """The trace's arrivals with random prompts of its lengths."""
    draw = random.Random(seed)
    return [
        Job(arrival.at, draw.choices(range(FIRST_TOKEN_ID, LAST_TOKEN_ID), k=arrival.num_prompt), arrival.num_output)
        for arrival in arrivals
    ]


async def replay(url: str, jobs: Sequence[Job], warm_up: Sequence[Job]) -> list[Outcome]:
    """Send `jobs` at their times, after `warm_up` one by one."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        async with session.get(f"{url}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        client = Client(session, url, model)
        for job in warm_up:
            await client.send(job, time.perf_counter())
        return await run_open(jobs, client)


def predict(setting: Setting, arrivals: Sequence[Arrival]) -> tuple[Record, Replica]:
    """The simulation of `arrivals`."""
    record = Record()
    return record, simulate_open(setting, arrivals, record)


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
        command = ["jaxserve", "serve", *engine_flags]
        cost_file = args.cost or Path("results/cost.toml")
        if args.from_run:
            command = ["bench.recorded_server", *engine_flags, "--record", str(cost_file)]
        elif args.cost is None:
            # In a process of its own, whose memory is gone when the server starts.
            calibration = ["bench.calibrate", *engine_flags, "--out", str(cost_file)]
            subprocess.run([sys.executable, "-m", *calibration], check=True)
        jobs = make_jobs(arrivals, args.seed)
        with serving(command) as url:
            outcomes = asyncio.run(replay(url, jobs, make_jobs(arrivals[:3], args.seed + 1)))
        cost, origin = read_cost(cost_file)
        setting = Setting(config, cost, origin.kv_bytes_per_token, origin.request_seconds, origin.spread, origin.window)
        record, replica = predict(setting, arrivals)
    except (JaxserveError, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"bench.validate: error: {error}", file=sys.stderr)
        return 2
    compared = compare(outcomes, record)
    num_failed = sum(outcome.error is not None for outcome in outcomes)
    num_gaps = sum(len(outcome.gaps) for outcome in outcomes)
    print(
        f"{len(outcomes)} requests in {arrivals[-1].at:.0f} s, {num_failed} failed; device busy "
        f"{replica.runner.busy_seconds / replica.clock.now:.0%} of the time, as predicted"
    )
    print(
        f"{num_gaps} gaps measured, {len(record.gaps)} predicted (tokens that give no text of their own merge with the next)"
    )
    print("\n".join(map(str, compared)))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        found = {"argv": sys.argv[1:], "figures": [{**asdict(one), "error": one.error} for one in compared]}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(abs(one.error) > TOLERANCE for one in compared if not one.name.startswith("E2E")))


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The arguments, and those of them that the server and the calibration take too."""
    own = argparse.ArgumentParser(add_help=False)
    group = own.add_argument_group("validation")
    group.add_argument("--trace", type=Path, required=True, metavar="FILE", help="as for bench.simulate")
    group.add_argument("--cost", type=Path, metavar="FILE", help="step costs; default: measure them first")
    group.add_argument("--from-run", action="store_true", help="fit the step costs to the server's own steps")
    group.add_argument("--rate", type=float, metavar="R", help="requests a second at random, instead of the trace's times")
    group.add_argument("--requests", type=int, default=200, metavar="N", help="the first N; default: %(default)s")
    group.add_argument("--max-prompt", type=int, default=0, metavar="N", help="cut longer prompts")
    group.add_argument("--max-output", type=int, default=0, metavar="N", help="cut longer answers")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals and prompts; default: 0")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the figures; results/ is ignored by git")
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
