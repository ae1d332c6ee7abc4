"""The runner: nothing compiles once it is warm, and what a result says of log probabilities."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.device import compile_counter
from jaxserve.device.abstract import page_bytes, pool_shape
from jaxserve.device.buckets import Bucket
from jaxserve.device.runner import DeviceRunner
from jaxserve.device.step import StepOutput
from jaxserve.models.sharding import make_mesh
from jaxserve.plan import RunnerLimits
from jaxserve.request import Request, SamplingParams
from tests.cached import CACHED
from tests.real_engines import TINY_MODEL, run, tiny_runner

pytestmark = CACHED

ENGINE = EngineConfig(dtype="float32", max_seqs=4, max_step_tokens=64, max_context=160, num_pages=100, page_size=8)


@pytest.fixture(scope="module")
def runner() -> DeviceRunner:
    return tiny_runner(ENGINE)


def mixed_traffic(*prompt_lengths: int) -> Iterator[Request]:
    """Every parameter that changes what the device does, alone and together."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.05, "seed": 1},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"logit_bias": ((1, 5.0), (2, -100.0))},
        {"logprobs": 0, "temperature": 0.0},
        {"logprobs": 20, "logit_bias": ((5, 1.0),)},
        {"min_tokens": 5, "stop_token_ids": (3, 4, 5)},
    ]
    rng = np.random.default_rng(0)
    for index in range(48):
        prompt = tuple(rng.integers(0, TINY_MODEL.vocab_size, rng.choice(prompt_lengths)).tolist())
        params = SamplingParams(**{"max_tokens": int(rng.integers(5, 25)), **kinds[index % len(kinds)]})
        yield Request(request_id=str(index), prompt=prompt, params=params, priority=index % 3)


def used_buckets(runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch) -> set[Bucket]:
    """The buckets that steps run in, from here on."""
    used = set()
    dispatch = runner._dispatch

    def noting(bucket: Bucket, limits: RunnerLimits, packed: np.ndarray) -> StepOutput:
        used.add(bucket)
        return dispatch(bucket, limits, packed)

    monkeypatch.setattr(runner, "_dispatch", noting)
    return used


@pytest.mark.slow
def test_nothing_compiles_after_readiness(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = tiny_runner(ENGINE)
    assert runner.compiles_since_ready == 0
    used = used_buckets(runner, monkeypatch)
    run(runner, list(mixed_traffic(100))[:1], prefill_chunk=64)
    run(runner, mixed_traffic(1, 2, 15, 60, 100), prefill_chunk=64)
    preempted = run(runner, mixed_traffic(1, 6), prefill_chunk=7, num_pages=8, overlap=False, eos_token_ids=(1,))
    assert preempted.stats.num_preemptions > 0
    assert used == set(runner.buckets), "the traffic must reach every program"
    assert runner.compiles_since_ready == 0


def test_a_step_copies_nothing_that_it_updates(runner: DeviceRunner) -> None:
    """Neither pools nor slots: a copy of either takes its time in every step."""
    shapes = {tuple(leaf.shape) for leaf in jax.tree.leaves(runner._abstract_state)}
    # In the pools' other shapes, too: pages of all layers, and their halves.
    shapes |= {(pool[0] * pool[1] * 2, *pool[2:]) for pool in list(shapes) if len(pool) == 5}
    shapes |= {(pool[0] * pool[1], *pool[2:]) for pool in list(shapes) if len(pool) == 5}
    for (bucket, _), step in runner._steps.items():
        copied = re.findall(r"= \w+\[([\d,]+)\]\{[\d,]*\} copy\(", step.as_text())
        assert not shapes & {tuple(int(size) for size in found.split(",")) for found in copied}, bucket
    assert any("copy(" in step.as_text() for step in runner._steps.values()), "what the test looks for is called so"


def test_a_compile_would_be_seen(runner: DeviceRunner) -> None:
    x = np.arange(3.0)
    before = runner.compiles_since_ready
    double = jax.jit(lambda x: 2 * x)
    double(x)
    assert runner.compiles_since_ready == before + 1
    double(x)
    assert runner.compiles_since_ready == before + 1
    double(np.arange(4.0))
    assert runner.compiles_since_ready == before + 2


def test_a_program_out_of_the_cache_counts_too() -> None:
    """It stalls requests for less long, yet shows that a shape was forgotten."""
    compile_counter.start_counting()
    compile_counter.start_counting()
    x = np.arange(5.0)
    for _ in range(2):  # two functions, one program
        before = compile_counter.num_compiles()
        jax.jit(lambda x: 3 * x + 1)(x)
        assert compile_counter.num_compiles() == before + 1


@pytest.mark.parametrize("logprobs", [0, 1, 5, 20])
@pytest.mark.parametrize("temperature", [0.0, 1.5], ids=["greedy", "sampled"])
def test_results_hold_as_many_logprobs_as_were_asked_for(runner: DeviceRunner, logprobs: int, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=12, logprobs=logprobs)
    output = run(runner, [Request(request_id="a", prompt=(1, 2, 3), params=params)]).outputs["a"]
    assert len(output.logprobs) == len(output.tokens) == 12
    for token, entry in zip(output.tokens, output.logprobs, strict=True):
        assert len(entry.top) == logprobs
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert sum(np.exp(values)) < 1 + 1e-5
        assert dict(entry.top).get(token, entry.logprob) == pytest.approx(entry.logprob, abs=1e-6)
        if logprobs and token not in dict(entry.top):
            assert entry.logprob <= values[-1] + 1e-6
        if logprobs and temperature == 0:
            assert entry.top[0][0] == token


def test_pages_are_counted_with_the_heads_that_the_mesh_adds() -> None:
    dtype = np.dtype(np.float32)
    one = page_bytes(TINY_MODEL, 8, make_mesh(1), dtype)
    assert one == 2 * 3 * 8 * 16 * 4  # layers, heads, positions, K and V, bytes
    assert page_bytes(TINY_MODEL, 8, make_mesh(2), dtype) == one * 4 // 3
    assert pool_shape(TINY_MODEL, 5, 8, make_mesh(4))[1] == 4


def test_the_runner_tells_what_it_holds(runner: DeviceRunner) -> None:
    assert runner.kv_bytes == 100 * page_bytes(TINY_MODEL, 8, make_mesh(1), np.dtype(np.float32))
    embedding, layer = 97 * 72, 2 * 72 + 3 * 5 * 8 * 72 + 72 * 72 + 3 * 48 * 72
    assert runner.weight_bytes == 4 * (embedding + 2 * layer + 72)
