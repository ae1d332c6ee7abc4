"""The prefix cache over HTTP: what usage says, salts, metrics, and who may empty it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from jaxserve.config import HttpConfig
from jaxserve.errors import InvalidRequest
from jaxserve.server.openai import parse_completion
from jaxserve.server.schema.common import MAX_SALT_CHARACTERS
from tests.engine.engines import fake_engine
from tests.server.serving import BYTE_LEVEL, MODEL, Serving, serving

PROMPT = list(range(20, 61))  # 41 tokens: 5 pages of 8 and 1 token
ASKED: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
BODY = ASKED | {"ignore_eos": True}


async def cached_tokens(server: Serving, **fields: Any) -> int:
    status, body = await server.post("/v1/completions", BODY | fields)
    assert status == 200
    assert body["usage"]["prompt_tokens"] == len(PROMPT)
    count: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


async def figure(server: Serving, name: str) -> float:
    async with server.http.get(f"{server.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"jaxserve_{name} "))


async def delete(server: Serving, key: str | None) -> tuple[int, Any]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with server.http.delete(f"{server.url}/v1/cache", headers=headers) as response:
        return response.status, await response.json()


async def test_usage_says_what_was_cached() -> None:
    async with serving(fake_engine(prefixes=True)) as server:
        assert await cached_tokens(server) == 0
        assert await cached_tokens(server) == 40
        chunks = await server.client.completions.create(**ASKED, stream=True, stream_options={"include_usage": True})
        usage = [chunk.usage async for chunk in chunks][-1]
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 40


async def test_choices_count_their_prompt_once() -> None:
    async with serving(fake_engine(prefixes=True)) as server:
        assert await cached_tokens(server, n=3) == 0
        assert server.fake.runner.num_copies == 0, "the last prompt token is alone in its page"
        assert await cached_tokens(server, n=3) == 40


async def test_without_a_cache_nothing_is_cached() -> None:
    async with serving(fake_engine()) as server:
        assert await cached_tokens(server) == 0
        assert await cached_tokens(server) == 0


async def test_nothing_is_shared_between_salts() -> None:
    async with serving(fake_engine(prefixes=True)) as server:
        assert await cached_tokens(server, cache_salt="a") == 0
        assert await cached_tokens(server, cache_salt="b") == 0
        assert await cached_tokens(server) == 0
        assert await cached_tokens(server, cache_salt="") == 40
        assert await cached_tokens(server, cache_salt="a") == 40


@pytest.mark.parametrize(
    ("salt", "message"),
    [
        (5, "cache_salt must be a string"),
        ("x" * 257, "cache_salt must be a string of at most 256 .* of 257"),
    ],
)
async def test_salts_out_of_range_are_refused(salt: Any, message: str) -> None:
    async with serving(fake_engine(prefixes=True)) as server:
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            await server.client.completions.create(**ASKED, extra_body={"cache_salt": salt})
        assert caught.value.param == "cache_salt"


def test_the_longest_salt_is_taken() -> None:
    def parse(salt: str) -> str:
        body = {"model": "m", "prompt": "hello", "cache_salt": salt}
        return parse_completion(body, BYTE_LEVEL, model="m", max_context=512, call_id="c").requests[0].cache_salt

    assert len(parse("ü" * MAX_SALT_CHARACTERS)) == MAX_SALT_CHARACTERS
    with pytest.raises(InvalidRequest):
        parse("ü" * (MAX_SALT_CHARACTERS + 1))


async def test_metrics_count_hits_and_evictions() -> None:
    async with serving(fake_engine(prefixes=True)) as server:
        for _ in range(2):
            await cached_tokens(server)
        assert await figure(server, "prefix_asked_tokens_total") == 82
        assert await figure(server, "prefix_hit_tokens_total") == 40
        assert await figure(server, "prefix_hit_rate") == pytest.approx(40 / 82)
        assert await figure(server, "cached_pages") == 5
        assert await figure(server, "evicted_pages_total") == 0
        assert await figure(server, "pinned_pages") == 0
        for name in ("host_pages", "saved_pages_total", "loaded_pages_total"):
            assert await figure(server, name) == 0


async def test_nobody_may_drop_the_cache_of_a_server_without_an_administrator() -> None:
    async with serving(fake_engine(prefixes=True)) as server:
        status, body = await delete(server, "anything")
        assert status == 403
        assert "started without --admin-key or API keys" in body["error"]["message"]


@pytest.mark.parametrize(("key", "expected"), [(None, 401), ("wrong", 401), ("sk-admin", 200)])
async def test_the_admin_key_drops_the_cache(key: str | None, expected: int) -> None:
    config = HttpConfig(port=0, admin_key="sk-admin")
    async with serving(fake_engine(prefixes=True), config=config) as server:
        assert await cached_tokens(server) == 0, "who only completes needs no key"
        status, body = await delete(server, key)
        assert status == expected
        if expected == 200:
            assert body == {"object": "cache", "dropped_pages": 5}
        assert await cached_tokens(server) == (0 if expected == 200 else 40)


@pytest.mark.parametrize(("key", "expected"), [("sk-user", 403), ("sk-ops", 200), ("sk-admin", 200), ("sk-none", 401)])
async def test_so_does_an_api_key_with_that_right(tmp_path: Path, key: str, expected: int) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[[keys]]\nlabel = "user"\nkey = "sk-user"\n\n[[keys]]\nlabel = "ops"\nkey = "sk-ops"\nadmin = true\n')
    config = HttpConfig(port=0, admin_key="sk-admin", api_keys_file=str(file))
    async with serving(fake_engine(prefixes=True), config=config) as server:
        status, _ = await delete(server, key)
        assert status == expected
        # The admin key is no API key.
        status, _ = await server.post("/v1/completions", BODY, headers={"Authorization": "Bearer sk-admin"})
        assert status == 401


async def test_a_running_request_keeps_its_pages() -> None:
    config = HttpConfig(port=0, admin_key="sk-admin")
    async with serving(fake_engine(prefixes=True, step_seconds=0.002), config=config) as server:
        stream = await server.client.completions.create(
            **ASKED | {"max_tokens": 100}, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        assert (await delete(server, "sk-admin"))[1]["dropped_pages"] == 0
        async for _ in stream:
            pass
        assert await cached_tokens(server) == 40
