"""schemathesis makes requests out of `/openapi.json`, right and wrong ones, and holds every answer against it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.servers import ROOT, running

SECONDS = int(os.environ.get("JAXSERVE_FUZZ_SECONDS", "30"))

NOT_CHECKED = (
    "positive_data_acceptance",  # a body may be well formed and still ask for too much, or for what the model cannot do
    "missing_required_header",  # no content type is required
)


GAVE_UP = "Cannot generate an array"
"""What it says, once in some thousand cases, of its own mutations of a schema; it has sent nothing then."""


@pytest.fixture
def fuzzed_server(tmp_path: Path) -> Iterator[str]:
    """The URL of a server with a fake model that takes no time, which must outlive the test."""
    with running(tmp_path / "log", "tests.server.fake_server", "--state-dir", str(tmp_path / "state")) as url:
        yield url


def test_no_request_ends_in_a_server_error(fuzzed_server: str, tmp_path: Path) -> None:
    """And what is wrong by the description is refused, with the status, headers and body that it promises."""
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{fuzzed_server}/openapi.json"]
    flags = [
        "--max-time",
        str(SECONDS),
        "--workers",
        "2",
        "--continue-on-failure",
        "--no-color",
        "--request-timeout",
        "60",  # ten by default, which 88 answers of a whole context may take beside other work
        "--suppress-health-check",
        "all",
    ]
    flags += ["--exclude-checks", ",".join(NOT_CHECKED), "--seed", os.environ.get("JAXSERVE_FUZZ_SEED", "1")]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.clients.fuzz_hooks", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*command, *flags], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS + 120
    )
    print(result.stdout[result.stdout.find("=== SUMMARY") :])
    assert "= FAILURES =" not in result.stdout, result.stdout[-20_000:]
    errors = re.search(r"\b(\d+) errors?\b[^\n]*=\s*$", result.stdout)
    gave_up = result.stdout.count(GAVE_UP)
    assert result.returncode == 0 or (errors and int(errors[1]) == gave_up), result.stdout[-20_000:]
    passed = re.search(r"(\d+) generated, \1 passed", result.stdout)
    assert passed, result.stdout[-20_000:]
    assert int(passed[1]) > SECONDS
