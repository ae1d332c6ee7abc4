"""The `tokenizer.json` made of GGUF metadata: ids against llama.cpp's own, and the splits of each pre-tokeniser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from checkpoints.byte_level import PRE_TOKENIZERS
from checkpoints.checkpoint import CheckpointError, open_checkpoint
from checkpoints.gguf_metadata import GgufMetadata
from checkpoints.gguf_tokenizer import tokenizer_from_metadata
from jaxserve.engine.text import Tokenizer as Ours
from jaxserve.vocabulary import build_tokenizer

# Text and ids that llama.cpp gives for the demo model (llama-cpp-python 0.3.36, `tokenize(..., add_bos=False, special=True)`).
DEMO_IDS = [
    ("", []),
    ("Hello world", [19556, 905]),
    (" leading space, trailing ", [2899, 1898, 28, 35079, 216]),
    (
        "In 2024, 12345.678 people",
        [788, 216, 34, 32, 34, 36, 28, 216, 33, 34, 35, 36, 37, 30, 38, 39, 40, 701],
    ),
    ("I'll don't WE'VE", [57, 3060, 1326, 982, 26587, 23, 18525]),
    ("tabs\t\tand\n\n\nlines  \n", [100, 7366, 197, 197, 397, 1116, 198, 5110, 32057]),
    (
        "naïve café \u2013 你好\uff0c世界 👩\u200d👩\u200d👧",
        [
            *(3546, 46494, 37366, 816, 216, 18645, 250, 48392, 138, 12831, 7906, 240, 178, 239, 230, 15107, 235, 119),
            *(321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117),
        ],
    ),
    (
        "def f(x):\n    return x**2  # ½ Ⅻ",
        [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 216, 16738, 216, 173, 223, 121],
    ),
    ("<|im_start|>user\nHi<|im_end|>\n", [1, 4093, 198, 26843, 2, 198]),
]


@pytest.fixture(scope="module")
def demo(demo_model_path: Path) -> Tokenizer:
    with open_checkpoint(demo_model_path) as checkpoint:
        assert checkpoint.tokenizer is not None
        assert checkpoint.tokenizer.tokenizer_json is not None
        return Tokenizer.from_str(checkpoint.tokenizer.tokenizer_json)


@pytest.mark.parametrize(("text", "ids"), DEMO_IDS, ids=range(len(DEMO_IDS)))
def test_the_demo_model_gets_llama_cpp_ids(demo: Tokenizer, text: str, ids: list[int]) -> None:
    assert demo.encode(text, add_special_tokens=False).ids == ids
    assert demo.decode(ids, skip_special_tokens=False) == text


# The published vocabulary has no token for these bytes (rare controls, and what UTF-8 never uses); they are dropped.
MISSING_BYTES = {4, 6, 19, 20, 22, 29, 192, 193, 241, 242, *range(245, 256)}


@given(st.text())
def test_the_demo_tokenizer_gives_any_text_back(demo: Tokenizer, text: str) -> None:
    assume(MISSING_BYTES.isdisjoint(text.encode()))
    ids = demo.encode(text, add_special_tokens=False).ids
    assert demo.decode(ids, skip_special_tokens=False) == text


def metadata(**changes: Any) -> GgufMetadata:
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["<s>", "a", "b", "ab", "[PAD4]", "<tool>"],
        "token_type": np.array([3, 1, 1, 1, 5, 4]),
        "merges": ["a b"],
        "bos_token_id": 0,
        "eos_token_id": 0,
    } | changes
    return GgufMetadata(Path("m.gguf"), {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None})


def built(**changes: Any) -> Tokenizer:
    files = tokenizer_from_metadata(metadata(**changes))
    assert files is not None
    assert files.tokenizer_json is not None
    return Tokenizer.from_str(files.tokenizer_json)


# What the tokenizers of GPT-2, SmolLM, Llama 3, Qwen 2, Mistral Nemo and Llama 4 make of a text that tells them apart.
MIXED = "I'LL pay 12345 for it's\n\n  x²!!\n½ aB"
SPLITS = {
    "gpt-2": ["I", "'", "LL", " pay", " 12345", " for", " it", "'s", "\n\n ", " x", "²", "!!", "\n", "½", " aB"],
    "smollm": ["I", "'", "LL", " pay", " ", *"12345", " for", " it", "'s", "\n\n ", " x", "²", "!!", "\n", "½", " aB"],
    "llama-bpe": ["I", "'LL", " pay", " ", "123", "45", " for", " it", "'s", "\n\n", " ", " x", "²", "!!\n", "½", " aB"],
    "qwen2": ["I", "'LL", " pay", " ", *"12345", " for", " it", "'s", "\n\n", " ", " x", "²", "!!\n", "½", " aB"],
    "tekken": ["I", "'LL", " pay", " ", *"12345", " for", " it", "'s", "\n\n", " ", " x", "²", "!!\n", "½", " a", "B"],
    "deepseek-v3": ["I", "'LL", " pay", " ", "123", "45", " for", " it", "'s", "\n\n", " ", " x", "²", "!!\n", "½", " aB"],
    "deepseek-coder": [
        *("I", "'", "LL", " pay", " ", *"12345", " for", " it", "'", "s", "\n", "\n", " ", " x", "²", "!!", "\n", "½", " aB")
    ],
    "deepseek-llm": [
        *("I", "'", "LL", " pay", " ", "12345", " for", " it", "'", "s", "\n", "\n", " ", " x", "²", "!!", "\n", "½", " aB")
    ],
    "qwen35": ["I", "'LL", " pay", " ", *"12345", " for", " it", "'s", "\n\n", " ", " x", "²", "!!\n", "½", " aB"],
    "seed-coder": ["I", "'LL", " pay", " ", *"12345", " for", " it", "'s", "\n\n", " ", " x", "²", "!!", "\n", "½", " aB"],
    "llama4": ["I'LL", " pay", " ", "123", "45", " for", " it's", "\n\n", " ", " x", "²", "!!\n", "½", " a", "B"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_each_pre_tokeniser_splits_as_its_model_does(pre: str) -> None:
    pieces = built(pre=pre).pre_tokenizer.pre_tokenize_str(MIXED)
    assert [MIXED[start:end] for _, (start, end) in pieces] == SPLITS[pre]


# What letters with marks, other scripts and capitals of other kinds tell apart.
SCRIPTS = "e\u0301t Ж中あ ԱԲաբ \U0001d400x  3\u3002"
SCRIPT_SPLITS = {
    "qwen2": ["e", "\u0301t", " Ж中あ", " ԱԲաբ", " \U0001d400x", " ", " ", "3", "\u3002"],
    "qwen35": ["e\u0301t", " Ж中あ", " ԱԲաբ", " \U0001d400x", " ", " ", "3", "\u3002"],
    "deepseek-llm": ["e", "\u0301", "t", " Ж", "中あ", " ԱԲ", "աբ \U0001d400", "x", "  ", "3", "\u3002"],
    "deepseek-coder": ["e", "\u0301", "t", " Ж", "中あ", " ԱԲաբ", " \U0001d400x", "  ", "3", "\u3002"],
    "deepseek-v3": ["e\u0301t", " Ж", "中あ", " ԱԲաբ", " \U0001d400x", "  ", "3", "\u3002"],
    "tekken": ["e\u0301t", " Ж中あ", " ԱԲաբ", " \U0001d400x", " ", " ", "3", "\u3002"],
}


@pytest.mark.parametrize("pre", SCRIPT_SPLITS)
def test_scripts_split_as_their_model_does(pre: str) -> None:
    pieces = built(pre=pre).pre_tokenizer.pre_tokenize_str(SCRIPTS)
    assert [SCRIPTS[start:end] for _, (start, end) in pieces] == SCRIPT_SPLITS[pre]


def test_aliases_share_a_pre_tokeniser() -> None:
    same = [
        ("gpt-2", "phi-2"),
        ("llama-bpe", "llama3"),
        ("llama-bpe", "llama-v3"),
        ("smollm", "starcoder"),
        ("gpt-4o", "llama4"),
    ]
    assert all(PRE_TOKENIZERS[a] is PRE_TOKENIZERS[b] for a, b in same)


def test_only_models_made_from_tiktoken_ranks_take_a_whole_token_without_merges() -> None:
    assert built(merges=[]).encode("ab").ids == [1, 2]
    assert built(merges=[], pre="llama-bpe").encode("ab").ids == [3]


def test_qwen_normalises_and_llama_does_not() -> None:
    def normaliser(pre: str) -> Any:
        return json.loads(built(pre=pre).to_str())["normalizer"]

    assert normaliser("qwen2") == {"type": "NFC"}
    assert normaliser("llama-bpe") is None


def sentencepiece_metadata(**changes: Any) -> GgufMetadata:
    tokens = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "a",
        "b",
        "ab",
        "\u2581a",
        "\u2581ab",
        "<tool>",
    ]
    kinds = [2, 3] + [6] * 256 + [1] * 6 + [4]
    scores = [0.0] * 258 + [-9.0, -9.0, -9.0, -1.0, -2.0, -3.0, 0.0]
    defaults = {"model": "llama", "pre": None, "tokens": tokens, "token_type": np.array(kinds), "scores": np.array(scores)}
    ends = {"merges": None, "bos_token_id": 1, "eos_token_id": 1, "unknown_token_id": 0, "add_bos_token": False}
    return metadata(**defaults | ends | changes)


def sentencepiece(**changes: Any) -> Ours:
    files = tokenizer_from_metadata(sentencepiece_metadata(**changes))
    assert files is not None
    return build_tokenizer(files)


def test_sentencepiece_joins_by_score_and_falls_back_to_bytes() -> None:
    tokenizer = sentencepiece()
    assert tokenizer.encode("ab") == [263]
    assert tokenizer.encode("b é") == [258, 260, 258, 2 + 0xC3, 2 + 0xA9]
    assert tokenizer.encode("<s>ab<tool>") == [1, 263, 264]
    assert tokenizer.decode([263, 258, 2 + 0xC3, 2 + 0xA9]) == "ab é"


def test_the_better_score_decides_which_pieces_join_first() -> None:
    kinds = np.array([2, 3] + [6] * 256 + [1] * 5 + [5, 4])
    bad, good = [-9.0] * 3, [0.0, 0.0]
    whole_first = sentencepiece(token_type=kinds, scores=np.array([0.0] * 258 + [*bad, -1.0, -2.0, *good]))
    space_first = sentencepiece(token_type=kinds, scores=np.array([0.0] * 258 + [*bad, -2.0, -1.0, *good]))
    assert whole_first.encode("ab") == [258, 261]
    assert space_first.encode("ab") == [262, 260]


def test_phi_3_has_white_space_after_control_tokens_belong_to_them() -> None:
    values = {**sentencepiece_metadata().values, "general.architecture": "phi3"}
    files = tokenizer_from_metadata(GgufMetadata(Path("m.gguf"), values))
    assert files is not None
    phi = build_tokenizer(files)
    assert phi.encode("<tool>\n ab") == [264, 263]
    assert phi.encode("<s> ab") == [1, 258, 263]
    assert sentencepiece().encode("<tool> ab") == [264, 258, 263]


def test_pieces_that_the_library_would_refuse_get_names_of_their_own() -> None:
    tokens = sentencepiece_metadata().values["tokenizer.ggml.tokens"]
    tokenizer = sentencepiece(tokens=[*tokens[:-3], "a", "", "<tool>"])
    assert tokenizer.encode("ab") == [258, 261]
    assert [tokenizer.token_name(i) for i in (262, 263)] == ["<duplicate 262 a>", "<duplicate 263 >"]


def test_sentencepiece_without_a_leading_space() -> None:
    tokenizer = sentencepiece(add_space_prefix=False)
    assert tokenizer.encode("ab") == [261]
    assert tokenizer.decode([263]) == " ab"


def test_control_tokens_are_special_user_defined_are_not_and_unused_do_not_exist() -> None:
    tokenizer = built()
    assert tokenizer.encode("<s>ab<tool>").ids == [0, 3, 5]
    assert tokenizer.decode([0, 3, 5]) == "ab<tool>"
    assert tokenizer.token_to_id("[PAD4]") is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"add_bos_token": True}, True),
        ({"pre": "llama-bpe"}, True),
        ({"model": "llama", "scores": np.zeros(6)}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"add_bos_token": True, "bos_token_id": None}, False),
    ],
)
def test_add_bos_follows_the_flag_else_the_pre_tokeniser(changes: dict[str, Any], expected: bool) -> None:
    files = tokenizer_from_metadata(metadata(**changes))
    assert files is not None
    assert files.add_bos is expected


def test_a_file_may_have_a_template_for_tools() -> None:
    values = {**metadata().values, "tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "with tools"}
    files = tokenizer_from_metadata(GgufMetadata(Path("m.gguf"), values))
    assert files is not None
    assert (files.chat_template, files.tool_template) == ("plain", "with tools")


def test_a_file_without_tokenizer_has_none() -> None:
    assert tokenizer_from_metadata(metadata(model=None)) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, r"tokenizer\.ggml\.model must be one of those supported: gpt2, llama, found 'bert'"),
        ({"model": "llama"}, r"tokenizer\.ggml\.scores is missing"),
        ({"pre": "viking"}, r"tokenizer\.ggml\.pre must be one of those supported: .*smollm.* found 'viking'"),
        ({"pre": None}, r"tokenizer\.ggml\.pre is missing"),
        ({"tokens": 3}, r"tokenizer\.ggml\.tokens must be a list of strings, found 3"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is missing"),
        ({"token_type": np.array([1])}, r"tokenizer\.ggml\.token_type must be an array of 6 numbers"),
        ({"token_type": 1}, r"tokenizer\.ggml\.token_type must be an array of 6 numbers"),
        ({"token_type": np.array([1, 1, 1, 1, 1, 300])}, r"tokenizer\.ggml\.token_type must be kinds of tokens from 0 to 6"),
        ({"token_type": np.array([2.5] * 6)}, r"tokenizer\.ggml\.token_type must be kinds of tokens from 0 to 6"),
        ({"bos_token_id": 6}, r"tokenizer\.ggml\.bos_token_id must be an integer from 0 to 5, found 6"),
        ({"add_bos_token": "yes"}, r"tokenizer\.ggml\.add_bos_token must be a boolean"),
    ],
)
def test_what_cannot_be_read_is_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=r"m\.gguf: " + message):
        tokenizer_from_metadata(metadata(**changes))
