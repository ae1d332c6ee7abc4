"""LoRA adapters on a real engine: what PEFT's merged weights say, whoever shares the step, and what the cache keeps apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from checkpoints.checkpoint import open_checkpoint
from jaxserve.adapters import PeftSource
from jaxserve.config import EngineConfig
from jaxserve.device.buckets import Bucket
from jaxserve.device.build import build_runner
from jaxserve.device.layer_memory import LayerMemory
from jaxserve.device.runner import DeviceRunner
from jaxserve.device.step import make_step
from jaxserve.request import Adapter, Request, SamplingParams
from jaxserve.weights import load_params
from tests.cached import CACHED
from tests.near_ties import assert_same_outputs
from tests.peft_files import RandomAdapter, random_adapter
from tests.real_engines import Output, checkpoint_runner, run, unoptimised
from tests.references.load import TinyReference, load_tiny, write_hf_directory

pytestmark = [*CACHED, pytest.mark.slow]

ENGINE = EngineConfig(
    dtype="float32",
    max_seqs=6,
    max_step_tokens=32,
    max_context=128,
    num_pages=128,
    page_size=8,
    max_adapters=3,
    max_adapter_rank=6,
)
REFERENCE = "nine_heads_tied"
"""Nine heads of three KV heads, which two devices do not divide."""

BUCKETS = (Bucket(6, 0, 6), Bucket(32, 6, 6))
"""Decodes and chunks."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and adapters of it, in files: of all products, of attention alone at a lower rank, and of an odd scale."""

    reference: TinyReference
    adapters: dict[str, RandomAdapter]
    folder: Path

    def path(self, name: str) -> Path:
        """The model, or the model with the adapter `name` merged into its weights."""
        weights = self.adapters[name].merged(self.reference.weights) if name else self.reference.weights
        return write_hf_directory(dataclasses.replace(self.reference, weights=weights), self.folder / f"model-{name}")

    def install(self, runner: DeviceRunner, name: str, slot: int) -> None:
        """Put the adapter `name` into a slot, as a server does."""
        path = self.folder / name
        if not path.exists():
            self.adapters[name].write(path)
        source = PeftSource(runner._config, runner)
        source.install(slot, source.read(str(path)))

    @contextmanager
    def merged(self, runner: DeviceRunner, name: str) -> Iterator[None]:
        """`runner` with the weights of `path(name)` for its own."""
        kept = runner._params, runner._stacked_params
        if runner.layer_memory is not None:
            runner.layer_memory = LayerMemory(runner.abstract_params.layers)
        with open_checkpoint(self.path(name)) as checkpoint:
            runner._hold(load_params(checkpoint, runner._config, runner._mesh, np.dtype(np.float32)))
        yield
        runner._params, runner._stacked_params = kept


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    reference = load_tiny(REFERENCE)
    weights = reference.weights
    adapters = {
        "all": random_adapter(weights, 1, rank=6, alpha=12),
        "attention": random_adapter(weights, 2, rank=2, modules=["q_proj", "v_proj", "o_proj"]),
        "rs": random_adapter(weights, 3, rank=3, alpha=5, use_rslora=True),
        "other": random_adapter(weights, 4, rank=4),
    }
    return Case(reference, adapters, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module", params=[1, 2], ids=["one_device", "two_devices"])
def runner(case: Case, request: pytest.FixtureRequest) -> DeviceRunner:
    engine = dataclasses.replace(ENGINE, tensor_parallel=request.param)
    with unoptimised():
        runner = checkpoint_runner(case.path(""), engine, BUCKETS)
    for slot, name in enumerate(("all", "attention", "rs")):
        case.install(runner, name, slot)
    return runner


LOADED = {"": None, "all": Adapter("all", 0, 1), "attention": Adapter("attention", 1, 2), "rs": Adapter("rs", 2, 3)}


def requests_for(case: Case, name: str, adapter: Adapter | None, count: int = 3) -> list[Request]:
    """The same prompts for everyone, some longer than a step."""
    ids = case.reference.input_ids
    vocabulary = int(case.reference.config["vocab_size"])
    prompts = [tuple(((np.resize(ids, 9 + 25 * index) + 5 * index) % vocabulary).tolist()) for index in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)
    return [
        Request(request_id=f"{name}-{index}", prompt=prompt, params=params, adapter=adapter)
        for index, prompt in enumerate(prompts)
    ]


def said_by_merged(case: Case, runner: DeviceRunner, name: str, asked: str) -> dict[str, Output]:
    """What the model says with an adapter merged into its weights; no row has one, so the program has none."""
    with case.merged(runner, name):
        return run(runner, requests_for(case, asked, None)).outputs


@pytest.mark.parametrize("prefixes", [False, True], ids=["", "prefix_cache"])
def test_a_mixed_batch_says_what_merged_weights_say(case: Case, runner: DeviceRunner, prefixes: bool) -> None:
    """vllm I30931: a prompt's pages are no other adapter's, though every adapter here has the same prompts."""
    expected: dict[str, Output] = {}
    for name in LOADED:
        expected |= said_by_merged(case, runner, name, name)
    requests = [request for name, adapter in LOADED.items() for request in requests_for(case, name, adapter)]
    order = np.random.default_rng(0).permutation(len(requests))
    compiled = runner.compiles_since_ready
    found = run(runner, [requests[index] for index in order], prefixes=prefixes)
    assert_same_outputs(expected, found.outputs, tolerance=2e-4, max_near_ties=0)
    assert runner.compiles_since_ready == compiled
    for key, output in expected.items():
        pairs = zip(output.logprobs, found.outputs[key].logprobs, strict=True)
        assert max(abs(one.logprob - other.logprob) for one, other in pairs) < 2e-4
        if not key.startswith("-"):
            base = expected[f"-{key.rsplit('-', 1)[1]}"]
            assert output.tokens != base.tokens, "an adapter that changes nothing would make equality mean nothing"


def test_a_slot_that_is_filled_again_has_the_new_adapter(case: Case, runner: DeviceRunner) -> None:
    """While others go on with theirs, and without a compile."""
    expected = said_by_merged(case, runner, "other", "again") | said_by_merged(case, runner, "rs", "rs")
    compiled = runner.compiles_since_ready
    case.install(runner, "other", 0)
    again = requests_for(case, "again", Adapter("all", 0, 4))
    found = run(runner, [*again, *requests_for(case, "rs", LOADED["rs"])], prefixes=True)
    case.install(runner, "all", 0)
    assert runner.compiles_since_ready == compiled
    assert_same_outputs(expected, found.outputs, tolerance=2e-4, max_near_ties=0)


def test_a_step_without_adapters_is_the_program_of_an_engine_without_any(runner: DeviceRunner) -> None:
    """The same text, so the same speed and the same bits."""
    config, mesh = runner._config, runner._mesh
    without = dataclasses.replace(ENGINE, max_adapters=0, tensor_parallel=mesh.size)
    plain = build_runner(without, config, mesh, np.dtype(np.float32))
    lowered = []
    for one in (plain, runner):
        limits = one._plain_limits
        assert limits.max_adapters == 0
        step = make_step(config, limits, BUCKETS[1], one.attention_impl, one._choose)
        lowered.append(one._lower(step, BUCKETS[1], limits).as_text())
    assert lowered[0] == lowered[1]
    assert len(plain._programs()) == len(plain.buckets), "and no other is compiled"


def test_an_adapter_that_overflows_leaves_nothing_behind(case: Case, runner: DeviceRunner) -> None:
    """Pages come to others as they were left, and where nothing is written yet, 0 times what is no number is none either."""
    wild = random_adapter(case.reference.weights, 5, rank=2, strength=1e30)
    case.adapters["wild"] = wild
    expected = said_by_merged(case, runner, "", "plain")
    case.install(runner, "wild", 0)
    mad = run(runner, requests_for(case, "mad", Adapter("wild", 0, 9))).outputs
    assert any(not np.isfinite(one.logprob) for output in mad.values() for one in output.logprobs), "it does not overflow"
    after = run(runner, requests_for(case, "plain", None)).outputs
    together = run(runner, requests_for(case, "mad", Adapter("wild", 0, 9)) + requests_for(case, "plain", None)).outputs
    case.install(runner, "all", 0)
    for found in (after, {name: output for name, output in together.items() if name in expected}):
        assert_same_outputs(expected, found, tolerance=2e-4, max_near_ties=0)
