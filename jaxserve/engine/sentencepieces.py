"""Encoding with a SentencePiece model, by SentencePiece itself, around tokens that are found in the text before it.

A conversion to merges, as others do it, gives other ids where two pieces score alike, spaces run long or a piece is
user-defined, and takes a hundred times as long to load. Owns the models' pieces as bytes, and added tokens. Where
`SecretNames` has special tokens under other names, it is by those that a text spells them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import sentencepiece

from jaxserve.engine.alternatives import any_of
from jaxserve.engine.secret_names import SecretNames
from jaxserve.engine.vocab import Vocabulary

MARK = "\u2581"
"""What SentencePiece writes for a space."""

# Characters of Unicode's White_Space, which is less than `str.isspace` takes for it.
WHITE_SPACE = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
)

# Added to the end of a serialised model, in which later fields win: normalizer_spec { add_dummy_prefix: false }.
_NO_DUMMY_PREFIX = bytes([0x1A, 2, 0x18, 0])


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A token that is found in the text as it is, before the model sees the rest.

    Attributes:
        content: what text it stands for, whatever the model's piece of that id.
        special: a control token, which is not text.
        lstrip, rstrip: white space before, or after it belongs to it.
    """

    token_id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieceSource:
    """A SentencePiece model, and what a model directory adds to it.

    Attributes:
        model: serialised; pieces that `added_tokens` are about are control symbols there.
        prefix_each: where the model puts a space before a text, it does so after every added token, and not only at the very
            beginning.
        keeps_characters: the model normalises nothing but spaces that become marks.
    """

    model: bytes
    added_tokens: tuple[AddedToken, ...] = ()
    prefix_each: bool = True
    keeps_characters: bool = False


class SentencePieceEncoder:
    """See `encoders.Encoder`.

    Raises:
        RuntimeError: SentencePiece cannot use the model.
    """

    def __init__(self, source: SentencePieceSource) -> None:
        self._first = sentencepiece.SentencePieceProcessor(model_proto=source.model)
        prefixes = self._first.normalize("a") == MARK + "a"
        self._later = self._first
        if prefixes and not source.prefix_each:
            self._later = sentencepiece.SentencePieceProcessor(model_proto=source.model + _NO_DUMMY_PREFIX)
        self.vocabulary, self._names_of = _read_pieces(self._first, source, strips_leading_space=prefixes)
        special = [name for name, is_special in zip(self._names_of, self.vocabulary.special, strict=True) if is_special]
        self.names = SecretNames(special)
        self._ids = {self.names.secret(name): token_id for token_id, name in enumerate(self._names_of) if name}
        self._added = _added_by_text(source, self.names)
        plain = any_of(token.content for token in source.added_tokens if not token.special)
        self._find = re.compile(f"{self.names.pattern}|{plain}")

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, special tokens in it under their secret names.

        Raises:
            UnicodeEncodeError: it holds half of a surrogate pair.
        """
        text.encode()  # or the library's error says nothing
        ids: list[int] = []
        start, strip = 0, False
        for match in self._find.finditer(text):
            token = self._token(match[0])
            if token is None:
                continue
            ids += self._encode_between(text, start, match.start(), lstrip=strip, rstrip=token.lstrip)
            ids.append(token.token_id)
            start, strip = match.end(), token.rstrip
        return ids + self._encode_between(text, start, len(text), lstrip=strip, rstrip=False)

    def _token(self, text: str) -> AddedToken | None:
        if (token := self._added.get(text)) is not None:
            return token
        token_id = self._ids.get(text)
        return None if token_id is None else AddedToken(token_id=token_id, content=text)

    def _encode_between(self, text: str, start: int, end: int, *, lstrip: bool, rstrip: bool) -> list[int]:
        part = text[start:end]
        if lstrip:
            part = part.lstrip(WHITE_SPACE)
        if rstrip:
            part = part.rstrip(WHITE_SPACE)
        if not part:
            return []
        ids: list[int] = (self._later if start else self._first).encode(part)
        return ids

    def id_of(self, name: str) -> int | None:
        return self._ids.get(self.names.secret(name))

    def name_of(self, token_id: int) -> str | None:
        return self._names_of[token_id] or None if 0 <= token_id < len(self._names_of) else None


def _added_by_text(source: SentencePieceSource, names: SecretNames) -> dict[str, AddedToken]:
    return {names.secret(token.content) if token.special else token.content: token for token in source.added_tokens}


def _read_pieces(
    model: sentencepiece.SentencePieceProcessor, source: SentencePieceSource, *, strips_leading_space: bool
) -> tuple[Vocabulary, list[str]]:
    added = {token.token_id: token for token in source.added_tokens}
    size = max([model.vocab_size(), *(token_id + 1 for token_id in added)])
    names: list[str] = model.id_to_piece(list(range(model.vocab_size())))
    names += [""] * (size - len(names))
    special = [model.is_control(token_id) for token_id in range(model.vocab_size())]
    special[model.unk_id()] = True
    special += [False] * (size - len(special))
    token_bytes = [
        (name if is_special else name.replace(MARK, " ")).encode() for name, is_special in zip(names, special, strict=True)
    ]
    looks_like_byte = [token_id for token_id, name in enumerate(names) if name.startswith("<0x") and len(name) == 6]
    bytes_of = {token_id: bytes([int(names[token_id][3:5], 16)]) for token_id in looks_like_byte if model.is_byte(token_id)}
    for token_id, byte in bytes_of.items():
        token_bytes[token_id] = byte
    for token_id, token in added.items():
        names[token_id], special[token_id] = token.content, token.special
        token_bytes[token_id] = token.content.encode()
    strips = any(token.lstrip or token.rstrip for token in source.added_tokens)
    vocabulary = Vocabulary(
        token_bytes=tuple(token_bytes),
        special=tuple(special),
        strips_leading_space=strips_leading_space,
        max_shrink=int(len(bytes_of) == 256 and source.keeps_characters and not strips),
    )
    return vocabulary, names
