"""Server processes, run by the project's own environment, so that nothing of it is installed beside the clients."""

from __future__ import annotations

import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv" / "bin" / "python"

MODEL = "smollm2-135m-instruct"
KEY = "sk-test"


@contextmanager
def running(log: Path, *arguments: str, ready_seconds: float = 300.0) -> Iterator[str]:
    """The URL of the server that `python -m ARGUMENTS` is, once it is ready. It must end well, too."""
    environment = {"JAX_PLATFORMS": "cpu", **os.environ}
    with log.open("wb") as file:
        process = subprocess.Popen([PYTHON, "-m", *arguments], cwd=ROOT, stderr=file, env=environment)
    try:
        yield _until_ready(process, log, ready_seconds)
        assert process.poll() is None, f"the server died:\n{log.read_text()[-3000:]}"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert process.returncode == 0, log.read_text()[-3000:]
    assert "Traceback" not in log.read_text()


def _until_ready(process: subprocess.Popen[bytes], log: Path, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        url = re.search(r"listening on (http://\S+)", log.read_text())
        if url and _answers(f"{url[1]}/ready"):
            return url[1]
        time.sleep(0.1)
    raise AssertionError(f"the server is not ready after {seconds:g} s:\n{log.read_text()[-3000:]}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except urllib.error.URLError:
        return False
