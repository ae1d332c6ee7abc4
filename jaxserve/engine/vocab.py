"""The bytes that each token id stands for, read from a `tokenizer.json`.

Owns the meaning of the decoders that language models use: byte-level BPE, and sentencepiece's word-boundary marks with
byte fallback. In both the text of a sequence is the concatenation of its tokens' bytes, decoded as UTF-8, so streaming
needs a table and no decoder. Knows neither encoding nor special tokens' roles.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import ModelLoadError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Bytes of every token.

    Attributes:
        token_bytes: by id; empty where no token has the id.
        special: for each id, whether it is a control token, which is not text.
        strips_leading_space: whether encoding puts one space before a text that decoding takes away again.
        max_shrink: what the characters of a text may be to those that its tokens stand for: 1 where encoding loses none of
            them, more where it composes some; 0 where nothing is promised, such as where one unknown token may stand for many.
    """

    token_bytes: tuple[bytes, ...]
    special: tuple[bool, ...]
    strips_leading_space: bool
    max_shrink: int


def byte_level_characters() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def read_vocabulary(spec: Mapping[str, Any]) -> Vocabulary:
    """Build the table from a parsed `tokenizer.json`.

    Raises:
        ModelLoadError: the decoder is missing, or is one whose text is not the sum of its tokens' bytes.
    """
    steps = list(_decoder_steps(spec.get("decoder")))
    tokens = dict(_model_tokens(spec["model"]))
    added = {entry["id"]: entry for entry in spec.get("added_tokens") or ()}
    size = 1 + max([*tokens, *added], default=-1)
    token_bytes = [b""] * size
    special = [False] * size
    to_bytes = _byte_level_bytes if any(step["type"] == "ByteLevel" for step in steps) else _marked_bytes(steps)
    for token_id, token in tokens.items():
        token_bytes[token_id] = to_bytes(token)
    for token_id, entry in added.items():
        special[token_id] = entry["special"]
        # Special and byte-level added tokens are matched against raw text, so they stand for themselves.
        verbatim = entry["special"] or to_bytes is _byte_level_bytes
        token_bytes[token_id] = entry["content"].encode() if verbatim else to_bytes(entry["content"])
    return Vocabulary(
        token_bytes=tuple(token_bytes),
        special=tuple(special),
        strips_leading_space=any(map(_strips_leading_space, steps)),
        max_shrink=_max_shrink(spec, added.values(), byte_level=to_bytes is _byte_level_bytes),
    )


def _model_tokens(model: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    vocab = model["vocab"]
    if isinstance(vocab, Mapping):
        return ((token_id, token) for token, token_id in vocab.items())
    return ((token_id, piece) for token_id, (piece, _) in enumerate(vocab))


def _decoder_steps(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        raise ModelLoadError("tokenizer: it has no decoder, so what its tokens mean as text is unknown")
    kind = decoder["type"]
    if kind == "Sequence":
        for step in decoder["decoders"]:
            yield from _decoder_steps(step)
        return
    known = (
        kind in ("ByteLevel", "ByteFallback", "Fuse", "Metaspace")
        or (kind == "Replace" and "String" in decoder["pattern"])
        or (kind == "Strip" and decoder["content"] == " " and decoder["start"] <= 1 and decoder["stop"] == 0)
    )
    if not known:
        raise ModelLoadError(
            f"tokenizer: decoder {dict(decoder)!r} is not supported; known: ByteLevel, Metaspace, Replace of a string, "
            "ByteFallback, Fuse, Strip of one leading space"
        )
    yield decoder


def _strips_leading_space(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
    return step["type"] == "Strip" and step["start"] == 1


MAX_COMPOSED = 4
"""Characters that NFC may compose to one: no canonical decomposition is longer."""


def _max_shrink(spec: Mapping[str, Any], added: Iterable[Mapping[str, Any]], *, byte_level: bool) -> int:
    whole = byte_level or _has_every_byte(spec["model"])
    if not whole or any(map(_eats_spaces, added)):
        return 0
    return math.prod(map(_shrink_of, _normalizer_steps(spec.get("normalizer"))))


def _has_every_byte(model: Mapping[str, Any]) -> bool:
    """Whether what no token stands for is spelled in bytes, so that it never becomes one unknown token."""
    tokens = {token for _, token in _model_tokens(model)}
    return bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in tokens for byte in range(256))


def _normalizer_steps(normalizer: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if normalizer is not None and normalizer["type"] == "Sequence":
        for step in normalizer["normalizers"]:
            yield from _normalizer_steps(step)
    elif normalizer is not None:
        yield normalizer


def _shrink_of(step: Mapping[str, Any]) -> int:
    if step["type"] == "NFC":
        return MAX_COMPOSED
    replaces_one = step["type"] == "Replace" and len(step["pattern"].get("String", "")) == 1 and step["content"]
    return 1 if step["type"] == "Prepend" or replaces_one else 0


def _eats_spaces(added: Mapping[str, Any]) -> bool:
    return bool(added.get("lstrip") or added.get("rstrip"))


_BYTE_OF = byte_level_characters()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _marked_bytes(steps: list[Mapping[str, Any]]) -> Any:
    replacements = [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
    replacements += [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
    byte_fallback = any(step["type"] == "ByteFallback" for step in steps)

    def to_bytes(token: str) -> bytes:
        if byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for mark, text in replacements:
            token = token.replace(mark, text)
        return token.encode()

    return to_bytes
