"""A server process with a scripted engine, for measuring what stands before one: `python -m bench.scripted_server --help`.

Owns the process, and starting one from another. What it answers is in `scripted_engine`.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.scripted_engine import MODEL, scripted_core, scripted_limits, scripted_tokenizer
from jaxserve.config import HttpConfig
from jaxserve.flags import add_http_flags
from jaxserve.from_mapping import from_mapping
from jaxserve.server.app import serve
from jaxserve.server.service import ServerParts


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m bench.scripted_server", description=__doc__.split("\n\n", 1)[0])
    parser.add_argument(
        "--step-seconds", type=float, default=0.02, metavar="X", help="what a step takes; default: %(default)s"
    )
    parser.add_argument(
        "--max-seqs", type=int, default=64, metavar="N", help="sequences that run at once; default: %(default)s"
    )
    parser.add_argument("--max-context", type=int, default=8192, metavar="N", help="default: %(default)s")
    parser.add_argument("--num-pages", type=int, default=0, metavar="N", help="default: as many as they can all use")
    add_http_flags(parser)
    args = parser.parse_args(argv)
    http = {dest.partition(".")[2]: value for dest, value in vars(args).items() if "." in dest and value is not None}
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    def build() -> ServerParts:
        limits = scripted_limits(max_seqs=args.max_seqs, max_context=args.max_context, num_pages=args.num_pages)
        core = scripted_core(limits, args.step_seconds)
        return ServerParts(core=core, limits=limits, tokenizer=scripted_tokenizer(), model_name=MODEL)

    return serve(build, from_mapping(HttpConfig, {"port": 0, **http}, where="command line"))


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A scripted server that runs.

    Attributes:
        log: a file with what it said.
    """

    url: str
    pid: int
    log: Path

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time by thread: "loop", where HTTP and text are handled, and "engine", all others."""
        seconds = {"loop": 0.0, "engine": 0.0}
        for path in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                nanoseconds = int((path / "schedstat").read_text().split()[0])
                seconds["loop" if int(path.name) == self.pid else "engine"] += nanoseconds / 1e9
        return seconds

    def resident_mib(self) -> float:
        """Memory of the process."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


@contextlib.contextmanager
def server_process(*flags: str) -> Iterator[ServerProcess]:
    """Start one with `flags`, and stop it in the end.

    Raises:
        RuntimeError: it did not start, or it did not stop as it should.
    """
    command = [sys.executable, "-m", "bench.scripted_server", *flags]
    with tempfile.NamedTemporaryFile(suffix=".txt") as log:
        process = subprocess.Popen(command, stderr=log)
        try:
            path = Path(log.name)
            yield ServerProcess(_wait_until_ready(process, path), process.pid, path)
        finally:
            process.terminate()
            try:
                code = process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        if code != 0:
            raise RuntimeError(f"the server ended with {code}: {path.read_text()}")


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """The server's URL."""
    while process.poll() is None:
        said = log.read_text()
        if "ready" in said and (match := re.search(r"listening on (http\S+)", said)):
            return match[1]
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start: {log.read_text()}")


if __name__ == "__main__":
    sys.exit(main())
