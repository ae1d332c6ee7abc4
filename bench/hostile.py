"""A hostile afternoon: `python -m bench.hostile --help`.

Owns the good clients, the clocks, and what must be true in the end. The bad clients are in `hostile_clients`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.hostile_clients import CLIENTS, Target, WrongAnswer
from bench.scripted_engine import FIRST_WORD, MODEL, VOCAB_SIZE, scripted_text, scripted_tokenizer
from bench.scripted_server import ServerProcess, server_process
from jaxserve.engine.text import Tokenizer

DESCRIPTION = """\
Send requests to a server of its own whose engine plays a script, so that the right answer is known. First good requests alone
(the quiet time); then the same load of good requests, with a third of all requests malformed, enormous, slow or aborted. In
the end every good answer must have been right, none slower than 1.5 times the quiet median, and the server must hold no more
memory than before, no request, page or connection, and must have failed nowhere. Good and bad clients have processes of their
own.
"""

HEAD_TIMEOUT, BODY_TIMEOUT, STALL_SECONDS = 2.0, 2.0, 3.0
MAX_HOSTILE_AT_ONCE = 64
WARM_UP = 100
SLOWEST_TO_QUIET_MEDIAN = 1.5
MAX_GROWTH_MIB = 32.0


@dataclass(slots=True)
class Report:
    """What came of it. Seconds are of good requests, from sending to the last byte.

    Attributes:
        wrong: good requests whose answer was not what it had to be, with what it was.
        wrong_to_hostile: hostile ones that were answered otherwise than they should have been.
        memory_mib: of the server before the hostile time, after each quarter of it, and in the end.
        left: what the server still held at the end, by metric.
        slow: good requests slower than the limit.
        stalls: by how many seconds the good clients' own process was at most late for something, quiet and hostile: what the
            machine, and not the server, adds to the slowest.
    """

    num_good: int = 0
    num_hostile: int = 0
    hostile: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    wrong_to_hostile: list[str] = field(default_factory=list)
    quiet_seconds: dict[str, float] = field(default_factory=dict)
    hostile_seconds: dict[str, float] = field(default_factory=dict)
    slow: int = 0
    slowest_to_quiet_median: float = 0.0
    stalls: list[float] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, float] = field(default_factory=dict)
    failures_in_log: list[str] = field(default_factory=list)

    @property
    def growth_mib(self) -> float:
        """Memory at the end less memory before the hostile time."""
        return self.memory_mib[-1] - self.memory_mib[0]

    def failures(self, *, timing: bool) -> list[str]:
        """What was not as it must be."""
        found = [f"{len(self.wrong)} wrong answers: {self.wrong[:3]}"] if self.wrong else []
        if self.wrong_to_hostile:
            found.append(f"{len(self.wrong_to_hostile)} wrong answers to hostile requests: {self.wrong_to_hostile[:3]}")
        if self.failures_in_log:
            found.append(f"the server failed: {self.failures_in_log[:3]}")
        if any(self.left.values()):
            found.append(f"the server still holds {self.left}")
        if self.growth_mib > MAX_GROWTH_MIB:
            found.append(f"memory grew by {self.growth_mib:.0f} MiB: {self.memory_mib}")
        if timing and self.slow:
            found.append(f"{self.slow} good requests took over {SLOWEST_TO_QUIET_MEDIAN} times the quiet median")
        return found


# --- good clients -----------------------------------------------------------------------------------------------------


class GoodClient:
    """Sends requests whose answers it knows."""

    def __init__(self, session: aiohttp.ClientSession, url: str, tokenizer: Tokenizer, num_tokens: int) -> None:
        self._session = session
        self._url = url
        self._tokenizer = tokenizer
        self._num_tokens = num_tokens

    async def ask(self, rng: random.Random) -> tuple[float, str | None]:
        """Send one; the seconds that it took, and what was wrong with the answer, if anything."""
        body: dict[str, Any] = {"model": MODEL, "max_tokens": self._num_tokens, "stream": rng.random() < 0.5}
        kind = rng.choice(["ids", "text", "chat"])
        prompt = [rng.randrange(FIRST_WORD, VOCAB_SIZE) for _ in range(rng.randrange(1, 200))]
        if kind == "chat":
            messages = [{"role": "user", "content": f"hello {rng.random()}"}]
            prompt = self._tokenizer.encode_chat(messages)
            body["messages"] = messages
        elif kind == "text":
            body["prompt"] = f"hello {rng.random()} 🙂"
            prompt = self._tokenizer.encode(body["prompt"])
        else:
            body["prompt"] = prompt
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
        started = time.perf_counter()
        try:
            async with self._session.post(self._url + path, json=body) as response:
                data = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            return time.perf_counter() - started, repr(error)
        seconds = time.perf_counter() - started
        if response.status != 200:
            return seconds, f"{response.status}: {data[:200]!r}"
        return seconds, self._what_is_wrong(data, body["stream"], prompt)

    def _what_is_wrong(self, data: bytes, stream: bool, prompt: list[int]) -> str | None:
        text, reasons, usage = "", [], None
        if stream:
            *events, done, end = data.decode().split("\n\n")
            if (done, end) != ("data: [DONE]", ""):
                return f"the stream ended with {done!r}"
            chunks = [json.loads(event.removeprefix("data: ")) for event in events if not event.startswith(":")]
        else:
            chunks = [json.loads(data)]
        for chunk in chunks:
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", ()):
                part = choice.get("delta") or choice.get("message") or choice
                text += part.get("text") or part.get("content") or ""
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        expected = scripted_text(prompt, self._num_tokens)
        if text != expected:
            return f"text {text[:80]!r}, not {expected[:80]!r}"
        if reasons != ["length"] or usage is None or usage["completion_tokens"] != self._num_tokens:
            return f"finish reasons {reasons}, usage {usage}"
        return None


async def ask_many(client: GoodClient, count: int, concurrency: int, seed: int, wrong: list[str]) -> list[float]:
    """`count` good requests, `concurrency` at a time; the seconds of each."""
    seconds: list[float] = []
    left = iter(range(count))

    async def worker(number: int) -> None:
        rng = random.Random(seed * 1000 + number)
        await asyncio.sleep(rng.random())
        for _ in left:
            taken, error = await client.ask(rng)
            seconds.append(taken)
            if error is not None:
                wrong.append(error)

    await asyncio.gather(*map(worker, range(concurrency)))
    return seconds


# --- bad clients ------------------------------------------------------------------------------------------------------


def be_hostile(target: Target, count: int, seconds: float, seed: int, names: list[str]) -> tuple[dict[str, int], list[str]]:
    """`count` hostile requests over `seconds`; how many of each kind, and what the server did wrong."""
    return asyncio.run(_be_hostile(target, count, seconds, seed, names))


async def _be_hostile(
    target: Target, count: int, seconds: float, seed: int, names: list[str]
) -> tuple[dict[str, int], list[str]]:
    rng = random.Random(seed)
    kinds: Counter[str] = Counter()
    wrong: list[str] = []
    places = asyncio.Semaphore(MAX_HOSTILE_AT_ONCE)

    async def one(name: str, own: random.Random) -> None:
        async with places:
            try:
                await CLIENTS[name](target, own)
            except WrongAnswer as error:
                wrong.append(f"{name}: {error}")
            except (OSError, EOFError, TimeoutError) as error:
                wrong.append(f"{name}: {error!r}")

    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            await asyncio.sleep(max(0.0, began + seconds * number / count - loop.time()))
            name = rng.choice(names)
            kinds[name] += 1
            group.create_task(one(name, random.Random(rng.random())))
    return dict(kinds), wrong


# --- the whole afternoon ----------------------------------------------------------------------------------------------


async def run(
    server: ServerProcess, *, num_requests: int, concurrency: int, num_tokens: int, seed: int, kinds: Sequence[str] = ()
) -> Report:
    """Quiet, then hostile, of these kinds or of all."""
    host, _, port = server.url.rpartition("/")[2].rpartition(":")
    target = Target(host, int(port), HEAD_TIMEOUT, BODY_TIMEOUT)
    report = Report(num_hostile=num_requests // 3)
    report.num_good = num_requests - report.num_hostile
    connector = aiohttp.TCPConnector(limit=0)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
            client = GoodClient(session, server.url, scripted_tokenizer(), num_tokens)
            before = await _figures(session, server.url)
            num_quiet = max(concurrency, report.num_good // 6)
            async with _stalls(report.stalls):
                quiet = await ask_many(client, num_quiet, concurrency, seed, report.wrong)
            median = statistics.median(quiet)
            loop = asyncio.get_running_loop()
            expected_seconds = report.num_good * median / concurrency
            names = list(kinds or CLIENTS)
            if "enormous" in names:  # what an allocator keeps of the largest bodies, it keeps once
                count = min(WARM_UP, num_requests // 20)
                await loop.run_in_executor(pool, be_hostile, target, count, count / 8, seed + 1, ["enormous"])
            report.memory_mib.append(round(server.resident_mib(), 1))
            hostile = loop.run_in_executor(pool, be_hostile, target, report.num_hostile, expected_seconds, seed, names)
            seconds: list[float] = []
            async with _stalls(report.stalls):
                for quarter in range(4):
                    count = report.num_good * (quarter + 1) // 4 - report.num_good * quarter // 4
                    seconds += await ask_many(client, count, concurrency, seed + 1 + quarter, report.wrong)
                    report.memory_mib.append(round(server.resident_mib(), 1))
            report.hostile, report.wrong_to_hostile = await hostile
        report.left, report.dropped = await _what_is_left(server, before)
    report.memory_mib.append(round(server.resident_mib(), 1))
    report.quiet_seconds, report.hostile_seconds = _summary(quiet), _summary(seconds)
    report.slowest_to_quiet_median = max(seconds) / median
    report.slow = sum(one > SLOWEST_TO_QUIET_MEDIAN * median for one in seconds)
    report.failures_in_log = re.findall(r".*(?:Traceback|failed|Error).*", server.log.read_text())
    return report


@contextlib.asynccontextmanager
async def _stalls(stalls: list[float]) -> AsyncIterator[None]:
    """Append how late this process was at most while the body ran."""
    worst = 0.0

    async def watch() -> None:
        nonlocal worst
        while True:
            due = time.perf_counter() + 0.01
            await asyncio.sleep(0.01)
            worst = max(worst, time.perf_counter() - due)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        stalls.append(round(worst, 3))


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    ranked = sorted(seconds)
    at = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
    return {name: round(ranked[min(len(ranked) - 1, int(share * len(ranked)))], 3) for name, share in at.items()}


async def _figures(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


async def _what_is_left(server: ServerProcess, before: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """What the server still holds once it has had the time to drop those who are slow; and what it dropped by reason."""
    async with aiohttp.ClientSession() as session:
        deadline = time.monotonic() + 2 * STALL_SECONDS + 10
        while True:
            now = await _figures(session, server.url)
            left = {name: now[f"jaxserve_{name}"] for name in ("running_sequences", "waiting_sequences", "queued_requests")}
            left["pages"] = before["jaxserve_free_pages"] - now["jaxserve_free_pages"]
            left["connections"] = now["jaxserve_connections"] - 1
            left["restarts"] = float(not Path(f"/proc/{server.pid}").exists())
            if not any(left.values()) or time.monotonic() > deadline:
                dropped = {name: value for name, value in now.items() if name.startswith("jaxserve_dropped_connections_total")}
                return left, dropped
            await asyncio.sleep(0.2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 1 if anything was not as it must be."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.hostile", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests", type=int, default=10_000, metavar="N", help="a third of them hostile; default: %(default)s"
    )
    parser.add_argument("--concurrency", type=int, default=32, metavar="N", help="good ones at once; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=40, metavar="N", help="of each good answer; default: %(default)s")
    parser.add_argument("--step-ms", type=float, default=20.0, metavar="X", help="of the engine; default: %(default)s")
    parser.add_argument("--kinds", default="", metavar="NAME,...", help=f"of hostile clients; default: {', '.join(CLIENTS)}")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report; results/ is ignored by git")
    args = parser.parse_args(argv)
    with server_process(*server_flags(args.step_ms / 1e3, max_seqs=256)) as server:
        work = run(
            server,
            num_requests=args.requests,
            concurrency=args.concurrency,
            num_tokens=args.tokens,
            seed=args.seed,
            kinds=args.kinds.split(",") if args.kinds else (),
        )
        report = asyncio.run(work)
    for name, value in asdict(report).items():
        print(f"{name:<24} {value if not isinstance(value, list) else value[:5]}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    failures = report.failures(timing=True)
    print("\n".join(failures) or "all as it must be")
    return 1 if failures else 0


def server_flags(step_seconds: float, max_seqs: int) -> list[str]:
    """Of a server that does not wait long for those who are slow, and whose prefix cache is soon as full as it gets."""
    flags = {"step-seconds": step_seconds, "max-seqs": max_seqs, "num-pages": 8 * max_seqs}
    flags |= {"head-timeout": HEAD_TIMEOUT, "body-timeout": BODY_TIMEOUT, "stall-seconds": STALL_SECONDS}
    return [f"--{name}={value}" for name, value in flags.items()]


if __name__ == "__main__":
    sys.exit(main())
