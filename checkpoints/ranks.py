"""Vocabularies kept as ranks, as `tiktoken` reads them: files of Llama 3, Qwen and OpenAI, and Mistral's Tekken.

Owns which expression cuts text for which vocabulary, and the names of special tokens where a file of ranks comes alone.
Merges are made of ranks as `transformers` makes them, so ids are its ids.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checkpoints.byte_level import GPT2, GPT4O, LLAMA3, QWEN2, PreTokenizer, after_splits, byte_level_json
from checkpoints.checkpoint import AddedToken, CheckpointError, TokenizerFiles

logger = logging.getLogger(__name__)

Ranks = Mapping[bytes, int]

MAX_SPECIAL = 100_000
MAX_TOKEN_BYTES = 4096
"""Of a rank's token, all halves of which are looked up."""

_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\s*(\n|$)")

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
# GPT-2's table: the printable character that stands for each byte.
CHARACTER_OF = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRanks:
    """A published vocabulary, recognised by how many ranks it has.

    Attributes:
        special: names of the tokens after the ranks, for where nothing else says them.
        nfc: text is composed (NFC) first.
        add_bos: prompts begin with `bos`.
    """

    pre_tokenizer: PreTokenizer
    special: Sequence[str] = ()
    nfc: bool = False
    bos: str | None = None
    eos: str | None = None
    add_bos: bool = False


def _llama3_special() -> list[str]:
    """As Llama 3.1 names them; its chat tokens are those of 3.0."""
    named = {0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id", 7: "end_header_id"}
    named |= {8: "eom_id", 9: "eot_id", 10: "python_tag"}
    reserved = itertools.count()
    return [f"<|{named[i] if i in named else f'reserved_special_token_{next(reserved)}'}|>" for i in range(256)]


QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))]

KNOWN: dict[int, KnownRanks] = {
    128_000: KnownRanks(
        pre_tokenizer=LLAMA3, special=_llama3_special(), bos="<|begin_of_text|>", eos="<|end_of_text|>", add_bos=True
    ),
    151_643: KnownRanks(pre_tokenizer=QWEN2, special=QWEN_SPECIAL, nfc=True, eos="<|endoftext|>"),
    50_256: KnownRanks(pre_tokenizer=GPT2, special=["<|endoftext|>"], eos="<|endoftext|>"),
    100_256: KnownRanks(pre_tokenizer=LLAMA3),
    199_998: KnownRanks(pre_tokenizer=GPT4O),
}


def is_tiktoken(data: bytes) -> bool:
    """Whether these bytes are lines of a token in base 64 and its rank."""
    return _LINE.match(data) is not None


def read_tiktoken(data: bytes, added: Sequence[AddedToken], *, where: str) -> TokenizerFiles:
    """A file of ranks as tokenizer files.

    Args:
        added: tokens that the directory's settings name; none for the vocabulary's own.

    Raises:
        CheckpointError: a line is no token and rank.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise CheckpointError(f"{where}, line {number}: expected a token in base 64 and its rank: {error}") from error
    _check_lengths(ranks, where)
    known = KNOWN.get(len(ranks))
    if known is None:
        logger.warning("%s: a vocabulary of %d ranks is not known; text is cut as GPT-4 cuts it", where, len(ranks))
        known = KnownRanks(pre_tokenizer=LLAMA3)
    first = max(ranks.values(), default=-1) + 1
    special = added or [
        AddedToken(token_id=first + i, content=content, special=True) for i, content in enumerate(known.special)
    ]
    return TokenizerFiles(
        tokenizer_json=_json(ranks, special, known.pre_tokenizer, nfc=known.nfc),
        bos_token=known.bos,
        eos_token=known.eos,
        add_bos=known.add_bos,
    )


# Of Tekken files from before they list their special tokens.
TEKKEN_SPECIAL = [
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
]


def read_tekken(spec: Mapping[str, Any], *, where: str) -> TokenizerFiles:
    """Mistral's `tekken.json` as tokenizer files: special tokens come first, and ids of others after them.

    Raises:
        CheckpointError: a part of it is missing, or is something else.
    """
    try:
        config = spec["config"]
        listed = spec.get("special_tokens") or [{"rank": i, "token_str": name} for i, name in enumerate(TEKKEN_SPECIAL)]
        names = {int(entry["rank"]): str(entry["token_str"]) for entry in listed}
        num_special = int(config.get("default_num_special_tokens") or len(names))
        if not 0 <= num_special <= MAX_SPECIAL:
            raise ValueError(f"default_num_special_tokens is {num_special}, more than {MAX_SPECIAL}")
        special = [AddedToken(token_id=i, content=names.get(i, f"<SPECIAL_{i}>"), special=True) for i in range(num_special)]
        # Files hold more ranks than their models have ids for.
        num_ranks = int(config["default_vocab_size"]) - num_special if config.get("default_vocab_size") else None
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in spec["vocab"][:num_ranks]]
        pre_tokenizer = after_splits(str(config["pattern"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{where}: not a Tekken vocabulary: {type(error).__name__}: {error}") from error
    ranks = {token: num_special + rank for rank, token in enumerate(tokens)}
    _check_lengths(ranks, where)
    return TokenizerFiles(
        tokenizer_json=_json(ranks, special, pre_tokenizer, nfc=False), bos_token="<s>", eos_token="</s>", add_bos=True
    )


def _check_lengths(ranks: Ranks, where: str) -> None:
    longest = max(map(len, ranks), default=0)
    if longest > MAX_TOKEN_BYTES:
        raise CheckpointError(f"{where}: a token of {longest} bytes, where vocabularies have none of more than some hundreds")


def _json(ranks: Ranks, special: Sequence[AddedToken], pre_tokenizer: PreTokenizer, *, nfc: bool) -> str:
    names = {token: _spelled(token) for token in ranks}
    vocabulary = {names[token]: rank for token, rank in ranks.items()}
    # Or the library counts their ids on from the others.
    vocabulary |= {token.content: token.token_id for token in special}
    return byte_level_json(vocabulary, _merges(ranks, names), pre_tokenizer, special, nfc=nfc, ignore_merges=True)


def _merges(ranks: Ranks, names: Mapping[bytes, str]) -> list[str]:
    """Every two tokens that make a third, best rank first: what looking up the rank of two neighbours' bytes comes to."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(ranks[left], ranks[right], left, right) for left, right in halves if left in ranks and right in ranks]
        merges += [f"{names[left]} {names[right]}" for *_, left, right in sorted(pairs)]
    return merges


_CHARACTERS = str.maketrans({chr(byte): character for byte, character in CHARACTER_OF.items()})


def _spelled(token: bytes) -> str:
    return token.decode("latin-1").translate(_CHARACTERS)
