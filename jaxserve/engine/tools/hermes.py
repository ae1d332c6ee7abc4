"""The form of Hermes and Qwen: `<tool_call>`, an object with name and arguments, `</tool_call>`, once for each call."""

from __future__ import annotations

from jaxserve.engine.tools.calls import Calls, Outcome, read_call, read_rest
from jaxserve.engine.tools.feed import Feed, Parse, accept, put_back, read_content, skip_space
from jaxserve.engine.tools.parts import Text

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARKERS = (OPEN, CLOSE)


def read(feed: Feed, calls: Calls) -> Parse:
    """The answer's text and calls. A tag that no call follows is text."""
    while (yield from read_content(feed, (OPEN,))):
        num_read = feed.num_kept
        character = yield from skip_space(feed)
        outcome = Outcome.NONE
        if character == "{":
            outcome = yield from read_call(feed, calls)
        if outcome is Outcome.NONE:
            yield Text(put_back(feed, num_read))
            continue
        if outcome is Outcome.OPEN:
            yield from read_rest(feed, calls, (CLOSE,))
        # Models forget the last brace, or write one too many.
        while (yield from skip_space(feed)) == "}":
            feed.pos += 1
        closed = yield from accept(feed, (CLOSE,))
        if not closed and CLOSE.startswith(feed.rest):  # cut off within the tag
            feed.pos = len(feed.text)
        yield from skip_space(feed)
