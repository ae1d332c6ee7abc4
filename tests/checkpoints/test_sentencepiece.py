"""A SentencePiece vocabulary as GGUF has it, against the SentencePiece library: the same ids, and the same text from them."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from checkpoints.checkpoint import CheckpointError
from checkpoints.gguf_metadata import GgufMetadata
from checkpoints.gguf_tokenizer import tokenizer_from_metadata
from checkpoints.sentencepiece_model import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED
from checkpoints.sources import resolve
from jaxserve.vocabulary import build_tokenizer

VOCABULARIES = Path(__file__).parent / "vocabularies"
# Letters of many scripts, digits, spaces, marks, symbols, what looks like a mark of the vocabulary's own, and combinations.
ODD = "aZéßΩжЖ中한ไทยहिंaؤ0١२½Ⅻ \t\n\r\u00a0\u3000'’-_/()[]{}<>.,!?😀👩\u200d👧\u0301ʼªᵃǅ▁"  # noqa: RUF001


@pytest.fixture(scope="module")
def library() -> sentencepiece.SentencePieceProcessor:
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(resolve("mistral-7b", VOCABULARIES)))
    except CheckpointError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no vocabulary: {error}")


def as_gguf(library: sentencepiece.SentencePieceProcessor) -> GgufMetadata:
    ids = range(library.vocab_size())

    def kind(token_id: int) -> int:
        kinds = {CONTROL: library.is_control, UNKNOWN: library.is_unknown, BYTE: library.is_byte, UNUSED: library.is_unused}
        return next((kind for kind, is_one in kinds.items() if is_one(token_id)), NORMAL)

    values = {
        "model": "llama",
        "tokens": [library.id_to_piece(i) for i in ids],
        "scores": np.array([library.get_score(i) for i in ids]),
        "token_type": np.array([kind(i) for i in ids]),
        "bos_token_id": library.bos_id(),
        "eos_token_id": library.eos_id(),
        "unknown_token_id": library.unk_id(),
    }
    return GgufMetadata(Path("m.gguf"), {f"tokenizer.ggml.{key}": value for key, value in values.items()})


@pytest.mark.slow
def test_ids_and_text_are_the_library_s(library: sentencepiece.SentencePieceProcessor, shared: Path) -> None:
    files = tokenizer_from_metadata(as_gguf(library))
    assert files is not None
    ours = build_tokenizer(files)
    rng = random.Random(0)
    texts = json.loads((shared / "data" / "fuzz" / "blns.json").read_text(encoding="utf-8"))
    texts += (shared / "data" / "text" / "wikitext-2_test.txt").read_text(encoding="utf-8").split("\n")[:1000]
    texts += ["".join(rng.choices(ODD, k=rng.randint(1, 40))) for _ in range(5000)]
    for text in texts:
        ids = library.encode(text)
        assert ours.encode_plain(text) == ids, text
        assert ours.decode(ids) == library.decode(ids), text
