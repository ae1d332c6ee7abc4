"""What a caller's requests are given: tenant and share, priority, time and length, within what its key and the server allow.

Pure. Knows neither bodies nor HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxserve.errors import Forbidden
from jaxserve.host.admission import cap_output
from jaxserve.plan import RunnerLimits
from jaxserve.request import Request
from jaxserve.server.call import Call, naming_fields_of
from jaxserve.server.keys import Caller


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a server allows everyone.

    Attributes:
        max_output_tokens: of one answer; 0 for no cap.
        max_seconds: that an answer may take; 0 for no limit.
    """

    limits: RunnerLimits
    max_output_tokens: int = 0
    max_seconds: float = 0.0


def grant(call: Call, caller: Caller, terms: Terms, *, now: float) -> Call:
    """`call` with all of that filled in. A time limit of the call's own holds where it is shorter than the server's.

    Args:
        now: when the call came, on the clock of deadlines.

    Raises:
        InvalidRequest: it wants more output tokens than there may be.
        Forbidden: it wants a more urgent priority than the key allows.
    """
    seconds = [limit for limit in (call.timeout, terms.max_seconds or None) if limit is not None]
    deadline = now + min(seconds) if seconds else None
    priority = _priority(call, caller)

    def grant_one(request: Request) -> Request:
        request = replace(request, tenant=caller.label, weight=caller.weight, priority=priority, deadline=deadline)
        return cap_output(request, terms.limits, terms.max_output_tokens)

    with naming_fields_of(call):
        return replace(call, requests=tuple(map(grant_one, call.requests)))


def _priority(call: Call, caller: Caller) -> int:
    usual = call.requests[0].priority
    if caller.priority is None:
        return usual
    if call.priority is not None and call.priority < caller.priority:
        raise Forbidden(
            f"priority must be {caller.priority} or a higher number for the API key {caller.label!r}, found {call.priority}",
            param="priority",
        )
    return max(usual, caller.priority)
