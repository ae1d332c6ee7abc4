"""Makes `tokenizer_ids.json`: ids that `transformers` gives. Run by hand; README.md says how.

For texts of our own, from small SentencePiece models, the ids themselves; for the Big List of Naughty Strings, which is kept
elsewhere, from vocabularies of real models, a checksum of each string's ids.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, LlamaTokenizer

HERE = Path(__file__).parent
MODELS = HERE.parent / "checkpoints" / "sentencepieces"

TEXTS = [
    *("", "the engine plans steps", " the", "  the", "the  engine ", "engineengines", "<tool>the", "the<tool> engine"),
    *("naïve Straße 😀 é", "42 1999 3", "a\nb\n\nc\n\n\n\td", "   \n   x", "<turn>the<turn>\n", "</s>the", "the</s> engine"),
    *("the<|end|> engine", "the <|end|>\n\n engine", "the <call>engine", "<unk>", "zzzqqq", "the the the"),
]
ADDED = {
    "340": {"content": "<|end|>", "special": True, "rstrip": True, "lstrip": True, "normalized": False, "single_word": False},
    "341": {
        "content": "<call>",
        "special": False,
        "rstrip": False,
        "lstrip": False,
        "normalized": False,
        "single_word": False,
    },
}
# Name to the model and its settings.
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with one space": ("llama", {"legacy": False, "tokenizer_class": "LlamaTokenizer"}),
    "llama with added tokens": ("llama", {"added_tokens_decoder": ADDED}),
    "gemma": ("gemma", {}),
    "unigram": ("unigram", {}),
    "unigram-bytes": ("unigram-bytes", {}),
}
# Before such a text `LlamaTokenizer` puts no space, where SentencePiece, llama.cpp and other classes of `transformers` do.
UNLIKE_SENTENCEPIECE = (" ", "engine", "<tool>")


def load(folder: Path, model: str, settings: dict[str, Any]) -> Any:
    shutil.copy(MODELS / f"{model}.model", folder / "tokenizer.model")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    loader = LlamaTokenizer if "tokenizer_class" in settings else AutoTokenizer
    return loader.from_pretrained(folder)


def deviates(tokenizer: Any, text: str) -> bool:
    first_only = getattr(tokenizer.backend_tokenizer.pre_tokenizer, "prepend_scheme", None) == "first"
    return first_only and text.startswith(UNLIKE_SENTENCEPIECE)


def small() -> dict[str, Any]:
    found = {}
    for name, (model, settings) in SMALL.items():
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = load(Path(folder), model, settings)
        ids = [None if deviates(tokenizer, text) else tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
        found[name] = {"model": model, "settings": settings, "ids": ids}
    return found


def checksum(ids: list[int]) -> int:
    return zlib.crc32(",".join(map(str, ids)).encode())


def real(path: Path, strings: list[str]) -> list[int | None]:
    with tempfile.TemporaryDirectory() as folder:
        if path.suffix == ".gguf":
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        else:
            name = "tekken.json" if path.suffix == ".json" else "tokenizer.model"
            shutil.copy(path, Path(folder) / name)
            tokenizer = AutoTokenizer.from_pretrained(folder)
    return [
        None if deviates(tokenizer, text) else checksum(tokenizer.encode(text, add_special_tokens=False)) for text in strings
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("strings", type=Path, help="blns.json")
    parser.add_argument("vocabularies", type=Path, nargs="*", metavar="NAME=PATH", help="as `test_tokenizer_ids` names them")
    parser.add_argument("--output", type=Path, default=HERE / "tokenizer_ids.json")
    args = parser.parse_args()
    strings = json.loads(args.strings.read_text())
    named = (str(argument).partition("=") for argument in args.vocabularies)
    reference = {
        "texts": TEXTS,
        "small": small(),
        "naughty": {name: real(Path(path), strings) for name, _, path in named},
    }
    args.output.write_text(json.dumps(reference, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
