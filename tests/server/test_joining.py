"""Retries that join the request that still runs: both see all of it, it is computed once, and it goes on while one waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import pytest

from jaxserve.engine.output import OutputDelta
from jaxserve.engine.tools.parts import CallArguments, CallBegin, Part, Reasoning, Text
from jaxserve.errors import EngineError, KeyReused, QueueFull
from jaxserve.request import FinishReason
from jaxserve.server.joining import Begun, CallRegistry, Deltas
from jaxserve.server.openai import parse_completion
from tests.engine.engines import fake_engine
from tests.server.serving import BYTE_LEVEL, MODEL, Serving, serving

BODY: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 30, "ignore_eos": True, "seed": 3}
NAMED = {"Idempotency-Key": "one"}


# --- the registry, without a server -----------------------------------------------------------------------------------

CALL = parse_completion({"model": "m", "prompt": "hello"}, BYTE_LEVEL, model="m", max_context=64, call_id="c")


class Script:
    """A source that says what a test tells it to, and its `begin`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.num_output = self.num_cached = 0
        self.num_reasoning = None
        self.num_begun = 0
        self.closed = False
        self._said: asyncio.Queue[Deltas | Exception] = asyncio.Queue()

    def say(self, *texts: str, end: bool = False) -> None:
        for text in texts:
            self._said.put_nowait([(0, OutputDelta(text, (), None))])
        if end:
            self._said.put_nowait([(0, OutputDelta("", (), FinishReason.STOP))])
            self._said.put_nowait([])

    def fail(self, error: Exception) -> None:
        self._said.put_nowait(error)

    async def read(self) -> Deltas:
        said = await self._said.get()
        if isinstance(said, Exception):
            raise said
        self.num_output += len(said)
        return said

    async def begin(self) -> Any:
        self.num_begun += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error

        @contextmanager
        def running() -> Any:
            try:
                yield Begun(CALL, 7, self)
            finally:
                self.closed = True

        return running()


async def text_of(source: Any) -> str:
    text = ""
    while deltas := await source.read():
        text += "".join(delta.text for _, delta in deltas)
    return text


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_each_reader_sees_all_of_it_whenever_it_came() -> None:
    registry, script = CallRegistry(), Script()
    first = registry.join(("", "k"), b"f", script.begin)
    begun = await first.begun()
    assert (begun.call, begun.created) == (CALL, 7)
    script.say("a", "b")
    await settle()
    assert [(index, delta.text) for index, delta in await first.read()] == [(0, "ab")]
    second = registry.join(("", "k"), b"f", Script().begin)
    assert (await second.begun()).created == 7
    script.say(*map(str, range(200)), end=True)
    expected = "".join(map(str, range(200)))
    assert await asyncio.gather(text_of(first), text_of(second)) == [expected, "ab" + expected]
    assert (script.num_begun, script.closed, first.num_output, second.num_output, len(registry)) == (1, True, 203, 203, 0)
    third = registry.join(("", "k"), b"other", script.begin)
    await settle()
    assert script.num_begun == 2, "after its end the key is free"
    third.close()
    await settle()


async def test_parts_of_an_answer_are_put_together_too() -> None:
    registry, script = CallRegistry(), Script()
    parts: list[Part] = [Reasoning("h"), Reasoning("m"), Text("a"), Text("b"), CallBegin(0, "i", "f"), CallArguments(0, "{")]
    reader = registry.join(("", "k"), b"f", script.begin)
    await reader.begun()
    for part in parts:
        script._said.put_nowait([(0, OutputDelta("x", (), None, parts=(part,)))])
    script._said.put_nowait([(0, OutputDelta("", (), FinishReason.STOP, "END", ()))])
    script._said.put_nowait([])
    await settle()
    late = registry.join(("", "k"), b"f", Script().begin)
    ((_, delta),) = await reader.read()
    assert delta.parts == (Reasoning("hm"), Text("ab"), CallBegin(0, "i", "f"), CallArguments(0, "{"))
    assert (delta.text, delta.finish_reason, delta.stopped_by) == ("x" * 6, FinishReason.STOP, "END")
    reader.close()
    late.close()


async def test_an_unread_answer_costs_what_its_text_does() -> None:
    registry, script = CallRegistry(), Script()
    reader = registry.join(("", "k"), b"f", script.begin)
    script.say(*"x" * 500)
    for _ in range(600):
        await asyncio.sleep(0)
    assert len(reader._unread._choices[0]) <= 65
    assert len(reader._shared._said._choices[0]) <= 65
    ((_, delta),) = await reader.read()
    assert delta.text == "x" * 500
    reader.close()
    await settle()


async def test_it_goes_on_while_one_waits_and_ends_with_the_last() -> None:
    registry, script = CallRegistry(), Script()
    first, second = (registry.join(("", "k"), b"f", script.begin) for _ in range(2))
    await first.begun()
    script.say("a")
    first.close()
    first.close()
    await settle()
    assert not script.closed
    assert [delta.text for _, delta in await second.read()] == ["a"]
    second.close()
    assert len(registry) == 0, "a retry at this moment begins anew"
    await settle()
    assert script.closed


async def test_what_keeps_it_from_beginning_is_told_to_all() -> None:
    registry, script = CallRegistry(), Script(error=QueueFull("full", retry_after=2.0))
    readers = [registry.join(("", "k"), b"f", script.begin) for _ in range(3)]
    found = await asyncio.gather(*(reader.begun() for reader in readers), return_exceptions=True)
    assert found == [script.error] * 3
    assert len(registry) == 0


async def test_what_ends_it_early_is_told_to_all_after_what_came_before() -> None:
    registry, script = CallRegistry(), Script()
    readers = [registry.join(("", "k"), b"f", script.begin) for _ in range(2)]
    script.say("a")
    script.fail(EngineError("broken"))
    for reader in readers:
        assert [delta.text for _, delta in await reader.read()] == ["a"]
        with pytest.raises(EngineError, match="broken"):
            await reader.read()
    assert script.closed


async def test_leaving_before_it_began() -> None:
    registry, script = CallRegistry(), Script()
    registry.join(("", "k"), b"f", script.begin).close()
    await settle()
    assert (len(registry), script.closed) == (0, False)


async def test_keys_are_a_tenant_s_own_and_stand_for_one_body() -> None:
    registry, script = CallRegistry(), Script()
    with registry.join(("a", "k"), b"f", script.begin), registry.join(("b", "k"), b"g", Script().begin):
        assert len(registry) == 2
        with pytest.raises(KeyReused, match="'k' belongs to a request that still runs and has another body"):
            registry.join(("a", "k"), b"g", script.begin)
    await settle()


# --- over HTTP --------------------------------------------------------------------------------------------------------


def slow() -> Any:
    return fake_engine(step_seconds=0.004)


async def until_running(server: Serving, num_output: int = 1) -> None:
    async with asyncio.timeout(10):
        while server.engine.stats.num_output_tokens < num_output:
            await asyncio.sleep(0.002)


async def events_of(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    async for line in response.content:
        if line.startswith(b"data: ") and b"[DONE]" not in line:
            yield json.loads(line.removeprefix(b"data: "))


async def streamed_text(response: aiohttp.ClientResponse) -> str:
    return "".join([event["choices"][0]["text"] async for event in events_of(response)])


@pytest.mark.parametrize("header", ["Idempotency-Key", pytest.param("X-Request-Id", marks=pytest.mark.slow)])
async def test_two_at_once_get_the_same_answer_from_one_computation(header: str) -> None:
    async with serving(slow()) as server:
        posts = [server.post("/v1/completions", BODY, headers={header: "same"}) for _ in range(3)]
        answers = await asyncio.gather(*posts)
        assert answers[0][0] == 200
        assert answers[0] == answers[1] == answers[2]
        await server.idle()
        assert server.engine.stats.num_output_tokens == 30
        assert server.service.metrics.joined._value.get() == 2
        assert len(server.service.calls) == 0
        status, again = await server.post("/v1/completions", BODY, headers={header: "same"})
        assert status == 200
        assert again["id"] != answers[0][1]["id"], "it had ended, so this is a new one"


async def test_one_that_joins_a_stream_late_sees_it_from_the_beginning() -> None:
    body = {**BODY, "stream": True}
    async with serving(slow()) as server:
        async with server.http.post(server.url + "/v1/completions", json=body, headers=NAMED) as first:
            await until_running(server, 10)
            async with server.http.post(server.url + "/v1/completions", json=body, headers=NAMED) as second:
                texts = await asyncio.gather(streamed_text(first), streamed_text(second))
        assert texts[0] == texts[1]
        assert len(texts[0]) > 0
        assert (await server.post("/v1/completions", BODY))[1]["choices"][0]["text"] == texts[0]
        assert server.engine.stats.num_output_tokens == 60


@pytest.mark.parametrize("leaves", ["first", pytest.param("second", marks=pytest.mark.slow)])
async def test_one_leaves_and_the_other_gets_it_all(leaves: str) -> None:
    body = {**BODY, "stream": True}
    async with serving(slow()) as server:
        first = await server.http.post(server.url + "/v1/completions", json=body, headers=NAMED)
        second = await server.http.post(server.url + "/v1/completions", json=body, headers=NAMED)
        await until_running(server, 5)
        leaver, stayer = (first, second) if leaves == "first" else (second, first)
        leaver.close()
        text = await streamed_text(stayer)
        assert (await server.post("/v1/completions", BODY))[1]["choices"][0]["text"] == text
        assert server.engine.stats.num_output_tokens == 60


async def test_when_all_have_left_it_is_aborted() -> None:
    body = {**BODY, "stream": True, "max_tokens": 500}
    async with serving(slow()) as server:
        responses = [await server.http.post(server.url + "/v1/completions", json=body, headers=NAMED) for _ in range(2)]
        await until_running(server, 3)
        for response in responses:
            response.close()
        async with asyncio.timeout(3):
            await server.idle()
        assert server.engine.stats.num_output_tokens < 400


async def test_another_body_is_422_and_no_key_joins_nothing() -> None:
    async with serving(slow()) as server:
        running = asyncio.create_task(server.post("/v1/completions", BODY, headers=NAMED))
        await until_running(server)
        for path, body in [("/v1/completions", {**BODY, "seed": 4}), ("/v1/completions", {**BODY, "stream": True})]:
            status, answer = await server.post(path, body, headers=NAMED)
            assert (status, answer["error"]["code"]) == (422, "idempotency_key_reused")
        assert (await server.post("/v1/completions", BODY))[0] == 200
        assert (await running)[0] == 200
        assert server.engine.stats.num_output_tokens == 60


async def test_a_bad_body_is_refused_under_a_key_too() -> None:
    async with serving() as server:
        status, answer = await server.post("/v1/completions", {**BODY, "top_p": 7}, headers=NAMED)
        assert (status, answer["error"]["param"]) == (400, "top_p")
        status, answer = await server.post("/v1/completions", BODY, headers={"Idempotency-Key": "x" * 256})
        assert (status, "at most 255 characters, found 256" in answer["error"]["message"]) == (400, True)
        assert (await server.post("/v1/completions", BODY, headers=NAMED))[0] == 200


async def test_shutting_down_ends_all_who_wait() -> None:
    body = {**BODY, "max_tokens": 400}
    async with serving(slow()) as server:
        posts = [asyncio.create_task(server.post("/v1/completions", body, headers=NAMED)) for _ in range(2)]
        await until_running(server)
        await server.service.close()
        answers = await asyncio.gather(*posts)
        assert [(status, answer["error"]["code"]) for status, answer in answers] == [(503, "not_ready")] * 2
