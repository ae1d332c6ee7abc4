"""Fields that say what an output has to be, over HTTP: what comes is so, streamed or not, and what cannot be is refused."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from typing import Any

import jsonschema
import pytest

from tests.server.serving import BYTE_LEVEL, MODEL, serving

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "seed": 1}
COMPLETION = {"model": MODEL, "prompt": "hello", "max_tokens": 200, "seed": 1}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "share": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "share"],
    "additionalProperties": False,
}


def wrapped(schema: Any, **options: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **options}}


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


WORKING: list[tuple[dict[str, Any], str | None]] = [
    ({"response_format": wrapped(SCHEMA)}, None),
    ({"response_format": wrapped(SCHEMA, strict=True, description="a colour")}, None),
    ({"response_format": wrapped(SCHEMA, strict=False)}, None),
    ({"structured_outputs": {"json": SCHEMA}}, None),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, None),
    ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}, "[a-c]{3}-[0-9]{2}"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"structured_outputs": {"grammar": 'start: "a" /[bc]{2}/'}}, "a[bc]{2}"),
    ({"response_format": {"type": "text"}, "structured_outputs": {"choice": ["yes"]}}, "yes"),
]


async def test_outputs_are_what_was_asked_for() -> None:
    async with serving() as server:
        for (path, body), (fields, pattern) in itertools.product(PATHS.items(), WORKING):
            status, answer = await server.post(path, {**body, **fields, "n": 2})
            assert status == 200, answer
            assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "stop"]
            if pattern is None:
                jsonschema.validate(json.loads(text_of(answer)), SCHEMA)
            else:
                assert re.fullmatch(pattern, text_of(answer))


async def test_a_stream_says_the_same_as_a_whole_answer() -> None:
    async with serving() as server:
        body = {**CHAT, "response_format": wrapped(SCHEMA)}
        _, answer = await server.post("/v1/chat/completions", body)
        async with server.http.post(server.url + "/v1/chat/completions", json={**body, "stream": True}) as response:
            events = (await response.text()).split("\n\n")[:-2]
        deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("content") or "" for delta in deltas) == text_of(answer)


async def test_json_mode_is_json_or_cut_short() -> None:
    async with serving() as server:
        _, answer = await server.post(
            "/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}, "max_tokens": 60}
        )
        text = text_of(answer)
        assert text.startswith("{")
        assert "  " not in text.replace('"', "")[:2]
        assert answer["choices"][0]["finish_reason"] == "length" or isinstance(json.loads(text), dict)


async def test_the_openai_client_parses_what_comes() -> None:
    async with serving() as server:
        completion = await server.client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hello"}],
            response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}},
        )
        jsonschema.validate(json.loads(completion.choices[0].message.content or ""), SCHEMA)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, "response_format.json_schema", ""),
    ({"response_format": {"type": "xml"}}, "response_format", "xml"),
    ({"response_format": "json_object"}, "response_format", "object"),
    ({"response_format": wrapped("string")}, "response_format.json_schema.schema", "object"),
    ({"response_format": wrapped({"type": "not-a-type"})}, "response_format.json_schema.schema", "not-a-type"),
    ({"response_format": wrapped({"$ref": "#"})}, "response_format.json_schema.schema", "no text satisfies it"),
    ({"response_format": wrapped({"uniqueItems": True})}, "response_format.json_schema.schema", "uniqueItems"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "regex"),
    ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs.grammar", "missing"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "not empty"),
    ({"structured_outputs": {}}, "structured_outputs", "one of json"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "one of json"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex and choice"),
    (
        {"structured_outputs": {"whitespace_pattern": " *", "json_object": True}},
        "structured_outputs.whitespace_pattern",
        "",
    ),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs", "left out"),
    ({"structured_outputs": {"regex": "a"}, "bad_words": ["b"]}, "bad_words", "structured_outputs.regex"),
    ({"response_format": {"type": "json_object"}, "allowed_token_ids": [1]}, "allowed_token_ids", "response_format"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "1"),
    ({"allowed_token_ids": [10_000]}, "allowed_token_ids", "10000"),
    ({"bad_words": [""]}, "bad_words", ""),
    ({"bad_words": ["  "]}, "bad_words", "spaces"),
    ({"bad_words": "word"}, "bad_words", "array"),
    ({"guided_json": SCHEMA}, "guided_json", "unknown field"),
]


async def test_what_cannot_be_is_refused_by_name() -> None:
    async with serving() as server:
        for (path, body), (fields, param, reason) in itertools.product(PATHS.items(), REFUSED):
            status, answer = await server.post(path, {**body, **fields})
            assert status == 400, (fields, answer)
            assert answer["error"]["param"].startswith(param), answer
            assert reason in answer["error"]["message"]


async def test_allowed_and_bad_words() -> None:
    async with serving() as server:
        body = {**COMPLETION, "allowed_token_ids": [BYTE_LEVEL.encode_plain(letter)[0] for letter in "!Pz"], "max_tokens": 60}
        _, free = await server.post("/v1/completions", body)
        assert set(text_of(free)) == set("!Pz")
        assert "!P" in text_of(free)
        _, answer = await server.post("/v1/completions", {**body, "bad_words": ["z", "!P"]})
        assert set(text_of(answer)) <= set("!P")
        assert "!P" not in text_of(answer)


async def test_a_grammar_that_becomes_too_complex_ends_its_own_request() -> None:
    async with serving() as server:
        body = {**COMPLETION, "structured_outputs": {"regex": "(?:a?){2000}a{2000}"}}
        other = asyncio.create_task(server.post("/v1/completions", {**COMPLETION, "ignore_eos": True}))
        status, answer = await server.post("/v1/completions", body)
        assert status == 400
        assert "could not be followed" in answer["error"]["message"]
        assert (await other)[0] == 200
        assert (await server.get("/health"))[0] == 200


async def test_a_slow_grammar_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as server:
        constraints = server.service.require_model().constraints
        begun, others_done = asyncio.Event(), asyncio.Event()
        loop, compile_grammar = asyncio.get_running_loop(), constraints._grammars.compile

        def slow(grammar: Any) -> Any:
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(others_done.wait(), loop).result(timeout=60)
            return compile_grammar(grammar)

        monkeypatch.setattr(constraints._grammars, "compile", slow)
        waiting = asyncio.create_task(
            server.post("/v1/completions", {**COMPLETION, "structured_outputs": {"choice": ["yes"]}})
        )
        await begun.wait()
        status, _ = await server.post("/v1/completions", {**COMPLETION, "max_tokens": 3})
        assert status == 200
        assert not waiting.done()
        others_done.set()
        assert text_of((await waiting)[1]) == "yes"
