"""What a request may take: time, output tokens, urgency, and a place in a queue that can still keep its target."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import openai
import pytest

from jaxserve.config import HttpConfig
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.plan import RunnerLimits
from jaxserve.server.call import Call
from jaxserve.server.keys import Caller
from jaxserve.server.openai import parse_chat, parse_completion
from jaxserve.server.terms import Terms, grant
from tests.engine.engines import LIMITS, fake_engine
from tests.server.serving import BYTE_LEVEL, MODEL, serving

LONG: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 400, "ignore_eos": True}


def parse(**fields: Any) -> Call:
    return parse_completion({"model": "m", "prompt": "hello", **fields}, BYTE_LEVEL, model="m", max_context=512, call_id="c")


def terms(limits: RunnerLimits = LIMITS, **changes: Any) -> Terms:
    return Terms(limits=limits, **changes)


# --- fields -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"), [("interactive", 0), ("batch", 10), (0, 0), (-100, -100), (100, 100), (7, 7), (None, None)]
)
def test_priorities(value: Any, expected: int | None) -> None:
    call = parse(priority=value)
    assert call.priority == expected
    assert call.requests[0].priority == (expected or 0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "priority",
            "urgent",
            r'priority must be one of "batch", "interactive" or an integer from -100 to 100, found string',
        ),
        ("priority", 101, 'priority must be one of "batch", "interactive" or an integer from -100 to 100, found integer 101'),
        ("priority", 1.0, "priority must be .* or an integer from -100 to 100, found number 1.0"),
        ("priority", True, "priority must be .* or an integer from -100 to 100, found true"),
        ("timeout", 0, "timeout must be a number of seconds above 0, found integer 0"),
        ("timeout", -1.5, "timeout must be a number of seconds above 0"),
        ("timeout", "5", "timeout must be a number of seconds above 0, found"),
        ("timeout", True, "timeout must be a number of seconds above 0, found"),
    ],
)
def test_priorities_and_timeouts_out_of_range(field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        parse(**{field: value})
    assert caught.value.param == field


def test_chat_has_both() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "priority": "batch", "timeout": 2.5}
    call = parse_chat(body, BYTE_LEVEL, model="m", max_context=512, call_id="c")
    assert (call.priority, call.timeout) == (10, 2.5)


@pytest.mark.parametrize(
    ("asked", "most", "expected"),
    [(None, 0.0, None), (5.0, 0.0, 105.0), (None, 30.0, 130.0), (5.0, 30.0, 105.0), (60, 30.0, 130.0)],
)
def test_the_shorter_of_two_time_limits_holds(asked: float | None, most: float, expected: float | None) -> None:
    call = grant(parse(timeout=asked, n=2), Caller(), terms(max_seconds=most), now=100.0)
    assert [request.deadline for request in call.requests] == [expected] * 2


def test_all_choices_are_the_caller_s_and_capped() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 2}
    call = parse_chat(body, BYTE_LEVEL, model="m", max_context=512, call_id="c")
    call = grant(call, Caller(label="team", weight=2.0, priority=3), terms(max_output_tokens=20), now=0.0)
    found = [(request.tenant, request.weight, request.priority, request.params.max_tokens) for request in call.requests]
    assert found == [("team", 2.0, 3, 20)] * 2


def test_the_cap_leaves_completions_their_default() -> None:
    with pytest.raises(ConfigError, match="max_output_tokens must be 0 or at least 16"):
        HttpConfig(max_output_tokens=15)


@pytest.mark.parametrize("name", ["max_output_tokens", "request_timeout", "slo_ttft_ms", "max_queue_tokens"])
def test_limits_of_the_server_are_not_negative(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 0, found -1"):
        HttpConfig(**{name: -1})


# --- over HTTP --------------------------------------------------------------------------------------------------------


async def test_a_request_whose_time_runs_out_is_answered_408_and_frees_its_pages() -> None:
    async with serving(fake_engine(step_seconds=0.01)) as server:
        started = asyncio.get_running_loop().time()
        async with server.http.post(server.url + "/v1/completions", json={**LONG, "timeout": 0.1, "n": 2}) as response:
            assert response.status == 408
            assert response.headers["x-should-retry"] == "false"
            error = (await response.json())["error"]
        assert (error["code"], error["type"]) == ("timeout", "timeout_error")
        assert "output tokens were made" in error["message"]
        assert asyncio.get_running_loop().time() - started >= 0.1
        await server.idle()
        assert server.service.metrics.requests.labels("completions", "timeout")._value.get() == 1


async def test_openai_s_client_does_not_repeat_what_ran_out_of_time() -> None:
    async with serving(fake_engine(step_seconds=0.01)) as server:
        client = server.client.with_options(max_retries=3)
        with pytest.raises(openai.APIStatusError, match="time ran out") as caught:
            await client.completions.create(
                model=MODEL, prompt="hello", max_tokens=400, extra_body={"ignore_eos": True, "timeout": 0.1}
            )
        assert caught.value.status_code == 408


async def test_a_stream_whose_time_runs_out_says_so_in_band() -> None:
    config = HttpConfig(port=0, request_timeout=0.5)
    async with serving(fake_engine(step_seconds=0.01), config=config) as server:
        async with server.http.post(server.url + "/v1/completions", json={**LONG, "stream": True}) as response:
            assert response.status == 200
            *chunks, error, done = (await response.read()).decode().strip().split("\n\n")
        assert done == "data: [DONE]"
        assert len(chunks) > 2, "what there was came before"
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "timeout"
        await server.idle()
        assert server.service.metrics.requests.labels("completions", "timeout")._value.get() == 1


async def test_one_that_waits_runs_out_of_time_too() -> None:
    limits = RunnerLimits(num_pages=256, page_size=8, max_seqs=1, max_step_tokens=64, max_context=512, vocab_size=272)
    async with serving(fake_engine(limits, step_seconds=0.01)) as server:
        first = asyncio.create_task(server.post("/v1/completions", {**LONG, "max_tokens": 30}))
        async with asyncio.timeout(10):
            while not server.engine.stats.running:
                await asyncio.sleep(0.002)
        status, answer = await server.post("/v1/completions", {**LONG, "timeout": 0.05})
        assert (status, "it had not begun" in answer["error"]["message"]) == (408, True)
        assert (await first)[0] == 200


async def test_the_cap_on_output_tokens() -> None:
    async with serving(config=HttpConfig(port=0, max_output_tokens=20)) as server:
        status, answer = await server.post("/v1/completions", LONG)
        assert (status, answer["error"]["param"]) == (400, "max_tokens")
        assert "at most 20, this server's limit for one answer, found 400" in answer["error"]["message"]
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
        status, answer = await server.post("/v1/chat/completions", chat)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 20)


@pytest.mark.slow
async def test_what_would_be_too_late_is_429_with_retry_after_and_is_counted() -> None:
    config = HttpConfig(port=0, slo_ttft_ms=50.0)
    async with serving(fake_engine(step_seconds=0.02), config=config) as server:
        posts = [server.post("/v1/completions", {**LONG, "max_tokens": 20}) for _ in range(200)]
        answers = await asyncio.gather(*posts)
        counts = {status: sum(status == found for found, _ in answers) for status in (200, 429)}
        assert sum(counts.values()) == 200
        assert min(counts.values()) > 0, counts
        late = next(answer for status, answer in answers if status == 429)
        assert late["error"]["code"] == "too_late"
        batch = await server.post("/v1/completions", {**LONG, "max_tokens": 2, "priority": "batch"})
        assert batch[0] == 200
        assert server.service.metrics.refused.labels("too_late")._value.get() == counts[429]
        async with server.http.get(server.url + "/metrics") as response:
            text = await response.text()
        share = next(float(line.split()[1]) for line in text.splitlines() if line.startswith("jaxserve_shed_share"))
        assert math.isclose(share, counts[429] / 201)


async def test_while_draining_it_is_503_with_retry_after_and_is_counted() -> None:
    async with serving() as server:
        await server.server.drain()
        async with server.http.post(server.url + "/v1/completions", json=LONG) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "5")
        assert server.service.metrics.refused.labels("not_ready")._value.get() == 1
