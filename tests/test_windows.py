"""Models whose layers have windows, all of them or some, say the same in small pools, giving pages back, as where they keep
them all."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.device import build
from jaxserve.device.buckets import Bucket
from jaxserve.device.runner import DeviceRunner
from jaxserve.model_config import ModelConfig
from jaxserve.request import Request
from tests.cached import CACHED
from tests.near_ties import assert_same_outputs
from tests.real_engines import TINY_MODEL, Output, mixed_requests, run, run_alone, tiny_runner, unoptimised

pytestmark = [*CACHED, pytest.mark.slow]

WINDOW = 50
ENGINE = EngineConfig(dtype="float32", max_seqs=6, max_step_tokens=32, max_context=704, num_pages=512, page_size=8)
BUCKETS = (Bucket(6, 0, 6), Bucket(32, 6, 6))
"""Decodes and chunks."""
TEXT = np.random.default_rng(0).integers(0, TINY_MODEL.vocab_size, 4000)
MODELS = {
    "all": dataclasses.replace(TINY_MODEL, family="mistral", window=WINDOW, windowed=(True,) * 2),
    "some": dataclasses.replace(TINY_MODEL, family="mistral", num_layers=3, window=WINDOW, windowed=(True, False, True)),
}
"""By which layers have the window."""


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> ModelConfig:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def runner(model: ModelConfig) -> DeviceRunner:
    with unoptimised():
        return tiny_runner(ENGINE, model, buckets=BUCKETS)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Most of them, and what they say, longer than the window; some begin the same."""
    requests = mixed_requests(TEXT, max_prompt=250, min_output=30, max_output=80, longest=600)[:10]
    long = [request for request in requests if len(request.prompt) > WINDOW][:4]
    return [*requests, *(dataclasses.replace(r, request_id=f"{r.request_id} less", prompt=r.prompt[:-3]) for r in long)]


@pytest.fixture(scope="module")
def alone(model: ModelConfig, requests: list[Request]) -> dict[str, Output]:
    """What each says by itself on a runner that sees whole tables, and keeps every page."""
    with (
        unoptimised(),
        patch.object(build, "widest_window", lambda model: None),
        patch.object(build, "_with_local_pages", lambda engine, model, limits, *others: limits),
    ):
        keeping = tiny_runner(ENGINE, model, buckets=BUCKETS)
    assert (keeping.limits.window, keeping.limits.local) == (None, None)
    return run_alone(keeping, requests)


def assert_equal(expected: dict[str, Output], found: dict[str, Output]) -> None:
    assert_same_outputs(expected, found, tolerance=2e-4, max_near_ties=1)


def test_tables_are_as_wide_as_a_row_sees(runner: DeviceRunner, model: ModelConfig) -> None:
    limits = runner.limits.local if None in map(model.layer_window, range(model.num_layers)) else runner.limits
    assert limits is not None
    assert limits.window == WINDOW
    assert limits.pages_for(704) == (WINDOW - 1 + 32 - 2) // 8 + 2 < 704 // 8


@pytest.mark.parametrize("prefixes", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("num_pages", [12, 60])
def test_a_small_pool_gives_what_a_large_one_does(
    runner: DeviceRunner, requests: list[Request], alone: dict[str, Output], num_pages: int, prefixes: bool
) -> None:
    """The longest has 84 pages. With a window in every layer one runs at a time in 12, or two that preempt each other."""
    if runner.limits.local_pages:
        num_pages += 84
    found = run(runner, requests, num_pages=num_pages, prefixes=prefixes, prefill_chunk=24)
    assert_equal(alone, found.outputs)
    assert (found.stats.num_preemptions > 0) == (num_pages in (12, 96))


def test_what_is_cached_gives_what_was_computed(
    runner: DeviceRunner, requests: list[Request], alone: dict[str, Output]
) -> None:
    """Each comes twice, in a pool for two thirds of what they compute, so that prefixes have holes."""
    again = [twin for r in requests for twin in (r, dataclasses.replace(r, request_id=f"{r.request_id} once more"))]
    found = run(runner, again, num_pages=200, max_seqs=4, prefixes=True).outputs
    expected = alone | {f"{key} once more": output for key, output in alone.items()}
    assert_equal(expected, found)
    assert sum(output.num_cached > WINDOW for output in found.values()) > 4
