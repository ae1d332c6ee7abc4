"""Ids are those of `transformers`, which `references/make_tokenizer_ids.py` recorded."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest

from checkpoints.checkpoint import CheckpointError, TokenizerFiles
from checkpoints.gguf_header import read_header
from checkpoints.gguf_tokenizer import tokenizer_from_metadata
from checkpoints.hf_files import read_tokenizer
from checkpoints.ranks import read_tiktoken
from checkpoints.sentencepiece_model import read_sentencepiece
from checkpoints.sources import cache_dir, resolve
from jaxserve.vocabulary import build_tokenizer

HERE = Path(__file__).parent
REFERENCE = json.loads((HERE.parent / "references" / "tokenizer_ids.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", REFERENCE["small"])
def test_small_models_in_a_directory(tmp_path: Path, name: str) -> None:
    reference: dict[str, Any] = REFERENCE["small"][name]
    shutil.copy(HERE / "sentencepieces" / f"{reference['model']}.model", tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(reference["settings"]))
    files = read_tokenizer(tmp_path)
    assert files is not None
    ours = build_tokenizer(files)
    for text, ids in zip(REFERENCE["texts"], reference["ids"], strict=True):
        if ids is not None:
            assert ours.encode(text, add_special_tokens=False) == ids, text


def from_gguf(path: Path) -> TokenizerFiles:
    files = tokenizer_from_metadata(read_header(path).metadata)
    assert files is not None
    return files


def real_files(shared: Path, name: str) -> TokenizerFiles:
    vectors = shared / "data" / "tokenizer-vectors" / f"ggml-vocab-{name}.gguf"
    if vectors.is_file():
        return from_gguf(vectors)
    named_models = HERE.parent.parent / "configs" / "models"
    if name == "gemma-3-270m" and not any((cache_dir() / "models" / name).glob("*.gguf")):
        pytest.skip(f"{name} is not in the cache, and its 253 MB are not fetched for its vocabulary alone")
    try:
        path = resolve(name, HERE / "vocabularies" if (HERE / "vocabularies" / f"{name}.toml").is_file() else named_models)
    except CheckpointError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no vocabulary: {error}")
    if path.suffix == ".gguf":
        return from_gguf(path)
    if name == "llama-3":
        return read_tiktoken(path.read_bytes(), (), where=name)
    return read_sentencepiece(path.read_bytes(), (), prefix_each=True, where=name)


SLOW = ("gemma-3-270m", "llama-3", "smollm2-135m-instruct")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in REFERENCE["naughty"]]
)
def test_real_vocabularies_on_naughty_strings(shared: Path, name: str) -> None:
    ours = build_tokenizer(real_files(shared, name))
    strings = json.loads((shared / "data" / "fuzz" / "blns.json").read_text(encoding="utf-8"))
    checksums = REFERENCE["naughty"][name]
    assert sum(expected is not None for expected in checksums) > 490
    for text, expected in zip(strings, checksums, strict=True):
        ids = ours.encode(text, add_special_tokens=False)
        assert expected is None or zlib.crc32(",".join(map(str, ids)).encode()) == expected, text
