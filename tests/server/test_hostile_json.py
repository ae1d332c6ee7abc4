"""JSONTestSuite as bodies: what must parse is judged by its content, what must not is refused as no JSON, and never a 5xx."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.server.handlers import ROUTES
from jaxserve.server.schema.chat import ChatRequest
from jaxserve.server.schema.completions import CompletionRequest
from jaxserve.server.schema.decoding import decode
from tests.server.serving import MODEL, Serving, serving

ABOUT_JSON = ("the body is not JSON", "the body is not UTF-8", "the body is nested too deeply", "must be a finite number")
"""How an error begins, or goes on, that says that a body is no JSON. The last one is for NaN and infinities."""

FORMS = ("/v1/files",)
"""What takes a form instead of JSON."""


@pytest.fixture(scope="module")
def files(shared: Path) -> list[Path]:
    found = sorted((shared / "data/fuzz/JSONTestSuite_test_parsing").glob("*.json"))
    assert {path.name[:2] for path in found} == {"y_", "n_", "i_"}
    return found


def check(path: Path, message: str) -> None:
    """A refusal with `message` is right for the file."""
    about_json = any(part in message for part in ABOUT_JSON)
    if path.name.startswith("y_"):
        assert not about_json, f"{path.name}: {message}"
        assert any(part in message for part in ("must be", "unknown field")), f"{path.name}: {message}"
    elif path.name.startswith("n_"):
        assert about_json, f"{path.name}: {message}"


@pytest.mark.parametrize("cls", [CompletionRequest, ChatRequest])
def test_as_bodies(files: list[Path], cls: type[Any]) -> None:
    for path in files:
        with pytest.raises(InvalidRequest) as caught:
            decode(path.read_bytes(), cls)
        check(path, str(caught.value))


@pytest.mark.slow
@pytest.mark.parametrize("cls", [CompletionRequest, ChatRequest])
def test_inside_a_body_that_is_right_otherwise(files: list[Path], cls: type[Any]) -> None:
    """Wherever a value may stand, what is no JSON makes the body none."""
    start = b'{"model": "m", "prompt": "x", "messages": [{"role": "user", "content": "x"}], "metadata": '
    for path in files:
        if path.stem in ("n_structure_trailing_#", "n_structure_double_array"):  # not if more follows
            continue
        with pytest.raises(InvalidRequest) as caught:
            decode(start + path.read_bytes() + b"}", cls)
        check(path, str(caught.value))


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted({route.path for route in ROUTES if route.method == "POST"}))
async def test_over_http(files: list[Path], path: str) -> None:
    async def post(server: Serving, file: Path) -> None:
        status, body = await server.post(path.replace("{", "").replace("}", ""), data=file.read_bytes())
        assert 400 <= status < 500, f"{file.name}: {status} {body}"
        assert set(body["error"]) == {"message", "type", "param", "code"}
        if status == 400 and path not in FORMS:
            check(file, body["error"]["message"])

    async with serving() as server:
        await asyncio.gather(*(post(server, file) for file in files))
        completion = await server.client.completions.create(model=MODEL, prompt="hello", max_tokens=1)
        assert completion.choices
