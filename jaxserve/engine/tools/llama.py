"""The form of Llama 3: an object with name and parameters, alone or after `<|python_tag|>`, several with semicolons between.

Without the tag, an object is a call only where the answer begins with it and it names a function that there is, since it may
as well be an answer in JSON.
"""

from __future__ import annotations

from collections.abc import Generator

from jaxserve.engine.tools.calls import Calls, Outcome, ReadCall, read_call, read_rest
from jaxserve.engine.tools.feed import Feed, Parse, accept, put_back, put_back_before, read_content, skip_space
from jaxserve.engine.tools.parts import Part

PYTHON_TAG = "<|python_tag|>"
MARKERS = (PYTHON_TAG,)


def read(feed: Feed, calls: Calls) -> Parse:
    """The answer's text and calls. What follows the tag is text if it is no call; the tag, a control token, is not."""
    feed.keep = feed.pos
    found = yield from _read_calls(feed, calls, only_known=True)
    if not found:
        put_back(feed, 0)
    while (yield from read_content(feed, MARKERS)):
        num_read = feed.num_kept
        found = yield from _read_calls(feed, calls, only_known=False)
        if not found:
            yield from put_back_before(feed, num_read, PYTHON_TAG)


def _read_calls(feed: Feed, calls: Calls, *, only_known: bool) -> Generator[Part | None, None, bool]:
    """Read calls until something else comes; whether there was any. If not, the caller puts back what was read."""
    character = yield from skip_space(feed)
    outcome = Outcome.NONE
    if character == "{":
        outcome = yield from read_call(feed, calls, only_known=only_known)
    found = outcome is not Outcome.NONE
    while outcome is not Outcome.NONE:
        if outcome is Outcome.OPEN:
            yield from read_rest(feed, calls, MARKERS)
        outcome = yield from _read_next(feed, calls, only_known)
    return found


def _read_next(feed: Feed, calls: Calls, only_known: bool) -> ReadCall:
    """Read a further call; without one, only white space is read."""
    yield from skip_space(feed)
    feed.keep = feed.pos
    yield from accept(feed, (";",))
    yield from skip_space(feed)
    yield from accept(feed, MARKERS)
    character = yield from skip_space(feed)
    outcome = Outcome.NONE
    if character == "{":
        outcome = yield from read_call(feed, calls, only_known=only_known)
    if outcome is Outcome.NONE:
        put_back(feed, 0)
    return outcome
