"""Special tokens under names that no text can spell, so that a user's text never becomes a control token.

A conversation's control tokens come from the chat template alone: the text `<|im_end|>` inside a message is encoded as those
ten characters. For that, the special tokens are given secret names before the vocabulary is loaded, so no text can spell one
by accident or intent, and `Tokenizer` translates to the secret names exactly where a control token is meant: anywhere in a
raw prompt (whose author controls all of it), and only outside message content in a conversation. One tokenizer, one pass over
the text, so that without look-alikes the ids are exactly the plain encoding's.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.engine.alternatives import any_of


class SecretNames:
    """Names for special tokens that no text can spell: private-use characters around 20 random digits.

    Attributes:
        pattern: an expression that every secret name matches, and only those.
    """

    def __init__(self, special: Sequence[str]) -> None:
        nonce = secrets.randbelow(10**20)  # digits, which no template's `lower` or `title` changes
        self._secret = {token: f"\ue000{nonce}-{i}\ue001" for i, token in enumerate(special)}
        self._shield = {token: f"\ue002{nonce}-{i}\ue003" for i, token in enumerate(special)}
        self.pattern = f"\ue000{nonce}-[0-9]+\ue001"
        self._special = tuple(special)
        self._public = {secret: token for token, secret in self._secret.items()}
        self._find = re.compile(any_of(filter(None, special)))
        # Also as JSON in ASCII spells it, for templates that quote content so.
        self._find_shield = re.compile(rf"(\ue002|\\ue002){nonce}-([0-9]+)(?:\ue003|\\ue003)")
        self._break = f"\ue004{nonce}\ue005"
        self._find_break = re.compile(rf"(?:\ue004|\\ue004){nonce}(?:\ue005|\\ue005)")
        spelled = [token for token in special if token and token.strip() == token]
        self._begins = {token[:end] for token in spelled for end in range(1, len(token))}
        self._ends = {token[begin:] for token in spelled for begin in range(1, len(token))}
        self._longest = max(map(len, spelled), default=0)

    def rename(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """The `tokenizer.json` with secret names for special tokens, ids unchanged; it neither pads nor truncates."""
        model = dict(spec["model"])
        vocab = model["vocab"]
        if isinstance(vocab, Mapping):
            model["vocab"] = {self.secret(token): token_id for token, token_id in vocab.items()}
        else:
            model["vocab"] = [[self.secret(piece), score] for piece, score in vocab]
        if model.get("unk_token") is not None:
            model["unk_token"] = self.secret(model["unk_token"])
        added = [{**entry, "content": self.secret(entry["content"])} for entry in spec.get("added_tokens") or ()]
        # BOS is ours to add (`Tokenizer.encode`), and a post-processor refers to special tokens by name.
        return {**spec, "model": model, "added_tokens": added, "truncation": None, "padding": None, "post_processor": None}

    def secret(self, token: str) -> str:
        return self._secret.get(token, token)

    def public(self, name: str) -> str:
        """What `secret` made `name` of."""
        return self._public.get(name, name)

    def to_secret(self, text: str) -> str:
        """`text` with every special token under its secret name."""
        return self._find.sub(lambda match: self._secret[match[0]], text)

    def shield(self, value: Any) -> Any:
        """`value` with look-alikes in all its strings hidden from `to_secret`; what holds none comes back as it is."""
        if isinstance(value, str):
            return self._shield_text(value)
        if isinstance(value, Mapping):
            return {self.shield(key): self.shield(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.shield(item) for item in value]
        return value

    def _shield_text(self, text: str) -> str:
        text = self._find.sub(lambda match: self._shield[match[0]], text)
        if not text or text.isalnum():  # a role is inside of many a token's name, and meant to be
            return text
        sizes = range(1, min(len(text), self._longest) + 1)
        # What a template puts beside the text could complete a token's name that it begins, ends or is the middle of.
        before = self._break if any(text[:size] in self._ends for size in sizes) else ""
        after = self._break if any(text[-size:] in self._begins for size in sizes) else ""
        if not before and len(text) < self._longest and any(text in token for token in self._special):
            before = self._break
        return before + text + after

    def unshield(self, text: str) -> str:
        """`text` with the look-alikes that `shield` hid."""

        def public(match: re.Match[str]) -> str:
            token = self._special[int(match[2])]
            return token if match[1] == "\ue002" else json.dumps(token)[1:-1]

        return self._find_shield.sub(public, self._find_break.sub("", text))
