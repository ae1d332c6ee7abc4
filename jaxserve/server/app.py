"""The server's lifetime: it listens before the model is there, serves, drains and stops.

Owns the application, the thread that loads, signals and the order of shutting down. Does not know routes or models.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from aiohttp import web

from jaxserve.config import HttpConfig
from jaxserve.server.access import SERVICE, STORE
from jaxserve.server.batch_runner import BATCHES, BatchRunner
from jaxserve.server.connections import ConnectionLimits, Connections, mark_busy
from jaxserve.server.cors import CROSS_ORIGIN, CrossOrigin, answer_preflights
from jaxserve.server.handlers import ROUTES
from jaxserve.server.limits import read_bodies
from jaxserve.server.middlewares import add_headers, answer_options, errors_as_json, known_callers_only, name_requests
from jaxserve.server.service import ServerParts, Service, State
from jaxserve.server.store.store import Store
from jaxserve.server.tls import load_tls

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 5.0
"""How long handlers may take to write what they have, after the engine has drained."""

SWITCH_SECONDS = 1e-3
"""How long a thread that computes, such as one that makes sense of a large body, may keep the interpreter from the others. A
write to a client lets it go each time, and so may wait as long to go on."""

BACKLOG = 1024
"""Connections that the kernel keeps until we come to accept them."""

MAX_OPEN_FILES = 65536
OTHER_FILES = 64
"""Of the files that a process may have open, those kept for what is no connection."""

MIDDLEWARES = (
    *(mark_busy, name_requests, errors_as_json, answer_preflights),
    *(known_callers_only, answer_options, read_bodies),
)
"""Outermost first: nobody's body is read before its sender is known, and everything that goes wrong is answered with JSON."""


def build_app(loading: Awaitable[ServerParts], config: HttpConfig) -> web.Application:
    """An application that answers `/health` at once and serves the model when `loading` is done.

    The engine runs from then until the application is cleaned up.

    Raises:
        ConfigError: the API keys of `config` cannot be read, an origin in it is none, or another server has its state folder.
    """
    app = web.Application(middlewares=MIDDLEWARES)
    service = Service(config)
    app[SERVICE] = service
    store = app[STORE] = Store(Path(config.state_dir)) if config.state_dir else None
    batches = app[BATCHES] = None if store is None else BatchRunner(service, store)
    app[CROSS_ORIGIN] = CrossOrigin(config.cors_origin)
    app.on_response_prepare.append(add_headers)

    async def lifetime(_: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(_begin(service, loading, batches))
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if batches is not None:
            await batches.close()
        await service.close()
        if store is not None:
            store.close()

    app.cleanup_ctx.append(lifetime)
    app.add_routes(ROUTES)
    return app


async def _begin(service: Service, loading: Awaitable[ServerParts], batches: BatchRunner | None) -> None:
    await service.load(loading, now=time.time)
    if batches is not None and service.state is State.READY:
        batches.start(service.require_model())


class Server:
    """An application on a TCP port. `start`, then `drain` and `stop`.

    Raises:
        ConfigError: the certificate of `config` cannot be used.
    """

    def __init__(self, app: web.Application, config: HttpConfig) -> None:
        self._service = app[SERVICE]
        self._batches = app[BATCHES]
        # A client that leaves cancels its handler, which closes its stream, which aborts its requests.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=LAST_WORDS_SECONDS)
        self._config = config
        self._tls = load_tls(config)
        self._listening: asyncio.Server | None = None

    async def start(self) -> str:
        """Listen; the address as a URL."""
        await self._runner.setup()
        try:
            self._listening = await self._listen()
        except BaseException:
            await self._runner.cleanup()
            raise
        host, port = self._listening.sockets[0].getsockname()[:2]
        scheme = "http" if self._tls is None else "https"
        url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        logger.info("listening on %s", url)
        return url

    async def _listen(self) -> asyncio.Server:
        config, server = self._config, self._runner.server
        assert server is not None
        limits = ConnectionLimits(
            max_connections=config.max_connections or max(1, _max_open_files() - OTHER_FILES),
            max_line_bytes=config.max_header_bytes,
            head_seconds=config.head_timeout,
            idle_seconds=config.idle_timeout,
            stall_seconds=config.stall_seconds,
        )
        connections = Connections(server, limits, self._service.metrics.count_dropped_connection)
        self._service.metrics.observe_connections(lambda: connections.count)
        return await asyncio.get_running_loop().create_server(
            connections,
            config.host,
            config.port,
            backlog=BACKLOG,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else config.head_timeout,
        )

    async def drain(self) -> None:
        """Refuse new requests with 503 and let running ones finish, for at most `drain_seconds`. Batches stop at once."""
        await self._stop_batches()
        await self._service.drain()

    async def stop(self) -> None:
        """Abort what still runs, so that its handlers can say so; then stop listening."""
        await self._stop_batches()
        await self._service.close()
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()

    async def _stop_batches(self) -> None:
        if self._batches is not None:
            await self._batches.close()


def serve(build: Callable[[], ServerParts], config: HttpConfig) -> int:
    """Serve until SIGTERM or SIGINT, then drain; the exit code. A second signal cuts draining short.

    Args:
        build: loads and warms the model; called in a thread of its own while the port is open already.

    Raises:
        Whatever `build` raises, after the server has stopped.
        OSError: the port cannot be opened.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    return asyncio.run(_serve(build, config))


async def _serve(build: Callable[[], ServerParts], config: HttpConfig) -> int:
    signals = _Signals()
    loading: asyncio.Future[ServerParts] = asyncio.get_running_loop().create_future()
    server = Server(build_app(asyncio.shield(loading), config), config)
    try:
        await server.start()
        _call_in_thread(build, loading)
        await _first_of(signals.first.wait(), _failure_of(loading))
        if not signals.first.is_set():
            loading.result()  # raises
        logger.info("draining for at most %g s", config.drain_seconds)
        await _first_of(server.drain(), signals.second.wait())
    finally:
        await server.stop()
        signals.restore()
    return 0


def _max_open_files() -> int:
    """How many files the process may have open, after asking for as many as it may ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


class _Signals:
    """SIGTERM and SIGINT as events."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._receive, number)

    def _receive(self, number: signal.Signals) -> None:
        logger.info("received %s", number.name)
        (self.second if self.first.is_set() else self.first).set()

    def restore(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)


def _call_in_thread(build: Callable[[], ServerParts], future: asyncio.Future[ServerParts]) -> None:
    """Settle `future` with what `build` gives, called in a daemon thread.

    Such a thread does not keep a process alive that was told to stop while it loads.
    """
    loop = asyncio.get_running_loop()

    def settle(parts: ServerParts | None, error: Exception | None) -> None:
        if future.done():
            return
        if parts is not None:
            future.set_result(parts)
        else:
            future.set_exception(error or RuntimeError("loading gave nothing"))

    def run() -> None:
        parts, failure = None, None
        try:
            parts = build()
            _leave_out_of_garbage_collection()
        except Exception as error:
            failure = error
        except BaseException as error:  # such as SystemExit, which would end this thread without a word
            failure = RuntimeError(f"loading ended with {error!r}")
        try:
            loop.call_soon_threadsafe(settle, parts, failure)
        except RuntimeError:
            logger.info("loading ended after the server had stopped")

    threading.Thread(target=run, name="jaxserve-load", daemon=True).start()


def _leave_out_of_garbage_collection() -> None:
    """What is loaded by now stays: to look through all of it for garbage, again and again, would hold up every stream for a
    tenth of a second or more each time."""
    gc.collect()
    gc.freeze()


async def _failure_of(loading: asyncio.Future[ServerParts]) -> None:
    """Wait until `loading` fails; for ever if it does not."""
    await asyncio.wait([loading])
    if loading.exception() is None:
        await asyncio.get_running_loop().create_future()


async def _first_of(*awaitables: Awaitable[object]) -> None:
    """Wait for the first to end, cancel the others, and raise what it raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
