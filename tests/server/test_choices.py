"""Which outputs are given (`best_of`), and what a stream says beside its text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxserve.engine.output import ShownToken
from jaxserve.errors import InvalidRequest
from jaxserve.request import FinishReason, TokenLogprobs
from jaxserve.server.call import Call
from jaxserve.server.openai import parse_completion
from jaxserve.server.ranking import Choice, shown_choices
from tests.engine.engines import fake_engine
from tests.server.serving import BYTE_LEVEL, MODEL, Serving, serving


def parse(**fields: Any) -> Call:
    body = json.dumps({"model": "m", "prompt": "hello", **fields}).encode()
    return parse_completion(body, BYTE_LEVEL, model="m", max_context=512, call_id="c")


def output(text: str, *logprobs: float) -> Choice:
    return text, [ShownToken(0, TokenLogprobs(value, ()), 0) for value in logprobs], FinishReason.STOP


def test_the_best_are_given_best_first_prompt_by_prompt() -> None:
    call = parse(prompt=["x", "y"], best_of=3, n=2, logprobs=0)
    outputs = [
        *(output("a", -1.0, -9.0), output("b", -2.0), output("c", -3.0, -3.0, -3.0)),
        *(output("d", -7.0), output(""), output("e", -8.0)),
    ]
    assert [text for text, _, _ in shown_choices(call, outputs)] == ["b", "c", "d", "e"]
    assert [tokens for _, tokens, _ in shown_choices(call, outputs)] == [outputs[i][1] for i in (1, 2, 3, 5)]


def test_log_probabilities_that_only_rank_are_not_given() -> None:
    call = parse(best_of=2)
    assert [request.params.logprobs for request in call.requests] == [0, 0]
    assert shown_choices(call, [output("a", -2.0), output("b", -1.0)]) == [("b", None, FinishReason.STOP)]


def test_as_many_as_are_generated_are_given_in_their_order() -> None:
    call = parse(best_of=2, n=2)
    assert [request.params.logprobs for request in call.requests] == [None, None]
    assert [text for text, _, _ in shown_choices(call, [output("a", -2.0), output("b", -1.0)])] == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"best_of": 1, "n": 2}, r"best_of must be at least n \(2\), found 1"),
        ({"best_of": 2, "stream": True}, r"best_of must be n \(1\) in a stream"),
        ({"best_of": 129}, "best_of must be an integer from 1 to 128"),
        ({"best_of": 64, "prompt": [[5]] * 33}, "33 prompts x best_of 64 > 2048 sequences"),
    ],
)
def test_what_best_of_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse(**fields)
    assert parse(best_of=2, n=2, stream=True).num_candidates == 2


async def test_best_of_over_the_wire() -> None:
    """The answer is the best of the choices that `n` alone gives, and usage counts all that was computed."""
    async with serving() as server:
        fields: dict[str, Any] = {"model": MODEL, "prompt": ["ab", "cd"], "max_tokens": 8, "seed": 1}
        every = await server.client.completions.create(**fields, n=4, logprobs=0)
        best = await server.client.completions.create(**fields, best_of=4, n=1)
        means = [sum(choice.logprobs.token_logprobs) / len(choice.logprobs.tokens) for choice in every.choices]  # type: ignore
        winners = [max(range(4), key=means.__getitem__), max(range(4, 8), key=means.__getitem__)]
        assert [choice.text for choice in best.choices] == [every.choices[i].text for i in winners]
        assert [(choice.index, choice.logprobs) for choice in best.choices] == [(0, None), (1, None)]
        assert best.usage == every.usage


async def events(server: Serving, path: str = "/v1/completions", **fields: Any) -> list[dict[str, Any]]:
    body = {"model": MODEL, "prompt": "hello", "stream": True, "max_tokens": 8, "temperature": 0, **fields}
    async with server.http.post(f"{server.url}{path}", json={k: v for k, v in body.items() if v is not None}) as response:
        lines = (await response.read()).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.mark.parametrize("include_usage", [True, False])
async def test_usage_in_every_chunk(include_usage: bool) -> None:
    chat: dict[str, Any] = {"path": "/v1/chat/completions", "prompt": None, "messages": [{"role": "user", "content": "x"}]}
    async with serving(fake_engine(step_seconds=0.001)) as server:
        for fields in ({"n": 2, "logprobs": 0}, chat):
            options = {"include_usage": include_usage, "continuous_usage_stats": True}
            chunks = await events(server, **fields, stream_options=options)
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts)
            assert counts[-1] == 8 * fields.get("n", 1)
            assert counts[0] < counts[-1]
            assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1
            assert all(chunk["usage"]["total_tokens"] == sum([*chunk["usage"].values()][:2]) for chunk in chunks)
            assert (not chunks[-1]["choices"]) == include_usage


async def test_obfuscation_evens_out_lengths() -> None:
    async with serving(fake_engine(step_seconds=0.001)) as server:
        plain = await events(server, max_tokens=40)
        padded = await events(server, max_tokens=40, stream_options={"include_obfuscation": True})
        lengths = []
        for chunk in padded:
            if chunk["choices"][0]["text"]:
                without = {key: value for key, value in chunk.items() if key != "obfuscation"}
                lengths.append(len(json.dumps(without, separators=(",", ":"))) + len(chunk["obfuscation"]))
        assert len({length % 32 for length in lengths}) == 1
        assert len({len(chunk["obfuscation"]) for chunk in padded if "obfuscation" in chunk}) > 1
        texts = ["".join(chunk["choices"][0]["text"] for chunk in chunks) for chunks in (plain, padded)]
        assert texts[0] == texts[1]
