"""Messages: roles, content parts, and templates that drop what they are given."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxserve.engine.text import Tokenizer
from jaxserve.errors import InvalidRequest
from jaxserve.server.call import Call
from jaxserve.server.openai import parse_chat
from tests.engine import tiny_tokenizers as tiny

TOKENIZER = tiny.byte_level()
SENTENCEPIECE = tiny.sentencepiece()
HELLO = [{"role": "user", "content": "hello"}]


def chat(tokenizer: Any = TOKENIZER, **fields: Any) -> Call:
    body = json.dumps({"model": "m", "messages": HELLO, **fields}).encode()
    return parse_chat(body, tokenizer, model="m", max_context=512, call_id="c")


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    joined = chat(messages=[{"role": "user", "content": parts}])
    assert joined == chat(messages=[{"role": "user", "content": "hel\nlo"}])
    assert joined.requests[0].prompt == tuple(TOKENIZER.encode_chat([{"role": "user", "content": "hel\nlo"}]))


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (5, "messages[0]"),
        ({}, "messages[0].role"),
        ({"role": "king", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": "\ud83d"}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": "x", "colour": 1}, "messages[0].colour"),
        (
            {"role": "assistant", "content": "x", "tool_calls": [{"id": "1", "type": "function"}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[0].content"),
        ({"role": "user", "content": "x", "name": "Ann"}, "messages[0].name"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "messages[0].tool_call_id"),
    ],
)
def test_bad_messages_are_refused_by_name(message: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=[message])
    assert caught.value.param == param


def test_roles_that_a_template_drops_are_refused() -> None:
    silent = "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.content }}{% endif %}{% endfor %}"
    messages = [*HELLO, {"role": "tool", "content": "42", "tool_call_id": "1"}]
    with pytest.raises(InvalidRequest, match="drops messages of this role") as caught:
        chat(tiny.byte_level(silent), messages=messages)
    assert caught.value.param == "messages[1].content"
    rendered = TOKENIZER.decode(chat(messages=messages).requests[0].prompt)
    assert "42" in rendered
    with pytest.raises(InvalidRequest, match="only user and assistant roles"):
        chat(SENTENCEPIECE, messages=messages)


def test_names_work_where_the_template_shows_them() -> None:
    shows = "{% for m in messages %}{{ m.name }}: {{ m.content }}{% endfor %}"
    call = chat(tiny.byte_level(shows), messages=[{"role": "user", "content": "x", "name": "Ann"}])
    assert TOKENIZER.decode(call.requests[0].prompt) == "Ann: x"


def test_template_variables() -> None:
    tokenizer = tiny.byte_level("{{ messages[0].content }}{% if thinking %}<think>{% endif %}{{ tools }}")
    plain, thinking = chat(tokenizer), chat(tokenizer, chat_template_kwargs={"thinking": True})
    assert len(thinking.requests[0].prompt) == len(plain.requests[0].prompt) + 1
    wrongs: list[Any] = [{"thinkin": True}, {"tools": []}, {"messages": []}, [], 5]
    for wrong in wrongs:
        with pytest.raises(InvalidRequest, match="chat_template_kwargs"):
            chat(tokenizer, chat_template_kwargs=wrong)


def test_reasoning_effort_is_a_variable_of_the_template() -> None:
    tokenizer = tiny.byte_level("{{ messages[0].content }}{% if reasoning_effort == 'high' %}!{% endif %}")
    high = chat(tokenizer, reasoning_effort="high")
    assert TOKENIZER.decode(high.requests[0].prompt) == "hello!"
    assert chat(tokenizer, reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "high"}) == high
    assert TOKENIZER.decode(chat(tokenizer, reasoning_effort="low").requests[0].prompt) == "hello"
    with pytest.raises(InvalidRequest, match="another one in chat_template_kwargs"):
        chat(tokenizer, reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "low"})
    with pytest.raises(InvalidRequest, match="reasoning_effort is not supported: the model's chat template does not read it"):
        chat(reasoning_effort="high")


def test_look_alikes_in_template_variables_stay_text() -> None:
    tokenizer = tiny.byte_level("{{ messages[0].content }}{{ date }}<|im_end|>")
    prompt = chat(tokenizer, chat_template_kwargs={"date": "<|im_end|>"}).requests[0].prompt
    assert prompt.count(tiny.IM_END_ID) == 1


def test_a_bos_of_the_template_comes_once() -> None:
    prompt = chat(SENTENCEPIECE).requests[0].prompt
    assert prompt.count(1) == 1
    assert prompt[0] == 1


def test_variables_are_those_of_the_template_for_tools_where_there_are_tools() -> None:
    with_tools = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}{{ mood }}"
    library = tiny.byte_level_library().to_str()
    tokenizer = Tokenizer(library, chat_template=tiny.CHATML, tool_template=with_tools).with_formats(tool_format="hermes")
    tools = [{"type": "function", "function": {"name": "tide"}}]
    prompt = chat(tokenizer, tools=tools, chat_template_kwargs={"mood": "!"}).requests[0].prompt
    assert tokenizer.decode(prompt) == "tidehello!"
    with pytest.raises(InvalidRequest, match=r"unknown field 'chat_template_kwargs\.mood'"):
        chat(tokenizer, chat_template_kwargs={"mood": "!"})
