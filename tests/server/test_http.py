"""HTTP itself: routes, bodies, error objects, event framing, metrics. What the OpenAI client hides."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from jaxserve import __version__
from jaxserve.config import HttpConfig
from jaxserve.server.metrics import Metrics
from tests.engine.engines import fake_engine
from tests.server.serving import MODEL, Serving, says, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 4}


async def events(server: Serving, path: str, body: dict[str, Any]) -> list[str]:
    """The data of each event of a stream, which must be framed as server-sent events are."""
    async with server.http.post(server.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        text = (await response.read()).decode()
    assert text.endswith("\n\n")
    found = text[:-2].split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in found)
    return [event.removeprefix("data: ") for event in found]


# --- events -----------------------------------------------------------------------------------------------------------


async def test_chat_events_in_order() -> None:
    """TGI I1896, sglang I3912: a role first, finish_reason null until the last, [DONE] last."""
    async with serving(says("hello", "hello world")) as server:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        *chunks, done = await events(server, CHAT, {**body, "stream_options": {"include_usage": True}})
        assert done == "[DONE]"
        first, *middle, last, usage = map(json.loads, chunks)
        assert first["choices"] == [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": "", "refusal": None},
                "logprobs": None,
                "finish_reason": None,
            }
        ]
        for chunk in middle:
            (choice,) = chunk["choices"]
            assert choice["finish_reason"] is None
            assert set(choice["delta"]) == {"content"}
            assert choice["delta"]["content"]
        assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
        assert usage["choices"] == []
        assert [chunk["usage"] for chunk in (first, *middle, last)] == [None] * (len(middle) + 2)
        heads = {
            tuple((key, chunk[key]) for key in ("id", "object", "created", "model")) for chunk in (first, *middle, last, usage)
        }
        assert len(heads) == 1
        assert dict(heads.pop())["object"] == "chat.completion.chunk"


async def test_completion_events_in_order() -> None:
    async with serving(says("hello", "hello world")) as server:
        *chunks, done = await events(server, COMPLETIONS, {**GOOD, "max_tokens": 50})
        assert done == "[DONE]"
        *middle, last = map(json.loads, chunks)
        assert all(chunk["choices"][0]["text"] and chunk["choices"][0]["finish_reason"] is None for chunk in middle)
        assert last["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}]
        assert all("usage" not in chunk for chunk in (*middle, last))


@pytest.mark.parametrize("logprobs", [False, True])
async def test_answers_have_every_field_that_openai_s_types_require(logprobs: bool) -> None:
    """The client itself builds its types without checking them."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
    chat |= {"logprobs": True, "top_logprobs": 2} if logprobs else {}
    text = GOOD | ({"logprobs": 2} if logprobs else {})
    usage = {"stream_options": {"include_usage": True}}
    async with serving(says("hello", "hello world")) as server:
        Completion.model_validate((await server.post(COMPLETIONS, text))[1])
        ChatCompletion.model_validate((await server.post(CHAT, chat))[1])
        for chunk in (await events(server, COMPLETIONS, text | usage))[:-1]:
            Completion.model_validate_json(chunk.replace('"finish_reason":null', '"finish_reason":"stop"'))
        for chunk in (await events(server, CHAT, chat | usage))[:-1]:
            ChatCompletionChunk.model_validate_json(chunk)


async def test_nothing_is_said_before_the_first_token() -> None:
    """Benchmarks (vllm bench, guidellm) take the first chunk for the first token; that it has begun, the headers say."""
    async with serving(fake_engine(step_seconds=0.2)) as server:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "a" * 150}], "n": 2, "stream": True, "max_tokens": 2}
        async with server.http.post(server.url + CHAT, json=body) as response:
            assert server.engine.stats.num_output_tokens == 0
            await response.content.readany()
            assert server.engine.stats.num_output_tokens > 0
            await response.read()


async def test_an_engine_failure_is_an_event() -> None:
    """vllm PR40986: failure before the first token gave only [DONE]."""
    async with serving(fake_engine(fail_on_submit=[0])) as server:
        *chunks, done = await events(server, COMPLETIONS, GOOD)
        assert done == "[DONE]"
        error = json.loads(chunks[-1])["error"]
        assert error["type"] == "server_error"
        assert "engine failed" in error["message"]
        status, body = await server.post(COMPLETIONS, GOOD)
        assert status == 200, body


async def test_an_engine_failure_is_a_500() -> None:
    async with serving(fake_engine(fail_on_submit=[0])) as server:
        status, body = await server.post(COMPLETIONS, GOOD)
        assert (status, body["error"]["type"]) == (500, "server_error")


async def test_refusals_of_streams_have_a_status() -> None:
    """Nothing has been sent yet, so the status can say it."""
    async with serving() as server:
        status, body = await server.post(COMPLETIONS, {**GOOD, "stream": True, "max_tokens": 9999})
        assert status == 400
        assert body["error"]["param"] == "max_tokens"


# --- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b" ", b'{"a":1, x}', b"{", b"[]", b"null", b"1", b'"text"', b"true", b"\xff\xfe", b"\xef\xbb\xbf{}", b"\x00"),
        *(b'{"model": "\xff"}', b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b'{"model": NaN}', b"{}"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_bad_bodies_are_a_400(path: str, data: bytes) -> None:
    """sglang I3805: a 500."""
    async with serving() as server:
        status, body = await server.post(path, data=data)
        assert status == 400
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["type"] == "invalid_request_error"
        assert body["error"]["message"]


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/json; charset=latin-1", "nonsense"])
async def test_any_content_type_is_read_as_json(content_type: str | None) -> None:
    """vllm I11171: a 500 without one."""
    async with serving() as server:
        headers = {} if content_type is None else {"Content-Type": content_type}
        skip = ["Content-Type"] if content_type is None else []
        data = json.dumps(GOOD).encode()
        status, _ = await server.post(COMPLETIONS, data=data, headers=headers, skip_auto_headers=skip)
        assert status == 200


async def test_bodies_over_a_mebibyte_are_read_and_over_the_limit_refused() -> None:
    """aiohttp I4474: its default limit is 1 MiB, and its answer plain text."""
    async with serving(config=HttpConfig(port=0, max_body_bytes=3 << 20)) as server:
        within, beyond = (json.dumps({**GOOD, "prompt": "a" * size}).encode() for size in (2 << 20, 4 << 20))
        status, body = await server.post(COMPLETIONS, data=io.BytesIO(within))
        assert status == 400
        assert f"prompt has {2 << 20} characters" in body["error"]["message"]
        status, body = await server.post(COMPLETIONS, data=io.BytesIO(beyond))
        assert status == 413
        assert f"larger than {3 << 20} bytes" in body["error"]["message"]
        ids = json.dumps({**GOOD, "prompt": [5] * (1 << 19)}).encode()
        status, body = await server.post(COMPLETIONS, data=io.BytesIO(ids))
        assert status == 400
        assert f"prompt {1 << 19}" in body["error"]["message"]
        assert (await server.post(COMPLETIONS, GOOD))[0] == 200


# --- routes -----------------------------------------------------------------------------------------------------------


async def test_unknown_routes_and_methods() -> None:
    async with serving() as server:
        for path in ("/", "/v1", "/v1/edits", "/v1/completions/", "/v2/models"):
            status, body = await server.get(path)
            assert (status, body["error"]["type"]) == (404, "invalid_request_error")
            assert path in body["error"]["message"]
        for path in (COMPLETIONS, CHAT):
            async with server.http.get(server.url + path) as response:
                assert response.status == 405
                assert response.headers["Allow"] == "OPTIONS, POST"
                assert "POST" in (await response.json())["error"]["message"]
        assert (await server.post("/health"))[0] == 405


async def test_models() -> None:
    async with serving() as server:
        status, body = await server.get("/v1/models")
        assert status == 200
        (model,) = body["data"]
        assert (model["id"], model["object"], body["object"]) == (MODEL, "model", "list")
        assert await server.get(f"/v1/models/{MODEL}") == (200, model)
        status, body = await server.get("/v1/models/org/other")
        assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_what_the_server_says_of_itself() -> None:
    async with serving() as server:
        assert await server.get("/health") == (200, {"status": "ok"})
        assert await server.get("/ready") == (200, {"status": "ready"})
        assert await server.get("/version") == (200, {"version": __version__})


async def test_an_unforeseen_error_is_a_500_without_its_details(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as server:
        monkeypatch.setattr(server.service, "require_model", lambda: 1 // 0)
        status, body = await server.post(COMPLETIONS, GOOD)
        assert (status, body["error"]["type"]) == (500, "server_error")
        assert "division" not in body["error"]["message"]
        assert "ZeroDivisionError" in caplog.text


# --- metrics ----------------------------------------------------------------------------------------------------------


async def scrape(server: Serving) -> dict[str, float]:
    async with server.http.get(server.url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = (await response.text()).splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


async def test_metrics_count_requests_and_tokens() -> None:
    async with serving(says("hello", "hello world")) as server:
        for stream in (False, True):
            async with server.http.post(server.url + COMPLETIONS, json={**GOOD, "stream": stream, "n": 2}) as response:
                await response.read()
        await server.post(COMPLETIONS, {**GOOD, "n": 0})
        await server.idle()
        found = await scrape(server)
        assert found['jaxserve_requests_total{endpoint="completions",outcome="ok"}'] == 2
        assert found['jaxserve_requests_total{endpoint="completions",outcome="refused"}'] == 1
        assert found['jaxserve_choices_total{reason="length"}'] == 4
        assert found["jaxserve_output_tokens_total"] == 16
        assert found["jaxserve_prompt_tokens_total"] == 2
        assert found["jaxserve_time_to_first_token_seconds_count"] == 4
        assert found["jaxserve_inter_token_seconds_count"] + 4 <= 16
        assert found["jaxserve_request_seconds_count"] == 2
        assert found["jaxserve_free_pages"] == found["jaxserve_total_pages"] == 256
        for name in ("running_sequences", "waiting_sequences", "queued_requests", "queued_tokens", "compiles_total"):
            assert found[f"jaxserve_{name}"] == 0
        assert found["jaxserve_steps_total"] > 0


async def test_metrics_before_the_model_is_there() -> None:
    text = Metrics().export().decode()
    assert "jaxserve_request_seconds_count 0.0" in text
    assert not re.search("free_pages", text)
