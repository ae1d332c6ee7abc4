"""Errors in the caller's own words, where a body of another API was made into a chat completion. Pure.

Owns how names of fields are translated back. Which names there are is each API's matter.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxserve.errors import InvalidRequest
from jaxserve.server.call import Call

_MESSAGE = re.compile(r"\bmessages\[(\d+)\](\.content)?")


@functools.cache
def _pattern_of(names: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(("" if name[0] == "." else "^") + rf"{re.escape(name)}\b" for name in longest_first))


class Wording:
    """What a caller calls the fields of the chat completion that its body became.

    Args:
        names: of fields, by their names in a chat completion: whole names as `stop`, or ends of them as `.function.name`. Of
            two that fit, the longer one counts.
        origins: for each message, the field that it comes from.
        texts: those of them that are a string each, and so have no content of their own.
    """

    def __init__(self, names: Mapping[str, str], origins: Sequence[str], *, texts: Sequence[str] = ()) -> None:
        self._names = names
        self._origins = origins
        self._texts = texts
        self._pattern = _pattern_of(tuple(names))

    def of(self, name: str) -> str:
        """The caller's name for a field that a chat completion calls `name`."""
        if _MESSAGE.match(name):
            return self._messages(name)
        return self._pattern.sub(lambda match: self._names[match[0]], name)

    def translate(self, error: InvalidRequest) -> None:
        """Have `error` speak of the caller's fields."""
        said = self._messages(str(error))
        if error.param is not None:
            theirs = self.of(error.param)
            said = said.replace(error.param, theirs)
            error.param = theirs
        error.args = (said,)

    def of_call(self, call: Call) -> Call:
        """`call`, of which what is compiled or admitted later is called what the caller calls it."""
        call = replace(call, field_names={ours: self.of(theirs) for ours, theirs in call.field_names.items()})
        params = call.requests[0].params
        if params.grammar is None:
            return call
        grammar = replace(params.grammar, param=self.of(params.grammar.param))
        requests = tuple(replace(request, params=replace(request.params, grammar=grammar)) for request in call.requests)
        return replace(call, requests=requests)

    def _messages(self, text: str) -> str:
        return _MESSAGE.sub(self._origin, text)

    def _origin(self, match: re.Match[str]) -> str:
        origin = self._origins[int(match[1])]
        return origin if match[2] is None or origin in self._texts else f"{origin}.content"
