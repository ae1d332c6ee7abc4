"""Between text and token ids: encoding prompts and conversations, and what each token is as text.

Owns `Tokenizer` and `ChatRules`. Knows neither requests nor sockets. Which special tokens text may spell is `secret_names`'
matter, text that comes token by token `text_stream`'s.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jaxserve.engine.chat import ChatTemplate, Message, check_depth
from jaxserve.engine.encoders import Source, build_encoder
from jaxserve.engine.tools.dialect import choose_dialect
from jaxserve.errors import InvalidRequest, ModelLoadError


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRules:
    """What whoever runs the server lets conversations do.

    Attributes:
        special_tokens_in_messages: what spells a special token in a message is one, and not text.
        trust_request_chat_template: a request may bring its own chat template.
    """

    special_tokens_in_messages: bool = False
    trust_request_chat_template: bool = False


@lru_cache(maxsize=16)
def _compile(source: str, bos_token: str, eos_token: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token=bos_token, eos_token=eos_token)


class Tokenizer:
    """A vocabulary, and the chat template that goes with it.

    Args:
        source: the text of a `tokenizer.json`, or a SentencePiece model.
        chat_template: Jinja source, or None for a model that does not chat.
        tool_template: of conversations with tools, if that is another.
        bos_token, eos_token: for the template; `bos_token` is also what `encode` begins with if `add_bos`.

    Attributes:
        vocab_size: one more than the highest id.
        special_ids: of control tokens, which are not text.
        add_bos: whether prompts begin with BOS.
        bos_token_id, eos_token_id: None where there is no such token.
        template: None without a chat template.
        rules: what conversations may hold.
        dialect: how the model writes calls and reasoning.

    Raises:
        ModelLoadError: the source is no tokenizer, its decoder is not supported, or the template does not compile.
    """

    def __init__(
        self,
        source: Source,
        *,
        chat_template: str | None = None,
        tool_template: str | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        add_bos: bool = False,
    ) -> None:
        self._encoder = build_encoder(source)
        self._vocabulary, self._names = self._encoder.vocabulary, self._encoder.names
        self.vocab_size = len(self._vocabulary.token_bytes)
        self.bos_token_id = self._id_of(bos_token)
        self.eos_token_id = self._id_of(eos_token)
        if add_bos and self.bos_token_id is None:
            raise ModelLoadError(f"tokenizer: prompts begin with {bos_token!r}, which is not in the vocabulary")
        self.add_bos = add_bos
        self._prefix = [self.bos_token_id] if add_bos and self.bos_token_id is not None else []
        self._names_in_template = (bos_token or "", eos_token or "")
        self.template = None if chat_template is None else _compile(chat_template, *self._names_in_template)
        self._tool_template = None if tool_template is None else _compile(tool_template, *self._names_in_template)
        self._template_source = "\n".join(source for source in (chat_template, tool_template) if source is not None)
        self.dialect = choose_dialect(self._template_source)
        self.rules = ChatRules()
        self.special_ids = frozenset(i for i, special in enumerate(self._vocabulary.special) if special)
        self._longest = max(1, *map(len, self._vocabulary.token_bytes))
        # What the text stream reads for each token; special tokens are not text.
        self._text_bytes = tuple(
            b"" if special else piece
            for piece, special in zip(self._vocabulary.token_bytes, self._vocabulary.special, strict=True)
        )

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._encoder.id_of(token)

    def special_ids_by_name(self, texts: Iterable[str]) -> dict[str, int]:
        """Ids of those of these texts that are special tokens."""
        ids = {text: self._id_of(text) for text in texts}
        return {text: token_id for text, token_id in ids.items() if token_id in self.special_ids and token_id is not None}

    def with_template(self, chat_template: str) -> Tokenizer:
        """The same vocabulary with another chat template, for conversations with tools and without.

        Raises:
            ModelLoadError: it does not compile.
        """
        other = copy.copy(self)
        other.template, other._tool_template = _compile(chat_template, *self._names_in_template), None
        other._template_source = chat_template
        other.dialect = choose_dialect(chat_template)
        return other

    def with_formats(self, *, tool_format: str = "auto", reasoning_format: str = "auto") -> Tokenizer:
        """The same vocabulary and template, with formats of calls and reasoning that are named and not found.

        Raises:
            ConfigError: there is no such format.
        """
        other = copy.copy(self)
        other.dialect = choose_dialect(self._template_source, tool_format=tool_format, reasoning_format=reasoning_format)
        return other

    def with_rules(self, rules: ChatRules) -> Tokenizer:
        """The same vocabulary and template under other rules."""
        other = copy.copy(self)
        other.rules = rules
        return other

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a raw prompt, in which special tokens are control tokens.

        Args:
            add_special_tokens: begin with one BOS if the model wants one.

        Raises:
            InvalidRequest: `text` holds half of a surrogate pair, which is not text.
        """
        ids = self._encode(self._names.to_secret(text))
        return self._with_prefix(ids) if add_special_tokens else ids

    def _with_prefix(self, ids: list[int]) -> list[int]:
        return ids if ids[:1] == self._prefix else self._prefix + ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` as nothing but text: no BOS, and what looks like a special token stays characters."""
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        try:
            return self._encoder.encode(text)
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequest("text holds half of a surrogate pair (U+D800 to U+DFFF), which is not a character") from None

    def fewest_tokens(self, text: str) -> int:
        """Tokens that `text` takes at least, found without encoding it. 0 where the vocabulary promises nothing."""
        shrink = self._vocabulary.max_shrink
        if not shrink:
            return 0
        return len(text) // self._longest // (1 if text.isascii() else shrink)

    def template_for(self, chat_template: str | None = None, *, tools: bool = False) -> ChatTemplate:
        """The model's chat template, or one that a request brings.

        Args:
            tools: whether the conversation has tools, for which the model may have a template of their own.

        Raises:
            InvalidRequest: there is none, it does not compile, or requests may bring none.
        """
        if chat_template is None:
            template = self._tool_template if tools and self._tool_template is not None else self.template
            if template is None:
                raise InvalidRequest("messages: this model has no chat template; use /v1/completions", param="messages")
            return template
        if not self.rules.trust_request_chat_template:
            raise InvalidRequest(
                "chat_template: this server renders with the model's own; one that is started with "
                "--trust-request-chat-template takes others",
                param="chat_template",
            )
        try:
            return _compile(chat_template, *self._names_in_template)
        except ModelLoadError as error:
            raise InvalidRequest(f"chat_template: {error}", param="chat_template") from None

    def render_chat(self, messages: Sequence[Message], *, chat_template: str | None = None, **options: Any) -> str:
        """The conversation as text, through a chat template.

        Args:
            options: as `ChatTemplate.render` takes them.

        Raises:
            InvalidRequest: as `template_for`, or the template refuses `messages`, which it names.
        """
        return self.template_for(chat_template, tools=bool(options.get("tools"))).render(messages, **options)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_special_tokens: bool = False,
        check: Callable[[str], None] = lambda _: None,
        **options: Any,
    ) -> list[int]:
        """Ids of the conversation. Special tokens come from the template alone, unless `rules` say otherwise.

        Args:
            add_special_tokens: begin with BOS if the model wants one, whether or not the template wrote it.
            check: called with the text, to refuse it before it is encoded.
            options: as `render_chat` takes them.

        Raises:
            InvalidRequest: as `render_chat`, or as `encode`.
        """
        if self.rules.special_tokens_in_messages:
            rendered = self.render_chat(messages, **options)
            check(rendered)
            text = self._names.to_secret(rendered)
        else:
            check_depth(messages=messages, **options)
            template = options.pop("chat_template", None)
            rendered = self.render_chat(self._names.shield(messages), chat_template=template, **self._names.shield(options))
            check(self._names.unshield(rendered))
            text = self._names.unshield(self._names.to_secret(rendered))
        ids = self._encode(text)
        return self._with_prefix(ids) if add_special_tokens else ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text that begins with `ids`; invalid UTF-8 gives U+FFFD.

        Args:
            skip_special_tokens: special tokens give no text; if false, their names are text.
        """
        bytes_of = self.text_bytes if skip_special_tokens else self.token_bytes
        text = b"".join(map(bytes_of, ids)).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._vocabulary.strips_leading_space else text

    def spell(self, ids: Iterable[int]) -> str:
        """The text of `ids` from anywhere in a sequence, special tokens by their names; invalid UTF-8 gives U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, which need not be whole characters; a special token's are its name's."""
        return self._vocabulary.token_bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_name(self, token_id: int) -> str | None:
        """The token as its vocabulary spells it, such as `Ġthe`; None if there is no such token."""
        return self._encoder.name_of(token_id)

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
