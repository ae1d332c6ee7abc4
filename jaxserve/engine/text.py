"""Between text and token ids: encoding prompts and conversations, and turning output tokens back into text as they come.

Owns `Tokenizer` and `TextStream`. Knows neither requests nor sockets.

Special tokens in what a user writes. A conversation's control tokens come from the chat template alone: the text
`<|im_end|>` inside a message is encoded as those ten characters. For that, the special tokens are given secret names before
the vocabulary is loaded, so no text can spell one by accident or intent, and `encode` and `encode_chat` translate to the
secret names exactly where a control token is meant: anywhere in a raw prompt (whose author controls all of it), and only
outside message content in a conversation. One tokenizer, one pass over the text, so that without look-alikes the ids are
exactly the plain encoding's.
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from jaxserve.engine.chat import ChatTemplate, Message
from jaxserve.engine.stop import StopAutomaton, stop_automaton
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
            self._names = _SecretNames(special)
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

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, which is not text."""
        return 0 <= token_id < self.vocab_size and self._vocabulary.special[token_id]


class _SecretNames:
    """Names for special tokens that no text can spell: private-use characters around 64 random bits."""

    def __init__(self, special: Sequence[str]) -> None:
        nonce = secrets.token_hex(8)
        self._secret = {token: f"\ue000{nonce}-{i}\ue001" for i, token in enumerate(special)}
        self._shield = {token: f"\ue002{nonce}-{i}\ue003" for i, token in enumerate(special)}
        self._public = {name: token for token, name in self._shield.items()}
        longest_first = sorted((token for token in special if token), key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._find_shield = re.compile(f"\ue002{nonce}-[0-9]+\ue003")

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

    def to_secret(self, text: str) -> str:
        """`text` with every special token under its secret name."""
        return self._find.sub(lambda match: self._secret[match[0]], text)

    def shield(self, value: Any) -> Any:
        """`value` with look-alikes in all its strings hidden from `to_secret`; what holds none comes back as it is."""
        if isinstance(value, str):
            return self._find.sub(lambda match: self._shield[match[0]], value)
        if isinstance(value, Mapping):
            return {key: self.shield(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.shield(item) for item in value]
        return value

    def unshield(self, text: str) -> str:
        return self._find_shield.sub(lambda match: self._public[match[0]], text)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one push added.

    Attributes:
        text: new text, never part of a stop string.
        stopped: whether a stop string was found, now or before; the output ends with this delta.
        offsets: for each token, in order, that this delta accounts for: how many characters of the output come before it.
            A token is accounted for once a character after that offset is out, or the output has ended.
    """

    text: str
    stopped: bool
    offsets: tuple[int, ...]


class TextStream:
    """Text of one output as its tokens come, cut at the first stop string.

    Joined deltas are `b"".join(text bytes of all tokens).decode("utf-8", "replace")`, cut just before the stop string that
    is complete first (of several that end at the same character, the longest). That does not depend on how tokens are
    grouped into pushes, nor on where they split the text. Held back: bytes that may still become a character, and the longest
    suffix that may still become a stop string.

    The output continues a prompt, so a leading space is part of it, also where decoding from the start would strip one.

    Args:
        stop: strings that end the output; none of them empty.
        min_tokens: stop strings count only in text of tokens after these.

    Attributes:
        num_tokens: tokens read, the one that completed a stop string included.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), *, min_tokens: int = 0) -> None:
        assert "" not in stop, "an empty stop string"
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._automaton = stop_automaton(stop) if stop else None
        self._state = StopAutomaton.START
        self._min_tokens = min_tokens
        self._held = ""
        self._num_decoded = 0
        self._num_released = 0
        self._starts: deque[int] = deque()
        self._stopped = False
        self.num_tokens = 0

    def push(self, token_ids: Iterable[int]) -> TextDelta:
        """Read tokens; those after a stop string are ignored."""
        for token_id in token_ids:
            if self._stopped:
                break
            self.num_tokens += 1
            self._starts.append(self._num_decoded)
            self._read(self._decoder.decode(self._tokenizer.text_bytes(token_id)))
        return self._release(0 if self._automaton is None else self._automaton.depth[self._state])

    def flush(self) -> TextDelta:
        """The output has ended: give out what was held back. Half a character becomes U+FFFD."""
        if not self._stopped:
            self._read(self._decoder.decode(b"", final=True))
        return self._release_all()

    def cut(self) -> TextDelta:
        """The output was cut short: as `flush`, but half a character is left out, since its other half would have come.

        So the text of fewer tokens is the beginning of the text of more.
        """
        self._decoder.reset()
        return self._release_all()

    def _release_all(self) -> TextDelta:
        delta = self._release(0)
        rest = tuple(self._starts)
        self._starts.clear()
        return TextDelta(delta.text, delta.stopped, delta.offsets + rest)

    def _read(self, text: str) -> None:
        self._held += text
        if self._automaton is not None and self.num_tokens > self._min_tokens:
            self._match(text)
        self._num_decoded += len(text)

    def _match(self, text: str) -> None:
        automaton = self._automaton
        assert automaton is not None
        state = self._state
        for position, character in enumerate(text, self._num_decoded + 1):
            state = automaton.advance(state, character)
            if automaton.matched[state]:
                self._stop_at(position - automaton.matched[state], self._num_decoded + len(text))
                return
        self._state = state

    def _stop_at(self, end: int, num_decoded: int) -> None:
        self._stopped = True
        self._state = StopAutomaton.START
        self._held = self._held[: len(self._held) - (num_decoded - end)]
        while self._starts and self._starts[-1] >= end:
            self._starts.pop()

    def _release(self, num_held: int) -> TextDelta:
        split = len(self._held) - num_held
        text, self._held = self._held[:split], self._held[split:]
        self._num_released += len(text)
        offsets = []
        while self._starts and self._starts[0] < self._num_released:
            offsets.append(self._starts.popleft())
        return TextDelta(text, self._stopped, tuple(offsets))
