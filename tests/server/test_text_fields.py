"""Fields about text, over a real connection: what is shown, how a prompt ends, and who may write special tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxserve.config import HttpConfig
from tests.engine import tiny_tokenizers as tiny
from tests.engine.engines import LIMITS, FakeEngine, fake_engine
from tests.server.serving import BYTE_LEVEL, MODEL, Serving, says, scripted, serving

HELLO = [{"role": "user", "content": "hello"}]


async def both(server: Serving, **fields: Any) -> tuple[str, str]:
    """The text of a chat completion and why it ended, which are the same streamed."""
    whole = (await server.client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=fields)).choices[0]  # type: ignore[arg-type]
    stream = await server.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, extra_body=fields)  # type: ignore[arg-type]
    choices = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.message.content
    assert choices[-1].finish_reason == whole.finish_reason
    assert whole.message.content is not None
    return whole.message.content, whole.finish_reason


IDS = [*BYTE_LEVEL.encode_plain("hi"), tiny.IM_START_ID, *BYTE_LEVEL.encode_plain(" world")]


L = BYTE_LEVEL.encode_plain("l")
SHOWN: list[tuple[dict[str, Any], str]] = [
    ({}, "hi world"),
    ({"skip_special_tokens": True, "include_stop_str_in_output": False}, "hi world"),
    ({"skip_special_tokens": False}, "hi<|im_start|> world"),
    ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "hi<|im_start|> world<|im_end|>"),
    ({"skip_special_tokens": False, "stop": ["start"]}, "hi<|im_"),
    ({"stop": ["wo", "r"]}, "hi "),
    ({"stop": ["wo", "r"], "include_stop_str_in_output": True}, "hi wo"),
    ({"stop_token_ids": L}, "hi wor"),
    ({"stop_token_ids": L, "include_stop_str_in_output": True}, "hi worl"),
]


async def test_what_of_an_answer_is_shown() -> None:
    async with serving(says("hello", IDS)) as server:
        for fields, expected in SHOWN:
            assert await both(server, **fields) == (expected, "stop"), fields


def engine_that_saw() -> tuple[FakeEngine, list[tuple[int, ...]]]:
    """An engine that answers with the end, and the prompts that it was given."""
    prompts: list[tuple[int, ...]] = []

    def next_token(tokens: Any, seed: int) -> int:
        prompts.append(tuple(tokens))
        return tiny.IM_END_ID

    return fake_engine(next_token=next_token, eos_token_ids=(tiny.IM_END_ID,)), prompts


ENDS: list[tuple[dict[str, Any], str]] = [
    ({}, "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"),
    ({"add_generation_prompt": False}, "<|im_start|>user\nhello<|im_end|>\n"),
    (
        {"messages": [*HELLO, {"role": "assistant", "content": "The "}], "continue_final_message": True},
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nThe ",
    ),
    ({"messages": [{"role": "developer", "content": "x"}]}, "<|im_start|>system\nx<|im_end|>\n<|im_start|>assistant\n"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n",
    ),
]


async def test_how_a_conversation_ends() -> None:
    fake, prompts = engine_that_saw()
    async with serving(fake) as server:
        for fields, expected in ENDS:
            status, _ = await server.post("/v1/chat/completions", {"model": MODEL, "messages": HELLO, **fields})
            assert status == 200
            await server.idle()
            assert BYTE_LEVEL.decode(prompts[0], skip_special_tokens=False) == expected
            prompts.clear()


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "exclude each other"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "--trust-request-chat-template"),
    ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens", "not supported"),
]


async def test_what_is_refused() -> None:
    async with serving() as server:
        for fields, param, said in REFUSED:
            status, body = await server.post("/v1/chat/completions", {"model": MODEL, "messages": HELLO, **fields})
            assert (status, body["error"]["param"]) == (400, param)
            assert said in body["error"]["message"]


@pytest.mark.parametrize("trusted", [False, True])
async def test_special_tokens_in_messages(trusted: bool) -> None:
    fake, prompts = engine_that_saw()
    config = HttpConfig(port=0, special_tokens_in_messages=trusted)
    messages = [{"role": "user", "content": "a<|im_end|>b"}]
    async with serving(fake, config=config) as server:
        status, _ = await server.post("/v1/chat/completions", {"model": MODEL, "messages": messages})
        assert status == 200
    assert prompts[0].count(tiny.IM_END_ID) == 1 + trusted


async def test_a_template_of_the_request_s_own() -> None:
    fake, prompts = engine_that_saw()
    config = HttpConfig(port=0, trust_request_chat_template=True)
    async with serving(fake, config=config) as server:
        body = {"model": MODEL, "messages": HELLO, "chat_template": "{{ messages[0].content }}{{ mood }}"}
        status, _ = await server.post("/v1/chat/completions", {**body, "chat_template_kwargs": {"mood": "!"}})
        assert status == 200
        assert BYTE_LEVEL.decode(prompts[0]) == "hello!"
        for template, said in (("{% for %}", "line 1"), ("{{ ''.__class__.__base__ }}", "SecurityError")):
            status, answer = await server.post("/v1/chat/completions", {**body, "chat_template": template})
            assert status == 400
            assert said in answer["error"]["message"]


async def test_a_prompt_without_bos() -> None:
    tokenizer = tiny.sentencepiece()
    ids = tuple(tokenizer.encode("hello"))
    answers = {ids: [*tokenizer.encode_plain("a"), 2], ids[1:]: [*tokenizer.encode_plain("b"), 2]}
    size = tokenizer.vocab_size
    fake = fake_engine(replace(LIMITS, vocab_size=size), next_token=scripted(answers, vocab_size=size))
    async with serving(fake, tokenizer=tokenizer) as server:
        for add, answer in ((None, " a"), (True, " a"), (False, " b")):
            _, body = await server.post("/v1/completions", {"model": MODEL, "prompt": "hello", "add_special_tokens": add})
            assert body["choices"][0]["text"] == answer
