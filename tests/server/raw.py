"""HTTP as bytes over a socket, for what no client library would say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from tests.server.serving import Serving


@dataclass(frozen=True)
class Reply:
    """One answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error object, which the body must be."""
        assert self.headers["content-type"] == "application/json; charset=utf-8"
        return json.loads(self.body)["error"]


@contextlib.asynccontextmanager
async def connect(
    server: Serving, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection whose both ends the test decides."""
    host, port = server.url.partition("://")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls, server_hostname="localhost" if tls else None)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def read_reply(reader: asyncio.StreamReader, *, has_body: bool = True) -> Reply:
    """The next answer, in at most 10 s; its body is as long as it says, or ends with the connection."""
    async with asyncio.timeout(10):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        pairs = (line.partition(": ") for line in head[1:] if line)
        headers = {name.lower(): value for name, _, value in pairs}
        length = int(headers.get("content-length", -1))
        body = b"" if not has_body else await (reader.read() if length < 0 else reader.readexactly(length))
        return Reply(int(head[0].split(" ")[1]), headers, body)


async def say(server: Serving, data: bytes, **options: Any) -> Reply:
    """The answer to `data`, over a connection of its own."""
    async with connect(server) as (reader, writer):
        writer.write(data)
        return await read_reply(reader, **options)


async def closed(reader: asyncio.StreamReader) -> bytes:
    """What still comes until the server closes the connection, in at most 10 s."""
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionError):
            return await reader.read()
        return b""
