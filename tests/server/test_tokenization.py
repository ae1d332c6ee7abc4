"""/tokenize, /detokenize and /tokenizer_info over a real connection."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.config import HttpConfig
from jaxserve.server import tokenization
from tests.engine import tiny_tokenizers as tiny
from tests.server.serving import BYTE_LEVEL, MODEL, serving

SENTENCEPIECE = tiny.sentencepiece()
USER = {"role": "user", "content": "hello<|im_end|>"}
BOTH = [USER, {"role": "assistant", "content": "x"}]


async def test_a_prompt_as_tokens_and_back() -> None:
    text = "hello w<|im_end|>é"
    async with serving() as server:
        status, body = await server.post("/tokenize", {"model": MODEL, "prompt": text, "return_token_strs": True})
        ids = BYTE_LEVEL.encode(text)
        names = ["hello", "Ġw", "<|im_end|>", "Ã©"]
        assert (status, body) == (200, {"count": 4, "max_model_len": 512, "tokens": ids, "token_strs": names})
        assert await server.post("/detokenize", {"tokens": ids}) == (200, {"prompt": text})
        assert await server.post("/detokenize", {"tokens": []}) == (200, {"prompt": ""})
        _, body = await server.post("/tokenize", {"prompt": "x" * 50_000})
        assert (body["count"], body["token_strs"]) == (50_000, None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "<|im_start|>user\nhello<|im_end|><|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "<|im_start|>user\nhello<|im_end|><|im_end|>\n"),
        (
            {"messages": BOTH, "continue_final_message": True},
            "<|im_start|>user\nhello<|im_end|><|im_end|>\n<|im_start|>assistant\nx",
        ),
        ({"messages": BOTH, "continue_final_message": True, "add_generation_prompt": True}, None),
        ({"chat_template_kwargs": {"unknown": 1}}, None),
        ({"chat_template": "{{ 1 }}"}, None),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, None),
    ],
)
async def test_messages_as_tokens(fields: dict[str, Any], expected: str | None) -> None:
    async with serving() as server:
        status, body = await server.post("/tokenize", {"messages": [USER], **fields})
        if expected is None:
            assert status == 400
            assert body["error"]["param"].partition(".")[0] in fields
            return
        assert status == 200
        assert body["tokens"].count(tiny.IM_END_ID) == expected.count("<|im_end|>") - 1
        assert await server.post("/detokenize", {"tokens": body["tokens"]}) == (200, {"prompt": expected})


async def test_bos_once() -> None:
    async with serving(tokenizer=SENTENCEPIECE) as server:
        for fields, num_bos in (
            ({"prompt": "hello"}, 1),
            ({"prompt": "<s>hello"}, 1),
            ({"prompt": "hello", "add_special_tokens": False}, 0),
            ({"messages": [{"role": "user", "content": "hello"}]}, 1),
            ({"messages": [{"role": "user", "content": "hello"}], "add_special_tokens": True}, 1),
        ):
            _, body = await server.post("/tokenize", fields)
            assert body["tokens"].count(1) == num_bos, fields


async def test_the_tokenizer_s_own_settings() -> None:
    async with serving(tokenizer=SENTENCEPIECE) as server:
        status, info = await server.get("/tokenizer_info")
        assert status == 200
        expected = {"bos_token": "<s>", "bos_token_id": 1, "eos_token": "</s>", "add_bos_token": True, "model_max_length": 512}
        assert info | expected == info
        assert info["chat_template"] == tiny.LLAMA2
        assert info["special_tokens"] == {"0": "<unk>", "1": "<s>", "2": "</s>"}
        assert info["tokenizer_class"]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
    ("/tokenize", {"prompt": ["a"]}, "prompt"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
    ("/tokenize", {"prompt": "a", "colour": 1}, "colour"),
    ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"prompt": "x" * 80_000}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x" * 79_990}]}, "messages"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "abc"}, "tokens"),
    ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
    ("/detokenize", {"tokens": [1, 1 << 40]}, "tokens[1]"),
    ("/detokenize", {"tokens": [1], "model": "other"}, "model"),
]


async def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenization, "MAX_CHARACTERS", 79_999)
    async with serving() as server:
        for path, body, param in REFUSED:
            status, answer = await server.post(path, body)
            assert (status, answer["error"]["param"]) == (404 if param == "model" else 400, param)


async def test_without_a_key_nothing_is_said() -> None:
    async with serving(config=HttpConfig(port=0, api_key="secret")) as server:
        for path in ("/tokenize", "/detokenize"):
            assert (await server.post(path, {"prompt": "a"}))[0] == 401
        assert (await server.get("/tokenizer_info"))[0] == 401
