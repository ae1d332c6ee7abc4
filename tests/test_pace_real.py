"""`slo_itl_ms` on a real runner: costs are measured without a compile, chunks shrink beside decodes, tokens stay the same."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.device.buckets import choose_bucket
from jaxserve.engine.calibration import build_pacer
from jaxserve.engine.core import EngineCore
from jaxserve.host.pace import Pacer
from jaxserve.host.scheduler import Scheduler
from jaxserve.plan import Runner, StepHandle, StepPlan
from tests.cached import CACHED
from tests.near_ties import assert_same_outputs
from tests.real_engines import TINY_MODEL, Output, PlanLog, mixed_requests, run, tiny_runner

pytestmark = [pytest.mark.slow, *CACHED]

ENGINE = EngineConfig(dtype="float32", max_seqs=8, max_step_tokens=256, max_context=512, num_pages=256, page_size=8)
TEXT = np.random.default_rng(0).integers(0, TINY_MODEL.vocab_size, 4000)


class Log(PlanLog):
    """Also notes how many tokens of chunks there were in each step with decodes."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.sizes_beside_decodes: list[int] = []

    def submit(self, plan: StepPlan) -> StepHandle:
        chunks = [row.count for row in plan.rows if row.count > 1]
        if chunks and any(row.start >= row.num_prompt for row in plan.rows):
            self.sizes_beside_decodes.append(plan.num_tokens)
        return super().submit(plan)


def test_a_target_that_cannot_be_met_leaves_the_floor_and_the_same_tokens() -> None:
    runner = tiny_runner(ENGINE)
    requests = mixed_requests(TEXT, max_prompt=300, max_output=20)
    plain = Log(runner)
    expected = run(plain, requests, overlap=True).outputs
    engine = dataclasses.replace(ENGINE, slo_itl_ms=0.001)
    pacer = build_pacer(engine, runner, runner.buckets, partial(choose_bucket, runner.buckets))
    assert isinstance(pacer, Pacer)
    assert runner.compiles_since_ready == 0
    paced = Log(runner)
    scheduler = Scheduler(runner.limits, prefill_chunk=256, seed=0, pacer=pacer)
    core = EngineCore(scheduler, paced, overlap=True)
    core.on_step = pacer.observe
    found = {request.request_id: Output() for request in requests}
    for request in requests:
        core.add(request)
    while core.has_work:
        for event in core.step():
            found[event.request_id].tokens += event.tokens
            found[event.request_id].logprobs += event.logprobs
            found[event.request_id].finish_reason = event.finish_reason
    scheduler.check_integrity()

    assert max(plain.sizes_beside_decodes) > 4 * pacer.floor(0)
    assert 0 < max(paced.sizes_beside_decodes) <= pacer.floor(0)
    assert_same_outputs(expected, found, tolerance=2e-4, max_near_ties=1)
