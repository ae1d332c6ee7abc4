"""A body that is wrong in one place is refused for that place, in every schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.server.schema.anthropic import MessagesRequest
from jaxserve.server.schema.chat import ChatRequest
from jaxserve.server.schema.completions import CompletionRequest
from jaxserve.server.schema.decoding import decode

TEXT = {"type": "text", "text": "x"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
SHARED: dict[str, Any] = {
    "model": "m",
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": False},
    "temperature": 0.5,
    "top_k": 4,
    "seed": 7,
    "stop": ["a", "b"],
    "stop_token_ids": [5, 6],
    "logit_bias": {"5": 1, "6": -2.5},
    "priority": "batch",
    "timeout": 2,
    "cache_salt": "s",
    "bad_words": ["bad"],
    "store": False,
}
BODIES: dict[type, dict[str, Any]] = {
    CompletionRequest: {
        **SHARED,
        "prompt": [[5, 6], [7]],
        "logprobs": 2,
        "best_of": 2,
        "structured_outputs": {"choice": ["a"]},
    },
    ChatRequest: {
        **SHARED,
        "messages": [
            {"role": "system", "content": "be"},
            {"role": "user", "content": [TEXT, TEXT], "name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
            {"role": "tool", "content": "42", "tool_call_id": "a"},
        ],
        "logprobs": True,
        "top_logprobs": 3,
        "reasoning_effort": "low",
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
        "modalities": ["text"],
    },
    MessagesRequest: {
        "model": "m",
        "max_tokens": 5,
        "system": [TEXT],
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [TEXT, {"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [TEXT], "is_error": False}]},
        ],
        "tools": [{"name": "f", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        "metadata": {"user_id": "u"},
    },
}
WRONG: list[Any] = [
    *(None, True, -7, 2.5, 10**30, "nonsense", "x" * 3000),
    *([], [[]], [None], {}, {"type": "nonsense"}, {"nonsense": 1}),
]
LIMITED = "modalities"
"""A field that is not implemented is judged as a whole."""

FREE = ("schema", "properties", "x", "input", "logit_bias")
"""Objects whose fields are the caller's."""


def places(value: Any, path: str = "") -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """Every place in a body: as errors call it, and how to get there."""
    if isinstance(value, dict):
        for name, part in value.items():
            here = f"{path}.{name}" if path else name
            yield here, (name,)
            yield from ((deeper, (name, *steps)) for deeper, steps in places(part, here))
    elif isinstance(value, list):
        for i, part in enumerate(value):
            here = f"{path}[{i}]"
            yield here, (i,)
            yield from ((deeper, (i, *steps)) for deeper, steps in places(part, here))


def changed(cls: type, steps: tuple[str | int, ...]) -> tuple[dict[str, Any], Any, str | int]:
    """A copy of the body, and in it the object or array that has the place, and its key there."""
    body = json.loads(json.dumps(BODIES[cls]))
    *outer, last = steps
    inner = body
    for step in outer:
        inner = inner[step]
    return body, inner, last


def refusal(body: Any, cls: type) -> InvalidRequest | None:
    try:
        decode(json.dumps(body).encode(), cls)
    except InvalidRequest as error:
        return error
    return None


@pytest.mark.parametrize("cls", BODIES, ids=lambda cls: cls.__name__)
def test_a_wrong_value_is_refused_where_it_is(cls: type) -> None:
    assert refusal(BODIES[cls], cls) is None
    num_refused = 0
    for place, steps in places(BODIES[cls]):
        for wrong in WRONG:
            body, inner, last = changed(cls, steps)
            inner[last] = wrong
            error = refusal(body, cls)
            if error is not None:
                num_refused += 1
                expected = place.partition("[")[0] if place.startswith(LIMITED) else place
                assert (error.param or "").startswith(expected), (place, wrong, error)
                assert (error.param or "") in str(error)
                assert len(str(error)) < 600
    assert num_refused > 100


@pytest.mark.parametrize("cls", BODIES, ids=lambda cls: cls.__name__)
def test_an_unknown_field_is_named_where_it_is(cls: type) -> None:
    for place, steps in places(BODIES[cls]):
        body, inner, last = changed(cls, steps)
        if isinstance(inner[last], dict) and not place.endswith(FREE):
            inner[last]["nonsense"] = 1
            error = refusal(body, cls)
            assert error is not None, place
            assert (error.param, str(error).startswith("unknown field")) == (f"{place}.nonsense", True)


@pytest.mark.parametrize("cls", BODIES, ids=lambda cls: cls.__name__)
def test_a_missing_field_is_named_where_it_should_be(cls: type) -> None:
    missed = []
    for place, steps in places(BODIES[cls]):
        body, inner, last = changed(cls, steps)
        if isinstance(inner, dict):
            del inner[last]
            error = refusal(body, cls)
            if error is not None:
                assert error.param == place
                assert re.fullmatch(rf"{re.escape(place)} must be .*, found nothing", str(error))
                missed.append(place)
    assert "model" in missed
