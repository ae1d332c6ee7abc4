"""Where a JSON value in a text that is still coming ends, and the text of a JSON string as it comes.

Owns strings, brackets and escapes. Does not check what is between: a model's arguments are handed on as the model wrote
them, and the API says that callers must check them.
"""

from __future__ import annotations

import json
import re

from jaxserve.engine.tools.feed import Feed

_OUTSIDE = re.compile(r"[\s\w:,.+\-]+", re.ASCII)
_SCALAR = re.compile(r"[\w.+\-]+", re.ASCII)
_INSIDE = re.compile(r'[^"\\]+')
_CLOSERS = {"{": "}", "[": "]"}
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class RawValue:
    """Reads one value, as it stands.

    Attributes:
        done: the value is whole.
        broken: something came that JSON has no place for; it has not been read.
    """

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._closers: list[str] = []
        self._in_string = False
        self._in_scalar = False

    def read(self, feed: Feed) -> str:
        """What there is of the value."""
        start = feed.pos
        while feed.pos < len(feed.text) and not self.done and not self.broken:
            step = self._string if self._in_string else self._structure
            end = step(feed.text, feed.pos)
            if end == feed.pos:
                break
            feed.pos = end
        return feed.text[start : feed.pos]

    def _string(self, text: str, pos: int) -> int:
        if match := _INSIDE.match(text, pos):
            return match.end()
        if text[pos] == '"':
            self._in_string = False
            self.done = not self._closers
            return pos + 1
        return pos + 2 if pos + 1 < len(text) else pos

    def _structure(self, text: str, pos: int) -> int:
        if match := (_OUTSIDE if self._closers else _SCALAR).match(text, pos):
            self._in_scalar = not self._closers
            return match.end()
        if self._in_scalar:
            self.done = True
            return pos
        character = text[pos]
        if character in _CLOSERS:
            self._closers.append(_CLOSERS[character])
        elif character == '"':
            self._in_string = True
        elif self._closers and character == self._closers[-1]:
            self._closers.pop()
            self.done = not self._closers
        else:
            self.broken = True
            return pos
        return pos + 1


class DecodedString:
    """Reads the text that a JSON string spells, from after its opening quote.

    Attributes:
        done: the closing quote has been read.
        broken: an escape came that JSON does not have; it has not been read.
    """

    def __init__(self) -> None:
        self.done = False
        self.broken = False

    def read(self, feed: Feed) -> str:
        """What there is of the text."""
        pieces = []
        while feed.pos < len(feed.text) and not self.done and not self.broken:
            if match := _INSIDE.match(feed.text, feed.pos):
                feed.pos = match.end()
                pieces.append(match[0])
            elif feed.text[feed.pos] == '"':
                feed.pos += 1
                self.done = True
            else:
                piece = self._escape(feed)
                if not piece:
                    break
                pieces.append(piece)
        return "".join(pieces)

    def _escape(self, feed: Feed) -> str:
        """The character of an escape, or "" if not all of it is there or it is none."""
        found = feed.text[feed.pos : feed.pos + 12]
        if len(found) < 2:
            return ""
        if found[1] != "u":
            self.broken = found[1] not in _ESCAPES
            feed.pos += 0 if self.broken else 2
            return _ESCAPES.get(found[1], "")
        if len(found) < 6 or (_is_half(found) and len(found) < 12 and "\\u".startswith(found[6:8]) and not feed.ended):
            self.broken = feed.ended
            return ""
        for length in (12, 6):
            text = _spelled(found[:length])
            if len(text) == 1:
                feed.pos += length
                return text
        self.broken = True
        return ""


def _is_half(escape: str) -> bool:
    return escape[2:4].lower() in ("d8", "d9", "da", "db")


def _spelled(escape: str) -> str:
    try:
        text: str = json.loads(f'"{escape}"')
        text.encode()
    except ValueError:
        return ""
    return text
