"""What the HTTP and text layers cost for each streamed token: `python -m bench.server_overhead --help`.

Owns the streams, the clocks and the report. The server is a process of its own with a scripted engine (`scripted_server`), so
what is counted is the thread that handles HTTP and text; the engine's thread and the client are counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.scripted_engine import MODEL
from bench.scripted_server import ServerProcess, server_process

DESCRIPTION = """\
CPU time of a server for each token of 64 streams, with an engine that only plays a script. Steps come at a pace, so that each
token is a chunk of its own, as with a fast accelerator; then as fast as they can, where tokens that pile up share a chunk.
"""

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "hello"}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """One run.

    Attributes:
        tokens_per_second, chunks_per_second: streamed.
        loop_ms: CPU of the thread of HTTP and text, milliseconds a token.
        engine_ms: of the engine's thread.
        client_ms: of the client, which is no part of the server.
        loop_share: part of a core that the loop's thread was busy.
    """

    endpoint: str
    step_seconds: float
    tokens_per_second: float
    chunks_per_second: float
    loop_ms: float
    engine_ms: float
    client_ms: float
    loop_share: float

    @property
    def ceiling(self) -> float:
        """Tokens a second that the loop's thread could stream at this cost, with a core of its own."""
        return 1000.0 / self.loop_ms


class _Counter(asyncio.Protocol):
    """A stream's client, which counts chunks and does nothing else."""

    num_chunks = 0
    num_open = 0

    def __init__(self, request: bytes) -> None:
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 "):
            if not data.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(f"a stream was refused: {data!r}")
            _Counter.num_open += 1
        _Counter.num_chunks += data.count(b"data: ")


async def measure(server: ServerProcess, endpoint: str, *, num_streams: int, step_seconds: float, seconds: float) -> Overhead:
    """Stream for `seconds`, once all streams are under way.

    Args:
        server: with a context of more than 100,000 tokens.
        step_seconds: its pace, for the report.

    Raises:
        TimeoutError: the streams do not start.
    """
    path, body = BODIES[endpoint]
    data = json.dumps({"model": MODEL, "stream": True, "max_tokens": 100_000, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    host, _, port = server.url.rpartition("/")[2].rpartition(":")
    loop = asyncio.get_running_loop()
    _Counter.num_chunks = _Counter.num_open = 0
    streams = [
        await loop.create_connection(lambda: _Counter(head.encode() + data), host, int(port)) for _ in range(num_streams)
    ]
    async with asyncio.timeout(30):
        while _Counter.num_open < num_streams:
            await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)
    before, started = await _reading(server), time.monotonic()
    await asyncio.sleep(seconds)
    after, elapsed = await _reading(server), time.monotonic() - started
    for transport, _ in streams:
        transport.close()
    await asyncio.sleep(0.1)
    tokens, chunks, on_loop, on_engine, on_client = (b - a for a, b in zip(before, after, strict=True))
    return Overhead(
        endpoint=endpoint,
        step_seconds=step_seconds,
        tokens_per_second=tokens / elapsed,
        chunks_per_second=chunks / elapsed,
        loop_ms=1e3 * on_loop / tokens,
        engine_ms=1e3 * on_engine / tokens,
        client_ms=1e3 * on_client / tokens,
        loop_share=on_loop / elapsed,
    )


async def _reading(server: ServerProcess) -> tuple[float, float, float, float, float]:
    """Tokens, chunks, and CPU seconds of loop, engine and client."""
    host, _, port = server.url.rpartition("/")[2].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    found = re.search(r"^jaxserve_output_tokens_total (\S+)$", text, flags=re.MULTILINE)
    assert found is not None
    cpu = server.cpu_seconds()
    return float(found[1]), float(_Counter.num_chunks), cpu["loop"], cpu["engine"], time.process_time()


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.server_overhead", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="at once; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=8.0, metavar="X", help="for each row; default: %(default)s")
    parser.add_argument("--step-ms", default="25,0", metavar="X,...", help="paces: milliseconds a step; default: %(default)s")
    parser.add_argument("--endpoints", default="completions,chat", metavar="NAME,...", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report; results/ is ignored by git")
    args = parser.parse_args(argv)
    print(f"{args.streams} streams; CPU in ms a token")
    print(
        f"{'endpoint':<12}{'step':>6}{'tokens/s':>10}{'chunks/s':>10}{'loop':>8}{'engine':>8}{'client':>8}{'busy':>6}{'ceiling':>9}"
    )
    rows = []
    for step_ms in map(float, args.step_ms.split(",")):
        flags = [f"--step-seconds={step_ms / 1e3}", f"--max-seqs={args.streams}", "--max-context=131072"]
        with server_process(*flags) as server:
            for endpoint in args.endpoints.split(","):
                work = measure(server, endpoint, num_streams=args.streams, step_seconds=step_ms / 1e3, seconds=args.seconds)
                row = asyncio.run(work)
                rows.append(row)
                print(
                    f"{endpoint:<12}{step_ms:>6g}{row.tokens_per_second:>10.0f}{row.chunks_per_second:>10.0f}{row.loop_ms:>8.4f}"
                    f"{row.engine_ms:>8.4f}{row.client_ms:>8.4f}{row.loop_share:>6.0%}{row.ceiling:>9.0f}",
                    flush=True,
                )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
