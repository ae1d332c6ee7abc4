"""Figures for Prometheus, in a registry of their own.

Owns names, buckets and what is counted per request. What the engine and its queue count is read from them when a scrape
comes. Knows neither HTTP nor text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.engine.core import EngineStats
from jaxserve.host.admission import Admission
from jaxserve.request import TokenEvent

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """Counters of one server. `observe_engine` adds the engine's once there is one."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "jaxserve_requests",
            "HTTP requests for completions, by how they ended: ok, refused (4xx), busy (429, 503), timeout (408 or in the "
            "stream), error (5xx or in the stream), disconnected (the client left), stalled (it stopped reading).",
            ["endpoint", "outcome"],
            registry=self._registry,
        )
        self.tenant_requests = Counter(
            "jaxserve_tenant_requests",
            "HTTP requests for completions, by the label of their API key and how they ended.",
            ["tenant", "outcome"],
            registry=self._registry,
        )
        self.tenant_tokens = Counter(
            "jaxserve_tenant_tokens",
            "Tokens by the label of their API key: those of admitted prompts, and those handed out.",
            ["tenant", "kind"],
            registry=self._registry,
        )
        self.refused = Counter(
            "jaxserve_shed_requests",
            "HTTP requests for completions that were turned away for now: queue_full (429), tenant_share (429: the key's part "
            "of the queue is full), too_late (429: its first token would miss the target), not_ready (503).",
            ["reason"],
            registry=self._registry,
        )
        self.finished = Counter(
            "jaxserve_choices", "Choices that ended, by finish reason.", ["reason"], registry=self._registry
        )
        self.batch_lines = Counter(
            "jaxserve_batch_lines",
            "Lines of batches that have a result, by the label of their API key: ok, or error.",
            ["tenant", "outcome"],
            registry=self._registry,
        )
        self.batches = Gauge("jaxserve_open_batches", "Batches that have not ended.", registry=self._registry)
        self.joined = self._counter(
            "jaxserve_joined_requests", "HTTP requests that joined one that ran, by a key they gave it."
        )
        self.dropped_connections = Counter(
            "jaxserve_dropped_connections",
            "Connections that were ended for what their client did: too_many (more than there may be), slow_head (its request "
            "did not come in time), malformed (not HTTP), stalled (it read nothing), idle (it did nothing, and others wanted "
            "its place).",
            ["reason"],
            registry=self._registry,
        )
        self.connections = Gauge("jaxserve_connections", "Connections that are open.", registry=self._registry)
        self.prompt_tokens = self._counter("jaxserve_prompt_tokens", "Prompt tokens of admitted requests.")
        self.output_tokens = self._counter("jaxserve_output_tokens", "Output tokens handed to requests.")
        self.first_token = self._histogram(
            "jaxserve_time_to_first_token_seconds", "From the request's arrival to its first token.", FIRST_TOKEN_BUCKETS
        )
        self.inter_token = self._histogram(
            "jaxserve_inter_token_seconds", "Between output tokens of one sequence.", INTER_TOKEN_BUCKETS
        )
        self.request_seconds = self._histogram(
            "jaxserve_request_seconds", "From a request's arrival to the end of its answer.", REQUEST_BUCKETS
        )

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(name, what, registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, what, buckets=buckets, registry=self._registry)

    def count_dropped_connection(self, reason: str) -> None:
        """Count one, by the reasons of `dropped_connections`."""
        self.dropped_connections.labels(reason).inc()

    def observe_connections(self, count: Callable[[], int]) -> None:
        """Export what this gives at the time of each scrape."""
        self.connections.set_function(count)

    def observe_engine(self, stats: Callable[[], EngineStats], admission: Admission, num_compiles: Callable[[], int]) -> None:
        """Export what these give at the time of each scrape."""
        self._registry.register(_EngineCollector(stats, admission, num_compiles))

    def export(self) -> bytes:
        """All figures in Prometheus' text format, which `CONTENT_TYPE` names."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats], admission: Admission, num_compiles: Callable[[], int]) -> None:
        self._stats = stats
        self._admission = admission
        self._num_compiles = num_compiles

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        gauges: dict[str, tuple[str, float]] = {
            "queued_requests": ("Requests that wait for their first token.", self._admission.queued_requests),
            "queued_tokens": ("Prompt tokens of those.", self._admission.queued_tokens),
            "queue_limit_tokens": ("Prompt tokens that may wait.", self._admission.max_queue_tokens),
            "queue_drain_tokens_per_second": (
                "Prompt tokens that leave the queue while there is a backlog; 0 while unknown.",
                self._admission.drain_rate or 0.0,
            ),
            "first_token_margin": ("The factor by which forecasts of first tokens are stretched.", self._admission.margin),
            "shed_share": ("The part of sequences turned away over the last minute, 0 to 1.", self._admission.shed_share),
            "running_sequences": ("Sequences that hold a slot.", stats.running),
            "waiting_sequences": ("Sequences that wait for a slot, new or preempted.", stats.waiting),
            "free_pages": ("Free pages of the KV pool.", stats.free_pages),
            "total_pages": ("Pages of the KV pool.", stats.total_pages),
            "cached_pages": ("Free pages that hold a prefix, until they are wanted.", stats.cached_pages),
            "pinned_pages": ("Pages kept for pinned prefixes.", stats.pinned_pages),
            "host_pages": ("Pages held in host memory.", stats.host_pages),
            "prefix_hit_rate": (
                "Part of all prompt tokens so far that were cached, 0 to 1.",
                stats.num_prefix_hit_tokens / max(1, stats.num_prefix_asked_tokens),
            ),
        }
        counters: dict[str, tuple[str, float]] = {
            "steps": ("Steps of the engine.", stats.num_steps),
            "computed_tokens": ("Positions computed, recomputed ones included.", stats.num_tokens),
            "prefix_asked_tokens": ("Prompt tokens of sequences that ran.", stats.num_prefix_asked_tokens),
            "prefix_hit_tokens": ("Those of them that were cached.", stats.num_prefix_hit_tokens),
            "evicted_pages": ("Pages that lost their prefix to make room.", stats.num_evicted_pages),
            "saved_pages": ("Pages copied to host memory to make room.", stats.num_saved_pages),
            "loaded_pages": ("Pages copied back from host memory.", stats.num_loaded_pages),
            "preemptions": ("Times that a sequence lost its pages.", stats.num_preemptions),
            "step_failures": ("Steps that failed.", stats.num_failures),
            "exposed_host_seconds": ("Host time in which the device had nothing to do.", stats.exposed_host_seconds),
            "device_wait_seconds": ("Time spent waiting for the device.", stats.wait_seconds),
            "compiles": ("Programs compiled; after readiness this must not grow.", self._num_compiles()),
        }
        for name, (what, value) in gauges.items():
            yield GaugeMetricFamily(f"jaxserve_{name}", what, value=value)
        for name, (what, value) in counters.items():
            yield CounterMetricFamily(f"jaxserve_{name}", what, value=value)

    def describe(self) -> Iterator[Metric]:
        """Nothing, which lets it be registered without being collected."""
        return iter(())


class TokenCounter:
    """Counts the tokens of one request of a tenant, for whom nobody waits.

    Attributes:
        arrived: when it came, by `time.monotonic`.
    """

    def __init__(self, metrics: Metrics, tenant: str) -> None:
        self._metrics = metrics
        self._tenant = tenant
        self._output_tokens = metrics.tenant_tokens.labels(tenant, "output")
        self.arrived = time.monotonic()

    def admit(self, num_prompt_tokens: int) -> None:
        """Take note that the engine has taken it on."""
        self._metrics.prompt_tokens.inc(num_prompt_tokens)
        self._metrics.tenant_tokens.labels(self._tenant, "prompt").inc(num_prompt_tokens)

    def observe(self, events: Iterable[TokenEvent]) -> None:
        """Take note of tokens that have just come."""
        for event in events:
            self._metrics.output_tokens.inc(len(event.tokens))
            self._output_tokens.inc(len(event.tokens))


class TokenClock(TokenCounter):
    """Times them too, for one that someone waits for."""

    def __init__(self, metrics: Metrics, tenant: str) -> None:
        super().__init__(metrics, tenant)
        self._last: dict[str, float] = {}

    def observe(self, events: Iterable[TokenEvent]) -> None:
        """Take note of tokens that have just come, and when."""
        now = time.monotonic()
        metrics = self._metrics
        for event in events:
            num_tokens = len(event.tokens)
            if not num_tokens:
                continue
            metrics.output_tokens.inc(num_tokens)
            self._output_tokens.inc(num_tokens)
            last = self._last.get(event.request_id)
            self._last[event.request_id] = now
            if last is None:
                metrics.first_token.observe(now - self.arrived)
                continue
            for _ in range(num_tokens):  # tokens that came together share the time since the last
                metrics.inter_token.observe((now - last) / num_tokens)

    def finish(self) -> None:
        """Take note that the answer is complete."""
        self._metrics.request_seconds.observe(time.monotonic() - self.arrived)
