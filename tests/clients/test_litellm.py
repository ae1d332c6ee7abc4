"""litellm, unmodified, which translates for many frameworks."""

from __future__ import annotations

from typing import Any

import litellm
import pytest

from tests.clients.servers import KEY, MODEL

QUESTION = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture
def options(url: str) -> dict[str, Any]:
    return {"model": f"openai/{MODEL}", "api_base": url, "api_key": KEY, "max_retries": 0}


GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


def test_chat(options: dict[str, Any]) -> None:
    whole = litellm.completion(messages=QUESTION, logprobs=True, top_logprobs=2, **GREEDY, **options)
    assert whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens == 12
    stream = litellm.completion(messages=QUESTION, stream=True, stream_options={"include_usage": True}, **GREEDY, **options)
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    built = litellm.stream_chunk_builder(chunks)
    assert built is not None
    assert built.usage.completion_tokens == 12
    assert built.choices[0].message.content == whole.choices[0].message.content


async def test_chat_without_blocking(options: dict[str, Any]) -> None:
    whole = await litellm.acompletion(messages=QUESTION, n=2, **GREEDY, **options)
    first, second = (choice.message.content for choice in whole.choices)
    assert first == second
    stream = await litellm.acompletion(messages=QUESTION, stream=True, **GREEDY, **options)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == first


def test_completion(options: dict[str, Any]) -> None:
    options = {**options, "model": f"text-completion-openai/{MODEL}"}
    assert "Paris" in litellm.text_completion(prompt="The capital of France is", **GREEDY, **options).choices[0].text


def test_errors_are_the_client_s_own(options: dict[str, Any]) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=QUESTION, **{**options, "api_key": "sk-wrong"})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=QUESTION, **{**options, "model": "openai/gpt-unknown"})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "hello " * 20_000}], **options)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=QUESTION, temperature=-1, **options)
