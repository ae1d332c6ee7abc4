"""Load on a running server over HTTP: `python -m bench.serve_load --help`.

Owns arrivals, requests and latencies. Knows the server by its OpenAI API alone, so any such server can be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.workloads import FIRST_TOKEN_ID, LAST_TOKEN_ID

DESCRIPTION = """\
Send streamed completions of random token prompts to a running server, and report latencies and throughput.

--concurrency N keeps N requests in flight (closed loop); --rate R lets R a second arrive at random, whatever the server does
(open loop, Poisson). Latencies count from a request's arrival, so a queue in front of the server counts too.
TTFT is the time to the first token; ITL the time between one chunk of text and the next.
"""


@dataclass(frozen=True, slots=True)
class Job:
    """One request: when it arrives (seconds from the start), its prompt, and how many tokens it wants."""

    arrival: float
    prompt: list[int]
    num_output: int


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are seconds, but for `arrived`: by `time.perf_counter`. `error` is None when it went
    well."""

    arrived: float = 0.0
    ttft: float | None = None
    latency: float | None = None
    gaps: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_output: int = 0
    error: str | None = None


def make_jobs(
    num_requests: int, *, rate: float | None, prompt: tuple[int, int], output: tuple[int, int], seed: int
) -> list[Job]:
    """Random jobs. Without a `rate` all arrive at 0, and only the concurrency holds them back."""
    draw = random.Random(seed)
    arrival, jobs = 0.0, []
    for _ in range(num_requests):
        arrival += draw.expovariate(rate) if rate else 0.0
        tokens = [draw.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(draw.randint(*prompt))]
        jobs.append(Job(arrival, tokens, draw.randint(*output)))
    return jobs


async def run_closed(jobs: Iterable[Job], client: Client, concurrency: int) -> list[Outcome]:
    """Keep `concurrency` jobs in flight until all are done; each one's clock starts when it is sent."""
    waiting = iter(jobs)

    async def worker() -> list[Outcome]:
        return [await client.send(job, time.perf_counter()) for job in waiting]

    return [outcome for share in await asyncio.gather(*(worker() for _ in range(concurrency))) for outcome in share]


async def run_open(jobs: Sequence[Job], client: Client) -> list[Outcome]:
    """Send each job at its arrival, however many are in flight; its clock starts then."""
    started = time.perf_counter()

    async def one(job: Job) -> Outcome:
        await asyncio.sleep(started + job.arrival - time.perf_counter())
        return await client.send(job, started + job.arrival)

    return await asyncio.gather(*map(one, jobs))


class Client:
    """Sends jobs to one model of one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = url
        self._model = model

    async def send(self, job: Job, arrival: float) -> Outcome:
        """Send one job and read its stream; failures become the outcome's `error`."""
        outcome = Outcome(arrived=arrival)
        body = {
            "model": self._model,
            "prompt": job.prompt,
            "max_tokens": job.num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
                if response.status != 200:
                    outcome.error = f"status {response.status}"
                    return outcome
                await _read_stream(response, arrival, outcome)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            outcome.error = type(error).__name__
        if outcome.error is None and outcome.latency is None:
            outcome.error = "the stream ended early"
        return outcome


async def _read_stream(response: aiohttp.ClientResponse, arrival: float, outcome: Outcome) -> None:
    last = None
    async for event in _events(response):
        now = time.perf_counter()
        if "error" in event:
            outcome.error = "an error in the stream"
            return
        if any(choice.get("text") for choice in event.get("choices", ())):
            if last is None:
                outcome.ttft = now - arrival
            else:
                outcome.gaps.append(now - last)
            last = now
        if any(choice.get("finish_reason") for choice in event.get("choices", ())):
            outcome.latency = now - arrival
        if usage := event.get("usage"):
            outcome.num_prompt, outcome.num_output = usage["prompt_tokens"], usage["completion_tokens"]


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)


@dataclass(frozen=True, slots=True)
class Summary:
    """The report: counts, rates a second, and percentiles in seconds."""

    num_requests: int
    num_errors: int
    errors: dict[str, int]
    seconds: float
    requests_per_second: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    ttft: dict[str, float]
    itl: dict[str, float]
    latency: dict[str, float]


def summarise(outcomes: Sequence[Outcome], seconds: float) -> Summary:
    """Rates and percentiles of the requests that went well; errors by kind."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    errors = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    return Summary(
        num_requests=len(outcomes),
        num_errors=len(outcomes) - len(good),
        errors=dict(errors.most_common()),
        seconds=seconds,
        requests_per_second=len(good) / seconds,
        prompt_tokens_per_second=sum(outcome.num_prompt for outcome in good) / seconds,
        output_tokens_per_second=sum(outcome.num_output for outcome in good) / seconds,
        ttft=percentiles([outcome.ttft for outcome in good if outcome.ttft is not None]),
        itl=percentiles([gap for outcome in good for gap in outcome.gaps]),
        latency=percentiles([outcome.latency for outcome in good if outcome.latency is not None]),
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99 by nearest rank, so that each is a value that was seen; empty where there are none."""
    ranked = sorted(values)
    return {f"p{percent}": ranked[-(-len(ranked) * percent // 100) - 1] for percent in (50, 95, 99)} if ranked else {}


def format_summary(summary: Summary) -> str:
    """A few lines for people; latencies in milliseconds."""
    lines = [
        f"requests   {summary.num_requests - summary.num_errors} of {summary.num_requests} in {summary.seconds:.1f} s, "
        f"{summary.requests_per_second:.2f}/s",
        f"tokens     {summary.prompt_tokens_per_second:.1f} in/s, {summary.output_tokens_per_second:.1f} out/s",
    ]
    for name, found in (("TTFT", summary.ttft), ("ITL", summary.itl), ("latency", summary.latency)):
        shown = ", ".join(f"{percent} {1000 * value:.1f}" for percent, value in found.items())
        lines.append(f"{name:<10} {shown + ' ms' if shown else 'nothing to report'}")
    lines += [f"errors     {count} x {error}" for error, count in summary.errors.items()]
    return "\n".join(lines)


async def run(args: argparse.Namespace) -> Summary:
    """The whole run.

    Raises:
        aiohttp.ClientError: the server does not answer.
    """
    timeout = aiohttp.ClientTimeout(total=args.timeout)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        client = Client(session, args.url, args.model or await _first_model(session, args.url))
        jobs = make_jobs(args.requests, rate=args.rate, prompt=args.prompt_tokens, output=args.output_tokens, seed=args.seed)
        work: Coroutine[Any, Any, list[Outcome]] = (
            run_open(jobs, client) if args.rate else run_closed(jobs, client, args.concurrency)
        )
        started = time.perf_counter()
        outcomes = await work
        return summarise(outcomes, time.perf_counter() - started)


async def _first_model(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/v1/models") as response:
        response.raise_for_status()
        return (await response.json())["data"][0]["id"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load; 1 if any request failed, 2 if the server does not answer."""
    args = _parse(argv)
    try:
        summary = asyncio.run(run(args))
    except (aiohttp.ClientError, TimeoutError) as error:
        print(f"bench.serve_load: error: {args.url}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(format_summary(summary))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"argv": sys.argv[1:], **asdict(summary)}, indent=1) + "\n")
    return 1 if summary.num_errors else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.serve_load", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--url", type=lambda url: url.rstrip("/"), default="http://127.0.0.1:8000", help="default: %(default)s"
    )
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="default: %(default)s")
    arrivals = parser.add_mutually_exclusive_group()
    arrivals.add_argument("--concurrency", type=int, default=8, metavar="N", help="closed loop; default: %(default)s")
    arrivals.add_argument("--rate", type=float, metavar="R", help="open loop: requests a second")
    parser.add_argument("--prompt-tokens", type=_span, default="16:256", metavar="MIN:MAX", help="default: %(default)s")
    parser.add_argument("--output-tokens", type=_span, default="16:64", metavar="MIN:MAX", help="default: %(default)s")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of prompts, lengths and arrivals; prompts of a run before may still be in the server's prefix cache; default: 0",
    )
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="for one request; default: 600")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report; results/ is ignored by git")
    args = parser.parse_args(argv)
    if args.requests < 1 or args.concurrency < 1 or (args.rate is not None and args.rate <= 0):
        parser.error("--requests, --concurrency and --rate must be positive")
    return args


def _span(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    try:
        span = int(low), int(high if colon else low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected MIN:MAX or N, found {text!r}") from None
    if not 1 <= span[0] <= span[1]:
        raise argparse.ArgumentTypeError(f"expected 1 <= MIN <= MAX, found {text!r}")
    return span


if __name__ == "__main__":
    sys.exit(main())
