"""A server with the demo model for all clients, one with a fake model where timing matters, and a check of all answers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import asks the network for prices
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"

from tests.clients.recorder import Recorder, recording
from tests.clients.servers import KEY, MODEL, ROOT, running
from tests.clients.specification import Specification


@pytest.fixture(scope="session")
def shared() -> Path:
    """Data beside the checkout that is too large or not ours to commit; tests that need it skip without it."""
    path = Path(os.environ.get("JAXSERVE_SHARED", ROOT.parent / "shared"))
    if not path.is_dir():
        pytest.skip(f"no shared data at {path}; set JAXSERVE_SHARED to its folder")
    return path


@pytest.fixture(scope="session")
def specification(shared: Path) -> Specification:
    """OpenAI's description of its API."""
    return Specification(shared / "data/openai-spec/openapi.yaml")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server with the demo model, without `/v1`."""
    folder = tmp_path_factory.mktemp("server")
    flags = ["--port", "0", "--api-key", KEY, "--chat-template", "configs/templates/smollm2-tools.jinja"]
    flags += ["--state-dir", str(folder / "state")]
    with running(folder / "log", "jaxserve", "serve", "--model", MODEL, *flags) as url:
        yield url


@pytest.fixture(scope="session")
def busy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server whose steps take 20 ms, and that queues one request beside the four that run."""
    log = tmp_path_factory.mktemp("busy") / "log"
    flags = ["--step-seconds", "0.02", "--max-seqs", "4", "--max-queue-requests", "1"]
    with running(log, "tests.server.fake_server", *flags) as url:
        yield url


@pytest.fixture(scope="session")
def proxy(server: str) -> Iterator[Recorder]:
    """What stands before `server`."""
    with recording(server) as recorder:
        yield recorder


@pytest.fixture(scope="session")
def checker(request: pytest.FixtureRequest) -> Specification | None:
    """OpenAI's description, or None where it is absent and the clients' own judgement has to do."""
    try:
        return request.getfixturevalue("specification")
    except pytest.skip.Exception:
        return None


@pytest.fixture
def url(proxy: Recorder, checker: Specification | None) -> Iterator[str]:
    """The URL that clients are given, with `/v1`. Everything that they were answered is as OpenAI describes it."""
    proxy.take()
    yield f"{proxy.url}/v1"
    exchanges = proxy.take()
    assert exchanges, "nothing went through the proxy"
    problems = [] if checker is None else [problem for exchange in exchanges for problem in checker.problems(exchange)]
    assert not problems, "\n".join(problems)
