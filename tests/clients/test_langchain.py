"""langchain-openai, unmodified."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients.servers import KEY, MODEL


@pytest.fixture
def options(url: str) -> dict[str, Any]:
    return {"model": MODEL, "base_url": url, "api_key": KEY, "temperature": 0, "max_retries": 0}


@pytest.fixture
def chat(options: dict[str, Any]) -> ChatOpenAI:
    return ChatOpenAI(max_tokens=12, stream_usage=True, **options)


def test_chat_streamed_or_not_says_the_same(chat: ChatOpenAI) -> None:
    whole = chat.invoke("Name three colours.")
    assert whole.content
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 12
    assert whole.response_metadata["finish_reason"] == "length"
    message, *rest = chat.stream("Name three colours.")
    for chunk in rest:
        message += chunk  # type: ignore[assignment]
    assert (message.content, message.usage_metadata) == (whole.content, whole.usage_metadata)


async def test_conversations_at_once(chat: ChatOpenAI) -> None:
    conversations: list[Any] = [[("system", "Be brief."), ("human", f"Count to {number}.")] for number in (2, 3, 4, 5)]
    together = await chat.abatch(conversations)
    assert [answer.content for answer in together] == [(await chat.ainvoke(one)).content for one in conversations]


def test_logprobs(chat: ChatOpenAI) -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke("Name three colours.")
    assert "".join(token["token"] for token in answer.response_metadata["logprobs"]["content"]) == answer.content


def test_completion(options: dict[str, Any]) -> None:
    model = OpenAI(max_tokens=12, **options)
    assert "Paris" in model.invoke("The capital of France is")
    assert "Paris" in "".join(model.stream("The capital of France is"))


def test_errors_are_the_client_s_own(options: dict[str, Any]) -> None:
    with pytest.raises(openai.AuthenticationError):
        ChatOpenAI(**{**options, "api_key": "sk-wrong"}).invoke("hello")
    with pytest.raises(ContextOverflowError):
        ChatOpenAI(**options).invoke("hello " * 20_000)
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(**{**options, "model": "gpt-4"}).invoke("hello")
