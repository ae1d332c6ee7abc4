"""A GGUF file's tokenizer metadata as tokenizer files: a `tokenizer.json`, or a SentencePiece model.

Owns the pre-tokenisers of the byte-level BPE vocabularies that it can reproduce exactly; others are refused by name. Builds
text and bytes only: no tokenizer library is imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from checkpoints.checkpoint import AddedToken, TokenizerFiles
from checkpoints.gguf_metadata import GgufMetadata
from checkpoints.sentencepiece_model import CONTROL, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED, build_bpe_model


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


def _cased_words(contractions: str, numbers: str) -> str:
    """The expression that GPT-4o, Llama 4 and Mistral's Tekken share: words also end where capitals begin."""
    upper, lower = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}[{upper}]*[{lower}]+{contractions}|{before}[{upper}]+[{lower}]*{contractions}"
    return words + "|" + numbers + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


GPT2 = _byte_level(split=True)
LLAMA3 = _after_split(_words(r"\p{N}{1,3}"))
TEKKEN = _after_split(_cased_words("", r"\p{N}"))
GPT4O = _after_split(_cased_words(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}"))
QWEN2 = _after_split(_words(r"\p{N}"))
DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2]}

# tokenizer.ggml.pre to pre-tokeniser.
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": GPT2,
    "phi-2": GPT2,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "tekken": TEKKEN,
    "gpt-4o": GPT4O,
    "llama4": GPT4O,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
}
NFC = {"qwen2", "deepseek-r1-qwen"}
# Vocabularies made from tiktoken ranks: a piece that is a token is one, whether or not merges lead to it.
IGNORE_MERGES = {"llama-bpe", "llama3", "llama-v3", "llama4", "gpt-4o", "tekken"}
ADD_BOS = IGNORE_MERGES - {"gpt-4o"}


def tokenizer_from_metadata(metadata: GgufMetadata) -> TokenizerFiles | None:
    """Tokenizer files from GGUF metadata; None if the file has no tokenizer.

    Raises:
        CheckpointError: a kind of tokenizer that is not supported, or metadata that contradicts itself.
    """
    model = metadata.text("tokenizer.ggml.model")
    if model is None:
        return None
    if model not in MODELS:
        raise metadata.error("tokenizer.ggml.model", f"one of those supported: {', '.join(sorted(MODELS))}")
    read, adds_bos = MODELS[model]
    tokens = metadata.strings("tokenizer.ggml.tokens")
    bos = _token_text(metadata, "tokenizer.ggml.bos_token_id", tokens)
    add_bos = metadata.flag("tokenizer.ggml.add_bos_token")
    return replace(
        read(metadata, tokens),
        chat_template=metadata.text("tokenizer.chat_template"),
        tool_template=metadata.text("tokenizer.chat_template.tool_use"),
        bos_token=bos,
        eos_token=_token_text(metadata, "tokenizer.ggml.eos_token_id", tokens),
        add_bos=bos is not None and (adds_bos(metadata) if add_bos is None else add_bos),
    )


def _token_text(metadata: GgufMetadata, key: str, tokens: list[str]) -> str | None:
    token_id = metadata.index(key, len(tokens))
    return None if token_id is None else tokens[token_id]


def _byte_level_bpe(metadata: GgufMetadata, tokens: list[str]) -> TokenizerFiles:
    spec = _byte_level_spec(metadata, tokens)
    return TokenizerFiles(tokenizer_json=json.dumps(spec, ensure_ascii=False))


def _byte_level_spec(metadata: GgufMetadata, tokens: list[str]) -> dict[str, Any]:
    pre = _pre_tokenizer_name(metadata)
    kinds = _token_kinds(metadata, len(tokens))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, kinds, {CONTROL}, {USER_DEFINED}),
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
            "vocab": _vocabulary(tokens, kinds),
            "merges": metadata.strings("tokenizer.ggml.merges"),
        },
    }


def _pre_tokenizer_name(metadata: GgufMetadata) -> str:
    # Files from before the key existed meant GPT-2's pre-tokeniser, which is wrong for most models made since.
    pre = metadata.text("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise metadata.error("tokenizer.ggml.pre", f"one of those supported: {', '.join(sorted(PRE_TOKENIZERS))}")
    return pre


def _sentencepiece(metadata: GgufMetadata, tokens: list[str]) -> TokenizerFiles:
    """The SentencePiece model that the file was made from, as far as encoding goes."""
    scores = metadata.numbers("tokenizer.ggml.scores", len(tokens))
    if scores is None:
        raise metadata.error("tokenizer.ggml.scores", f"an array of {len(tokens)} numbers")
    kinds = _token_kinds(metadata, len(tokens))
    unknown = metadata.index("tokenizer.ggml.unknown_token_id", len(tokens))
    if unknown is None:
        unknown = kinds.index(UNKNOWN) if UNKNOWN in kinds else 0
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix") is not False
    added = _plain_tokens(metadata, tokens, kinds) if prefix else ()
    return TokenizerFiles(
        sentencepiece=build_bpe_model(
            _unique([token.replace(" ", SPACE) for token in tokens]),
            scores.tolist(),
            _piece_kinds(kinds, unknown, {token.token_id for token in added}),
            unknown_id=unknown,
            bos_id=metadata.index("tokenizer.ggml.bos_token_id", len(tokens)),
            eos_id=metadata.index("tokenizer.ggml.eos_token_id", len(tokens)),
            dummy_prefix=prefix,
        ),
        added_tokens=added,
    )


def _piece_kinds(kinds: list[int], unknown: int, hidden: set[int]) -> list[int]:
    """Kinds as the library wants them: one unknown piece, whose id may be marked as something else."""
    shown = [CONTROL if kind == UNKNOWN or token_id in hidden else kind for token_id, kind in enumerate(kinds)]
    shown[unknown] = UNKNOWN
    return shown


def _unique(pieces: list[str]) -> list[str]:
    """The pieces with names of their own for those that are empty or come again, which the library would refuse."""
    seen: set[str] = set()
    if len(set(pieces)) == len(pieces) and all(pieces):
        return pieces
    unique = []
    for token_id, piece in enumerate(pieces):
        name = f"<duplicate {token_id} {piece}>" if not piece or piece in seen else piece
        seen.add(name)
        unique.append(name)
    return unique


def _plain_tokens(metadata: GgufMetadata, tokens: list[str], kinds: list[int]) -> tuple[AddedToken, ...]:
    """User-defined tokens, after which a text begins anew, with a space before it."""
    return tuple(
        AddedToken(token_id=token_id, content=tokens[token_id]) for token_id, kind in enumerate(kinds) if kind == USER_DEFINED
    )


def _added_tokens(tokens: list[str], kinds: list[int], special: set[int], plain: set[int]) -> list[dict[str, Any]]:
    return [
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in special,
        }
        for token_id, kind in enumerate(kinds)
        if kind in special or kind in plain
    ]


def _vocabulary(tokens: list[str], kinds: list[int]) -> dict[str, int]:
    # Unused ids pad the embedding to a round size; as entries they could be produced from their placeholder text.
    return {token: token_id for token_id, token in enumerate(tokens) if kinds[token_id] != UNUSED}


def _token_kinds(metadata: GgufMetadata, length: int) -> list[int]:
    kinds = metadata.numbers("tokenizer.ggml.token_type", length)
    return [NORMAL] * length if kinds is None else kinds.tolist()


# tokenizer.ggml.model to what reads it, and whether a file that does not say so adds the first token.
MODELS: dict[str, tuple[Callable[[GgufMetadata, list[str]], TokenizerFiles], Callable[[GgufMetadata], bool]]] = {
    "gpt2": (_byte_level_bpe, lambda metadata: metadata.text("tokenizer.ggml.pre") in ADD_BOS),
    "llama": (_sentencepiece, lambda metadata: True),
}
