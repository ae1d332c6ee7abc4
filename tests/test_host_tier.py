"""The same tokens on a real engine whose pages go to host memory and come back, as with no cache; what start-up decides."""

from __future__ import annotations

import dataclasses
import logging
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.device.buckets import choose_bucket
from jaxserve.device.build import build_runner
from jaxserve.device.runner import DeviceRunner
from jaxserve.engine.calibration import find_cost
from jaxserve.engine.tiering import build_tier
from jaxserve.errors import ConfigError
from jaxserve.host.tier import HostTier
from jaxserve.models.sharding import make_mesh
from jaxserve.request import Request, SamplingParams
from tests.cached import CACHED
from tests.near_ties import assert_same_outputs
from tests.real_engines import TINY_MODEL, Run, run, tiny_runner

pytestmark = [*CACHED, pytest.mark.slow]

PAGE = 8
BYTES_PER_PAGE = 2 * 3 * PAGE * 16 * 4
SLOTS = 64
ENGINE = EngineConfig(
    dtype="float32",
    max_seqs=8,
    max_step_tokens=64,
    max_context=160,
    num_pages=40,
    page_size=PAGE,
    host_kv_memory=SLOTS * BYTES_PER_PAGE,
)


@pytest.fixture(scope="module")
def runner() -> DeviceRunner:
    return tiny_runner(ENGINE)


def always(start: int, num_pages: int, num_tokens: int) -> bool:
    return True


def conversations(count: int, *, turns: int, seed: int = 0, max_tokens: int = 20) -> list[Request]:
    """Prompts that go on where their text was left in the turn before, and so are all wanted again after all others."""
    rng = np.random.default_rng(seed)
    texts = rng.integers(0, TINY_MODEL.vocab_size, (count, 200)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=2)
    return [
        Request(request_id=f"{turn}-{index}", prompt=tuple(text[: 40 + 37 * turn + index % PAGE]), params=params)
        for turn in range(turns)
        for index, text in enumerate(texts)
    ]


def assert_equal(expected: Run, found: Run) -> None:
    assert_same_outputs(expected.outputs, found.outputs, tolerance=2e-4, max_near_ties=2)


@pytest.mark.parametrize("overlap", [False, True], ids=["in_turn", "overlapped"])
@pytest.mark.parametrize("num_slots", [SLOTS, 12], ids=["ample", "short_of_slots"])
def test_evicted_pages_come_back_and_say_the_same(runner: DeviceRunner, overlap: bool, num_slots: int) -> None:
    requests = conversations(5, turns=3)
    expected = run(runner, requests, overlap=overlap)
    tier = HostTier(num_slots, always)
    found = run(runner, requests, overlap=overlap, prefixes=True, tier=tier)
    assert_equal(expected, found)
    stats = found.stats
    assert stats.num_saved_pages >= 30
    assert stats.num_loaded_pages >= (20 if num_slots == SLOTS else 1)
    assert (stats.host_pages == num_slots) == (tier.num_lost > 0)
    assert runner.compiles_since_ready == 0
    cached = [run(runner, requests, overlap=overlap, prefixes=True, tier=t).stats for t in (None, HostTier(SLOTS, always))]
    assert cached[1].num_prefix_hit_tokens > cached[0].num_prefix_hit_tokens


def test_preempted_sequences_come_back_and_say_the_same(runner: DeviceRunner) -> None:
    requests = conversations(8, turns=1, max_tokens=80)
    expected = run(runner, requests)
    recomputed = run(runner, requests, prefixes=True, num_pages=24)
    swapped = run(runner, requests, prefixes=True, num_pages=24, tier=HostTier(SLOTS, always))
    assert_equal(expected, recomputed)
    assert_equal(expected, swapped)
    assert swapped.stats.num_preemptions > 0
    assert swapped.stats.num_loaded_pages > 0
    assert swapped.stats.num_tokens < recomputed.stats.num_tokens
    assert runner.compiles_since_ready == 0


def test_a_tier_that_never_pays_changes_nothing(runner: DeviceRunner) -> None:
    requests = conversations(5, turns=3)
    tier = HostTier(SLOTS, lambda start, num_pages, num_tokens: False)
    plain, found = run(runner, requests, prefixes=True), run(runner, requests, prefixes=True, tier=tier)
    assert {key: output.num_cached for key, output in found.outputs.items()} == {
        key: output.num_cached for key, output in plain.outputs.items()
    }
    assert found.stats.num_loaded_pages == 0


def test_start_up_measures_and_decides(runner: DeviceRunner, caplog: pytest.LogCaptureFixture) -> None:
    """With what was measured, and had loads taken a second each."""
    bucket_for = partial(choose_bucket, runner.buckets)
    seconds = runner.time_loads()
    cost = find_cost(ENGINE, runner, runner.buckets, bucket_for)
    with caplog.at_level(logging.INFO):
        build_tier(ENGINE, runner.limits, seconds, cost, bucket_for)
        assert build_tier(ENGINE, runner.limits, dict.fromkeys(seconds, 1.0), cost, bucket_for) is None
        tier = build_tier(ENGINE, runner.limits, dict.fromkeys(seconds, 1e-9), cost, bucket_for)
    assert len([record for record in caplog.records if record.message.startswith("host tier:")]) == 3
    assert tier is not None
    requests = conversations(5, turns=3)
    found = run(runner, requests, prefixes=True, tier=tier)
    assert_equal(run(runner, requests), found)
    assert found.stats.num_loaded_pages > 0
    assert runner.compiles_since_ready == 0


def test_two_devices_move_pages_too() -> None:
    runner = tiny_runner(dataclasses.replace(ENGINE, tensor_parallel=2, host_kv_memory=2 * SLOTS * BYTES_PER_PAGE))
    requests = conversations(5, turns=2)
    found = run(runner, requests, prefixes=True, tier=HostTier(SLOTS, always))
    assert_equal(run(runner, requests), found)
    assert found.stats.num_loaded_pages > 0
    assert runner.compiles_since_ready == 0


def test_less_than_a_page_is_refused() -> None:
    engine = dataclasses.replace(ENGINE, host_kv_memory=BYTES_PER_PAGE - 1)
    with pytest.raises(ConfigError, match="too few for one page of"):
        build_runner(engine, TINY_MODEL, make_mesh(1), np.dtype(jnp.float32))
