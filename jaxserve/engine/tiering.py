"""The host tier of an engine, from what was measured on its runner: how long pages take to come back, and to compute again."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from jaxserve.config import EngineConfig
from jaxserve.host.cost import BucketFor, StepCost
from jaxserve.host.tier import HostTier, LoadOrCompute
from jaxserve.plan import RunnerLimits

logger = logging.getLogger(__name__)


def build_tier(
    engine: EngineConfig,
    limits: RunnerLimits,
    load_seconds: Mapping[int, float],
    cost: StepCost,
    bucket_for: BucketFor,
) -> HostTier | None:
    """A tier of `limits.host_pages` slots; None, with a warning, where to load would take longer than to compute, always.

    Args:
        load_seconds: as `LoadOrCompute` has it.
    """
    pays = LoadOrCompute(load_seconds, cost, bucket_for, limits.page_size, min(engine.prefill_chunk, limits.max_step_tokens))
    num_tokens = min(limits.max_context, limits.num_pages * limits.page_size)
    num_pages = (num_tokens - 1) // limits.page_size
    figures = (
        f"{num_pages} pages of {limits.page_size} tokens take {pays.seconds_to_load(num_pages) * 1000:.3g} ms to load and "
        f"{pays.seconds_to_compute(0, num_pages * limits.page_size) * 1000:.3g} ms to compute, one page "
        f"{pays.seconds_to_load(1) * 1000:.3g} and {pays.seconds_to_compute(0, limits.page_size) * 1000:.3g} ms"
    )
    if not pays.ever(num_tokens):
        logger.warning("host tier: not used, since pages come back no faster than they are computed: %s", figures)
        return None
    logger.info("host tier: %d pages; %s", limits.host_pages, figures)
    return HostTier(limits.host_pages, pays)
