"""A line in batch format is read, and answered, by the code that does so over HTTP: each field, with the same answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import ServeConfig
from jaxserve.engine.core import EngineCore
from jaxserve.engine.text import Tokenizer
from jaxserve.offline.cli import main
from jaxserve.plan import RunnerLimits
from tests.engine import tiny_tokenizers as tiny
from tests.engine.engines import fake_engine
from tests.server.serving import MODEL, serving
from tests.server.test_fields import BODIES, PATHS, PROBES, TEMPLATE, WORKS, with_field

TOKENIZER = tiny.byte_level(TEMPLATE, add_bos=True)

NOT_IN_FILES = {"stream", "stream_options.include_usage", "stream_options.continuous_usage_stats", "timeout"} | {
    "stream_options.include_obfuscation"
}
"""There is nobody to stream to, and nobody who waits."""

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@dataclass
class FakeOffline:
    """Satisfies `jaxserve.offline.generation.Engine`, over the engine that tests of the server have."""

    core: EngineCore
    limits: RunnerLimits
    tokenizer: Tokenizer = TOKENIZER
    model_name: str = MODEL

    def close(self) -> None:
        pass


def build(config: ServeConfig) -> FakeOffline:
    fake = fake_engine()
    return FakeOffline(fake.core, fake.runner.limits)


def lines() -> dict[str, dict[str, Any]]:
    """A line for each field that works, by a name for it; and some for what takes several of them."""
    found = {}
    for endpoint, name in WORKS:
        if name in NOT_IN_FILES:
            continue
        probe = PROBES[name]
        if isinstance(probe, dict):
            probe = probe[endpoint]
        body = {**BODIES[endpoint], "seed": 3, **probe.beside, **with_field(name, probe.value)}
        found[f"{endpoint} {name}"] = {"url": PATHS[endpoint], "body": body}
    chat = BODIES["chat"] | {"seed": 3}
    several = [
        {"tools": [WEATHER], "tool_choice": "required"},
        {"n": 3, "temperature": 1, "logprobs": True, "top_logprobs": 2, "stop": "a"},
        {"top_p": 9},
        {"colour": "red"},
    ]
    return found | {f"chat {fields}": {"url": PATHS["chat"], "body": chat | fields} for fields in several}


def run_offline(folder: Path, work: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The response to each line."""
    (folder / "in.jsonl").write_text(
        "".join(json.dumps({"custom_id": name, "method": "POST", **line}) + "\n" for name, line in work.items())
    )
    argv = ["--model", MODEL, "--input", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl")]
    assert main(argv, build_engine=build) == 3
    results = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return {result["custom_id"]: result["response"] for result in results}


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what says which answer it is, and how much of the prompt was cached."""
    rest = {name: value for name, value in answer.items() if name not in ("id", "created")}
    if "usage" in rest:
        rest["usage"] = {name: value for name, value in rest["usage"].items() if name != "prompt_tokens_details"}
    return rest


@pytest.mark.slow
async def test_every_field_works_as_over_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = lines()
    assert len(work) > 60
    responses = run_offline(tmp_path, work)
    statuses = [response["status_code"] for response in responses.values()]
    assert statuses.count(200) > 55
    assert set(statuses) == {200, 400, 404}
    async with serving(tokenizer=TOKENIZER) as server:
        for name, line in work.items():
            status, answer = await server.post(line["url"], line["body"])
            assert responses[name]["status_code"] == status, (name, responses[name], answer)
            assert comparable(responses[name]["body"]) == comparable(answer), name
