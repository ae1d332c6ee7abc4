"""Clients that are slow, many, or do not speak HTTP: each costs a socket for a while, and nobody else anything."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import time
from typing import Any

import pytest
from aiohttp import web

from jaxserve.config import HttpConfig
from jaxserve.errors import ConfigError
from tests.engine.engines import fake_engine
from tests.server.raw import closed, connect, read_reply, say
from tests.server.serving import MODEL, Serving, serving

GOOD: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


async def num_dropped(server: Serving, reason: str) -> float:
    return server.service.metrics.dropped_connections.labels(reason)._value.get()


async def test_what_is_not_http_is_answered_with_an_error_object(caplog: pytest.LogCaptureFixture) -> None:
    """And does not fill the log: whoever scans ports would."""
    async with serving() as server:
        cases = (
            b"HELLO\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"GET /health HTTP/9.9\r\n\r\n",
            POST + b"Content-Length: abc\r\n\r\n",
            POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            POST + b"no colon\r\n\r\n",
        )
        for data in cases:
            reply = await say(server, data)
            assert (reply.status, reply.error["code"]) == (400, "malformed_http"), data
            assert (reply.headers["server"], reply.headers["x-request-id"][:4]) == ("jaxserve", "req-")
        for data in (
            b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
            POST + b"X-A: " + b"a" * 20_000 + b"\r\n\r\n",
            POST + b"".join(b"X-%d: a\r\n" % i for i in range(200)) + b"\r\n",
        ):
            reply = await say(server, data)
            assert reply.status in (400, 431), data
            assert reply.error["code"] == "malformed_http"
        assert await num_dropped(server, "malformed") == len(cases) + 3
        assert (await server.post("/v1/completions", GOOD))[0] == 200
    assert not caplog.records


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        (b"Content-Encoding: gzip\r\n", b"this is not gzip", 415),
        (b"Content-Encoding: br\r\n", b"nor is this br", 415),
        (b"Content-Encoding: gzip\r\n", gzip.compress(b" " * (1 << 20)), 415),  # a few kilobytes could hold gigabytes
        (b"Content-Encoding: identity\r\n", json.dumps(GOOD).encode(), 200),
        (b"Content-Type: multipart/form-data; boundary=x\r\n", b"--x--", 415),
        (b"Content-Type: application/x-www-form-urlencoded\r\n", json.dumps(GOOD).encode(), 200),
    ],
)
async def test_bodies_by_encoding_and_type(headers: bytes, body: bytes, status: int) -> None:
    async with serving() as server:
        reply = await say(server, POST + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert reply.status == status
        assert (b"error" in reply.body) == (status != 200)


async def test_a_chunked_body_that_is_broken_is_a_400() -> None:
    async with serving() as server:
        reply = await say(server, POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n")
        assert reply.status == 400
        assert reply.error["message"]


async def test_a_body_too_large_by_its_own_account_is_refused_unread() -> None:
    """The answer arrives, though the client goes on sending."""
    async with serving() as server, connect(server) as (reader, writer):
        writer.write(POST + b"Content-Length: 99999999999\r\n\r\n" + b" " * 100_000)
        reply = await read_reply(reader)
        assert (reply.status, reply.error["code"]) == (413, "request_entity_too_large")
        assert "larger than 4194304 bytes" in reply.error["message"]


async def test_the_largest_body_follows_the_context() -> None:
    async with serving() as server:
        service = server.service
        assert service.max_body_bytes == 4 << 20
        model = service.require_model()
        object.__setattr__(model.terms.limits, "max_context", 1 << 20)
        assert service.max_body_bytes == 64 << 20
        object.__setattr__(model.terms.limits, "max_context", 512)


@pytest.mark.slow
async def test_a_body_is_gone_when_its_request_is() -> None:
    """And does not wait until garbage is collected, which is rare and costs everyone: enormous ones would pile up."""
    data = json.dumps(GOOD | {"prompt": [5] * 40_000}).encode()
    gc.collect()
    gc.disable()
    try:
        async with serving() as server, connect(server) as (reader, writer):
            for _ in range(3):
                writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(data) + data[:1000])
                await asyncio.sleep(0.01)
                writer.write(data[1000:])
                assert (await read_reply(reader)).status == 400
            requests = [item for item in gc.get_objects() if type(item) is web.Request]
            assert [len(request._read_bytes or b"") for request in requests if request._read_bytes] == []
    finally:
        gc.enable()


async def test_a_large_body_of_crumbs_is_refused_before_it_is_decoded() -> None:
    """And one of text that is full of brackets is not, nor is a small one."""
    async with serving() as server:
        status, body = await server.post("/v1/completions", GOOD | {"prompt": [[5]] * 200_000})
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        assert "brackets in 1" in body["error"]["message"]
        status, body = await server.post(
            "/v1/completions", GOOD | {"prompt": "for (int i = 0; i < a[0]; i++) { b[i]++; }\n" * 20_000}
        )
        assert status == 400
        assert "prompt has 860000 characters" in body["error"]["message"]
        status, body = await server.post("/v1/completions", GOOD | {"prompt": [[5]] * 5_000})
        assert "5000 prompts > 2048" in body["error"]["message"]
        status, body = await server.post("/v1/completions", GOOD | {"user": 1, "prompt": "x" * 1_000_000})
        assert (status, body["error"]["param"]) == (400, "user")


# --- slow senders -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_senders_of_a_byte_now_and_then_are_dropped() -> None:
    """In the head, in the body, after an answer, and with nothing said at all; all at once, while others are served."""
    config = HttpConfig(port=0, head_timeout=0.4, body_timeout=0.4, idle_timeout=0.8)
    head, body = POST + b"X-Long: " + b"a" * 500, POST + b"Content-Length: 500\r\n\r\n" + b" " * 500

    async def drip(server: Serving, first: bytes, data: bytes) -> tuple[float, bytes]:
        async with connect(server) as (reader, writer):
            started = time.monotonic()
            writer.write(first)
            answer = asyncio.create_task(closed(reader))
            for byte in data:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.05)
                if answer.done() or writer.is_closing():
                    break
            return time.monotonic() - started, await answer

    async with serving(config=config) as server:
        in_head, in_body, silent, idle = await asyncio.gather(
            drip(server, head[:20], head[20:]),
            drip(server, body[:80], body[80:]),
            drip(server, b"", b""),
            drip(server, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b""),
        )
        for seconds, _ in (in_head, in_body, idle, silent):
            assert seconds < 10
        assert in_head[1].startswith(b"HTTP/1.1 408 ")
        assert b'"code": "timeout"' in in_head[1]
        assert in_body[1].startswith(b"HTTP/1.1 408 ")
        assert b"the body did not come within" in in_body[1]
        assert idle[1].startswith(b"HTTP/1.1 200 ")
        assert await num_dropped(server, "slow_head") >= 1
        assert (await server.post("/v1/completions", GOOD))[0] == 200
        assert server.fake.runner.num_steps > 0


@pytest.mark.slow
async def test_a_slow_body_that_keeps_coming_is_read() -> None:
    """Each 16 KiB buy another second."""
    config = HttpConfig(port=0, body_timeout=0.3)
    data = json.dumps(GOOD | {"user": "x" * 40_000}).encode()
    async with serving(config=config) as server, connect(server) as (reader, writer):
        writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(data))
        for start in range(0, len(data), 10_000):
            writer.write(data[start : start + 10_000])
            await asyncio.sleep(0.15)
        assert (await read_reply(reader)).status == 200


# --- how many ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_more_connections_than_there_may_be_are_told_so() -> None:
    """Those who are being answered stay."""
    data = json.dumps(GOOD | {"max_tokens": 40}).encode()
    request = POST + b"Content-Length: %d\r\n\r\n" % len(data) + data
    async with (
        serving(fake_engine(step_seconds=0.01), config=HttpConfig(port=0, max_connections=2)) as server,
        connect(server) as (first, to_first),
        connect(server) as (second, to_second),
    ):
        to_first.write(request)
        to_second.write(request)
        async with asyncio.timeout(5):
            while server.engine.num_live < 2:
                await asyncio.sleep(0.002)
        async with connect(server) as (reader, _):
            reply = await read_reply(reader)
            assert (reply.status, reply.error["code"]) == (503, "too_many_connections")
            assert reply.headers["retry-after"] == "1"
        assert await num_dropped(server, "too_many") == 1
        assert [(await read_reply(reader)).status for reader in (first, second)] == [200, 200]


async def test_idle_connections_make_room_for_new_ones() -> None:
    """So whoever opens many and does nothing keeps nobody out."""
    health = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    async with serving(config=HttpConfig(port=0, max_connections=2)) as server:
        async with connect(server) as (silent, _), connect(server) as (idle, to_idle):
            to_idle.write(health)
            assert (await read_reply(idle)).status == 200
            for gone in (silent, idle):
                async with connect(server) as (reader, writer):
                    writer.write(health)
                    assert (await read_reply(reader)).status == 200
                    assert await closed(gone) == b""
                    async with connect(server):
                        pass
        assert await num_dropped(server, "idle") >= 2


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving() as server, connect(server) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /no HTTP/1.1\r\nHost: x\r\n\r\n" * 20)
        assert [(await read_reply(reader)).status for _ in range(40)] == [200, 404] * 20


# --- a step that does not come back -----------------------------------------------------------------------------------


async def test_a_hung_step_shows_in_health_until_it_comes_back() -> None:
    config = HttpConfig(port=0, hang_seconds=0.15)
    async with serving(fake_engine(step_seconds=0.4), config=config) as server:
        answer = asyncio.create_task(server.post("/v1/completions", GOOD | {"max_tokens": 1}))
        async with asyncio.timeout(5):
            while (await server.get("/health"))[0] == 200:
                await asyncio.sleep(0.01)
        status, body = await server.get("/health")
        assert (status, body["status"]) == (503, "hung")
        assert "a step has not come back for" in body["reason"]
        assert await server.get("/ready") == (503, {"status": "hung"})
        assert (await server.post("/v1/completions", GOOD))[1]["error"]["code"] == "not_ready"
        assert (await answer)[0] == 200
        async with asyncio.timeout(5):
            while await server.get("/health") != (200, {"status": "ok"}):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("field", "value"), [("head_timeout", 0.0), ("stall_seconds", -1.0), ("max_header_bytes", 10), ("hang_seconds", -1.0)]
)
def test_limits_that_make_no_sense(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        HttpConfig(**{field: value})
