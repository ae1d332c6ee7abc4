"""`/v1/responses` through OpenAI's Python client: the same words as from chat completions, in items and events."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.clients.servers import KEY, MODEL
from tests.clients.shapes import QUESTION, Paint

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)


def test_text(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(messages=[{"role": "user", "content": QUESTION}], max_tokens=16, **GREEDY)
    response = client.responses.create(input=QUESTION, max_output_tokens=16, **GREEDY)
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    assert response.usage is not None
    assert chat.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (chat.usage.prompt_tokens, 16)


def test_conversations(client: openai.OpenAI) -> None:
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Name a colour."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Red."}]},
        {"role": "user", "content": "Another."},
    ]
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": "Another."},
    ]
    response = client.responses.create(input=turns, instructions="Be brief.", max_output_tokens=16, **GREEDY)
    chat = client.chat.completions.create(messages=messages, max_tokens=16, **GREEDY)
    assert response.output_text == chat.choices[0].message.content


def test_events(client: openai.OpenAI) -> None:
    whole = client.responses.create(input=QUESTION, max_output_tokens=16, **GREEDY)
    events = list(client.responses.create(input=QUESTION, max_output_tokens=16, stream=True, **GREEDY))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    with client.responses.stream(input=QUESTION, max_output_tokens=16, **GREEDY) as stream:
        for _ in stream:
            pass


def test_a_class(client: openai.OpenAI) -> None:
    assert isinstance(client.responses.parse(input=QUESTION, text_format=Paint, **GREEDY).output_parsed, Paint)


def test_errors_are_the_client_s_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="gpt-4", input=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.responses.create(input=QUESTION, model=MODEL, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as stored:
        client.responses.create(input=QUESTION, model=MODEL, previous_response_id="resp_none")
    assert stored.value.param == "previous_response_id"
