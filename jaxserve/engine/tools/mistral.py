"""The forms of Mistral: `[TOOL_CALLS]` and a list of objects with name and arguments; newer, `[TOOL_CALLS]name[ARGS]{...}`.

In the newer form the tag comes before each call, `[ARGS]` may be missing, and `[CALL_ID]` with the model's own id may come
before it. Ids are of nine letters and digits, which Mistral's templates insist on; the model's own are not used, since the
other form has them too late, after the arguments.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Generator

from jaxserve.engine.tools.calls import Calls, Outcome, ReadCall, read_arguments, read_call, read_rest
from jaxserve.engine.tools.feed import MAX_NAME, Feed, Parse, put_back, put_back_before, read_before, read_content, skip_space
from jaxserve.engine.tools.parts import Part

TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
MARKERS = (TOOL_CALLS, ARGS, CALL_ID)

_NAME = re.compile(r"[^\s\[\]{}]+")
_ID_CHARACTERS = string.ascii_letters + string.digits


def make_id(seed: str) -> str:
    """A call's id as Mistral's templates want it."""
    digest = hashlib.sha256(seed.encode()).digest()
    return "".join(_ID_CHARACTERS[byte % len(_ID_CHARACTERS)] for byte in digest[:9])


def read(feed: Feed, calls: Calls) -> Parse:
    """The answer's text and calls. What follows the tag is text if it is no call; the tag, a control token, is not."""
    while (yield from read_content(feed, (TOOL_CALLS,))):
        num_read = feed.num_kept
        character = yield from skip_space(feed)
        if character == "[":
            found = yield from _read_list(feed, calls)
        elif character == "{":
            found = (yield from read_call(feed, calls)) is not Outcome.NONE
        else:
            found = (yield from _read_named(feed, calls)) is not Outcome.NONE
        if found:
            yield from skip_space(feed)
        else:
            yield from put_back_before(feed, num_read, TOOL_CALLS)


def _read_list(feed: Feed, calls: Calls) -> Generator[Part | None, None, bool]:
    """Read a list of calls, as far as it is one; whether there was any."""
    feed.pos += 1
    found = False
    while True:
        character = yield from skip_space(feed)
        if character == "{":
            feed.keep = feed.keep if feed.keep is not None else feed.pos
            outcome = yield from read_call(feed, calls)
            if outcome is Outcome.NONE:
                if found:
                    put_back(feed, 0)
                return found
            found = True
            if outcome is Outcome.OPEN:
                yield from read_rest(feed, calls, (TOOL_CALLS,))
        elif character == "," and found:
            feed.pos += 1
        else:
            if character == "]" and found:
                feed.pos += 1
            return found


def _read_named(feed: Feed, calls: Calls) -> ReadCall:
    """Read a name and, after a marker or a brace, the arguments."""
    name, marker = yield from read_before(feed, (ARGS, CALL_ID, "{"), limit=MAX_NAME)
    if not _NAME.fullmatch(name) or not marker:
        return Outcome.NONE
    if marker == CALL_ID:
        _, marker = yield from read_before(feed, (ARGS, "{"), limit=MAX_NAME)
    feed.keep = None
    yield calls.begin(name)
    if marker == "{":
        feed.pos -= 1
    yield from skip_space(feed)
    outcome = yield from read_arguments(feed, calls)
    if outcome is Outcome.OPEN:
        yield from read_rest(feed, calls, (TOOL_CALLS,))
    return outcome
