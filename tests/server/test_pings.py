"""Streams that would be silent for long say that they live; what clients read is the same."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from jaxserve.config import HttpConfig
from tests.engine.engines import fake_engine
from tests.server.serving import BYTE_LEVEL, MODEL, Serving, serving

PING = ": keep-alive"
PROMPT = BYTE_LEVEL.encode_plain("a") * 200  # seven steps of prefill
BODY: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, "temperature": 0}


async def events(server: Serving, **fields: Any) -> list[str]:
    async with server.http.post(
        server.url + "/v1/completions", json={**BODY, "ignore_eos": True, "stream": True, **fields}
    ) as response:
        assert response.status == 200
        return (await response.text()).removesuffix("\n\n").split("\n\n")


async def test_a_stream_pings_while_its_prompt_is_computed() -> None:
    async with serving(fake_engine(step_seconds=0.02), config=HttpConfig(port=0, ping_seconds=0.04)) as server:
        found = await events(server)
        first = next(i for i, event in enumerate(found) if event.startswith("data: "))
        assert first >= 1
        assert found[:first] == [PING] * first
        said = [event for event in found if event != PING]
        assert said[-1] == "data: [DONE]"
        chunks = [chunk async for chunk in await server.client.completions.create(**BODY, stream=True, **extra())]
        whole = await server.client.completions.create(**BODY, **extra())
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert len(chunks) == len(said) - 1


def extra() -> dict[str, Any]:
    return {"extra_body": {"ignore_eos": True}}


@pytest.mark.parametrize("seconds", [0.0, 5.0])
async def test_a_stream_that_is_never_silent_for_long_has_no_pings(seconds: float) -> None:
    async with serving(fake_engine(), config=HttpConfig(port=0, ping_seconds=seconds)) as server:
        assert PING not in await events(server)


async def test_an_error_after_pings_is_an_event_that_clients_raise() -> None:
    """vllm PR40986: a failure before the first token was nothing but [DONE]."""
    fake = fake_engine(step_seconds=0.02, fail_on_submit=[6])
    async with serving(fake, config=HttpConfig(port=0, ping_seconds=0.04)) as server:
        stream = await server.client.completions.create(**BODY, stream=True, **extra())
        with pytest.raises(openai.APIError, match="the engine failed"):
            await anext(aiter(stream))


async def test_pings_stop_with_the_stream() -> None:
    config = HttpConfig(port=0, ping_seconds=0.05)
    async with serving(fake_engine(step_seconds=0.02), config=config) as server:
        before = asyncio.all_tasks()
        assert (await events(server))[-1] == "data: [DONE]"
        async with server.http.post(
            server.url + "/v1/completions", json={**BODY, "ignore_eos": True, "stream": True}
        ) as response:
            response.close()
        await server.idle()
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() <= before
