"""Trains the small SentencePiece models of this folder: `python -m tests.checkpoints.sentencepieces.make`.

Each differs from the others in what an encoder has to get right: the algorithm, bytes for what is unknown, a space before the
text, pieces that are user-defined, and normalisation.
"""

from __future__ import annotations

import io
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece

FOLDER = Path(__file__).parent
TEXT = """the a serving engine plans steps and commits them while pages of keys wait in one pool
naïve café Straße 42 1999"""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["<tool>", "engine"],
    },
    "gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<turn>", "\n", "\n\n", "\u2581\u2581", "\u2581\u2581\u2581", "\t"],
        "bos_piece": "<bos>",
        "eos_piece": "<eos>",
    },
    "unigram": {"model_type": "unigram", "control_symbols": ["<sep>"], "normalization_rule_tsv": "rules.tsv"},
    "unigram-bytes": {
        "model_type": "unigram",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
}


# What becomes what, in hexadecimal: the library's own rules take 200 kB.
RULES = {"\uff21": "A", "\ufb01": "fi", "\u00bd": "1/2", "\u3000": " ", "e\u0301": "\u00e9"}


def write_rules(path: Path) -> None:
    def spelled(text: str) -> str:
        return " ".join(f"{ord(character):X}" for character in text)

    path.write_text("".join(f"{spelled(source)}\t{spelled(target)}\n" for source, target in RULES.items()))


def sentences() -> list[str]:
    rng = random.Random(0)
    words = TEXT.split()
    return [" ".join(rng.choices(words, k=rng.randint(3, 12))) + rng.choice(".!?") for _ in range(400)]


def main() -> None:
    """Write `NAME.model` for each."""
    os.chdir(tempfile.mkdtemp())
    write_rules(Path("rules.tsv"))
    for name, options in MODELS.items():
        written = io.BytesIO()
        size = 340 if options.get("byte_fallback") else 90
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences()), model_writer=written, vocab_size=size, hard_vocab_limit=False, **options
        )
        (FOLDER / f"{name}.model").write_bytes(written.getvalue())


if __name__ == "__main__":
    main()
