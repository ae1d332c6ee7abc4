"""Between text and token ids: encoding prompts and conversations, and what each token is as text.

Owns `Tokenizer`. Knows neither requests nor sockets. Which special tokens text may spell is `secret_names`' matter, text that
comes token by token `text_stream`'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tokenizers

from jaxserve.engine.chat import ChatTemplate, Message
from jaxserve.engine.secret_names import SecretNames
from jaxserve.engine.vocab import read_vocabulary
from jaxserve.errors import InvalidRequest, ModelLoadError


class Tokenizer:
    """A vocabulary, and the chat template that goes with it.

    Args:
        tokenizer_json: the text of a `tokenizer.json`.
        chat_template: Jinja source, or None for a model that does not chat.
        bos_token, eos_token: for the template; `bos_token` is also what `encode` begins with if `add_bos`.

    Attributes:
        vocab_size: one more than the highest id.
        special_ids: of control tokens, which are not text.
        bos_token_id, eos_token_id: None where there is no such token.
        template: None without a chat template.

    Raises:
        ModelLoadError: the text is no tokenizer, its decoder is not supported, or the template does not compile.
    """

    def __init__(
        self,
        tokenizer_json: str,
        *,
        chat_template: str | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        add_bos: bool = False,
    ) -> None:
        try:
            spec = json.loads(tokenizer_json)
            self._vocabulary = read_vocabulary(spec)
            special = [entry["content"] for entry in spec.get("added_tokens") or () if entry["special"]]
            self._names = SecretNames(special)
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(self._names.rename(spec)))
        except ModelLoadError:
            raise
        except Exception as error:  # the library raises plain Exception for a JSON that it cannot use
            raise ModelLoadError(f"tokenizer: not a usable tokenizer.json: {type(error).__name__}: {error}") from error
        self.vocab_size = len(self._vocabulary.token_bytes)
        self.bos_token_id = self._id_of(bos_token)
        self.eos_token_id = self._id_of(eos_token)
        if add_bos and self.bos_token_id is None:
            raise ModelLoadError(f"tokenizer: prompts begin with {bos_token!r}, which is not in the vocabulary")
        self._prefix = [self.bos_token_id] if add_bos and self.bos_token_id is not None else []
        self.template = None
        if chat_template is not None:
            self.template = ChatTemplate(chat_template, bos_token=bos_token or "", eos_token=eos_token or "")
        self.special_ids = frozenset(i for i, special in enumerate(self._vocabulary.special) if special)
        self._longest = max(1, *map(len, self._vocabulary.token_bytes))
        # What the text stream reads for each token; special tokens are not text.
        self._text_bytes = tuple(
            b"" if special else piece
            for piece, special in zip(self._vocabulary.token_bytes, self._vocabulary.special, strict=True)
        )

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(self._names.secret(token))

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt: special tokens in it are control tokens, and it begins with one BOS if the model wants one.

        Raises:
            InvalidRequest: `text` holds half of a surrogate pair, which is not text.
        """
        ids = self._encode(self._names.to_secret(text))
        return ids if ids[:1] == self._prefix else self._prefix + ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` as nothing but text: no BOS, and what looks like a special token stays characters."""
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        try:
            # The batch call is the one that does not trace offsets, which nobody reads here.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError:
            raise InvalidRequest("text holds half of a surrogate pair (U+D800 to U+DFFF), which is not a character") from None

    def fewest_tokens(self, text: str) -> int:
        """Tokens that `text` takes at least, found without encoding it. 0 where the vocabulary promises nothing."""
        return len(text) // self._longest if self._vocabulary.exact else 0

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The conversation as text, through the chat template.

        Raises:
            InvalidRequest: naming `messages`, if there is no template or it refuses them.
        """
        if self.template is None:
            raise InvalidRequest("messages: this model has no chat template; use /v1/completions", param="messages")
        return self.template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """Ids of the conversation. The template alone decides about BOS, and special tokens come from it alone.

        Raises:
            InvalidRequest: as `render_chat`, or as `encode`.
        """
        shielded = self._names.shield(messages)
        text = self.render_chat(shielded, add_generation_prompt=add_generation_prompt, **self._names.shield(variables))
        return self._encode(self._names.unshield(self._names.to_secret(text)))

    def decode(self, ids: Iterable[int]) -> str:
        """The whole text that begins with `ids`; special tokens give none, invalid UTF-8 gives U+FFFD."""
        text = b"".join(map(self.text_bytes, ids)).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._vocabulary.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, which need not be whole characters; a special token's are its name's."""
        return self._vocabulary.token_bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def text_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text: its bytes, or none if it is special or the model has no such token."""
        return self._text_bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def text_bytes_with(self, shown_special: frozenset[int]) -> Callable[[int], bytes]:
        """As `text_bytes`, but the names of these special tokens are text too."""
        shown = {token_id: self.token_bytes(token_id) for token_id in shown_special & self.special_ids}
        return lambda token_id: shown.get(token_id) or self.text_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, which is not text."""
        return 0 <= token_id < self.vocab_size and self._vocabulary.special[token_id]
