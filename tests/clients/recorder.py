"""A proxy between clients and a server, which keeps what was answered, so that every answer to every client is checked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
from aiohttp import web

from tests.clients.specification import Exchange

_HOP_BY_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})


class Recorder:
    """What passed through one proxy. A client has seen nothing that is not here already."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._exchanges: list[Exchange] = []
        self.url = ""

    def take(self) -> list[Exchange]:
        """The exchanges since the last call."""
        taken, self._exchanges = self._exchanges, []
        return taken

    async def run(self, started: threading.Event, stop: asyncio.Event) -> None:
        """Pass on requests until `stop`."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        async with aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout()) as self._session:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            started.set()
            await stop.wait()
            await runner.cleanup()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        async with self._session.request(
            request.method, f"{self._target}{request.path_qs}", headers=headers, data=await request.read()
        ) as answer:
            kept = [(name, value) for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP]
            if answer.content_type == "text/event-stream":
                return await self._stream(request, answer, kept)
            body = await answer.read()
            self._keep(request, answer.status, body)
            response = web.Response(status=answer.status, body=body)
            response.headers.clear()
            response.headers.extend(kept)
            return response

    async def _stream(
        self, request: web.Request, answer: aiohttp.ClientResponse, headers: list[tuple[str, str]]
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=dict(headers))
        await response.prepare(request)
        waiting = b""
        async for data in answer.content.iter_any():
            whole, end, waiting = (waiting + data).rpartition(b"\n\n")
            for line in whole.splitlines():
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    self._keep(request, answer.status, line.removeprefix(b"data: "), event=True)
            await response.write(whole + end)
        await response.write(waiting)
        return response

    def _keep(self, request: web.Request, status: int, body: bytes, *, event: bool = False) -> None:
        path = request.path.removeprefix("/v1")
        self._exchanges.append(Exchange(request.method, path, status, body, event))


@contextmanager
def recording(target: str) -> Iterator[Recorder]:
    """A proxy before `target`, in a thread of its own."""
    recorder = Recorder(target)
    started, stop, loop = threading.Event(), asyncio.Event(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(recorder.run(started, stop),), daemon=True)
    thread.start()
    try:
        assert started.wait(10)
        yield recorder
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
