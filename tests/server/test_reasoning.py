"""Reasoning of chat completions, set apart from the answer: whole and streamed, and counted."""

from __future__ import annotations

import pytest

from jaxserve.config import HttpConfig
from jaxserve.errors import ConfigError
from jaxserve.server.openai import parse_chat
from jaxserve.server.service import Service
from tests.engine import tiny_tokenizers as tiny
from tests.server.serving import MODEL, says, serving

THINKS = tiny.CHATML + "{# the model begins with <think> #}"
OPENS = tiny.CHATML.replace("assistant\\n'", "assistant\\n<think>\\n'")
ANSWER = "<think>\nhello?\n</think>\n\nhello world"


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        pytest.param(THINKS, ANSWER, id="begins"),
        pytest.param(OPENS, ANSWER.removeprefix("<think>\n"), id="opened_by_the_prompt"),
    ],
)
async def test_reasoning_is_set_apart_and_counted(template: str, answer: str) -> None:
    tokenizer = tiny.byte_level(template)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "n": 2, "temperature": 0}
    async with serving(says("hi", answer, tokenizer=tokenizer), tokenizer=tokenizer) as server:
        _, whole = await server.post("/v1/chat/completions", body)
        stream = await server.client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
            temperature=0,
        )
        chunks = [chunk async for chunk in stream]
    for choice in whole["choices"]:
        assert choice["message"] == {
            "role": "assistant",
            "content": "hello world",
            "refusal": None,
            "reasoning_content": "hello?",
        }
        assert choice["finish_reason"] == "stop"
    num_reasoning = len(tokenizer.encode_plain(answer[: answer.index("hello world")]))
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * num_reasoning}
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hello?"
    assert "".join(delta.content or "" for delta in deltas) == "hello world"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens_details is not None
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == num_reasoning


async def test_reasoning_may_be_cut_off_or_left_in_the_text() -> None:
    tokenizer = tiny.byte_level(THINKS)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
    async with serving(says("hi", ANSWER, tokenizer=tokenizer), tokenizer=tokenizer) as server:
        _, cut = await server.post("/v1/chat/completions", body)
    assert cut["choices"][0]["message"]["content"] == ""
    assert cut["choices"][0]["message"]["reasoning_content"] == "hello?"
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    config = HttpConfig(port=0, reasoning_format="none")
    async with serving(says("hi", ANSWER, tokenizer=tokenizer), tokenizer=tokenizer, config=config) as server:
        _, plain = await server.post("/v1/chat/completions", {**body, "max_tokens": 100})
    assert plain["choices"][0]["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert "completion_tokens_details" not in plain["usage"]


@pytest.mark.parametrize(
    ("begun", "opened"), [("<think>\nhm", True), ("<think>\nhm\n</think>\n\nWell", False), ("Well", False)]
)
def test_a_message_that_is_continued_may_have_opened_reasoning(begun: str, opened: bool) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": begun}]
    body = {"model": MODEL, "messages": messages, "continue_final_message": True}
    call = parse_chat(body, tiny.byte_level(THINKS), model=MODEL, max_context=500, call_id="c")
    assert call.reading is not None
    assert call.reading.opened == opened


def test_a_format_that_does_not_exist_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="reasoning_format must be auto, none or one of think, mistral, gemma, found 'xml'"):
        Service(HttpConfig(reasoning_format="xml"))
