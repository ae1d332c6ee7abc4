"""Clients that leave or stall: what they asked for stops, and its pages come back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import socket
from typing import Any

import aiohttp
import pytest

from jaxserve.config import HttpConfig
from jaxserve.server import answers
from tests.engine.engines import fake_engine
from tests.server.serving import BYTE_LEVEL, MODEL, Serving, serving

LONG: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 500, "ignore_eos": True}


async def raw_request(
    server: Serving, body: dict[str, Any], *, limit: int = 1 << 24
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request over a bare connection, whose end the test decides, and which reads twice `limit` bytes ahead of it."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)  # else megabytes wait in the kernel
    reader, writer = await asyncio.open_connection(sock=connection, limit=limit)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


async def until_running(server: Serving, count: int = 1) -> None:
    async with asyncio.timeout(5):
        while server.engine.stats.running < count:
            await asyncio.sleep(0.002)


async def outcome_count(server: Serving, outcome: str) -> float:
    return server.service.metrics.requests.labels("completions", outcome)._value.get()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", ["close", "reset", "half_close"])
async def test_leaving_stops_generation(kind: str, stream: bool, n: int) -> None:
    """vllm I54947: generation went on after a disconnect, or pages leaked."""
    async with serving(fake_engine(step_seconds=0.005)) as server:
        reader, writer = await raw_request(server, {**LONG, "stream": stream, "n": n})
        await until_running(server, n)
        if stream:
            await reader.readuntil(b"data: ")
        if kind == "reset":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if kind == "half_close":
            writer.write_eof()
        else:
            writer.close()
        async with asyncio.timeout(2):  # all 500 tokens would take longer
            await server.idle()
        assert await outcome_count(server, "disconnected") == 1
        writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_before_the_first_token(stream: bool) -> None:
    """In the middle of a long prompt's chunks, and while waiting for a slot."""
    async with serving(fake_engine(step_seconds=0.02)) as server:
        prompt = BYTE_LEVEL.encode_plain("a") * 400
        connections = [
            await raw_request(server, {**LONG, "prompt": prompt, "max_tokens": 9, "stream": stream}) for _ in range(30)
        ]
        await until_running(server, 2)
        assert server.engine.stats.num_output_tokens == 0
        for _, writer in connections:
            writer.close()
        await server.idle()
        assert server.engine.stats.num_output_tokens == 0


async def test_leaving_right_after_the_headers() -> None:
    async with serving(fake_engine(step_seconds=0.005)) as server:
        reader, writer = await raw_request(server, {**LONG, "stream": True})
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        writer.close()
        async with asyncio.timeout(2):
            await server.idle()


async def test_closing_the_client_s_stream_early() -> None:
    async with serving(fake_engine(step_seconds=0.005)) as server:
        stream = await server.client.completions.create(
            model=MODEL, prompt="hello", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()
        async with asyncio.timeout(2):
            await server.idle()


@pytest.fixture
def small_send_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much a kernel takes from a server before a client has read it differs by megabytes; make it little."""
    original = answers.Answer._write_events

    async def write_events(answer: Any, response: Any, *rest: Any) -> None:
        answer._request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        await original(answer, response, *rest)

    monkeypatch.setattr(answers.Answer, "_write_events", write_events)


@pytest.mark.usefixtures("small_send_buffers")
async def test_a_reader_that_stalls_is_dropped() -> None:
    """It costs two socket buffers and ours at most, and not for long."""
    config = HttpConfig(port=0, stall_seconds=0.3)
    async with serving(fake_engine(), config=config) as server:
        body = {**LONG, "stream": True, "logprobs": 20, "n": 4}
        reader, writer = await raw_request(server, body)
        with contextlib.closing(writer):
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            async with asyncio.timeout(20):
                while await outcome_count(server, "stalled") == 0:
                    await asyncio.sleep(0.05)
            await server.idle()


def num_stalled(server: Serving) -> float:
    return server.service.metrics.dropped_connections.labels("stalled")._value.get()


def unsent(server: Serving) -> int:
    """Bytes that the server keeps for its clients, beside what is with the kernel."""
    web_server = server.server._runner.server
    assert web_server is not None
    transports = [connection.transport for connection in web_server.connections]
    return sum(transport.get_write_buffer_size() for transport in transports if transport is not None)


@pytest.mark.slow
@pytest.mark.usefixtures("small_send_buffers")
async def test_what_stalled_readers_cost() -> None:
    """Many long answers, read by nobody: what is kept of each is less than one of our writes and one more."""
    config = HttpConfig(port=0, stall_seconds=1.5, max_queue_requests=1000)
    async with serving(fake_engine(), config=config) as server:
        body = {**LONG, "stream": True, "logprobs": 20}
        connections = [await raw_request(server, body, limit=1 << 12) for _ in range(16)]
        for reader, _ in connections:
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            reader._transport.pause_reading()  # type: ignore[attr-defined]
        most = 0
        async with asyncio.timeout(30):
            while num_stalled(server) < len(connections):
                most = max(most, unsent(server))
                await asyncio.sleep(0.01)
        assert 0 < most < len(connections) * 2 * 64 * 1024
        await server.idle()
        assert unsent(server) == 0
        for _, writer in connections:
            writer.close()


async def test_a_whole_answer_that_nobody_reads_is_dropped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after its handler is done, and where the connection was to be closed behind it."""
    config = HttpConfig(port=0, stall_seconds=0.3)
    original = answers.Answer.whole

    async def whole(answer: Any) -> Any:
        answer._request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        return await original(answer)

    monkeypatch.setattr(answers.Answer, "whole", whole)
    async with serving(config=config) as server:
        reader, writer = await raw_request(server, {**LONG, "logprobs": 20, "max_tokens": 200})
        with contextlib.closing(writer):
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            async with asyncio.timeout(20):
                while num_stalled(server) == 0:
                    await asyncio.sleep(0.02)
            assert unsent(server) == 0


@pytest.mark.usefixtures("small_send_buffers")
async def test_a_slow_reader_gets_everything() -> None:
    async with serving() as server:
        body = {**LONG, "stream": True, "logprobs": 20, "temperature": 0}
        reader, writer = await raw_request(server, body)
        with contextlib.closing(writer):
            await reader.readuntil(b"\r\n\r\n")
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(0.3)
            reader._transport.resume_reading()  # type: ignore[attr-defined]
            data = await reader.readuntil(b"data: [DONE]\n\n")
        chunks = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b'data: {"id"')]
        _, whole = await server.post("/v1/completions", {**LONG, "temperature": 0})
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]


# --- all at once ------------------------------------------------------------------------------------------------------


async def one_of_many(server: Serving, rng: random.Random) -> str:
    """A request of random kind, which its client may leave at a random moment; how it ended."""
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": [rng.randrange(3, 200) for _ in range(rng.randrange(1, 200))],
        "max_tokens": rng.randrange(1, 60),
        "stream": rng.random() < 0.6,
        "n": rng.choice([1, 1, 1, 2, 3]),
    }
    if rng.random() < 0.2:
        body["stop"] = [chr(rng.randrange(97, 123)), "xyz"]
    if rng.random() < 0.2:
        body["logprobs"] = rng.randrange(5)
    if rng.random() < 0.1:
        body["temperature"] = "hot"
    patience = rng.random() * 0.2 if rng.random() < 0.4 else 30.0
    try:
        async with asyncio.timeout(patience), server.http.post(f"{server.url}/v1/completions", json=body) as response:
            data = await response.read()
            if response.status != 200:
                return str(response.status)
            assert not body["stream"] or data.endswith(b"data: [DONE]\n\n")
            return "ok"
    except TimeoutError:
        return "left"


@pytest.mark.slow
async def test_a_thousand_mixed_requests_with_disconnects() -> None:
    """All pages come back, no task is left, and memory does not grow with the number of requests."""
    rng = random.Random(0)
    outcomes: dict[str, int] = {}
    num_objects: list[int] = []
    config = HttpConfig(port=0, max_queue_requests=10_000, max_queue_tokens=1_000_000)
    async with serving(fake_engine(eos_probability=0.02), config=config) as server:
        await server.http.close()
        server.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64))
        for _ in range(5):
            for outcome in await asyncio.gather(*(one_of_many(server, rng) for _ in range(200))):
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
            await server.idle()
            gc.collect()
            num_objects.append(len(gc.get_objects()))
        await server.http.close()
        server.fake.scheduler.check_integrity()
        server.fake.admission.check_integrity()
    assert sum(outcomes.values()) == 1000
    assert all(outcomes.get(kind, 0) > 20 for kind in ("ok", "left", "400")), outcomes
    assert set(outcomes) == {"ok", "left", "400"}
    assert num_objects[-1] - num_objects[1] < 500, num_objects
