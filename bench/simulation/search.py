"""Searches upward for the largest batch that keeps latency targets, and its token budget; writes what it found as a profile.

The load is a closed loop: as many requests in flight as the batch holds, the next coming when one is answered, with the
lengths of a trace. So the batch is always full, which is when tokens come slowest, and nothing waits for a slot: time to the
first token is that of prefill beside a full batch. What comes on top when requests queue is a matter of load, which
admission bounds (`slo_ttft_ms`).
"""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.simulation.record import Record, Targets, percentiles
from bench.simulation.replica import Setting, limits_of, run_closed
from bench.simulation.traces import Arrival
from jaxserve.device.buckets import enumerate_buckets
from jaxserve.host.cost import StepWork, chunk_products

SMALLEST_BUDGET = 64
REQUESTS_PER_SEQUENCE = 6
"""Requests in a trial for each place in the batch: enough that the batch has been full for most of it."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A batch that was tried, and how it went. Seconds."""

    max_seqs: int
    max_step_tokens: int
    ttft_p95: float
    itl_p95: float
    output_tokens_per_second: float
    fits: bool

    def __str__(self) -> str:
        return (
            f"max_seqs {self.max_seqs:>4}  max_step_tokens {self.max_step_tokens:>5}  TTFT p95 {self.ttft_p95:>7.3f} s  "
            f"ITL p95 {1e3 * self.itl_p95:>7.1f} ms  {self.output_tokens_per_second:>7.0f} tokens/s  "
            f"{'ok' if self.fits else 'too slow'}"
        )


def with_batch(setting: Setting, max_seqs: int, max_step_tokens: int, targets: Targets) -> Setting:
    """The setting with this batch and budget, which chunks do not split, and the target for tokens."""
    engine = replace(
        setting.config.engine,
        max_seqs=max_seqs,
        max_step_tokens=max_step_tokens,
        prefill_chunk=max_step_tokens,
        slo_itl_ms=1000 * targets.itl,
    )
    return replace(setting, config=replace(setting.config, engine=engine))


def try_batch(setting: Setting, arrivals: Sequence[Arrival], targets: Targets, max_seqs: int, max_step_tokens: int) -> Profile:
    """Run one closed loop."""
    # Admission must not hide what the engine cannot do.
    http = replace(setting.config.http, slo_ttft_ms=0.0)
    open_setting = replace(setting, config=replace(setting.config, http=http))
    count = min(len(arrivals), max(100, REQUESTS_PER_SEQUENCE * max_seqs))
    record = Record()
    tried = with_batch(open_setting, max_seqs, max_step_tokens, targets)
    replica = run_closed(tried, arrivals[:count], record, concurrency=max_seqs)
    outcomes = record.outcomes.values()
    # Those that fill the batch at the start come all at once, which no later one does.
    ttft = percentiles([one.first - one.arrived for one in outcomes if one.first is not None and one.arrived > 0])
    itl = percentiles(record.gaps)
    found = ttft.get("p95", 0.0), itl.get("p95", 0.0)
    num_output = sum(outcome.num_output for outcome in outcomes)
    # Where chunks are so large that few steps have one, p95 would not see that each of those is too slow.
    smallest = smallest_chunk_seconds(tried)
    fits = bool(ttft) and found[0] <= targets.ttft and max(found[1], smallest) <= targets.itl
    return Profile(max_seqs, max_step_tokens, *found, num_output / max(1e-9, replica.clock.now), fits)


def smallest_chunk_seconds(setting: Setting) -> float:
    """What a step takes that has the smallest chunk there is beside a full batch, all of it at the start of its context."""
    limits = limits_of(setting)
    places = min(bucket.num_tokens for bucket in enumerate_buckets(limits) if bucket.has_chunks)
    size = places - limits.max_seqs
    return setting.cost.seconds(StepWork(places, True, limits.max_seqs, 1, limits.max_seqs, size, chunk_products(0, size)))


def find_batch(
    setting: Setting,
    arrivals: Sequence[Arrival],
    targets: Targets,
    *,
    max_seqs: int,
    max_step_tokens: int = 4096,
    progress: Callable[[Profile], None],
) -> Profile | None:
    """The largest batch that keeps `targets`, with the token budget that then gives most tokens; None if there is none.

    Batches double until none of the budgets, which double too, keeps the targets. A larger budget than the best would keep
    them too at times, since few steps have chunks then, but spends more on empty places than it saves.
    """
    best = None
    size = 1
    while size <= max_seqs:
        fitting = None
        budget = max(SMALLEST_BUDGET, size)
        while budget <= max_step_tokens:
            tried = try_batch(setting, arrivals, targets, size, budget)
            progress(tried)
            if tried.fits and (fitting is None or tried.output_tokens_per_second > fitting.output_tokens_per_second):
                fitting = tried
            budget *= 2
        if fitting is None:
            return best
        best = fitting
        size *= 2
    return best


def profile_toml(best: Profile, setting: Setting, targets: Targets, argv: Sequence[str]) -> str:
    """A file for `jaxserve serve --config`."""
    wanted = f"{targets.ttft:g} s to the first token and {1e3 * targets.itl:g} ms to each next"
    found = f"{best.ttft_p95:.2f} s and {1e3 * best.itl_p95:.0f} ms, {best.output_tokens_per_second:.0f} output tokens/s"
    return f"""\
# The largest batch, always full, whose p95 stays within {wanted}.
# Found in simulation on {datetime.date.today().isoformat()}, with {found}:
#   python -m bench.simulate {shlex.join(argv)}
model = "{setting.config.model}"

[engine]
max_seqs = {best.max_seqs}
max_step_tokens = {best.max_step_tokens}
prefill_chunk = {best.max_step_tokens}
slo_itl_ms = {1e3 * targets.itl:.1f}

[http]
slo_ttft_ms = {1e3 * targets.ttft:.1f}
"""
