"""A line in batch format is read, and answered, by the code that does so over HTTP: each field, with the same answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import jaxserve
from jaxserve.config import ServeConfig
from jaxserve.engine.adapters import NO_ADAPTERS, AdapterTable
from jaxserve.engine.constraints import Constraints
from jaxserve.engine.core import EngineCore
from jaxserve.engine.text import Tokenizer
from jaxserve.offline.cli import main
from jaxserve.plan import RunnerLimits
from tests.engine import tiny_tokenizers as tiny
from tests.engine.engines import fake_engine
from tests.server.serving import MODEL, serving
from tests.server.test_fields import BODIES, PATHS, PROBES, TEMPLATE, WORKS, with_field
from tests.server.test_tools import BODY, CALLS, HERMES, NOW, TOOLS, answering

TOKENIZER = tiny.byte_level(TEMPLATE, add_bos=True)

NOT_IN_FILES = {"stream", "stream_options.include_usage", "stream_options.continuous_usage_stats", "timeout"} | {
    "stream_options.include_obfuscation"
}
"""There is nobody to stream to, and nobody who waits."""


@dataclass
class FakeOffline:
    """Satisfies `jaxserve.offline.generation.Engine`, over the engine that tests of the server have."""

    core: EngineCore
    limits: RunnerLimits
    tokenizer: Tokenizer = TOKENIZER
    model_name: str = MODEL
    adapters: AdapterTable = NO_ADAPTERS
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def constraints(self) -> Constraints:
        return Constraints(self.tokenizer, self.limits.vocab_size, self.core.eos_token_ids)

    def close(self) -> None:
        pass


def build(config: ServeConfig) -> FakeOffline:
    fake = fake_engine()
    return FakeOffline(fake.core, fake.runner.limits)


def build_calling(config: ServeConfig) -> FakeOffline:
    """A model that thinks, says something and calls two functions."""
    fake = answering(CALLS)
    return FakeOffline(fake.core, fake.runner.limits, HERMES)


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
        {"n": 3, "temperature": 1, "logprobs": True, "top_logprobs": 2, "stop": "a"},
        {"top_p": 9},
        {"colour": "red"},
    ]
    return found | {f"chat {fields}": {"url": PATHS["chat"], "body": chat | fields} for fields in several}


def run_offline(
    folder: Path, work: dict[str, dict[str, Any]], build: Callable[[ServeConfig], FakeOffline] = build
) -> dict[str, Any]:
    """The response to each line, of which some fail."""
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
    for choice in rest.get("choices", ()):
        for call in choice.get("message", {}).get("tool_calls", ()):
            call.pop("id")
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


CALLING: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"tool_choice": "none"},
    {"tool_choice": "required", "max_tokens": 400},
    {"tool_choice": {"type": "function", "function": {"name": "now"}}},
    {"tools": [{"type": "function", "function": NOW}], "parallel_tool_calls": False},
    {"logprobs": True, "top_logprobs": 1},
    {"response_format": {"type": "json_object"}, "tools": None},
    {"tools": [*TOOLS, TOOLS[0]]},
]


@pytest.mark.slow
async def test_calls_of_functions_come_back_as_over_http(tmp_path: Path) -> None:
    work = {f"{fields}": {"url": PATHS["chat"], "body": BODY | {"seed": 3} | fields} for fields in CALLING}
    responses = run_offline(tmp_path, work, build_calling)
    assert len(responses["{}"]["body"]["choices"][0]["message"]["tool_calls"]) == 2
    async with serving(answering(CALLS), tokenizer=HERMES) as server:
        for name, line in work.items():
            status, answer = await server.post(line["url"], line["body"])
            assert responses[name]["status_code"] == status, (name, responses[name], answer)
            assert comparable(responses[name]["body"]) == comparable(answer), name


@pytest.mark.parametrize(
    ("fields", "prepared"), [({}, False), ({"response_format": {"type": "json_object"}}, True), ({"tools": TOOLS}, True)]
)
def test_grammars_are_prepared_while_programs_compile_if_lines_want_any(
    fields: dict[str, Any], prepared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Constraints] = []
    monkeypatch.setattr(Constraints, "prepare", lambda constraints: calls.append(constraints))

    def build_engine(config: ServeConfig, *, meanwhile: Callable[[Constraints], None], **_: Any) -> FakeOffline:
        engine = build_calling(config)
        meanwhile(engine.constraints)
        return engine

    launch = ModuleType("jaxserve.launch")
    launch.build_engine = build_engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jaxserve.launch", launch)
    monkeypatch.setattr(jaxserve, "launch", launch, raising=False)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2} | fields
    line = {"custom_id": "a", "method": "POST", "url": PATHS["chat"], "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    assert main(["--model", MODEL, "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]) == 0
    assert len(calls) == prepared


def test_a_run_may_have_a_chat_template_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    launch = ModuleType("jaxserve.launch")
    launch.build_engine = lambda config, **_: build(config)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jaxserve.launch", launch)
    monkeypatch.setattr(jaxserve, "launch", launch, raising=False)
    body = BODIES["chat"] | {"max_tokens": 2}
    (tmp_path / "in.jsonl").write_text(
        "".join(
            json.dumps({"custom_id": name, "method": "POST", "url": PATHS["chat"], "body": body | fields}) + "\n"
            for name, fields in {"file": {}, "own": {"chat_template": "{{ messages[0].content }}? and more"}}.items()
        )
    )
    files = ["--model", MODEL, "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    settings = ["--chat-template", str(template), "--trust-request-chat-template"]
    assert main([*files, *settings]) == 0
    usages = [json.loads(line)["response"]["body"]["usage"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    expected = [len(TOKENIZER.encode_plain(prompt)) for prompt in ("hello!", "hello? and more")]
    assert [usage["prompt_tokens"] for usage in usages] == expected
    template.write_text("{{ messages[0].content }}")
    assert main([*files, *settings]) == 2, "it is another run"
    assert main([*files, "--chat-template", str(tmp_path / "none")]) == 2
