"""The serialised form of a SentencePiece model: what loading needs to know of one, changing pieces' kinds, and writing one.

Owns the few fields of SentencePiece's `sentencepiece_model.proto` that matter here, in the wire format of protocol buffers.
Encodes no text, which is the library's business.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from checkpoints.checkpoint import AddedToken, CheckpointError, TokenizerFiles

# Kinds of pieces; GGUF's tokenizer.ggml.token_type has the same numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"
"""What SentencePiece writes for a space."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
# Fields of ModelProto, of a piece, of TrainerSpec and of NormalizerSpec.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE, _KIND = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK, _SUFFIX = 3, 35, 24
_UNK_ID, _BOS_ID, _EOS_ID, _PAD_ID = 40, 41, 42, 43
_UNK_PIECE, _BOS_PIECE, _EOS_PIECE = 45, 46, 47
_NAME, _CHARSMAP, _DUMMY_PREFIX, _EXTRA_SPACES, _ESCAPE_SPACES = 1, 2, 3, 4, 5
_BPE = 2

Value = int | bytes


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What a model says of itself.

    Attributes:
        bos_token, eos_token: None where it has none.
        keeps_characters: nothing is normalised but spaces that become marks.
        dummy_prefix: a space goes before every text.
        marks_suffix: words end with the mark of a space, and do not begin with it.
    """

    bos_token: str | None
    eos_token: str | None
    keeps_characters: bool
    dummy_prefix: bool
    marks_suffix: bool


def read_sentencepiece(model: bytes, added_tokens: tuple[AddedToken, ...], *, prefix_each: bool, where: str) -> TokenizerFiles:
    """A serialised model as tokenizer files: as such models' tokenizers do, prompts begin with BOS.

    Raises:
        CheckpointError: the bytes are no SentencePiece model, or one that marks spaces as no language model's does.
    """
    try:
        settings = read_settings(model)
        pieces = _read_pieces(model, {token.token_id for token in added_tokens})
        added_tokens = tuple(token for token in added_tokens if not _is_model_s_own(token, pieces, settings))
        model = _hide_pieces(model, [pieces[token.token_id] for token in added_tokens if token.token_id in pieces])
    except (ValueError, IndexError) as error:
        raise CheckpointError(f"{where}: not a SentencePiece model: {error}") from error
    if settings.marks_suffix:
        raise CheckpointError(f"{where}: treat_whitespace_as_suffix is not supported")
    return TokenizerFiles(
        sentencepiece=model,
        added_tokens=added_tokens,
        prefix_each=prefix_each,
        bos_token=settings.bos_token,
        eos_token=settings.eos_token,
        add_bos=settings.bos_token is not None,
    )


def _is_model_s_own(token: AddedToken, pieces: Mapping[int, _Piece], settings: ModelSettings) -> bool:
    """Whether the model finds this token itself, as it was trained to: as raw text, marks of spaces would never be found."""
    piece = pieces.get(token.token_id)
    if piece is None or piece.text != token.content or token.special or token.lstrip or token.rstrip:
        return False
    return SPACE in piece.text or (piece.kind == USER_DEFINED and not settings.dummy_prefix)


def read_settings(model: bytes) -> ModelSettings:
    """Read a serialised model's settings.

    Raises:
        ValueError: the bytes are no SentencePiece model.
    """
    rest = max((end for _, end in _piece_spans(model)), default=0)
    if not rest:
        raise ValueError("it has no pieces")
    parts = list(_fields(model, rest))
    trainer, normalizer = _merged(parts, _TRAINER), _merged(parts, _NORMALIZER)
    keeps = not normalizer.get(_CHARSMAP) and not normalizer.get(_EXTRA_SPACES, 1) and bool(normalizer.get(_ESCAPE_SPACES, 1))
    return ModelSettings(
        bos_token=_token(trainer, _BOS_ID, 1, _BOS_PIECE, b"<s>"),
        eos_token=_token(trainer, _EOS_ID, 2, _EOS_PIECE, b"</s>"),
        keeps_characters=keeps,
        dummy_prefix=bool(normalizer.get(_DUMMY_PREFIX, 1)),
        marks_suffix=bool(trainer.get(_SUFFIX, 0)),
    )


def _token(trainer: dict[int, Value], id_field: int, default_id: int, field: int, default: bytes) -> str | None:
    token_id, piece = trainer.get(id_field, default_id), trainer.get(field, default)
    if not isinstance(token_id, int):
        raise ValueError(f"{default!r} has no id")
    # -1, which the wire has as an unsigned number of 64 bits, is none.
    return piece.decode() if isinstance(piece, bytes) and 0 <= token_id < 1 << 31 else None


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece, and where its field is in the serialised model."""

    text: str
    kind: int
    start: int
    end: int


def _read_pieces(model: bytes, token_ids: Collection[int]) -> dict[int, _Piece]:
    """These pieces, as far as the model has them."""
    pieces: dict[int, _Piece] = {}
    for token_id, (start, end) in enumerate(_piece_spans(model) if token_ids else ()):
        if token_id in token_ids:
            _, value, _ = next(_fields(model[start:end]))
            fields = {number: found for number, found, _ in _fields(value)} if isinstance(value, bytes) else {}
            text, kind = fields.get(_PIECE, b""), fields.get(_KIND, NORMAL)
            if not isinstance(text, bytes) or not isinstance(kind, int):
                raise ValueError(f"piece {token_id} is no text and kind")
            pieces[token_id] = _Piece(text.decode(), kind, start, end)
    return pieces


def _hide_pieces(model: bytes, pieces: list[_Piece]) -> bytes:
    """The model with these pieces as control symbols, so that no text is encoded as one; unknown and byte pieces stay."""
    parts, position = [], 0
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if piece.kind not in (NORMAL, USER_DEFINED, UNUSED):
            continue
        parts += [model[position : piece.start], _bytes_field(_PIECES, _serialised(piece.text.encode(), bytes(4), CONTROL))]
        position = piece.end
    return b"".join([*parts, model[position:]])


def build_bpe_model(
    pieces: Sequence[str],
    scores: Sequence[float] | np.ndarray,
    kinds: Sequence[int],
    *,
    unknown_id: int,
    bos_id: int | None,
    eos_id: int | None,
    dummy_prefix: bool,
) -> bytes:
    """A BPE model that falls back to bytes, and changes nothing of a text but spaces, which it marks.

    Args:
        dummy_prefix: a space goes before every text.
    """
    with np.errstate(over="ignore"):
        packed = np.asarray(scores).astype("<f4").tobytes()
    written = [
        _piece_field(piece.encode(), packed[4 * token_id : 4 * token_id + 4], kind)
        for token_id, (piece, kind) in enumerate(zip(pieces, kinds, strict=True))
    ]
    trainer = [
        _varint_field(_MODEL_TYPE, _BPE),
        _varint_field(_BYTE_FALLBACK, 1),
        *_named(_UNK_ID, _UNK_PIECE, unknown_id, pieces),
        *_named(_BOS_ID, _BOS_PIECE, bos_id, pieces),
        *_named(_EOS_ID, _EOS_PIECE, eos_id, pieces),
        *_named(_PAD_ID, 0, None, pieces),
    ]
    normalizer = [
        _bytes_field(_NAME, b"identity"),
        _varint_field(_DUMMY_PREFIX, int(dummy_prefix)),
        _varint_field(_EXTRA_SPACES, 0),
        _varint_field(_ESCAPE_SPACES, 1),
    ]
    return b"".join([*written, _bytes_field(_TRAINER, b"".join(trainer)), _bytes_field(_NORMALIZER, b"".join(normalizer))])


def _piece_field(text: bytes, score: bytes, kind: int) -> bytes:
    if len(text) < 0x78:
        # There are hundreds of thousands, and nearly all are so short that every length is one byte.
        return b"\x0a%c\x0a%c%b\x15%b\x18%c" % (len(text) + 9, len(text), text, score, kind)
    return _bytes_field(_PIECES, _serialised(text, score, kind))


def _serialised(text: bytes, score: bytes, kind: int) -> bytes:
    return _bytes_field(_PIECE, text) + _varint(_SCORE << 3 | _FIXED32) + score + _varint_field(_KIND, kind)


def _named(id_field: int, piece_field: int, token_id: int | None, pieces: Sequence[str]) -> list[bytes]:
    if token_id is None:
        return [_varint_field(id_field, (1 << 64) - 1)]
    return [_varint_field(id_field, token_id), _bytes_field(piece_field, pieces[token_id].encode())]


def _merged(parts: list[tuple[int, Value, bytes]], number: int) -> dict[int, Value]:
    """The last value of each field of a message, which may come in several parts."""
    whole = b"".join(value for field, value, _ in parts if field == number and isinstance(value, bytes))
    return {field: value for field, value, _ in _fields(whole)}


def _piece_spans(model: bytes) -> Iterator[tuple[int, int]]:
    """Where each piece's field begins and ends; a model begins with them, and they are too many to read them all."""
    position, size = 0, len(model)
    while position + 1 < size and model[position] == _PIECES << 3 | _LENGTH:
        start, length = position, model[position + 1]
        position += 2
        if length & 0x80:
            length, position = _read_varint(model, start + 1)
        position += length
        yield start, position


def _fields(message: bytes, start: int = 0) -> Iterator[tuple[int, Value, bytes]]:
    """Number, value and whole bytes of every field."""
    size = len(message)
    if start > size:
        raise ValueError("it ends within a piece")
    while start < size:
        tag, position = _read_varint(message, start)
        kind, value = tag & 7, 0
        end = position
        if kind == _VARINT:
            value, end = _read_varint(message, position)
        elif kind == _LENGTH:
            length, position = _read_varint(message, position)
            end = position + length
        elif kind in (_FIXED32, _FIXED64):
            end = position + (4 if kind == _FIXED32 else 8)
        else:
            raise ValueError(f"a field of type {kind} at byte {start}")
        if end > size:
            raise ValueError(f"it ends within the field at byte {start}")
        yield tag >> 3, value if kind == _VARINT else message[position:end], message[start:end]
        start = end


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(message) and shift < 70:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError(f"no number at byte {position}")


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _LENGTH) + _varint(len(value)) + value
