"""Anthropic's Python client, unmodified, before `/v1/messages`."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from tests.clients.servers import KEY, MODEL

MESSAGES: list[Any] = [{"role": "user", "content": "Name three colours."}]
GREEDY = {"temperature": 0}  # the client has no argument for it any more
ASKED: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "extra_body": GREEDY}


@pytest.fixture
def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=KEY, max_retries=0)


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_the_same_words_as_from_openai_s_client(client: anthropic.Anthropic, url: str) -> None:
    message = client.messages.create(system="Be brief.", **ASKED)
    with openai.OpenAI(base_url=url, api_key=KEY) as other:
        system: list[Any] = [{"role": "system", "content": "Be brief."}]
        chat = other.chat.completions.create(model=MODEL, messages=system + MESSAGES, max_tokens=12, temperature=0)
    assert text_of(message) == chat.choices[0].message.content
    assert (message.role, message.stop_reason) == ("assistant", "max_tokens")
    assert chat.usage is not None
    assert (message.usage.input_tokens, message.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    count = client.messages.count_tokens(model=MODEL, messages=MESSAGES, system="Be brief.")
    assert count.input_tokens == message.usage.input_tokens


def test_streams(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASKED)
    with client.messages.stream(**ASKED) as stream:
        assert "".join(stream.text_stream) == text_of(whole)
        final = stream.get_final_message()
    assert (text_of(final), final.stop_reason) == (text_of(whole), whole.stop_reason)
    assert final.usage.output_tokens == whole.usage.output_tokens
    events = [event.type for event in client.messages.create(stream=True, **ASKED) if event.type != "ping"]
    deltas = events.count("content_block_delta")
    start = ["message_start", "content_block_start"]
    end = ["content_block_stop", "message_delta", "message_stop"]
    assert events == start + ["content_block_delta"] * deltas + end


def test_stop_sequences_and_prefills(client: anthropic.Anthropic) -> None:
    whole = text_of(client.messages.create(**ASKED))
    stop = whole[4:7]
    cut = client.messages.create(stop_sequences=[stop], **ASKED)
    assert (text_of(cut), cut.stop_reason, cut.stop_sequence) == (whole[: whole.index(stop)], "stop_sequence", stop)
    head = whole[: whole.index(" ", 4)]  # whole words, so that its tokens are those that the model said
    begun = client.messages.create(**{**ASKED, "messages": [*MESSAGES, {"role": "assistant", "content": head}]})
    assert (head + text_of(begun)).startswith(whole)


async def test_without_blocking(url: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=KEY, max_retries=0) as client:
        async with client.messages.stream(**ASKED) as stream:
            text = "".join([part async for part in stream.text_stream])
        assert text == text_of(await client.messages.create(**ASKED))


def test_errors_are_the_client_s_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="sk-wrong").messages.create(**ASKED)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ASKED, "model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**{**ASKED, "extra_body": {"temperature": -1}})
