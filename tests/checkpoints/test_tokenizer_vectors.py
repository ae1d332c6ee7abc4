"""Tokenizers of known models against llama.cpp's own ids, and against the libraries themselves on hostile strings."""

from __future__ import annotations

import functools
import json
import os
import unicodedata
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer as Library

from checkpoints.checkpoint import CheckpointError, TokenizerFiles
from checkpoints.gguf_header import read_header
from checkpoints.gguf_tokenizer import tokenizer_from_metadata
from checkpoints.ranks import read_tiktoken
from checkpoints.sources import resolve
from jaxserve.engine.text import Tokenizer
from jaxserve.vocabulary import build_tokenizer

VOCABULARIES = Path(__file__).parent / "vocabularies"
SEPARATOR = "\n__ggml_vocab_test__\n"

# Vectors that come with no vocabulary: which of `vocabularies` fits.
FROM_RANKS = {"llama-bpe": "llama-3", "qwen2": "qwen-2"}
# No package that a test can fetch has the vocabulary of Gemma 3 and 4; a variable says where a `tokenizer.json` is.
GEMMA = "JAXSERVE_GEMMA_TOKENIZER"

NAMES = [
    *("gpt-2", "llama-spm"),
    # Making merges of 150,000 ranks takes seconds; one is made as the one before it.
    *(pytest.param(name, marks=pytest.mark.slow) for name in (*FROM_RANKS, "phi-3")),
    pytest.param("gemma-4", marks=pytest.mark.slow),
]


def tokenizer_files(shared: Path, name: str) -> TokenizerFiles:
    if name == "gemma-4":
        return gemma_files()
    if name not in FROM_RANKS:
        header = read_header(shared / "data" / "tokenizer-vectors" / f"ggml-vocab-{name}.gguf")
        files = tokenizer_from_metadata(header.metadata)
        assert files is not None
        return files
    try:
        path = resolve(FROM_RANKS[name], VOCABULARIES)
    except CheckpointError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no vocabulary: {error}")
    return read_tiktoken(path.read_bytes(), (), where=name)


def gemma_files() -> TokenizerFiles:
    path = os.environ.get(GEMMA)
    if path is None:
        pytest.skip(f"no vocabulary of Gemma: set {GEMMA} to the path of a tokenizer.json of Gemma 3 or 4")
    return TokenizerFiles(tokenizer_json=Path(path).read_text(encoding="utf-8"))


class Processor:
    """SentencePiece by the names of the `tokenizers` library: no special tokens in the text."""

    def __init__(self, model: bytes) -> None:
        self.model = sentencepiece.SentencePieceProcessor(model_proto=model)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.model.encode(text)
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self.model.decode(ids)
        return text


class Converted:
    """The `tokenizers` library."""

    def __init__(self, tokenizer_json: str) -> None:
        self.library = Library.from_str(tokenizer_json)

    def encode(self, text: str) -> list[int]:
        return self.library.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.library.decode(ids, skip_special_tokens=False)


@functools.cache
def tokenizers_of(shared: Path, name: str) -> tuple[Tokenizer, Processor | Converted]:
    """Ours, and the library's without any of what we add."""
    files = tokenizer_files(shared, name)
    if files.tokenizer_json is not None:
        return build_tokenizer(files), Converted(files.tokenizer_json)
    assert files.sentencepiece is not None
    return build_tokenizer(files), Processor(files.sentencepiece)


def vectors(shared: Path, name: str) -> list[tuple[str, list[int]]]:
    path = shared / "data" / "tokenizer-vectors" / f"ggml-vocab-{name}.gguf"
    texts = path.with_suffix(".gguf.inp").read_text(encoding="utf-8").split(SEPARATOR)
    lines = path.with_suffix(".gguf.out").read_text().split("\n")[: len(texts)]
    assert len(texts) == len(lines) > 40
    return [(text, [int(token_id) for token_id in line.split()]) for text, line in zip(texts, lines, strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_llama_cpp_s(shared: Path, name: str) -> None:
    ours, library = tokenizers_of(shared, name)
    for text, ids in vectors(shared, name):
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.encode_plain(text) == ids, text
        assert library.encode(text) == ids, text
        assert ours.decode(ids) == text
        assert library.decode(ids) == text


@pytest.mark.parametrize("name", NAMES)
def test_hostile_strings_round_trip_as_in_the_library(shared: Path, name: str) -> None:
    ours, library = tokenizers_of(shared, name)
    for text in json.loads((shared / "data" / "fuzz" / "blns.json").read_text()):
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == library.encode(text), text
        assert ours.encode_plain(text) == ids, text
        normal = unicodedata.normalize("NFC", text) if name == "qwen2" else text
        assert ours.decode(ids) == normal
        assert library.decode(ids) == normal


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", pytest.param("phi-3", marks=pytest.mark.slow)])
def test_every_special_token_is_one_where_it_is_meant_and_text_elsewhere(shared: Path, name: str) -> None:
    ours, _ = tokenizers_of(shared, name)
    assert ours.special_ids
    for token_id in ours.special_ids:
        spelled = ours.token_bytes(token_id).decode()
        # Phi-3's take the white space after them.
        for before, after in (("", ""), ("a", ""), ("", "b" if name == "phi-3" else " b"), (" ", f"{spelled}>")):
            ids = ours.encode(before + spelled + after, add_special_tokens=False)
            parts = [ours.encode_plain(part) for part in (before, after.removeprefix(spelled))]
            assert ids == [*parts[0], token_id, *[token_id] * after.startswith(spelled), *parts[1]], (before, spelled, after)
            plain = ours.encode_plain(before + spelled + after)
            assert ours.special_ids.isdisjoint(plain)
            assert ours.decode(plain) == before + spelled + after
