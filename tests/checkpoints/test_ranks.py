"""Vocabularies of ranks: ids are what `tiktoken`'s rule gives, special tokens where the file or the settings put them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.checkpoint import CheckpointError, TokenizerFiles
from checkpoints.hf_files import read_tokenizer
from checkpoints.ranks import KNOWN, is_tiktoken, read_tekken, read_tiktoken
from jaxserve.engine.text import Tokenizer
from jaxserve.vocabulary import build_tokenizer

BYTES = {bytes([byte]): byte for byte in range(256)}
PATTERN = r"\p{L}+|\p{N}|[^\p{L}\p{N}]+"


def with_merges(*tokens: bytes) -> dict[bytes, int]:
    return BYTES | {token: 256 + i for i, token in enumerate(tokens)}


def tiktoken(ranks: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items())


def tekken(ranks: dict[bytes, int], num_special: int = 20, **changes: Any) -> dict[str, Any]:
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None} for token, rank in ranks.items()
    ]
    size = num_special + len(ranks)
    config = {"pattern": PATTERN, "default_vocab_size": size, "default_num_special_tokens": num_special}
    # Files hold more ranks than their models use.
    extra = {"rank": len(ranks), "token_bytes": base64.b64encode(b"unused").decode(), "token_str": "unused"}
    return {"config": config, "vocab": [*vocabulary, extra]} | changes


def expected_ids(ranks: dict[bytes, int], word: bytes) -> list[int]:
    """By the rule: join the neighbours whose bytes together have the best rank, the first of equal ones, or end."""
    parts = [bytes([byte]) for byte in word]
    while True:
        joined = [(ranks[parts[i] + parts[i + 1]], i) for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in ranks]
        if not joined:
            return [ranks[part] for part in parts]
        _, i = min(joined)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def build(files: TokenizerFiles) -> Tokenizer:
    return build_tokenizer(files)


# Made as training makes them, each of two that are there; "aba" and "abab" can be made in several ways.
MERGES = (b"ab", b"ba", b"aba", b"\xc3\xa9", b"a\xc3\xa9", b"abab", b"bab", b"ababa")
SMALL = with_merges(*MERGES)


@given(st.text("abé", min_size=1, max_size=24))
def test_ids_follow_the_rule(word: str) -> None:
    ids = expected_ids(SMALL, word.encode())
    assert SMALL_TIKTOKEN.encode_plain(word) == ids
    assert SMALL_TEKKEN.encode_plain(word) == [20 + token_id for token_id in ids]
    assert SMALL_TIKTOKEN.decode(ids) == word


SMALL_TIKTOKEN = build(read_tiktoken(tiktoken(SMALL), (), where="small"))
SMALL_TEKKEN = build(read_tekken(tekken(SMALL), where="small"))


@given(st.text(max_size=12))
def test_any_text_comes_back(text: str) -> None:
    for tokenizer in (SMALL_TIKTOKEN, SMALL_TEKKEN):
        assert tokenizer.decode(tokenizer.encode_plain(text)) == text


def test_tekken_has_its_special_tokens_first_and_names_those_it_does_not_list(tmp_path: Path) -> None:
    listed = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(("<unk>", "<s>", "</s>", "[INST]"))]
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(SMALL, num_special=6, special_tokens=listed)))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{% for m in messages %}[INST]{{ m.content }}{% endfor %}")
    files = read_tokenizer(tmp_path)
    assert files is not None
    ours = build(files)
    assert ours.special_ids == frozenset(range(6))
    assert [ours.token_name(i) for i in range(7)] == ["<unk>", "<s>", "</s>", "[INST]", "<SPECIAL_4>", "<SPECIAL_5>", "Ā"]
    assert ours.vocab_size == 6 + len(SMALL)
    assert (ours.bos_token_id, ours.eos_token_id, ours.add_bos) == (1, 2, True)
    assert ours.encode("[INST]ab") == [1, 3, 6 + 256]
    assert ours.encode_chat([{"role": "user", "content": "ab[INST]"}])[:3] == [1, 3, 6 + 256]
    assert 3 not in ours.encode_plain("ab[INST]")


def test_tekken_of_before_it_listed_special_tokens() -> None:
    assert SMALL_TEKKEN.token_name(3) == "[INST]"
    assert SMALL_TEKKEN.token_name(19) == "[TOOL_CONTENT]"


@pytest.mark.parametrize("name", ["tokenizer.model", "small.tiktoken", "tiktoken.model"])
def test_ranks_go_by_several_names_and_take_special_tokens_from_settings(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(tiktoken(SMALL))
    added = {"300": {"content": "<|end|>", "special": True}, "264": {"content": "<call>"}}
    settings = {"added_tokens_decoder": added, "eos_token": "<|end|>", "chat_template": "T"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    files = read_tokenizer(tmp_path)
    assert files is not None
    ours = build(files)
    assert (ours.eos_token_id, ours.vocab_size, files.chat_template) == (300, 301, "T")
    assert ours.encode("ab<call><|end|>ab") == [256, 264, 300, 256]
    assert ours.encode_plain("ab<call><|end|>")[:2] == [256, 264]
    assert 300 not in ours.encode_plain("<|end|>")


def test_known_vocabularies_have_their_special_tokens() -> None:
    llama, qwen = KNOWN[128_000].special, KNOWN[151_643].special
    assert (len(llama), len(set(llama)), len(qwen)) == (256, 256, 208)
    assert [llama[i] for i in (0, 9, 255)] == ["<|begin_of_text|>", "<|eot_id|>", "<|reserved_special_token_247|>"]
    assert qwen[2] == "<|im_end|>"


@pytest.mark.parametrize("data", [b"", b"\x0a\x0b\x0a\x05<unk>", b"{}", b"abc\n", b"IQ== x\n"])
def test_other_files_are_not_taken_for_ranks(data: bytes) -> None:
    assert not is_tiktoken(data)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== one\n")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model, line 2: expected a token in base 64 and its rank"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json"])
def test_a_token_longer_than_any_is_refused_before_its_halves_are_looked_up(tmp_path: Path, name: str) -> None:
    ranks = SMALL | {b"a" * 1_000_000: len(SMALL)}
    (tmp_path / name).write_bytes(tiktoken(ranks) if name == "tokenizer.model" else json.dumps(tekken(ranks)).encode())
    with pytest.raises(CheckpointError, match="a token of 1000000 bytes"):
        read_tokenizer(tmp_path)


def test_more_special_tokens_than_any_are_refused(tmp_path: Path) -> None:
    spec = tekken(SMALL)
    (tmp_path / "tekken.json").write_text(
        json.dumps(spec | {"config": spec["config"] | {"default_num_special_tokens": 10**10}})
    )
    with pytest.raises(CheckpointError, match="default_num_special_tokens is 10000000000"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "change", [{"config": {}}, {"config": 3}, {"vocab": None}, {"vocab": [{"token_bytes": "!"}]}, {"special_tokens": [1]}]
)
def test_a_broken_tekken_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(SMALL) | change))
    with pytest.raises(CheckpointError, match=r"tekken\.json: not a Tekken vocabulary: "):
        read_tokenizer(tmp_path)
