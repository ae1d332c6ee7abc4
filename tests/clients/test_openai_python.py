"""OpenAI's Python client, unmodified, before a real model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.clients.servers import KEY, MODEL

QUESTION: list[Any] = [{"role": "user", "content": "Name three colours."}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12}


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def text_of(stream: Any) -> str:
    return "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)


# --- models, completions ----------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL) == model


def test_completions_of_prompts_of_every_kind(client: openai.OpenAI) -> None:
    prompts: list[Any] = ["The capital of France is", "One, two, three,"]
    alone = [client.completions.create(prompt=prompt, **GREEDY).choices[0] for prompt in prompts]
    assert [choice.finish_reason for choice in alone] == ["length"] * 2
    together = client.completions.create(prompt=prompts, n=2, **GREEDY)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in together.choices] == [choice.text for choice in alone for _ in range(2)]
    assert together.usage is not None
    assert together.usage.completion_tokens == 48
    ids = client.completions.create(prompt=[[504, 3575, 282, 4649, 314]], **GREEDY)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 5


def test_a_streamed_completion_says_the_same(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt="The capital of France is", **GREEDY)
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(prompt="The capital of France is", **GREEDY, **options))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert "Paris" in whole.choices[0].text
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)


def test_logprobs_of_a_completion(client: openai.OpenAI) -> None:
    choice = client.completions.create(prompt="The capital of France is", logprobs=5, **GREEDY).choices[0]
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert "".join(found.tokens) == choice.text
    assert found.top_logprobs is not None
    assert found.text_offset is not None
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values())
        assert len(top) == 5
        assert sum(map(math.exp, top.values())) <= 1.0 + 1e-6


# --- chat -------------------------------------------------------------------------------------------------------------


def test_chat_streamed_or_not_says_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=QUESTION, **GREEDY)
    message = whole.choices[0].message
    assert (message.role, message.refusal, message.tool_calls) == ("assistant", None, None)
    assert message.content
    chunks = list(
        client.chat.completions.create(messages=QUESTION, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    assert text_of(chunks) == message.content
    assert [choice.delta.role for chunk in chunks for choice in chunk.choices if choice.delta.role] == ["assistant"]
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_client_s_own_accumulation_of_a_stream(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "n": 2, "seed": 3, "stop": ["e"]}  # it refuses cut answers
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    found = {choice.index: choice.message.content for choice in final.choices}
    assert found == {choice.index: choice.message.content for choice in whole.choices}
    assert len(set(found.values())) == 2


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(messages=QUESTION, logprobs=True, top_logprobs=3, **GREEDY).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    spelled = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
    assert spelled.decode() == choice.message.content
    for token in choice.logprobs.content:
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob == token.logprob
        assert len(token.top_logprobs) == 3


def test_stop_and_seed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=QUESTION, **GREEDY).choices[0].message.content or ""
    stop = whole[4:7]
    cut = client.chat.completions.create(messages=QUESTION, stop=[stop], **GREEDY).choices[0]
    assert (cut.message.content, cut.finish_reason) == (whole[: whole.index(stop)], "stop")
    drawn = [
        client.chat.completions.create(messages=QUESTION, model=MODEL, max_tokens=8, temperature=1.0, seed=seed)
        for seed in (1, 1, 2)
    ]
    first, again, other = (answer.choices[0].message.content for answer in drawn)
    assert first == again != other


async def test_many_at_once(url: str) -> None:
    import asyncio

    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        asked = [[{"role": "user", "content": f"Count to {number}."}] for number in range(2, 10)]
        together = await asyncio.gather(*(client.chat.completions.create(messages=one, **GREEDY) for one in asked))  # type: ignore[arg-type]
        alone = [await client.chat.completions.create(messages=one, **GREEDY) for one in asked]  # type: ignore[arg-type]
    assert [answer.choices[0].message for answer in together] == [answer.choices[0].message for answer in alone]


# --- errors -----------------------------------------------------------------------------------------------------------


def test_errors_are_the_client_s_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as unknown:
        client.with_options(api_key="sk-wrong").models.list()
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-1)
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError, match="no such route"):
        client.images.generate(prompt="a page table", model=MODEL)
