"""One server in virtual time, built from the settings that the real one is built from.

Owns how a `ServeConfig` becomes limits without a model, and the order in which arrivals and steps meet, which is that of the
real engine's thread: what came while a step was waited for goes in before the next is planned.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from bench.simulation.record import Record
from bench.simulation.traces import Arrival, prompt_tokens
from bench.simulation.virtual import CostRunner, VirtualClock
from jaxserve.config import ServeConfig
from jaxserve.device.buckets import choose_bucket, enumerate_buckets
from jaxserve.engine.core import EngineCore
from jaxserve.errors import ConfigError, InvalidRequest, JaxserveError
from jaxserve.host.admission import Admission, cap_output
from jaxserve.host.cost import BucketFor, StepCost, StepWork
from jaxserve.host.cost_file import CostOrigin
from jaxserve.host.pace import Pacer
from jaxserve.host.prefix import make_tree
from jaxserve.host.scheduler import Scheduler
from jaxserve.host.sizes import StepSizes, fixed_places
from jaxserve.plan import RunnerLimits
from jaxserve.request import Request, SamplingParams, TokenEvent

DEFAULT_MAX_CONTEXT = 8192
DEFAULT_KV_BYTES = 2 * 2**30
VOCAB_SIZE = 2**31
MANY = 1 << 20
"""Tokens of a step so large that only what grows with it counts."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What every replica of a simulation is built from.

    Attributes:
        kv_bytes_per_token: of the model, from which the pool's pages follow where `config` gives memory.
        request_seconds: from a request's arrival to the engine.
        reply_seconds: from the engine to whoever reads a token.
        spread: how much single steps vary; see `CostRunner`.
        window: positions that every layer sees at most; 0 where one sees all.
    """

    config: ServeConfig
    cost: StepCost
    kv_bytes_per_token: float
    request_seconds: float = 0.0
    reply_seconds: float = 0.0
    spread: tuple[float, ...] = ()
    window: int = 0


def setting_of(config: ServeConfig, cost: StepCost, origin: CostOrigin) -> Setting:
    """Of a server with this configuration, whose steps cost what was measured there."""
    return Setting(
        config,
        cost,
        origin.kv_bytes_per_token,
        request_seconds=origin.request_seconds,
        reply_seconds=origin.reply_seconds,
        spread=origin.spread,
        window=origin.window,
    )


def limits_of(setting: Setting) -> RunnerLimits:
    """The limits that a server with this setting would have."""
    engine = setting.config.engine
    if engine.host_kv_memory:
        raise ConfigError(f"host_kv_memory is {engine.host_kv_memory}, yet the simulator knows no host tier; leave it out")
    if engine.pin_prefix:
        raise ConfigError(f"pin_prefix is {engine.pin_prefix}, yet a trace has no texts that it could begin; leave it out")
    max_context = engine.max_context or DEFAULT_MAX_CONTEXT
    fitting = (engine.kv_memory or DEFAULT_KV_BYTES) // max(1.0, setting.kv_bytes_per_token * engine.page_size)
    limits = RunnerLimits(
        num_pages=engine.num_pages or int(fitting),
        page_size=engine.page_size,
        max_seqs=engine.max_seqs,
        max_step_tokens=engine.max_step_tokens,
        max_context=max_context,
        vocab_size=VOCAB_SIZE,
        window=setting.window or None,
    )
    if engine.num_pages:
        return limits
    return replace(limits, num_pages=max(2, min(limits.num_pages, engine.max_seqs * limits.pages_for(max_context))))


def tokens_of_equal_cost(cost: StepCost) -> float:
    """Tokens before a token at which its attention costs as much as all else of it; infinite where attention costs nothing."""
    many = StepWork(MANY, True, 1, 1, 0, 0, 0)
    seconds = cost.seconds(many)
    of_tokens = cost.seconds(replace(many, places=2 * MANY)) - seconds
    of_pairs = cost.seconds(replace(many, chunk_products=MANY**2)) - seconds
    return MANY * of_tokens / of_pairs if of_pairs > 0 else math.inf


class Replica:
    """A server: admission, scheduler and loop, on a runner of virtual time.

    Args:
        ready_at: when it begins to work; what is offered earlier waits.
        record: shared by all replicas.
    """

    def __init__(self, setting: Setting, record: Record, *, ready_at: float = 0.0) -> None:
        limits = limits_of(setting)
        engine, http = setting.config.engine, setting.config.http
        buckets = enumerate_buckets(limits)
        bucket_for: BucketFor = lru_cache(maxsize=1 << 16)(partial(choose_bucket, buckets))
        self.started = self.ready_at = ready_at
        self.clock = VirtualClock(ready_at)
        self._arrival_clock = VirtualClock(ready_at)
        self._record = record
        self._request_seconds = setting.request_seconds
        self._reply_seconds = setting.reply_seconds
        self._http = http
        self._outstanding: dict[str, int] = {}
        self.tokens_in_flight = 0
        self._pending: list[TokenEvent] = []
        pacer = None
        if engine.slo_itl_ms:
            pacer = Pacer(setting.cost, buckets, bucket_for, target_seconds=engine.slo_itl_ms / 1e3)
        self.runner = CostRunner(limits, setting.cost, bucket_for, self.clock, setting.spread)
        self.scheduler = Scheduler(
            limits,
            prefill_chunk=engine.prefill_chunk,
            seed=0,
            clock=self.clock,
            prefixes=make_tree(engine, partial(tokens_of_equal_cost, setting.cost)),
            pacer=pacer,
            sizes=StepSizes(buckets, fixed_places(setting.cost, buckets)),
        )
        self.core = EngineCore(
            self.scheduler,
            self.runner,
            overlap=engine.overlap,
            clock=self.clock,
            on_step=None if pacer is None else pacer.observe,
        )
        self.admission = Admission(
            limits,
            max_queue_requests=http.max_queue_requests,
            max_queue_tokens=http.max_queue_tokens,
            slo_ttft_seconds=http.slo_ttft_ms / 1e3,
            clock=self._arrival_clock,
        )

    @property
    def idle(self) -> bool:
        return not self._outstanding

    @property
    def num_waiting(self) -> int:
        """Requests that have no token yet."""
        return self.admission.queued_requests

    def offer(self, arrival: Arrival, number: int) -> bool:
        """Ask admission, and hand on what it lets in; whether it did. `advance` must have reached the moment at which the
        arrival gets to the engine."""
        request = Request(
            request_id=f"r{number}",
            prompt=prompt_tokens(arrival, number),
            params=SamplingParams(temperature=0.0, max_tokens=arrival.num_output, ignore_eos=True),
            deadline=arrival.at + self._http.request_timeout if self._http.request_timeout else None,
        )
        reaches = arrival.at + self._request_seconds
        if not self.core.has_work:
            self.clock.pass_until(reaches)
        self._arrival_clock.pass_until(reaches)
        try:
            cap_output(request, self.runner.limits, self._http.max_output_tokens)
            self.admission.admit(request)
        except InvalidRequest:
            self._record.too_long += 1
            return False
        except JaxserveError as error:
            name = type(error).__name__
            self._record.refused[name] = self._record.refused.get(name, 0) + 1
            return False
        self._record.arrive(request.request_id, arrival.at, arrival.num_prompt)
        weight = arrival.num_prompt + arrival.num_output
        self._outstanding[request.request_id] = weight
        self.tokens_in_flight += weight
        self.core.add(request)
        return True

    def advance(self, until: float = math.inf) -> list[str]:
        """Run steps until that time, or until there is no work; the requests that finished."""
        finished: list[str] = []
        if until >= self.clock.now:
            finished += self._deliver()
        while self.clock.now < until and self.core.has_work:
            self._pending = self.core.step()
            if self.clock.now <= until:
                finished += self._deliver()
        return finished

    def turn(self) -> list[str]:
        """Run one step, and let everybody know of it at once; the requests that finished."""
        self._pending = self.core.step()
        return self._deliver()

    def _deliver(self) -> list[str]:
        """Let everybody know of the last step's events, whose time has come."""
        events, self._pending = self._pending, []
        if not events:
            return []
        self._arrival_clock.pass_until(self.clock.now)
        self.admission.observe(events)
        self._record.observe(events, self.clock.now + self._reply_seconds)
        finished = [event.request_id for event in events if event.finish_reason is not None]
        for request_id in finished:
            self.tokens_in_flight -= self._outstanding.pop(request_id)
        return finished


def run_open(setting: Setting, arrivals: Sequence[Arrival], record: Record) -> Replica:
    """One replica under arrivals at their own times."""
    replica = Replica(setting, record)
    for number, arrival in enumerate(arrivals):
        replica.advance(arrival.at + setting.request_seconds)
        replica.offer(arrival, number)
    replica.advance()
    return replica


def run_closed(setting: Setting, arrivals: Sequence[Arrival], record: Record, concurrency: int) -> Replica:
    """One replica that always has `concurrency` requests, the next coming when one is answered; their times are not used."""
    replica = Replica(setting, record)
    waiting = iter(enumerate(arrivals))
    coming = deque([0.0] * concurrency)
    """When those come that are next, the earliest first."""
    while coming or replica.core.has_work:
        while coming and (coming[0] + setting.request_seconds <= replica.clock.now or not replica.core.has_work):
            at = coming.popleft()
            for number, arrival in waiting:
                if replica.offer(replace(arrival, at=at), number):
                    break
        if replica.core.has_work:
            coming.extend(replica.clock.now + setting.reply_seconds for _ in replica.turn())
    return replica
