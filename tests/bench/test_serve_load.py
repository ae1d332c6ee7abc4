"""The load generator against a small server that speaks just enough of the API."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from bench import served
from bench.serve_load import Client, main, make_jobs, percentiles, run_closed, run_open, summarise
from jaxserve.config import EngineConfig

STEP_SECONDS = 0.01
CONTEXT = 140


class SlowServer:
    """Streams one token every `STEP_SECONDS`; every third request is refused if `refuse`."""

    def __init__(self, *, refuse: bool = False, cut: bool = False) -> None:
        self.refuse, self.cut = refuse, cut
        self.in_flight = self.most_in_flight = self.num_requests = 0

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.num_requests += 1
        if self.refuse and self.num_requests % 3 == 0:
            return web.Response(status=429)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        num_tokens = body["max_tokens"]
        for number in range(num_tokens):
            await asyncio.sleep(STEP_SECONDS)
            if self.cut and number == 1:
                break
            reason = "length" if number == num_tokens - 1 else None
            await self._send(response, {"choices": [{"text": "x", "finish_reason": reason}], "usage": None})
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": num_tokens}
        await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        self.in_flight -= 1
        return response

    @staticmethod
    async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    @staticmethod
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "only"}]})

    @staticmethod
    async def tokenize(_: web.Request) -> web.Response:
        return web.json_response({"count": 0, "max_model_len": CONTEXT, "tokens": []})


@asynccontextmanager
async def serving(server: SlowServer) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", server.completions)
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/tokenize", server.tokenize)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}"
    await runner.cleanup()


async def test_a_closed_loop_keeps_its_concurrency() -> None:
    server = SlowServer()
    jobs = make_jobs(10, rate=None, prompt=(3, 9), output=(4, 4), seed=1)
    async with serving(server) as url, aiohttp.ClientSession() as session:
        outcomes = await run_closed(jobs, Client(session, url, "only"), 3)
    assert server.most_in_flight == 3
    assert [outcome.error for outcome in outcomes] == [None] * 10
    assert sum(outcome.num_prompt for outcome in outcomes) == sum(len(job.prompt) for job in jobs)
    for outcome in outcomes:
        assert outcome.ttft is not None
        assert outcome.latency is not None
        assert outcome.num_output == 4
        assert len(outcome.gaps) == 3
        assert STEP_SECONDS * 0.9 < outcome.ttft < outcome.latency
        assert outcome.latency > 4 * STEP_SECONDS * 0.9


async def test_the_load_that_costs_are_learnt_from_has_every_width_and_stays_within_the_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served, "OUTPUT_TOKENS", (2, 4))
    server = SlowServer()
    async with serving(server) as url:
        started = time.perf_counter()
        phases = await served.load(url, EngineConfig(max_seqs=4), seconds=0.3, seed=0)
    assert [phase.concurrency for phase in phases] == [1, 3, 4]
    assert server.most_in_flight == 4
    starts_and_ends = [at for phase in phases for at in (phase.start, phase.end)]
    assert started < starts_and_ends[0]
    assert starts_and_ends == sorted(starts_and_ends)
    lengths = [outcome.num_prompt for phase in phases for outcome in phase.outcomes]
    assert min(lengths) >= served.SHORTEST_PROMPT
    assert served.SHORTEST_PROMPT * 2 < max(lengths) <= CONTEXT - 4
    for phase in phases:
        assert all(phase.start <= outcome.arrived <= phase.end for outcome in phase.outcomes)


async def test_a_load_that_fails_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "OUTPUT_TOKENS", (2, 4))
    async with serving(SlowServer(refuse=True)) as url:
        with pytest.raises(RuntimeError, match="status 429"):
            await served.load(url, EngineConfig(max_seqs=8), seconds=0.1, seed=0)


async def test_an_open_loop_does_not_wait_for_the_server() -> None:
    server = SlowServer()
    jobs = make_jobs(20, rate=1000.0, prompt=(3, 3), output=(8, 8), seed=1)
    async with serving(server) as url, aiohttp.ClientSession() as session:
        outcomes = await run_open(jobs, Client(session, url, "only"))
    assert server.most_in_flight > 10
    assert summarise(outcomes, 1.0).output_tokens_per_second == 160


@pytest.mark.parametrize(
    ("server", "errors"),
    [(SlowServer(refuse=True), {"status 429": 2}), (SlowServer(cut=True), {"the stream ended early": 6})],
)
async def test_failures_are_counted_by_kind(server: SlowServer, errors: dict[str, int]) -> None:
    jobs = make_jobs(6, rate=None, prompt=(3, 3), output=(3, 3), seed=1)
    async with serving(server) as url, aiohttp.ClientSession() as session:
        summary = summarise(await run_closed(jobs, Client(session, url, "only"), 2), 1.0)
    assert summary.errors == errors
    assert summary.num_errors == sum(errors.values())


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "http://127.0.0.1:1" in line


async def test_the_report_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(SlowServer()) as url:
        flags = ["--url", url + "/", "--requests", "4", "--prompt-tokens", "2:5", "--output-tokens", "2"]
        code = await asyncio.to_thread(main, [*flags, "--json", str(tmp_path / "new" / "load.json")])
    assert code == 0
    assert "TTFT" in capsys.readouterr().out
    assert json.loads((tmp_path / "new" / "load.json").read_text())["num_requests"] == 4


def test_jobs_are_reproducible_and_arrive_at_the_rate() -> None:
    jobs = make_jobs(2000, rate=50.0, prompt=(1, 4), output=(5, 6), seed=3)
    assert jobs == make_jobs(2000, rate=50.0, prompt=(1, 4), output=(5, 6), seed=3)
    assert jobs != make_jobs(2000, rate=50.0, prompt=(1, 4), output=(5, 6), seed=4)
    assert 2000 / jobs[-1].arrival == pytest.approx(50, rel=0.1)
    assert {len(job.prompt) for job in jobs} == {1, 2, 3, 4}
    assert {job.num_output for job in jobs} == {5, 6}


def test_percentiles_are_values_that_were_seen() -> None:
    assert percentiles([float(value) for value in range(1, 101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0}
    assert percentiles([]) == {}


@pytest.mark.parametrize(
    "flags", [["--prompt-tokens", "0:5"], ["--prompt-tokens", "5:1"], ["--output-tokens", "x"], ["--rate", "0"]]
)
def test_bad_flags_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(flags)
    assert stop.value.code == 2
