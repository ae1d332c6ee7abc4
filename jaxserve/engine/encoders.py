"""What turns text into ids: the `tokenizers` library for a `tokenizer.json`, SentencePiece for its own models.

Owns what `Tokenizer` needs of either. Special tokens have secret names in both, so only text that is meant to spells one.
"""

from __future__ import annotations

import json
from typing import Protocol

import tokenizers

from jaxserve.engine.secret_names import SecretNames
from jaxserve.engine.sentencepieces import SentencePieceEncoder, SentencePieceSource
from jaxserve.engine.vocab import Vocabulary, read_vocabulary
from jaxserve.errors import ModelLoadError

Source = str | SentencePieceSource
"""The text of a `tokenizer.json`, or a SentencePiece model."""


class Encoder(Protocol):
    """A vocabulary that encodes. Safe to use from any thread.

    Attributes:
        vocabulary: what each token is as bytes.
        names: of special tokens.
    """

    @property
    def vocabulary(self) -> Vocabulary: ...
    @property
    def names(self) -> SecretNames: ...
    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without BOS; special tokens in it are under their secret names.

        Raises:
            TypeError, UnicodeEncodeError: it holds half of a surrogate pair.
        """

    def id_of(self, name: str) -> int | None:
        """Id of the token that its vocabulary spells so."""

    def name_of(self, token_id: int) -> str | None:
        """The token as its vocabulary spells it."""


def build_encoder(source: Source) -> Encoder:
    """The encoder for a vocabulary, whatever its form.

    Raises:
        ModelLoadError: the source is no tokenizer, or its decoder is not supported.
    """
    kind = "tokenizer.json" if isinstance(source, str) else "SentencePiece model"
    try:
        return LibraryEncoder(source) if isinstance(source, str) else SentencePieceEncoder(source)
    except ModelLoadError:
        raise
    except Exception as error:  # both libraries raise plain exceptions for what they cannot use
        raise ModelLoadError(f"tokenizer: not a usable {kind}: {type(error).__name__}: {error}") from error


class LibraryEncoder:
    """A `tokenizer.json`; see `Encoder`."""

    def __init__(self, tokenizer_json: str) -> None:
        spec = json.loads(tokenizer_json)
        self.vocabulary = read_vocabulary(spec)
        self.names = SecretNames([entry["content"] for entry in spec.get("added_tokens") or () if entry["special"]])
        self._library = tokenizers.Tokenizer.from_str(json.dumps(self.names.rename(spec)))

    def encode(self, text: str) -> list[int]:
        # The batch call is the one that does not trace offsets, which nobody reads here.
        return self._library.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def id_of(self, name: str) -> int | None:
        return self._library.token_to_id(self.names.secret(name))

    def name_of(self, token_id: int) -> str | None:
        name: str | None = self._library.id_to_token(token_id)
        return None if name is None else self.names.public(name)
