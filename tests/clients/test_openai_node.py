"""OpenAI's client for Node, unmodified; its side is `openai.cjs`."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.servers import KEY, MODEL, ROOT

MODULES = ROOT / ".venv-clients" / "node" / "node_modules"


@pytest.fixture
def found(url: str) -> Any:
    """What the client found."""
    if shutil.which("node") is None or not (MODULES / "openai").is_dir():
        pytest.skip("no node here, or no npm when the clients were installed")
    script = Path(__file__).with_name("openai.cjs")
    environment = {**os.environ, "NODE_PATH": str(MODULES)}
    result = subprocess.run(["node", script, url, KEY, MODEL], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_openai_for_node(found: Any) -> None:
    assert found["models"] == [MODEL]
    whole = found["whole"]
    assert whole["finish_reason"] == "length"
    *chunks, usage = found["chunks"]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == whole["message"]["content"]
    assert (usage["choices"], usage["usage"]) == ([], found["usage"])
    for choice in found["accumulated"]["choices"]:
        assert choice["message"]["content"] == whole["message"]["content"]
        spelled = bytes(byte for token in choice["logprobs"]["content"] for byte in token["bytes"])
        assert spelled.decode() == whole["message"]["content"]
    assert len(found["accumulated"]["choices"]) == 2
    assert "Paris" in found["completion"]["choices"][0]["text"]
    assert set(found["parsed"]) == {"red"}
    for choice in (found["call"], found["streamedCall"]):
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"]["name"], choice["finish_reason"]) == ("paint", "tool_calls")
        assert set(json.loads(call["function"]["arguments"])) == {"red"}
    assert math.hypot(*found["embedding"]) == pytest.approx(1.0, abs=1e-4)
    assert found["response"] == found["streamedResponse"]
    assert found["response"].startswith(whole["message"]["content"])
    assert (found["content"], found["deleted"]) == ("{}\n", True)
    expected = {"kind": "AuthenticationError", "status": 401, "code": "invalid_api_key"}
    assert found["unauthorized"].items() >= expected.items()
    assert found["missing"].items() >= {"kind": "NotFoundError", "code": "model_not_found", "param": "model"}.items()
    assert found["invalid"].items() >= {"kind": "BadRequestError", "status": 400, "param": "temperature"}.items()
