"""Clients that no server wants, one function a kind, each with what a good server does about it.

Owns what they send and what they must be answered. Does not know how many there are or when they come (`hostile`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from bench.scripted_engine import MODEL

MIB = 1 << 20
PATIENCE_SECONDS = 60.0
"""After which a client that waits for something calls the server hung."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server, and how long it lets a client be slow, in seconds."""

    host: str
    port: int
    head_timeout: float
    body_timeout: float


class WrongAnswer(Exception):
    """The server answered a hostile client otherwise than it should have."""


Client = Callable[[Target, random.Random], Awaitable[None]]


@contextlib.asynccontextmanager
async def _connected(
    target: Target, receive_bytes: int = 0
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    connection = socket.socket()
    connection.setblocking(False)
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    await asyncio.get_running_loop().sock_connect(connection, (target.host, target.port))
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _post(body: bytes, *, path: str = "/v1/completions", headers: str = "", length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    return f"POST {path} HTTP/1.1\r\nHost: h\r\n{headers}Content-Length: {length}\r\n\r\n".encode() + body


def _completion(**fields: object) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 8, **fields}).encode()


async def _expect(target: Target, data: bytes, *statuses: int) -> None:
    """Send `data`; the answer must have one of the statuses, and an error object if it is an error."""
    async with _connected(target) as (reader, writer):
        writer.write(data)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status = int(head.split(" ", 2)[1])
        if status not in statuses:
            raise WrongAnswer(f"{status}, not {statuses}, to {data[:200]!r}")
        length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length:"))
        body = json.loads(await reader.readexactly(length))
        if status >= 400 and not body["error"]["message"]:
            raise WrongAnswer(f"{status} without an error object to {data[:200]!r}")


# --- malformed --------------------------------------------------------------------------------------------------------

BROKEN_BODIES = (
    *(b"", b"{", b"[]", b"null", b'{"a":1, x}', b'"text"', b"\xff\xfe{}", b'{"model": "\xff"}', b"\x00" * 64, b"nan"),
    *(b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5_000, b'{"model": "scripted", "prompt": "\\ud800"}'),
)
WRONG_FIELDS: tuple[dict[str, Any], ...] = (
    *({"temperature": "hot"}, {"n": 0}, {"max_tokens": -1}, {"prompt": {}}, {"prompt": [[]]}, {"stop": [1]}, {"top_p": 7}),
    *({"logit_bias": 3}, {"seed": "x"}, {"stream": "yes"}, {"no_such_field": 1}, {"prompt": [10**9]}, {"max_tokens": 10**12}),
)
NOT_HTTP = (
    b"HELLO\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x07" * 40,
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nno colon here\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nX: " + b"a" * 40_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(500)) + b"\r\n",
)


async def broken_json(target: Target, rng: random.Random) -> None:
    """What is no JSON object."""
    path = rng.choice(["/v1/completions", "/v1/chat/completions"])
    await _expect(target, _post(rng.choice(BROKEN_BODIES), path=path), 400)


async def wrong_fields(target: Target, rng: random.Random) -> None:
    """A field that cannot be."""
    await _expect(target, _post(_completion(**rng.choice(WRONG_FIELDS))), 400)


async def wrong_places(target: Target, rng: random.Random) -> None:
    """Paths, methods and models that are not there."""
    data, status = rng.choice(
        [
            (b"GET /no/such/route HTTP/1.1\r\nHost: h\r\n\r\n", 404),
            (b"GET /v1/completions HTTP/1.1\r\nHost: h\r\n\r\n", 405),
            (b"GET /%ff/../../etc/passwd HTTP/1.1\r\nHost: h\r\n\r\n", 404),
            (_post(_completion(model="gpt-99")), 404),
            (_post(_completion(), headers="Content-Type: multipart/form-data; boundary=x\r\n"), 415),
        ]
    )
    await _expect(target, data, status)


async def not_http(target: Target, rng: random.Random) -> None:
    """What is no HTTP request, or has more headers than one should."""
    await _expect(target, rng.choice(NOT_HTTP), 400, 431)


async def broken_encoding(target: Target, rng: random.Random) -> None:
    """Chunks and compression that are not what they say, or unknown."""
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    coding = rng.choice(["gzip", "br", "nonsense"])
    await _expect(target, rng.choice([chunked, _post(b"not it", headers=f"Content-Encoding: {coding}\r\n")]), 400, 415)


# --- enormous ---------------------------------------------------------------------------------------------------------

BOMB = gzip.compress(bytes(64 * MIB))
LONG_TEXT = _completion(prompt="word " * (MIB // 2))
MANY_IDS = _completion(prompt=[5] * (MIB // 2))
MANY_PROMPTS = _completion(prompt=[[5]] * (MIB // 2))
MOST_IDS = _completion(prompt=[5] * (MIB + MIB // 8))
DEEP = b'{"model":"scripted","prompt":' + b"[" * MIB


async def enormous(target: Target, rng: random.Random) -> None:
    """Bodies that are too large, by their own account or in truth, and prompts that are too long."""
    data, status = rng.choice(
        [
            (_post(b" " * 1000, length=10 << 30), 413),
            (_post(b" " * (5 * MIB)), 413),
            (_post(BOMB, headers="Content-Encoding: gzip\r\n"), 415),
            (_post(LONG_TEXT), 400),
            (_post(MANY_IDS), 400),
            (_post(MOST_IDS), 400),
            (_post(MANY_PROMPTS), 400),
            (_post(DEEP), 400),
        ]
    )
    await _expect(target, data, status)


# --- slow -------------------------------------------------------------------------------------------------------------


async def _drip(target: Target, first: bytes, rest: bytes, within: float) -> None:
    """Send the rest a byte at a time; the server must end it."""
    loop = asyncio.get_running_loop()
    async with _connected(target) as (reader, writer):
        writer.write(first)
        answer = asyncio.ensure_future(reader.read(64 * 1024))
        started = loop.time()
        with contextlib.suppress(ConnectionError):
            for byte in rest:
                await asyncio.wait([answer], timeout=0.25)
                if answer.done():
                    break
                writer.write(bytes([byte]))
            data = await answer
            if data and not data.startswith(b"HTTP/1.1 408 "):
                raise WrongAnswer(f"a slow sender got {data[:100]!r}")
        if loop.time() - started > within:
            raise WrongAnswer(f"a slow sender was kept for {loop.time() - started:.1f} s")


async def slow_head(target: Target, _: random.Random) -> None:
    """A header that comes a byte at a time."""
    request = _post(b"", headers="X-Slow: " + "a" * 500 + "\r\n")
    await _drip(target, request[:30], request[30:], 3 * target.head_timeout + 5)


async def slow_body(target: Target, _: random.Random) -> None:
    """A body that comes a byte at a time."""
    await _drip(target, _post(b"{", length=500), b" " * 500, 3 * target.body_timeout + 10)


async def silent(target: Target, _: random.Random) -> None:
    """A connection on which nothing is said."""
    async with _connected(target) as (reader, _writer):
        with contextlib.suppress(ConnectionError):
            await reader.read(1)


async def slow_reader(target: Target, rng: random.Random) -> None:
    """A stream that nobody reads."""
    async with _connected(target, receive_bytes=4096) as (reader, writer):
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(_post(_completion(max_tokens=64, n=4, stream=True, logprobs=5)))
        await asyncio.sleep(rng.uniform(0.5, 4.0))


# --- gone -------------------------------------------------------------------------------------------------------------


async def aborted(target: Target, rng: random.Random) -> None:
    """Left in the middle of the head, the body, the queue or the answer, politely or by a reset."""
    request = _post(_completion(max_tokens=200, stream=rng.random() < 0.7, n=rng.choice([1, 2])))
    async with _connected(target) as (reader, writer):
        cut = rng.choice([10, 60, len(request) - 5, len(request), len(request)])
        writer.write(request[:cut])
        if cut == len(request) and rng.random() < 0.7:
            with contextlib.suppress(TimeoutError, ConnectionError):
                await asyncio.wait_for(reader.read(rng.choice([1, 300, 3000])), rng.uniform(0, 1))
        else:
            await asyncio.sleep(rng.uniform(0, 0.3))
        if rng.random() < 0.5:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        elif rng.random() < 0.3 and not writer.is_closing():
            writer.write_eof()


async def pipelined_garbage(target: Target, _: random.Random) -> None:
    """Good requests with garbage right behind them. Where both came in one piece the parser sees the garbage first."""
    await _expect(target, _post(_completion()) + b"\x00garbage\r\n\r\n", 200, 400)


CLIENTS: dict[str, Client] = {
    client.__name__: client
    for client in (
        *(broken_json, wrong_fields, wrong_places, not_http, broken_encoding, enormous),
        *(slow_head, slow_body, silent, slow_reader, aborted, pipelined_garbage),
    )
}
