"""The same greedy tokens with the prefix cache as without it, for many at once on a real engine; and that it is used."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.device.runner import DeviceRunner
from jaxserve.errors import ConfigError
from jaxserve.host.prefix import Node, least_recently_used
from jaxserve.launch import prefix_tree
from jaxserve.request import Request, SamplingParams
from tests.cached import CACHED
from tests.near_ties import assert_same_outputs
from tests.real_engines import TINY_MODEL, PlanLog, Run, run, tiny_runner

pytestmark = [*CACHED, pytest.mark.slow]

PAGE = 8
ENGINE = EngineConfig(dtype="float32", max_seqs=32, max_step_tokens=256, max_context=320, num_pages=1024, page_size=PAGE)


@pytest.fixture(scope="module")
def runner() -> DeviceRunner:
    return tiny_runner(ENGINE)


def sharing_requests(count: int, *, seed: int = 0, **params: object) -> list[Request]:
    """Requests of four texts that part after a multiple of the page size, one before or one after it, or not at all."""
    rng = np.random.default_rng(seed)
    texts = rng.integers(0, TINY_MODEL.vocab_size, (4, 200))
    requests = []
    for index in range(count):
        parting = int(rng.choice([4, 8, 12])) * PAGE + (index // 4) % 3 - 1
        own = rng.integers(0, TINY_MODEL.vocab_size, [0, 1, PAGE, 30][index % 4])
        prompt = (*texts[index % len(texts)][:parting].tolist(), *own.tolist())
        asked = {"temperature": 0.0, "max_tokens": 12, "logprobs": 2} | params
        requests.append(Request(request_id=str(index), prompt=prompt, params=SamplingParams(**asked)))  # type: ignore[arg-type]
    return requests


def assert_equal(expected: Run, found: Run) -> None:
    """Logits of this model lie 1 apart on average and are exact to 1e-5."""
    assert_same_outputs(expected.outputs, found.outputs, tolerance=2e-4, max_near_ties=2)


@pytest.mark.parametrize("overlap", [False, True], ids=["in_turn", "overlapped"])
@pytest.mark.parametrize("num_pages", [1024, 96], ids=["ample", "short_of_pages"])
def test_64_requests_that_share_prefixes_say_the_same(runner: DeviceRunner, overlap: bool, num_pages: int) -> None:
    requests = sharing_requests(64)
    expected = run(runner, requests, overlap=overlap)
    log = PlanLog(runner)
    found = run(log, requests, overlap=overlap, prefixes=True, num_pages=num_pages)
    assert_equal(expected, found)
    assert max(len(step) for step in log.steps) >= (32 if num_pages == 1024 else 12), "the requests must run together"
    stats = found.stats
    assert stats.num_prefix_hit_tokens > stats.num_prefix_asked_tokens / 2
    assert stats.num_tokens < expected.stats.num_tokens / 2 + 64 * 12
    if num_pages < 1024:
        assert stats.num_evicted_pages > 0


def test_a_prompt_again_says_the_same(runner: DeviceRunner) -> None:
    """Cold, and then from the cache: at a multiple of the page size and on either side of it."""
    base = np.random.default_rng(1).integers(0, TINY_MODEL.vocab_size, 40).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=10, logprobs=2)
    for length in (2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1):
        request = Request(request_id="a", prompt=tuple(base[:length]), params=params)
        cold = run(runner, [request])
        again = [dataclasses.replace(request, request_id=name) for name in "abc"]
        warm = run(runner, again, prefixes=True, max_seqs=1)
        assert warm.outputs["a"].num_cached == 0
        assert [warm.outputs[name].num_cached for name in "bc"] == [length - 1] * 2
        for name in "abc":
            assert_same_outputs({"x": cold.outputs["a"]}, {"x": warm.outputs[name]}, tolerance=2e-4, max_near_ties=1)


def test_penalties_count_cached_tokens(runner: DeviceRunner) -> None:
    """The device has to be told of tokens that it never computed in this slot."""
    requests = sharing_requests(8, repetition_penalty=1.7, presence_penalty=0.7, frequency_penalty=0.4)
    expected = run(runner, requests, max_seqs=2)
    found = run(runner, requests, max_seqs=2, prefixes=True)
    assert found.stats.num_prefix_hit_tokens > 0
    assert_equal(expected, found)


def test_choices_of_one_prompt_are_those_of_each_alone(runner: DeviceRunner) -> None:
    """Seven of eight copy the page that the first one writes."""
    prompt = tuple(np.random.default_rng(2).integers(0, TINY_MODEL.vocab_size, 2 * PAGE + 5).tolist())
    requests = [
        Request(request_id=str(seed), prompt=prompt, params=SamplingParams(seed=seed, max_tokens=12)) for seed in range(8)
    ]
    expected = run(runner, requests)
    found = run(runner, requests, prefixes=True)
    assert {key: output.tokens for key, output in found.outputs.items()} == {
        key: output.tokens for key, output in expected.outputs.items()
    }
    assert [output.num_cached for output in found.outputs.values()] == [0] + [len(prompt) - 1] * 7
    assert runner.compiles_since_ready == 0


def test_two_devices_share_pages_too() -> None:
    runner = tiny_runner(dataclasses.replace(ENGINE, tensor_parallel=2, max_seqs=8, max_step_tokens=64))
    requests = sharing_requests(24, seed=3)
    assert_equal(run(runner, requests), run(runner, requests, prefixes=True))
    assert runner.compiles_since_ready == 0


def test_the_settings_make_the_tree() -> None:
    assert prefix_tree(dataclasses.replace(ENGINE, prefix_cache=False), TINY_MODEL) is None
    tree = prefix_tree(ENGINE, TINY_MODEL)
    assert tree is not None
    assert (tree.page_size, tree._policy) == (PAGE, least_recently_used)
    llama_8b = dataclasses.replace(
        TINY_MODEL, hidden_size=4096, intermediate_size=14_336, num_heads=32, num_kv_heads=8, head_dim=128
    )
    tree = prefix_tree(dataclasses.replace(ENGINE, page_size=64, eviction="cost"), llama_8b)
    assert tree is not None
    node = Node(None, b"", 416)  # 26,624 tokens before it: attention costs as much as all else
    assert tree._policy(node, 10.0) == pytest.approx(12.0, rel=0.01)
    with pytest.raises(ConfigError, match="eviction must be lru or cost, found 'fifo'"):
        EngineConfig(eviction="fifo")
    with pytest.raises(ConfigError, match="needs prefix_cache, which is off"):
        EngineConfig(prefix_cache=False, pin_prefix="system.txt")
