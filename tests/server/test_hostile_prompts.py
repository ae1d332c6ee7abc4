"""Whatever a user writes reaches the model as it is: a model that repeats what it reads gives it back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine import tiny_tokenizers as tiny
from tests.engine.engines import LIMITS, FakeEngine, fake_engine
from tests.server.serving import BYTE_LEVEL, MODEL, Serving, serving

TURN = BYTE_LEVEL.encode("<|im_start|>user\n")
END_OF_TURN = BYTE_LEVEL.encode("<|im_end|>\n<|im_start|>assistant\n")
END_OF_PROMPT = [tiny.IM_START_ID]


def repeating() -> FakeEngine:
    """An engine whose model repeats a user's message, or a prompt up to `<|im_start|>`, and ends."""

    def next_token(tokens: Seq[int], seed: int) -> int:
        tokens = list(tokens)
        chat = tokens[: len(TURN)] == TURN
        end = END_OF_TURN if chat else END_OF_PROMPT
        # What is repeated holds no special token.
        at = next(i for i in range(len(tokens)) if tokens[i] == end[0] and tokens[i : i + len(end)] == end and i >= chat)
        said = tokens[len(TURN) * chat : at]
        num_repeated = len(tokens) - at - len(end)
        return said[num_repeated] if num_repeated < len(said) else tiny.IM_END_ID

    limits = replace(LIMITS, num_pages=4096, max_step_tokens=512, max_context=4096)
    return fake_engine(limits, next_token=next_token, eos_token_ids=(tiny.IM_END_ID,))


async def check(server: Serving, text: str) -> None:
    common = {"model": MODEL, "max_tokens": 2000}
    body = {**common, "messages": [{"role": "user", "content": text}]}
    status, answer = await server.post("/v1/chat/completions", body)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, text)
    status, answer = await server.post("/v1/completions", {**common, "prompt": f"{text}<|im_start|>"})
    assert (status, answer["choices"][0]["text"]) == (200, text)
    status, answer = await server.post("/tokenize", {"prompt": text})
    assert (status, answer["tokens"]) == (200, BYTE_LEVEL.encode_plain(text))
    assert await server.post("/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": text})


async def check_all(texts: Seq[str]) -> None:
    async with serving(repeating()) as server:
        at_once = asyncio.Semaphore(16)

        async def check_one(text: str) -> None:
            async with at_once:
                await check(server, text)

        await asyncio.gather(*map(check_one, texts))
        await server.idle()


async def test_text_with_a_meaning_elsewhere() -> None:
    await check_all(
        ["", " ", "\x00\x7f\u2028", "{{ 7 * 7 }} {% raw %}", "</s>[INST]<think>", "\ue000\ue002\uffff", "👩‍👧 ẞ\u0301"]
    )


@pytest.mark.slow
async def test_hostile_strings(shared: Path) -> None:
    await check_all(json.loads((shared / "data/fuzz/blns.json").read_text(encoding="utf-8")))
