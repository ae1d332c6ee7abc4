"""The server's life: listening before the model is there, draining at SIGTERM, and dying honestly."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai
import pytest

from jaxserve.config import HttpConfig
from jaxserve.errors import ModelLoadError
from jaxserve.server.app import Server, build_app, serve
from jaxserve.server.service import ServerParts
from tests.engine.engines import fake_engine
from tests.server.serving import BYTE_LEVEL, MODEL, serving

LONG: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 100, "ignore_eos": True}


@dataclass
class Running:
    """A server process, and what it has logged."""

    process: Process
    http: aiohttp.ClientSession
    url: str = ""
    log: list[str] = field(default_factory=list)

    async def until_logged(self, pattern: str) -> re.Match[str]:
        assert self.process.stderr is not None
        async with asyncio.timeout(20):
            while line := (await self.process.stderr.readline()).decode():
                self.log.append(line)
                if match := re.search(pattern, line):
                    return match
        raise AssertionError(f"{pattern!r} was not logged: {self.log}")

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as response:
            return response.status, await response.json()

    async def exit_code(self) -> int:
        async with asyncio.timeout(15):
            _, log = await self.process.communicate()
        self.log.append(log.decode())
        assert self.process.returncode is not None
        return self.process.returncode


@asynccontextmanager
async def process(*flags: str) -> AsyncIterator[Running]:
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.server.fake_server", *flags, stderr=PIPE)
    try:
        async with aiohttp.ClientSession() as http:
            running = Running(child, http)
            running.url = (await running.until_logged(r"listening on (http://\S+)"))[1]
            yield running
    finally:
        if child.returncode is None:
            child.kill()
            await child.communicate()


# --- signals, in a process of their own -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
async def test_a_signal_drains_and_exits_0(number: signal.Signals) -> None:
    async with process("--step-seconds", "0.01", "--drain-seconds", "10") as server:
        await server.until_logged("ready")
        assert await server.get("/ready") == (200, {"status": "ready"})
        answer = asyncio.create_task(server.http.post(f"{server.url}/v1/completions", json=LONG))
        stream = await server.http.post(f"{server.url}/v1/completions", json={**LONG, "stream": True})
        await stream.content.readany()
        server.process.send_signal(number)
        await server.until_logged("draining")
        assert await server.get("/ready") == (503, {"status": "draining"})
        assert (await server.get("/health"))[0] == 200
        async with server.http.post(f"{server.url}/v1/completions", json=LONG) as late:
            assert late.status == 503
            assert late.headers["Retry-After"]
            assert (await late.json())["error"]["code"] == "not_ready"
        response = await answer
        assert (await response.json())["usage"]["completion_tokens"] == 100
        assert (await stream.read()).endswith(b"data: [DONE]\n\n")
        assert await server.exit_code() == 0
        assert not any("Traceback" in line for line in server.log), server.log


@pytest.mark.slow
async def test_draining_has_an_end() -> None:
    async with process("--step-seconds", "0.05", "--drain-seconds", "0.2") as server:
        await server.until_logged("ready")
        stream = await server.http.post(f"{server.url}/v1/completions", json={**LONG, "max_tokens": 500, "stream": True})
        answer = asyncio.create_task(server.http.post(f"{server.url}/v1/completions", json={**LONG, "max_tokens": 500}))
        await stream.content.readany()
        started = time.monotonic()
        server.process.terminate()
        *_, error, done = (await stream.read()).decode().strip().split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "not_ready"
        assert (await answer).status == 503
        assert await server.exit_code() == 0
        assert time.monotonic() - started < 5


@pytest.mark.slow
async def test_a_second_signal_cuts_draining_short() -> None:
    async with process("--step-seconds", "0.05", "--drain-seconds", "60") as server:
        await server.until_logged("ready")
        stream = await server.http.post(f"{server.url}/v1/completions", json={**LONG, "max_tokens": 500, "stream": True})
        await stream.content.readany()
        server.process.terminate()
        await server.until_logged("draining")
        server.process.terminate()
        assert (await stream.read()).endswith(b"data: [DONE]\n\n")
        assert await server.exit_code() == 0


async def test_a_signal_while_loading_exits_0_at_once() -> None:
    async with process("--load-seconds", "60") as server:
        assert await server.get("/health") == (200, {"status": "ok"})
        assert await server.get("/ready") == (503, {"status": "loading"})
        server.process.terminate()
        started = time.monotonic()
        assert await server.exit_code() == 0
        assert time.monotonic() - started < 5


@pytest.mark.slow
async def test_a_model_that_does_not_load_ends_the_process() -> None:
    async with process("--load-seconds", "0.2", "--fail") as server:
        assert await server.exit_code() == 1
        assert "the weights are missing" in server.log[-1]


# --- loading ----------------------------------------------------------------------------------------------------------


async def test_the_port_opens_before_the_model_is_there() -> None:
    fake = fake_engine()
    loading: asyncio.Future[ServerParts] = asyncio.get_running_loop().create_future()
    config = HttpConfig(port=0)
    server = Server(build_app(loading, config), config)
    url = await server.start()
    async with aiohttp.ClientSession() as http, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:

        async def status(path: str) -> int:
            async with http.get(url + path) as response:
                return response.status

        assert [await status(path) for path in ("/health", "/ready", "/metrics", "/version")] == [200, 503, 200, 200]
        with pytest.raises(openai.InternalServerError, match="still loading") as caught:
            await client.completions.create(model=MODEL, prompt="x")
        assert caught.value.status_code == 503
        assert await status("/v1/models") == 503
        loading.set_result(
            ServerParts(
                core=fake.core, limits=fake.runner.limits, tokenizer=BYTE_LEVEL, model_name=MODEL, num_compiles=lambda: 7
            )
        )
        await asyncio.sleep(0.01)
        assert [await status(path) for path in ("/health", "/ready", "/v1/models")] == [200, 200, 200]
        assert (await client.completions.create(model=MODEL, prompt="x")).choices
        async with http.get(url + "/metrics") as response:
            assert "jaxserve_compiles_total 7.0" in await response.text()
    await server.stop()


async def test_stopping_while_loading_leaves_nothing() -> None:
    tasks = asyncio.all_tasks()
    loading: asyncio.Future[ServerParts] = asyncio.get_running_loop().create_future()
    server = Server(build_app(loading, HttpConfig(port=0)), HttpConfig(port=0))
    await server.start()
    await server.drain()
    await server.stop()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == tasks


async def test_a_failed_load_shows_in_health() -> None:
    loading: asyncio.Future[ServerParts] = asyncio.get_running_loop().create_future()
    server = Server(build_app(loading, HttpConfig(port=0)), HttpConfig(port=0))
    url = await server.start()
    loading.set_exception(ModelLoadError("model.gguf is truncated"))
    await asyncio.sleep(0.01)
    async with aiohttp.ClientSession() as http, http.get(url + "/health") as response:
        assert response.status == 503
        assert "model.gguf is truncated" in (await response.json())["reason"]
    await server.stop()


def test_a_port_in_use_is_an_error_before_anything_loads() -> None:
    loads: list[int] = []

    def build() -> ServerParts:
        loads.append(1)
        raise AssertionError

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="address already in use"):
            serve(build, HttpConfig(port=taken.getsockname()[1]))
    assert not loads


# --- dying ------------------------------------------------------------------------------------------------------------


async def test_a_dead_engine_shows_in_health() -> None:
    async with serving(fake_engine(fail_on_submit=range(10_000))) as server:
        for _ in range(3):
            with pytest.raises(openai.InternalServerError):
                await server.client.completions.create(model=MODEL, prompt="x")
        async with asyncio.timeout(5):
            while (await server.get("/health"))[0] == 200:
                await asyncio.sleep(0.01)
        status, body = await server.get("/health")
        assert (status, body["status"]) == (503, "failed")
        assert await server.get("/ready") == (503, {"status": "failed"})
        with pytest.raises(openai.InternalServerError, match="engine is dead"):
            await server.client.completions.create(model=MODEL, prompt="x")
