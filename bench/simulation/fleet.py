"""Replicas behind one door, and their number over time.

Owns routing (to the replica with the fewest tokens in flight), starting, draining and stopping replicas, and what they cost.
How many there should be is `autoscale`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.simulation.autoscale import Load, Policy
from bench.simulation.record import Record, Summary, Targets, summarise
from bench.simulation.replica import Replica, Setting
from bench.simulation.traces import Arrival


@dataclass(frozen=True, slots=True)
class Scaling:
    """When replicas come and go.

    Attributes:
        low, high: bounds of their number; there are `low` at the start, ready.
        policy: how many are wanted; None for always `low`.
        interval: seconds between decisions.
        load_seconds: from the decision for a replica until it is ready. It costs from the decision on.
        cooldown: seconds after any change before one is taken away.
    """

    low: int = 1
    high: int = 1
    policy: Policy | None = None
    interval: float = 5.0
    load_seconds: float = 30.0
    cooldown: float = 120.0


class Fleet:
    """Replicas of one setting under `scaling`.

    Attributes:
        history: (seconds, replicas) at each change.
    """

    def __init__(self, setting: Setting, scaling: Scaling, record: Record) -> None:
        self._setting = setting
        self._scaling = scaling
        self._record = record
        self._replicas = [Replica(setting, record) for _ in range(scaling.low)]
        self._draining: list[Replica] = []
        self._stopped: list[tuple[Replica, float]] = []
        self._next_tick = scaling.interval
        self._last_change = 0.0
        self._busy_before = 0.0
        self.history: list[tuple[float, int]] = [(0.0, scaling.low)]

    def run(self, arrivals: Sequence[Arrival]) -> float:
        """Serve `arrivals`, which are in order of time; when the last token came."""
        for number, arrival in enumerate(arrivals):
            reaches = arrival.at + self._setting.request_seconds
            self._advance(reaches)
            self._route(reaches).offer(arrival, number)
        while not all(replica.idle for replica in self._everyone()):
            self._advance(self._next_tick)
        return max([outcome.last for outcome in self._record.outcomes.values()], default=0.0)

    def _everyone(self) -> list[Replica]:
        return self._replicas + self._draining

    def _route(self, now: float) -> Replica:
        ready = [replica for replica in self._replicas if replica.ready_at <= now]
        return min(ready or self._replicas, key=lambda replica: (replica.tokens_in_flight, replica.ready_at))

    def _advance(self, until: float) -> None:
        while self._scaling.policy is not None and self._next_tick <= until:
            self._move(self._next_tick)
            self._decide(self._next_tick, self._scaling.policy)
            self._next_tick += self._scaling.interval
        self._move(until)
        if self._scaling.policy is None:
            self._next_tick = until + self._scaling.interval

    def _move(self, until: float) -> None:
        for replica in self._everyone():
            replica.advance(until)
        for replica in [replica for replica in self._draining if replica.idle]:
            self._draining.remove(replica)
            self._stopped.append((replica, until))

    def _busy_seconds(self) -> float:
        return sum(replica.runner.busy_seconds for replica in [*self._everyone(), *(gone for gone, _ in self._stopped)])

    def _decide(self, now: float, policy: Policy) -> None:
        scaling, busy = self._scaling, self._busy_seconds()
        count = len(self._replicas)
        load = Load(
            now=now,
            num_replicas=count,
            num_waiting=sum(replica.num_waiting for replica in self._replicas),
            tokens_in_flight=sum(replica.tokens_in_flight for replica in self._replicas),
            utilisation=min(1.0, (busy - self._busy_before) / (scaling.interval * count)),
        )
        self._busy_before = busy
        wanted = min(scaling.high, max(scaling.low, policy(load)))
        if wanted > count:
            self._replicas += [self._start(now) for _ in range(wanted - count)]
        elif wanted < count and now - self._last_change >= scaling.cooldown:
            # The emptiest go, and finish what they have.
            leaving = sorted(self._replicas, key=lambda replica: replica.tokens_in_flight)[: count - wanted]
            self._replicas = [replica for replica in self._replicas if replica not in leaving]
            self._draining += leaving
        if len(self._replicas) != count:
            self._last_change = now
            self.history.append((now, len(self._replicas)))

    def _start(self, now: float) -> Replica:
        replica = Replica(self._setting, self._record, ready_at=now + self._scaling.load_seconds)
        replica.started = now
        return replica

    def summarise(self, targets: Targets, end: float) -> Summary:
        """The whole fleet's summary; `end` as `run` gave it."""
        everyone = [*self._everyone(), *(replica for replica, _ in self._stopped)]
        alive = sum(end - replica.started for replica in self._everyone())
        gone = sum(stopped - replica.started for replica, stopped in self._stopped)
        return summarise(
            self._record,
            targets,
            seconds=end,
            busy_seconds=self._busy_seconds(),
            replica_seconds=max(0.0, alive + gone),
            num_steps=sum(replica.runner.num_steps for replica in everyone),
            num_preemptions=sum(replica.scheduler.num_preemptions for replica in everyone),
        )
