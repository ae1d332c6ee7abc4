"""The README's tables of parameters, walked: what they say works does, and what they say is refused is."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jaxserve.constraint import JSON_OBJECT, Grammar, GrammarKind
from jaxserve.request import Request
from jaxserve.server.schema.body import limited_fields
from jaxserve.server.schema.chat import ChatRequest
from jaxserve.server.schema.common import StreamOptions
from jaxserve.server.schema.completions import CompletionRequest
from tests.engine import tiny_tokenizers as tiny
from tests.server.serving import MODEL, Serving, serving

README = Path(__file__).resolve().parents[2] / "README.md"
SCHEMAS = {"completions": CompletionRequest, "chat": ChatRequest}
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"model": MODEL, "prompt": "hello", "temperature": 0, "max_tokens": 12},
    "chat": {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 12},
}
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
EXTENSIONS = (
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output"),
    *("skip_special_tokens", "echo", "prompt_logprobs", "logit_bias", "allowed_token_ids", "bad_words", "n", "seed"),
    *("stream_options.include_usage", "stream_options.continuous_usage_stats", "priority", "cache_salt", "structured_outputs"),
)
CHAT_EXTENSIONS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
TEMPLATE = (
    tiny.CHATML
    + "{{ mood }}{{ reasoning_effort }}"
    + '{% if tools %}{{ tools | tojson }}<tool_call>{"name": "arguments"}{% endif %}'
)
TOOLS = [{"type": "function", "function": {"name": "f"}}]


# --- the tables -------------------------------------------------------------------------------------------------------


def tables() -> tuple[dict[tuple[str, str], None], dict[tuple[str, str], list[Any]]]:
    """What works, and what is refused with the values at which it is not; keyed by endpoint and field."""
    section = README.read_text().split("No parameter is silently ignored", 1)[1].split("\n##", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| `")]
    works: dict[tuple[str, str], None] = {}
    refused: dict[tuple[str, str], list[Any]] = {}
    for names, endpoints, *rest in rows:
        for endpoint in ("completions", "chat") if endpoints == "both" else (endpoints,):
            for name in re.findall(r"`([^`]+)`", names):
                assert (endpoint, name) not in {**works, **refused}, f"{name} of {endpoint} has two rows"
                if len(rest) == 2:
                    works[endpoint, name] = None
                else:
                    refused[endpoint, name] = [json.loads(value) for value in re.findall(r"`([^`]+)`", rest[0])]
    return works, refused


WORKS, REFUSED = tables()


@pytest.mark.parametrize("endpoint", SCHEMAS)
def test_the_tables_are_the_schema(endpoint: str) -> None:
    limited = dict(limited_fields(SCHEMAS[endpoint]))
    options = [f"stream_options.{name}" for name in StreamOptions.__struct_fields__]
    known = {*SCHEMAS[endpoint].__struct_fields__, *options} - {"stream_options"}
    assert {name for of, name in WORKS if of == endpoint} == known - set(limited)
    assert {name: values for (of, name), values in REFUSED.items() if of == endpoint} == {
        name: list(values) for name, values in limited.items()
    }


def test_the_tables_have_every_extension() -> None:
    listed = {*WORKS, *REFUSED}
    assert {(endpoint, name) for endpoint in SCHEMAS for name in EXTENSIONS} <= listed
    assert {("chat", name) for name in CHAT_EXTENSIONS} <= listed


@functools.cache
def reference(shared: Path) -> dict[str, Any]:
    """All schemas of OpenAI's own description, by name."""
    yaml = pytest.importorskip("yaml")
    text = (shared / "data/openai-spec/openapi.yaml").read_text()
    schemas: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["components"]["schemas"]
    return schemas


def reference_fields(shared: Path, name: str) -> set[str]:
    """The fields of an object in OpenAI's own description."""
    schemas = reference(shared)

    def properties(schema: dict[str, Any]) -> set[str]:
        if "$ref" in schema:
            return properties(schemas[schema["$ref"].rpartition("/")[2]])
        parts = [properties(part) for part in (*schema.get("allOf", ()), *schema.get("anyOf", ()))]
        return set(schema.get("properties", ())).union(*parts)

    return properties(schemas[name])


@pytest.mark.slow
def test_the_tables_have_every_field_of_the_reference(shared: Path) -> None:
    for endpoint, name in (("completions", "CreateCompletionRequest"), ("chat", "CreateChatCompletionRequest")):
        reference = reference_fields(shared, name) - {"stream_options"}
        options = {f"stream_options.{option}" for option in reference_fields(shared, "ChatCompletionStreamOptions")}
        assert options
        assert {(endpoint, field) for field in reference | options} <= {*WORKS, *REFUSED}


# --- what is refused --------------------------------------------------------------------------------------------------

ANYTHING: list[Any] = [True, "x", 2, False]


@asynccontextmanager
async def recording() -> AsyncIterator[tuple[Serving, list[Request]]]:
    """A server, and the requests that its engine is given."""
    async with serving(tokenizer=tiny.byte_level(TEMPLATE, add_bos=True)) as server:
        seen: list[Request] = []
        engine, to_engine = server.engine, server.engine.open

        def record(*requests: Request) -> Any:
            seen.extend(requests)
            return to_engine(*requests)

        engine.open = record  # type: ignore[method-assign]
        yield server, seen


async def test_what_is_refused() -> None:
    plain: dict[str, Any] = {}
    async with recording() as (server, _):
        for (endpoint, name), values in REFUSED.items():
            path, body = PATHS[endpoint], {**BODIES[endpoint], "max_tokens": 2}
            plain[endpoint] = plain.get(endpoint) or (await server.post(path, body))[1]["choices"]
            for value in [*values, None]:
                status, answer = await server.post(path, {**body, name: value})
                assert (status, answer.get("choices")) == (200, plain[endpoint]), f"{name} of {endpoint} as {value}"
            accepted = {json.dumps(value) for value in values}
            for value in [value for value in ANYTHING if json.dumps(value) not in accepted][:2]:
                status, answer = await server.post(path, {**body, name: value})
                assert (status, answer["error"]["param"]) == (400, name), f"{name} of {endpoint} as {value}"
                assert name in answer["error"]["message"]


# --- what works -------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What came of a body: the status, the answer or its events, and the requests that the engine was given."""

    status: int
    answer: Any
    requests: list[Request]

    @property
    def choices(self) -> list[Any]:
        chosen: list[Any] = self.answer["choices"]
        return chosen

    @property
    def num_output(self) -> int:
        return int(self.answer["usage"]["completion_tokens"])


@dataclass(frozen=True)
class Probe:
    """A value for a field, what it needs beside it, and whether its effect is there.

    Attributes:
        sees: given what came of the body with the field, and of the same without it.
    """

    value: Any
    sees: Callable[[Seen, Seen], bool]
    beside: dict[str, Any] = field(default_factory=dict)


PARAMETER = {"response_format": "grammar", "structured_outputs": "grammar"}
SAMPLING: dict[str, tuple[Any, Any]] = {
    "min_tokens": (2, 2),
    "temperature": (0.7, 0.7),
    "top_k": (5, 5),
    "top_p": (0.5, 0.5),
    "min_p": (0.25, 0.25),
    "seed": (7, 7),
    "presence_penalty": (0.5, 0.5),
    "frequency_penalty": (0.5, 0.5),
    "repetition_penalty": (1.5, 1.5),
    "logit_bias": ({"5": 2}, ((5, 2.0),)),
    "stop": (["END"], ("END",)),
    "stop_token_ids": ([5], (5,)),
    "ignore_eos": (True, True),
    "response_format": ({"type": "json_object"}, Grammar(GrammarKind.JSON_SCHEMA, JSON_OBJECT, "response_format")),
    "structured_outputs": ({"regex": "[ab]+"}, Grammar(GrammarKind.REGEX, "[ab]+", "structured_outputs.regex")),
    "allowed_token_ids": ([7, 8], (7, 8)),
    "bad_words": (["hello"], ("hello",)),
    "include_stop_str_in_output": (True, True),
    "skip_special_tokens": (False, False),
}


def of_sampling(name: str, value: Any, expected: Any) -> Probe:
    return Probe(
        value,
        lambda new, old: (
            getattr(new.requests[0].params, PARAMETER.get(name, name)) == expected
            and getattr(old.requests[0].params, PARAMETER.get(name, name)) != expected
            and new.status == 200
        ),
    )


def kept_two(new: Seen, old: Seen) -> bool:
    return len(old.requests[0].prompt) > 2 and new.requests[0].prompt == old.requests[0].prompt[-2:]


LABEL = Probe("someone", lambda new, old: new.choices == old.choices)
PROBES: dict[str, Probe | dict[str, Probe]] = {
    **{name: of_sampling(name, value, expected) for name, (value, expected) in SAMPLING.items()},
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), LABEL),
    "model": Probe("other", lambda new, old: new.status == 404 and new.answer["error"]["param"] == "model"),
    "prompt": Probe([[5], [6, 7]], lambda new, old: [request.prompt for request in new.requests] == [(5,), (6, 7)]),
    "messages": Probe(
        [{"role": "system", "content": "be"}, {"role": "user", "content": "hello"}],
        lambda new, old: len(new.requests[0].prompt) > len(old.requests[0].prompt),
    ),
    "chat_template": Probe(  # as this server is run
        "{{ 1 }}", lambda new, old: (new.status, new.answer["error"]["param"]) == (400, "chat_template")
    ),
    "add_generation_prompt": Probe(False, lambda new, old: len(new.requests[0].prompt) < len(old.requests[0].prompt)),
    "continue_final_message": Probe(
        True, lambda new, old: old.requests[0].prompt[: len(new.requests[0].prompt)] == new.requests[0].prompt
    ),
    "add_special_tokens": {
        "completions": Probe(False, lambda new, old: new.requests[0].prompt == old.requests[0].prompt[1:]),
        "chat": Probe(True, lambda new, old: new.requests[0].prompt[1:] == old.requests[0].prompt),
    },
    "chat_template_kwargs": Probe({"mood": "!"}, lambda new, old: new.requests[0].prompt != old.requests[0].prompt),
    "reasoning_effort": Probe("low", lambda new, old: new.requests[0].prompt != old.requests[0].prompt),
    "tools": Probe(TOOLS, lambda new, old: len(new.requests[0].prompt) > len(old.requests[0].prompt)),
    "tool_choice": Probe(
        "required",
        lambda new, old: bool(new.requests[0].params.grammar) and not old.requests[0].params.grammar,
        {"tools": TOOLS},
    ),
    "parallel_tool_calls": Probe(
        False, lambda new, old: bool(new.requests[0].params.grammar) and not old.requests[0].params.grammar, {"tools": TOOLS}
    ),
    "truncate_prompt_tokens": {
        "completions": Probe(2, kept_two, {"prompt": "hello world!"}),
        "chat": Probe(2, kept_two),
    },
    "n": Probe(2, lambda new, old: [choice["index"] for choice in new.choices] == [0, 1]),
    "best_of": Probe(3, lambda new, old: (len(new.requests), len(new.choices)) == (3, 1)),
    "stream": Probe(True, lambda new, old: isinstance(new.answer, list) and not isinstance(old.answer, list)),
    "stream_options.include_usage": Probe(
        True, lambda new, old: not new.answer[-1]["choices"] and "usage" not in old.answer[-1], {"stream": True}
    ),
    "stream_options.continuous_usage_stats": Probe(
        True,
        lambda new, old: all(chunk["usage"] for chunk in new.answer) and "usage" not in old.answer[0],
        {"stream": True},
    ),
    "stream_options.include_obfuscation": Probe(
        True,
        lambda new, old: any("obfuscation" in chunk for chunk in new.answer) and "obfuscation" not in str(old.answer),
        {"stream": True},
    ),
    "max_tokens": Probe(3, lambda new, old: new.num_output == 3 and old.num_output != 3),
    "max_completion_tokens": Probe(3, lambda new, old: new.num_output == 3 and old.num_output != 3, {"max_tokens": None}),
    "logprobs": {
        "completions": Probe(
            1, lambda new, old: bool(new.choices[0]["logprobs"]["tokens"]) and not old.choices[0]["logprobs"]
        ),
        "chat": Probe(True, lambda new, old: bool(new.choices[0]["logprobs"]["content"]) and not old.choices[0]["logprobs"]),
    },
    "top_logprobs": Probe(
        2, lambda new, old: len(new.choices[0]["logprobs"]["content"][0]["top_logprobs"]) == 2, {"logprobs": True}
    ),
    "echo": Probe(
        True, lambda new, old: new.choices[0]["text"].startswith("hello") and not old.choices[0]["text"].startswith("hello")
    ),
    "prompt_logprobs": {
        "completions": Probe(
            1, lambda new, old: new.choices[0]["prompt_logprobs"][0] is None and "prompt_logprobs" not in old.choices[0]
        ),
        "chat": Probe(1, lambda new, old: new.answer["prompt_logprobs"][0] is None and "prompt_logprobs" not in old.answer),
    },
    "cache_salt": Probe("s", lambda new, old: (new.requests[0].cache_salt, old.requests[0].cache_salt) == ("s", "")),
    "priority": Probe("batch", lambda new, old: (new.requests[0].priority, old.requests[0].priority) == (10, 0)),
    "timeout": Probe(
        1.5,
        lambda new, old: (new.requests[0].deadline or 0) < (old.requests[0].deadline or float("inf")) and new.status == 200,
    ),
}


async def send(server: Serving, seen: list[Request], endpoint: str, fields: dict[str, Any]) -> Seen:
    seen.clear()
    body = {**BODIES[endpoint], **fields}
    if not body.get("stream"):
        status, answer = await server.post(PATHS[endpoint], body)
        return Seen(status, answer, list(seen))
    async with server.http.post(server.url + PATHS[endpoint], json=body) as response:
        events = (await response.text()).split("\n\n")[:-2]
        return Seen(response.status, [json.loads(event.removeprefix("data: ")) for event in events], list(seen))


def with_field(name: str, value: Any) -> dict[str, Any]:
    outer, _, inner = name.partition(".")
    return {outer: {inner: value} if inner else value}


async def test_what_works() -> None:
    async with recording() as (server, seen):
        for endpoint, name in WORKS:
            probe = PROBES[name]
            if isinstance(probe, dict):
                probe = probe[endpoint]
            old = await send(server, seen, endpoint, probe.beside)
            new = await send(server, seen, endpoint, probe.beside | with_field(name, probe.value))
            assert old.status == 200, f"{name} of {endpoint}: {old.answer}"
            assert probe.sees(new, old), f"{name} of {endpoint}: {new.answer}"
