"""A GGUF file's tokenizer metadata, written as a Hugging Face `tokenizer.json`.

Owns the pre-tokenisers of the byte-level BPE vocabularies that it can reproduce exactly; others are refused by name. Builds
text only: no tokenizer library is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints.checkpoint import CheckpointError, TokenizerFiles

# Values of tokenizer.ggml.token_type.
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5


def _byte_level(*, split: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split}


def _after_split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(split=False)]}


def _words(numbers: str) -> str:
    """The expression that Llama 3 and Qwen 2 share, but for how many digits go together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + numbers + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )


GPT2 = _byte_level(split=True)
LLAMA3 = _after_split(_words(r"\p{N}{1,3}"))
QWEN2 = _after_split(_words(r"\p{N}"))
DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2]}

# tokenizer.ggml.pre to pre-tokeniser.
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": GPT2,
    "phi-2": GPT2,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
}
NFC = {"qwen2", "deepseek-r1-qwen"}
# Vocabularies made from tiktoken ranks: a piece that is a token is one, whether or not merges lead to it.
IGNORE_MERGES = {"llama-bpe", "llama3", "llama-v3"}
ADD_BOS = IGNORE_MERGES


def tokenizer_from_metadata(metadata: Mapping[str, Any], path: Path) -> TokenizerFiles | None:
    """Tokenizer files from GGUF metadata; None if the file has no tokenizer.

    Raises:
        CheckpointError: a kind of tokenizer that is not supported, or metadata that contradicts itself.
    """
    if "tokenizer.ggml.model" not in metadata:
        return None
    model = metadata["tokenizer.ggml.model"]
    if model != "gpt2":
        raise CheckpointError(f"{path}: tokenizer.ggml.model is {model!r}; supported: 'gpt2' (byte-level BPE)")
    # Files from before the key existed meant GPT-2's pre-tokeniser, which is wrong for most models made since.
    pre = metadata.get("tokenizer.ggml.pre", "missing")
    if pre not in PRE_TOKENIZERS:
        raise CheckpointError(f"{path}: tokenizer.ggml.pre is {pre!r}; supported: {', '.join(sorted(PRE_TOKENIZERS))}")
    tokens = _strings(metadata, "tokenizer.ggml.tokens", path)
    bos = token_text(metadata, "tokenizer.ggml.bos_token_id", tokens, path)
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", pre in ADD_BOS)) and bos is not None
    template = metadata.get("tokenizer.chat_template")
    return TokenizerFiles(
        tokenizer_json=json.dumps(_tokenizer_json(metadata, pre, tokens, path), ensure_ascii=False),
        chat_template=template if isinstance(template, str) else None,
        bos_token=bos,
        eos_token=token_text(metadata, "tokenizer.ggml.eos_token_id", tokens, path),
        add_bos=add_bos,
    )


def token_text(metadata: Mapping[str, Any], key: str, tokens: list[str], path: Path) -> str | None:
    """The text of the token whose id is under `key`; None if there is no such key."""
    token_id = metadata.get(key)
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise CheckpointError(f"{path}: {key} must be a token id below {len(tokens)}, found {token_id!r}")
    return tokens[token_id]


def _strings(metadata: Mapping[str, Any], key: str, path: Path) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list):
        raise CheckpointError(f"{path}: {key} must be a list of strings, found {'nothing' if values is None else values!r}")
    return values


def _tokenizer_json(metadata: Mapping[str, Any], pre: str, tokens: list[str], path: Path) -> dict[str, Any]:
    kinds = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", ())] or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{path}: {len(tokens)} tokens but {len(kinds)} entries in tokenizer.ggml.token_type")
    added = [
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for token_id, kind in enumerate(kinds)
        if kind in (CONTROL, USER_DEFINED)
    ]
    # Unused ids pad the embedding to a round size; as entries they could be produced from their placeholder text.
    vocabulary = {token: token_id for token_id, token in enumerate(tokens) if kinds[token_id] != UNUSED}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre in NFC else None,
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in IGNORE_MERGES,
            "vocab": vocabulary,
            "merges": _strings(metadata, "tokenizer.ggml.merges", path),
        },
    }
