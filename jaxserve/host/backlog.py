"""What waits for its first token, by priority and tenant, how much of it goes before a newcomer, and what has begun.

Owns the sums. Does not know limits, rates or the order within a tenant.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxserve.request import TokenEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One request that waits.

    Attributes:
        num_tokens: of its prompt.
        since: when it came.
        forecast: seconds to its first token as they were foreseen then, or None.
    """

    priority: int
    tenant: str
    weight: float
    num_tokens: int
    since: float
    forecast: float | None = None


@dataclass(slots=True)
class _Flow:
    """What one tenant has waiting at one priority."""

    weight: float = 1.0
    num_requests: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class Backlog:
    """Entries by request id. Adding and removing are O(1), `tokens_ahead` is O(priorities + tenants) of what waits."""

    num_tokens: int = 0
    _entries: OrderedDict[str, Entry] = field(default_factory=OrderedDict)
    _flows: dict[int, dict[str, _Flow]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    @property
    def oldest(self) -> float | None:
        """When the one came that has waited longest, or None when nothing waits."""
        return next(iter(self._entries.values())).since if self._entries else None

    def ids(self) -> list[str]:
        """Of the requests that wait."""
        return list(self._entries)

    def add(self, request_id: str, entry: Entry) -> None:
        """Add an entry, whose id must be new. Entries come in order of time."""
        self._entries[request_id] = entry
        self.num_tokens += entry.num_tokens
        flow = self._flows.setdefault(entry.priority, {}).setdefault(entry.tenant, _Flow())
        flow.weight = entry.weight
        flow.num_requests += 1
        flow.num_tokens += entry.num_tokens

    def remove(self, request_id: str) -> Entry | None:
        """Remove and return an entry; None when there is none."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        self.num_tokens -= entry.num_tokens
        tenants = self._flows[entry.priority]
        flow = tenants[entry.tenant]
        flow.num_requests -= 1
        flow.num_tokens -= entry.num_tokens
        if not flow.num_requests:
            del tenants[entry.tenant]
            if not tenants:
                del self._flows[entry.priority]
        return entry

    def of_tenant(self, tenant: str) -> tuple[int, int]:
        """Requests and prompt tokens that the tenant has waiting, at any priority."""
        flows = [tenants[tenant] for tenants in self._flows.values() if tenant in tenants]
        return sum([flow.num_requests for flow in flows]), sum([flow.num_tokens for flow in flows])

    def requests_ahead(self, priority: int) -> int:
        """Requests at this priority and at more urgent ones."""
        flows = [flow for level, tenants in self._flows.items() if level <= priority for flow in tenants.values()]
        return sum([flow.num_requests for flow in flows])

    def tokens_ahead(
        self, priority: int, tenant: str, weight: float, num_tokens: int, served: Callable[[str], float]
    ) -> float:
        """Prompt tokens that run before the last of a tenant's `num_tokens` new ones does, without these.

        All that waits at more urgent priorities, all that the tenant itself has at this one, and of each other tenant as
        much as brings it to the same service for its weight by then.

        Args:
            served: tokens that a tenant was given lately.
        """
        ahead = 0.0
        tenants = self._flows.get(priority, {})
        own = tenants[tenant].num_tokens if tenant in tenants else 0
        for level, others in self._flows.items():
            if level < priority:
                ahead += sum([flow.num_tokens for flow in others.values()])
        level_by_then = (served(tenant) + own + num_tokens) / weight
        for name, flow in tenants.items():
            if name != tenant:
                ahead += min(flow.num_tokens, max(0.0, level_by_then * flow.weight - served(name)))
        return ahead + own

    def check_integrity(self) -> None:
        """Assert that the sums are those of their parts."""
        sums: dict[tuple[int, str], tuple[int, int]] = {}
        for entry in self._entries.values():
            requests, tokens = sums.get((entry.priority, entry.tenant), (0, 0))
            sums[entry.priority, entry.tenant] = requests + 1, tokens + entry.num_tokens
        found = {
            (priority, tenant): (flow.num_requests, flow.num_tokens)
            for priority, tenants in self._flows.items()
            for tenant, flow in tenants.items()
        }
        assert found == sums, f"flows are {found}, their entries sum to {sums}"
        assert self.num_tokens == sum(entry.num_tokens for entry in self._entries.values()), "queued tokens do not add up"


@dataclass(slots=True)
class Running:
    """A request that has its first token and has not ended.

    Attributes:
        num_tokens: of its prompt and output, without those of the prompt that it found cached.
    """

    priority: int
    num_prompt: int
    num_tokens: int


@dataclass(slots=True)
class InService:
    """What runs, by request id; all but `num_at` is O(1).

    Attributes:
        num_tokens: of all of them.
    """

    num_tokens: int = 0
    _running: dict[str, Running] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running

    def start(self, event: TokenEvent, entry: Entry) -> None:
        """Add the request of `entry`, whose first tokens `event` has."""
        num_tokens = event.num_prompt - event.num_cached + len(event.tokens)
        self._running[event.request_id] = Running(entry.priority, entry.num_tokens, num_tokens)
        self.num_tokens += num_tokens

    def add_tokens(self, event: TokenEvent) -> None:
        """Count further tokens; those of requests that are not here are ignored."""
        running = self._running.get(event.request_id)
        if running is not None:
            running.num_tokens += len(event.tokens)
            self.num_tokens += len(event.tokens)

    def end(self, request_id: str) -> Running | None:
        """Remove and return a request; None when it is not here."""
        running = self._running.pop(request_id, None)
        if running is not None:
            self.num_tokens -= running.num_tokens
        return running

    def num_at(self, priority: int) -> int:
        """Requests at this priority and at more urgent ones."""
        return sum([running.priority <= priority for running in self._running.values()])

    def check_integrity(self) -> None:
        """Assert that the sum is that of its parts."""
        assert self.num_tokens == sum(running.num_tokens for running in self._running.values()), "running tokens do not add up"
