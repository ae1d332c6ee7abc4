"""Answers of every kind, whole and streamed, as they go over the wire, are what OpenAI describes; and the check can fail."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.clients.servers import KEY, MODEL
from tests.clients.specification import Exchange, Specification

HELLO = [{"role": "user", "content": "Hello."}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 4}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "max_tokens": 4}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": {"properties": {"red": {"type": "boolean"}}}}}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"max_tokens": 1},
    {"stop": ["."]},
    {"stream_options": {"include_usage": True}, "n": 2},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"structured_outputs": {"regex": "[a-z]{3}"}},
    {"user": "u", "seed": 5, "service_tier": "auto"},
]
COMPLETION_VARIANTS: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"echo": True, "logprobs": 1},
    {"echo": True, "logprobs": 1, "max_tokens": 0},
    {"prompt": ["Hello", "World"], "echo": True, "n": 2},
]
CHAT_VARIANTS: list[dict[str, Any]] = [
    {"logprobs": True, "top_logprobs": 2},
    {"response_format": {"type": "json_object"}},
    {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
    {"tools": [TOOL], "tool_choice": "auto"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "paint"}}, "max_tokens": 60},
]
RESPONSE: dict[str, Any] = {"model": MODEL, "input": "Hello.", "max_output_tokens": 16}
RESPONSE_TOOL = {"type": "function", **TOOL["function"], "strict": False}  # type: ignore[dict-item]
RESPONSE_VARIANTS: list[dict[str, Any]] = [
    {},
    {"instructions": "Be brief.", "metadata": {"a": "b"}, "user": "u"},
    {"text": {"format": {"type": "json_object"}}},
    {"tools": [RESPONSE_TOOL], "tool_choice": "required", "max_output_tokens": 60},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
]


def ask(url: str, path: str, body: Any = None, *, key: str = KEY) -> tuple[int, bytes]:
    """Status and body of a POST, or of a GET where there is no body to send. Nothing of it is any client's doing."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        *[("/completions", {**COMPLETION, **variant}) for variant in (*VARIANTS, *COMPLETION_VARIANTS)],
        *[("/chat/completions", {**CHAT, **variant}) for variant in (*VARIANTS, *CHAT_VARIANTS)],
        *[("/responses", {**RESPONSE, **variant}) for variant in RESPONSE_VARIANTS],
    ],
)
def test_answers(url: str, path: str, body: dict[str, Any], stream: bool) -> None:
    if not stream:
        body = {name: value for name, value in body.items() if name != "stream_options"}
    status, answer = ask(url, path, {**body, "stream": stream})
    assert status == 200, answer
    assert not stream or path == "/responses" or answer.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("status", "path", "body", "key"),
    [
        (400, "/completions", {**COMPLETION, "temperature": "hot"}, KEY),
        (400, "/chat/completions", {**CHAT, "messages": []}, KEY),
        (400, "/chat/completions", b'{"model"', KEY),
        (400, "/completions", [], KEY),
        (401, "/models", None, "sk-wrong"),
        (401, "/chat/completions", CHAT, "sk-wrong"),
        (404, "/chat/completions", {**CHAT, "model": "gpt-4"}, KEY),
        (404, "/models/gpt-4", None, KEY),
    ],
)
def test_errors(url: str, status: int, path: str, body: Any, key: str) -> None:
    assert ask(url, path, body, key=key)[0] == status


def test_models(url: str) -> None:
    assert ask(url, "/models")[0] == ask(url, f"/models/{MODEL}")[0] == 200


# --- the check itself -------------------------------------------------------------------------------------------------

CHUNK: dict[str, Any] = {
    "id": "c",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}],
}
MESSAGE = {"role": "assistant", "content": "x", "refusal": None}
WHOLE: dict[str, Any] = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": MESSAGE, "logprobs": None, "finish_reason": "stop"}],
}


@pytest.mark.parametrize(
    ("value", "event", "problem"),
    [
        (WHOLE, False, ""),
        (CHUNK, True, ""),
        ({**CHUNK, "usage": None}, True, ""),
        ({**WHOLE, "jaxserve": 1}, False, ""),
        ({**WHOLE, "object": "chat"}, False, "object"),
        ({**WHOLE, "created": "now"}, False, "created"),
        ({**WHOLE, "choices": [{"index": 0, "message": {"role": "assistant"}}]}, False, "choices[0]"),
        ({**CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "eos_token"}]}, True, "finish_reason"),
        ({**CHUNK, "choices": [{"index": 0, "delta": {"content": 5}, "finish_reason": None}]}, True, "content"),
        ({"error": {"message": "x"}}, True, "error"),
    ],
)
def test_the_check_tells_right_from_wrong(specification: Specification, value: Any, event: bool, problem: str) -> None:
    exchange = Exchange("POST", "/chat/completions", 200, json.dumps(value).encode(), event)
    problems = specification.problems(exchange)
    assert bool(problems) == bool(problem)
    assert problem in " ".join(problems)


def test_the_check_reads_json_strictly(specification: Specification) -> None:
    for body in (b"", b"{", b'{"created": NaN}'):
        assert "not JSON" in specification.problems(Exchange("POST", "/completions", 200, body))[0]
    assert specification.problems(Exchange("POST", "/completions", 500, b'{"error": "x"}'))
    assert not specification.problems(Exchange("GET", "/health", 200, b"ok"))
