"""Embeddings through the clients that ask for them, as floats and as base64."""

from __future__ import annotations

import math
from typing import Any

import litellm
import openai
import pytest
from langchain_openai import OpenAIEmbeddings

from tests.clients.servers import KEY, MODEL

TEXTS = ["A page table maps addresses.", "Bananas are yellow.", "A page table maps addresses."]


@pytest.fixture
def expected(url: str) -> list[list[float]]:
    """What OpenAI's client gets, in floats."""
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        answer = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    assert [each.index for each in answer.data] == [0, 1, 2]
    return [each.embedding for each in answer.data]


def assert_near(found: Any, expected: list[list[float]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_openai(expected: list[list[float]], url: str) -> None:
    first, second, again = expected
    assert first == pytest.approx(again, abs=1e-4)
    assert math.dist(first, second) > 0.05
    assert all(math.hypot(*vector) == pytest.approx(1.0, abs=1e-4) for vector in expected)
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        answer = client.embeddings.create(model=MODEL, input=TEXTS)  # it asks for base64 by itself
        assert_near([each.embedding for each in answer.data], expected)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 3
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(model=MODEL, input="")
        assert refused.value.param == "input"


def test_langchain(expected: list[list[float]], url: str) -> None:
    options: dict[str, Any] = {"model": MODEL, "base_url": url, "api_key": KEY, "max_retries": 0}
    model = OpenAIEmbeddings(check_embedding_ctx_length=False, **options)  # else it counts with OpenAI's own tokenizer
    assert_near(model.embed_documents(TEXTS), expected)
    assert_near([model.embed_query(TEXTS[1])], expected[1:2])


def test_litellm(expected: list[list[float]], url: str) -> None:
    options: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": url, "api_key": KEY, "max_retries": 0}
    answer = litellm.embedding(input=TEXTS, encoding_format="float", **options)
    assert_near([each["embedding"] for each in answer.data], expected)
