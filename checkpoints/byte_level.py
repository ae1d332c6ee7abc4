"""Byte-level BPE vocabularies as `tokenizer.json`, and the pre-tokenisers that their models were trained with.

Owns the names that GGUF has for pre-tokenisers, as far as each can be reproduced exactly. Builds text only: no tokenizer
library is imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from checkpoints.checkpoint import AddedToken

PreTokenizer = Mapping[str, Any]


def _byte_level(*, split: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split}


def after_splits(*patterns: str) -> PreTokenizer:
    """A pre-tokeniser that cuts a text by these expressions, one after the other."""
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} for pattern in patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, _byte_level(split=False)]}


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(numbers: str) -> str:
    """The expression that Llama 3 and Qwen 2 share, but for how many digits go together."""
    return _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + numbers + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES


def _cased_words(contractions: str, numbers: str) -> str:
    """The expression that GPT-4o, Llama 4 and Mistral's Tekken share: words also end where capitals begin."""
    upper, lower = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}[{upper}]*[{lower}]+{contractions}|{before}[{upper}]+[{lower}]*{contractions}"
    return words + "|" + numbers + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES


# Letters that have a case in the scripts and blocks that DeepSeek's first vocabulary knows: these it does not.
_UNKNOWN_CASED = (
    "[\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\uab68\U00010570-\U000105bc\U00010d50-\U00010d85"
    "\U00016e40-\U00016eff\U0001d400-\U0001d7cb\U0001df00-\U0001df2a]"
)
_CASED_LETTER = rf"(?:(?!{_UNKNOWN_CASED})[\p{{Lu}}\p{{Ll}}\p{{Lt}}])"
_ASCII_AND_WIDE_MARKS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
_UP_TO_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"

GPT2 = _byte_level(split=True)
LLAMA3 = after_splits(_words(r"\p{N}{1,3}"))
QWEN2 = after_splits(_words(r"\p{N}"))
QWEN35 = after_splits(_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES)
SEED_CODER = after_splits(_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES)
TEKKEN = after_splits(_cased_words("", r"\p{N}"))
GPT4O = after_splits(_cased_words(_CONTRACTIONS + "?", r"\p{N}{1,3}"))
DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2]}
DEEPSEEK_LLM = after_splits(
    "[\r\n]", rf"\s?{_CASED_LETTER}+", rf"\s?{_ASCII_AND_WIDE_MARKS}+", r"\s+$", _UP_TO_HAN_AND_HANGUL, r"\p{N}+"
)
DEEPSEEK_CODER = after_splits("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _UP_TO_HAN_AND_HANGUL, r"\p{N}")
DEEPSEEK_V3 = after_splits(
    r"\p{N}{1,3}",
    _HAN_AND_KANA,
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)

# tokenizer.ggml.pre to pre-tokeniser.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "trillion", "granite-docling", "mellum", "a.x-4.0"), GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "dbrx", "smaug-bpe"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "stablelm2"), QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), GPT4O),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b", "mellum2"), DIGITS),
    "tekken": TEKKEN,
    "qwen35": QWEN35,
    "seed-coder": SEED_CODER,
    "deepseek-llm": DEEPSEEK_LLM,
    "deepseek-coder": DEEPSEEK_CODER,
    "deepseek-v3": DEEPSEEK_V3,
}
NFC = {"qwen2", "deepseek-r1-qwen", "qwen35"}
_LLAMA3_NAMES = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"}
# Vocabularies made from tiktoken ranks: a piece that is a token is one, whether or not merges lead to it.
IGNORE_MERGES = _LLAMA3_NAMES | {"llama4", "gpt-4o", "tekken"}
ADD_BOS = _LLAMA3_NAMES | {"llama4", "tekken"}


def byte_level_json(
    vocabulary: Mapping[str, int],
    merges: Sequence[str],
    pre_tokenizer: PreTokenizer,
    added: Iterable[AddedToken],
    *,
    nfc: bool = False,
    ignore_merges: bool = False,
) -> str:
    """The text of a `tokenizer.json`.

    Args:
        vocabulary: tokens in byte-level characters, added ones as they are.
        merges: pairs with a space between them, the first to be done first.
        nfc: text is composed (NFC) before anything else.
        ignore_merges: a piece that is a token is one, whether or not merges lead to it.
    """
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(map(_added_entry, added)),
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": pre_tokenizer,
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
            "ignore_merges": ignore_merges,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    return json.dumps(spec, ensure_ascii=False)


def _added_entry(token: AddedToken) -> dict[str, Any]:
    return {
        "id": token.token_id,
        "content": token.content,
        "single_word": False,
        "lstrip": token.lstrip,
        "rstrip": token.rstrip,
        "normalized": False,
        "special": token.special,
    }
