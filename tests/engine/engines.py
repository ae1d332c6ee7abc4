"""Engines without a device, and their admission, for tests of what stands above them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.core import EngineCore
from jaxserve.host.admission import Admission
from jaxserve.host.prefix import PrefixTree
from jaxserve.host.scheduler import Scheduler
from jaxserve.plan import RunnerLimits
from tests.fakes import FAKE_HIDDEN_SIZE, FakeRunner, NextToken

LIMITS = RunnerLimits(
    num_pages=256, page_size=8, max_seqs=16, max_step_tokens=64, max_context=512, vocab_size=272, hidden_size=FAKE_HIDDEN_SIZE
)  # fmt: skip


@dataclass
class FakeEngine:
    """An engine core over a `FakeRunner`, and the parts a test looks into."""

    scheduler: Scheduler
    runner: FakeRunner
    core: EngineCore
    admission: Admission

    def start(self) -> AsyncEngine:
        """Its asyncio side, started in the running loop."""
        engine = AsyncEngine(self.core, self.admission)
        engine.start()
        return engine


def fake_engine(
    limits: RunnerLimits = LIMITS,
    *,
    next_token: NextToken | None = None,
    eos_token_ids: tuple[int, ...] = (2,),
    eos_probability: float = 0.0,
    step_seconds: float = 0.0,
    fail_on_submit: Collection[int] = (),
    max_queue_requests: int = 4096,
    prefixes: bool = False,
) -> FakeEngine:
    """An engine that samples what `next_token` says, by default a hash of the prefix and the seed."""
    scheduler = Scheduler(
        limits,
        prefill_chunk=32,
        eos_token_ids=eos_token_ids,
        seed=0,
        prefixes=PrefixTree(limits.page_size) if prefixes else None,
    )
    runner = FakeRunner(
        limits,
        next_token=next_token,
        eos_token_id=eos_token_ids[0] if eos_token_ids else 0,
        eos_probability=eos_probability,
        step_seconds=step_seconds,
        fail_on_submit=fail_on_submit,
    )
    core = EngineCore(scheduler, runner, overlap=True)
    admission = Admission(limits, max_queue_requests=max_queue_requests, max_queue_tokens=1_000_000)
    return FakeEngine(scheduler, runner, core, admission)
