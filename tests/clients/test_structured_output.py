"""Structured output through the clients that ask for it: what comes fits the model class that they were given."""

from __future__ import annotations

import json
import re
from typing import Any

import instructor
import litellm
import openai
import pytest
from langchain_openai import ChatOpenAI

from tests.clients.servers import KEY, MODEL
from tests.clients.shapes import QUESTION, Paint

MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_openai_parses_into_a_class(client: openai.OpenAI, temperature: float) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "response_format": Paint,
        "temperature": temperature,
        "seed": 1,
    }
    (choice,) = client.chat.completions.parse(**asked).choices
    assert isinstance(choice.message.parsed, Paint)
    assert choice.finish_reason == "stop"
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        (streamed,) = stream.get_final_completion().choices
    assert streamed.message.parsed == choice.message.parsed


def test_json_of_any_shape(client: openai.OpenAI) -> None:
    """As long as it is let go on it is JSON, without whitespace to no end."""
    format_: Any = {"type": "json_object"}
    for seed in range(3):
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, response_format=format_, seed=seed, max_tokens=60, temperature=1.0
        )
        (choice,) = answer.choices
        text = choice.message.content or ""
        assert text.startswith("{")
        assert not re.search(r"\s{50}", text)
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"choice": ["yes", "no", "maybe"]}, "yes|no|maybe"),
        ({"regex": "[A-Z]{2}-[0-9]{3}"}, "[A-Z]{2}-[0-9]{3}"),
        ({"grammar": 'start: "<" /[a-c]{1,4}/ ">"'}, "<[a-c]{1,4}>"),
    ],
)
def test_other_forms(client: openai.OpenAI, asked: dict[str, Any], pattern: str) -> None:
    extra = {"structured_outputs": asked}
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=30, extra_body=extra)
    assert re.fullmatch(pattern, chat.choices[0].message.content or "")
    text = client.completions.create(model=MODEL, prompt="Answer:", max_tokens=30, extra_body=extra)
    assert re.fullmatch(pattern, text.choices[0].text)


@pytest.mark.parametrize("schema", [{"type": "not-a-type"}, {"$ref": "#"}, {"type": "object", "properties": 5}])
def test_a_schema_that_cannot_be_kept_is_refused(client: openai.OpenAI, schema: Any) -> None:
    format_: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=format_, stream=stream)
        assert (refused.value.param or "").startswith("response_format")


def test_instructor(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "response_model": Paint,
        "temperature": 0,
        "max_tokens": 200,
    }
    wrapped = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    assert isinstance(wrapped.chat.completions.create(max_retries=1, **asked), Paint)
    *_, last = wrapped.chat.completions.create_partial(**asked)
    Paint.model_validate(last.model_dump())


def test_langchain(url: str) -> None:
    model = ChatOpenAI(model=MODEL, base_url=url, api_key=KEY, temperature=0, max_retries=0)  # type: ignore[arg-type]
    assert isinstance(model.with_structured_output(Paint, method="json_schema").invoke(QUESTION), Paint)


def test_litellm(url: str) -> None:
    options: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": url, "api_key": KEY, "max_retries": 0}
    answer = litellm.completion(messages=MESSAGES, response_format=Paint, temperature=0, **options)
    Paint.model_validate_json(answer.choices[0].message.content)
