"""What holds for every answer, whatever was asked for: streamed or not it is the same, and its events come in their order.

Bugs of other servers that broke one of these laws: vllm I3574, I7262, I8625, I27300 and PR16863, llama.cpp I11538, PR9867 and
PR4446, TGI PR1648, PR2344 and I1896, sglang I3912.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import LIMITS, FakeEngine, fake_engine
from tests.fakes import hash_next_token
from tests.server.serving import BYTE_LEVEL, MODEL, Serving, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ANSWERS = [
    *(
        "",
        "hello",
        "🫠龜é€😀",
        "a\u2028b\u2029c\x85d\x0be\r\nf\n\ng\x00",
        "\ufffd is what was said",
        "data: [DONE]\n\n",
        "é" * 40,
    ),
    *(
        '{"a": "\\ud83d"}',
        "l m n o p q r",
        "<|im_end|> <think> </s>",
        "x" * 90,
        "👩‍👩‍👧‍👦🏳️‍🌈",
        "مرحبا",
        "\t \t",
        "A B C\nD E F\n",
        "ÿþ",
    ),
]
NUM_DIGITS = 3


def prompt_of(index: int) -> str:
    return f"{index:0{NUM_DIGITS}d}"


def answering(answers: Seq[str]) -> FakeEngine:
    """An engine that answers prompt `prompt_of(i)`, on either endpoint, with `answers[i]`, and others with hashes."""
    scripts = {}
    for index, answer in enumerate(answers):
        ids = [*BYTE_LEVEL.encode_plain(answer), BYTE_LEVEL.eos_token_id]
        scripts[tuple(BYTE_LEVEL.encode(prompt_of(index)))] = ids
        scripts[tuple(BYTE_LEVEL.encode_chat([{"role": "user", "content": prompt_of(index)}]))] = ids
    lengths = sorted({len(prompt) for prompt in scripts}, reverse=True)
    hashed = hash_next_token(LIMITS.vocab_size)

    def next_token(tokens: Seq[int], seed: int) -> int:
        for length in lengths:
            script = scripts.get(tuple(tokens[:length]))
            if script is not None and length <= len(tokens) < length + len(script):
                token = script[len(tokens) - length]
                assert token is not None
                return token
        return hashed(tokens, seed)

    assert BYTE_LEVEL.eos_token_id is not None
    return fake_engine(next_token=next_token, eos_token_ids=(BYTE_LEVEL.eos_token_id,))


@dataclass(frozen=True)
class Asked:
    """One call, and the text that each choice must have; None where only the two ways must agree."""

    path: str
    body: dict[str, Any]
    text: str | None = None


def draw_call(rng: random.Random, answers: Seq[str]) -> Asked:
    """A call that asks for things at random."""
    index = rng.randrange(len(answers))
    known = rng.random() < 0.8
    prompt, text = (prompt_of(index), answers[index]) if known else ("something else", None)
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 400 if known else rng.randint(1, 40), "seed": rng.randrange(99)}
    path = rng.choice([COMPLETIONS, CHAT])
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if rng.random() < 0.4:
        body["n"] = rng.randint(1, 4)
    if rng.random() < 0.4:
        body |= {"logprobs": True, "top_logprobs": rng.randint(0, 3)} if path == CHAT else {"logprobs": rng.randint(0, 3)}
    if text and rng.random() < 0.4:
        start = rng.randrange(len(text))
        stop = text[start : start + rng.randint(1, 6)]
        body["stop"] = [stop, "never said"]
        text = text[: text.index(stop)]
    elif text and rng.random() < 0.2:
        body["max_tokens"] = rng.randint(1, len(text.encode()))
        text = None
    return Asked(path, body, text)


async def check(server: Serving, asked: Asked, *, include_usage: bool) -> None:
    """The laws."""
    status, whole = await server.post(asked.path, asked.body)
    assert status == 200, whole
    options = {"stream": True} | ({"stream_options": {"include_usage": True}} if include_usage else {})
    async with server.http.post(server.url + asked.path, json=asked.body | options) as response:
        *events, done, nothing = (await response.read()).decode().split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    if include_usage:
        *chunks, last = chunks
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
    by_index: dict[int, list[Any]] = {index: [] for index in range(asked.body.get("n", 1))}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        by_index[choice["index"]].append(choice)
    assert [choice["index"] for choice in whole["choices"]] == list(by_index)
    for choice in whole["choices"]:
        check_choice(asked, choice, by_index[choice["index"]])


def check_choice(asked: Asked, whole: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    """The parts of one choice, of which the last says why it ended, make the whole one."""
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [whole["finish_reason"]]
    assert whole["finish_reason"] in ("stop", "length")
    if asked.path == CHAT:
        assert [part["delta"].get("role") for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        text, deltas = whole["message"]["content"], [part["delta"].get("content") or "" for part in parts]
    else:
        text, deltas = whole["text"], [part["text"] for part in parts]
    assert "".join(deltas) == text
    assert all(delta or part["logprobs"] for delta, part in [*zip(deltas, parts, strict=True)][asked.path == CHAT : -1])
    if asked.text is not None:
        assert text == asked.text
        assert whole["finish_reason"] == "stop"
    check_logprobs(asked, text, whole["logprobs"], [part["logprobs"] for part in parts if part["logprobs"]])


def check_logprobs(asked: Asked, text: str, whole: Any, parts: list[Any]) -> None:
    """Those of the parts are those of the whole; the bytes of the tokens spell the text, but for what a stop string cuts."""
    if "logprobs" not in asked.body:
        assert whole is None
        assert not parts
        return
    names = ["content"] if asked.path == CHAT else ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    for name in names:
        assert [entry for part in parts for entry in part[name]] == whole[name]
    if asked.path == COMPLETIONS:
        assert len({len(whole[name]) for name in names}) == 1
        assert all(token in top for token, top in zip(whole["tokens"], whole["top_logprobs"], strict=True))
        assert whole["text_offset"] == sorted(whole["text_offset"])
    elif asked.text is not None:
        spelled = b"".join(bytes(entry["bytes"]) for entry in whole["content"])
        assert spelled.startswith(text.encode()), "a token that a stop string cuts is shown whole"
        assert spelled == text.encode() or "stop" in asked.body


async def check_many(answers: Seq[str], rng: random.Random, number: int) -> None:
    async with serving(answering(answers)) as server:
        calls = [draw_call(rng, answers) for _ in range(number)]
        at_once = asyncio.Semaphore(16)

        async def check_one(asked: Asked) -> None:
            async with at_once:
                await check(server, asked, include_usage=rng.random() < 0.5)

        await asyncio.gather(*map(check_one, calls))
        await server.idle()


async def test_calls_of_every_kind() -> None:
    await check_many(ANSWERS, random.Random(0), 60)


@pytest.mark.slow
async def test_hostile_answers(shared: Path) -> None:
    """A model may say anything."""
    strings = json.loads((shared / "data/fuzz/blns.json").read_text(encoding="utf-8"))
    await check_many([string for string in strings if len(string.encode()) < 400], random.Random(1), 600)
