"""Reading a text that is still coming: parsers written straight down, as generators that pause where the text ends so far.

A parser looks at `feed.text` from `feed.pos` on, moves `pos` past what it has understood, and yields parts, or `WAIT` when it
needs more than there is. Whether it waits never decides what it makes of the text, only when: so what it yields does not
depend on how the text was cut into pieces. Owns that, and the tools that all formats share. Knows no format.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

from jaxserve.engine.tools.parts import Part, Text

WAIT = None

Parse = Generator[Part | None, None, None]
"""A parser at work."""

MAX_NAME = 256
"""Characters of a function's name, where nothing but what follows it tells that it is one."""

MAX_HELD_SPACE = 64
"""White space before a call is not content, so it is held back until something else comes; more than this is content."""


class Feed:
    """The text so far, from the first character that may still be needed.

    Attributes:
        pos: where the parser stands in `text`.
        ended: whether no more will come.
        keep: where the parser may go back to, or None.
    """

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False
        self.keep: int | None = None
        self._num_dropped = 0

    def add(self, text: str) -> None:
        """More has come."""
        drop = self.pos if self.keep is None else self.keep
        self.text = self.text[drop:] + text
        self._num_dropped += drop
        self.pos -= drop
        if self.keep is not None:
            self.keep = 0

    @property
    def offset(self) -> int:
        """Characters before `pos`, counted from the beginning."""
        return self._num_dropped + self.pos

    @property
    def rest(self) -> str:
        """What has not been read."""
        return self.text[self.pos :]

    @property
    def num_kept(self) -> int:
        """Characters from `keep` to `pos`."""
        assert self.keep is not None, "nothing was kept"
        return self.pos - self.keep


def peek(feed: Feed) -> Generator[None, None, str]:
    """The next character, not yet read; "" at the end."""
    while feed.pos == len(feed.text):
        if feed.ended:
            return ""
        yield WAIT
    return feed.text[feed.pos]


def skip_space(feed: Feed) -> Generator[None, None, str]:
    """Read white space; the character after it, or "" at the end."""
    while True:
        while feed.pos < len(feed.text) and feed.text[feed.pos].isspace():
            feed.pos += 1
        if feed.pos < len(feed.text):
            return feed.text[feed.pos]
        if feed.ended:
            return ""
        yield WAIT


def accept(feed: Feed, markers: Iterable[str]) -> Generator[None, None, str]:
    """Read one of `markers`, none of which begins another, if the text goes on with it; else "" and nothing is read."""
    markers = tuple(markers)
    while True:
        for marker in markers:
            if feed.text.startswith(marker, feed.pos):
                feed.pos += len(marker)
                return marker
        rest = feed.rest
        if feed.ended or not any(marker.startswith(rest) for marker in markers):
            return ""
        yield WAIT


def find(feed: Feed, markers: tuple[str, ...]) -> tuple[int, str]:
    """Where the first of `markers` begins at or after `pos`, and which; else where one may still begin, and ""."""
    found = [(at, marker) for marker in markers if (at := feed.text.find(marker, feed.pos)) >= 0]
    if found:
        return min(found)
    if feed.ended:
        return len(feed.text), ""
    longest = max(map(len, markers))
    for start in range(max(feed.pos, len(feed.text) - longest + 1), len(feed.text)):
        if any(marker.startswith(feed.text[start:]) for marker in markers):
            return start, ""
    return len(feed.text), ""


def read_until(feed: Feed, markers: tuple[str, ...], make: Callable[[str], Part]) -> Generator[Part | None, None, str]:
    """Read up to and past the first of `markers`, which is returned ("" at the end); what comes before it is made a part."""
    while True:
        at, marker = find(feed, markers)
        text = feed.text[feed.pos : at]
        feed.pos = at + len(marker)
        if text:
            yield make(text)
        if marker or feed.ended:
            return marker
        yield WAIT


def read_before(feed: Feed, markers: tuple[str, ...], *, limit: int | None = None) -> Generator[None, None, tuple[str, str]]:
    """Read past the first of `markers`; what comes before it, and which it is. If none comes, ("", "") and nothing is read.

    Args:
        limit: characters before it; where there are more, it does not come.
    """
    while True:
        at, marker = find(feed, markers)
        text = feed.text[feed.pos : at]
        if (limit is not None and len(text) > limit) or (feed.ended and not marker):
            return "", ""
        if marker:
            feed.pos = at + len(marker)
            return text.strip(), marker
        yield WAIT


def skip_to(feed: Feed, markers: tuple[str, ...]) -> Generator[None, None, None]:
    """Read up to the first of `markers`, or to the end."""
    while True:
        feed.pos, marker = find(feed, markers)
        if marker or feed.ended:
            return
        yield WAIT


def read_content(
    feed: Feed, markers: tuple[str, ...], make: Callable[[str], Part] = Text
) -> Generator[Part | None, None, str]:
    """As `read_until`, but white space before the marker is no part of what comes before it.

    `feed.keep` is then where that white space begins, for `put_back` if what follows the marker makes no sense.
    """
    while True:
        at, marker = find(feed, markers)
        end = at if feed.ended and not marker else _without_space(feed.text, feed.pos, at)
        text = feed.text[feed.pos : end]
        feed.pos = end
        if text:
            yield make(text)
        if marker:
            feed.keep = end
            feed.pos = at + len(marker)
        if marker or feed.ended:
            return marker
        yield WAIT


def put_back(feed: Feed, num_read: int) -> str:
    """Stand again `num_read` characters after `feed.keep`; those characters."""
    assert feed.keep is not None, "nothing was kept"
    read = feed.text[feed.keep : feed.keep + num_read]
    feed.pos = feed.keep + num_read
    feed.keep = None
    return read


def put_back_before(feed: Feed, num_read: int, marker: str) -> Parse:
    """Make text of the `num_read` characters after `feed.keep`, but for the marker at their end, and stand behind that."""
    if text := put_back(feed, num_read - len(marker)):
        yield Text(text)
    feed.pos += len(marker)


def _without_space(text: str, start: int, end: int) -> int:
    held = max(start, end - MAX_HELD_SPACE)
    return held + len(text[held:end].rstrip())


def read_all(feed: Feed) -> Parse:
    """Everything as text."""
    while True:
        if text := feed.rest:
            feed.pos = len(feed.text)
            yield Text(text)
        if feed.ended:
            return
        yield WAIT


class Parser:
    """Runs a parser over text as it comes."""

    def __init__(self, parse: Callable[[Feed], Parse]) -> None:
        self._feed = Feed()
        self._parse = parse(self._feed)

    def push(self, text: str) -> tuple[Part, ...]:
        """What `text` adds, as far as that is certain."""
        self._feed.add(text)
        return self._run()

    def finish(self) -> tuple[Part, ...]:
        """What was held back: the text has ended."""
        self._feed.ended = True
        return self._run()

    def _run(self) -> tuple[Part, ...]:
        parts: list[Part] = []
        for part in self._parse:
            if part is WAIT:
                break
            # A parser stands at the end of the text that it yields.
            parts.append(Text(part.text, self._feed.offset - len(part.text)) if isinstance(part, Text) else part)
        return tuple(parts)
