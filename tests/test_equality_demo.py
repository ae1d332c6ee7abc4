"""What `test_equality.py` shows of a tiny random model, of the demo model and 32 pieces of real text."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from checkpoints.checkpoint import open_checkpoint
from jaxserve.config import EngineConfig
from jaxserve.constraint import Grammar, GrammarKind
from jaxserve.device.buckets import Bucket
from jaxserve.device.runner import DeviceRunner
from jaxserve.engine.constraints import Constraints
from jaxserve.host.jump import JumpForward
from jaxserve.launch import _tokenizer
from jaxserve.models.families import model_config_from_hf
from jaxserve.request import FinishReason, Request, SamplingParams
from tests.cached import CACHED
from tests.near_ties import assert_same_outputs
from tests.real_engines import Output, PlanLog, checkpoint_runner, mixed_requests, run, run_alone
from tests.references.load import DEMO_NAMES, load_demo

pytestmark = [pytest.mark.slow, *CACHED]

ENGINE = EngineConfig(dtype="float32", max_seqs=32, max_step_tokens=64, max_context=512, num_pages=1600, page_size=8)
BUCKETS = (Bucket(1, 0, 1), Bucket(32, 0, 32), Bucket(64, 32, 32))


def assert_equal(expected: dict[str, Output], found: dict[str, Output]) -> None:
    """Products of up to 1,536 terms in 30 layers: logits are exact to 1e-3."""
    assert_same_outputs(expected, found, tolerance=2e-3, max_near_ties=2)


@pytest.fixture(scope="module")
def runner(demo_model_path: Path) -> DeviceRunner:
    """Room for chunks of 2048; but for them, tests run it with a budget of 64 tokens a step."""
    engine = dataclasses.replace(ENGINE, max_step_tokens=2048)
    return checkpoint_runner(demo_model_path, engine, (*BUCKETS, Bucket(2048, 32, 32)))


@pytest.fixture(scope="module")
def text() -> np.ndarray:
    return np.concatenate([load_demo(name).input_ids for name in DEMO_NAMES])


@pytest.fixture(scope="module")
def requests(text: np.ndarray) -> list[Request]:
    return mixed_requests(text, max_prompt=150, max_output=20, longest=400)


@pytest.fixture(scope="module")
def alone(runner: DeviceRunner, requests: list[Request]) -> dict[str, Output]:
    return run_alone(runner, requests, overlap=False, max_step_tokens=64)


@pytest.mark.parametrize("overlap", [False, True], ids=["in_turn", "overlapped"])
def test_a_batch_gives_what_each_gives_alone(
    runner: DeviceRunner, requests: list[Request], alone: dict[str, Output], overlap: bool
) -> None:
    assert_equal(alone, run(runner, requests, overlap=overlap, max_step_tokens=64).outputs)


@pytest.mark.parametrize("chunk", [16, 2048])
def test_chunks_of_any_size_give_the_same(
    runner: DeviceRunner, requests: list[Request], alone: dict[str, Output], chunk: int
) -> None:
    log = PlanLog(runner)
    assert_equal(alone, run(log, requests, prefill_chunk=chunk, max_step_tokens=2048 if chunk == 2048 else 64).outputs)
    assert log.largest == min(chunk, len(requests[0].prompt))


@pytest.mark.parametrize("name", DEMO_NAMES)
def test_log_probabilities_of_a_prompt_are_what_transformers_gives(runner: DeviceRunner, name: str) -> None:
    """Of the likeliest tokens, which is what there is to compare with."""
    reference = load_demo(name)
    prompt = tuple(reference.input_ids[:400].tolist())
    asks = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    (output,) = run(runner, [Request(request_id="a", prompt=prompt, params=asks)], prefill_chunk=64).outputs.values()
    expected = (reference.argmax_logit - reference.logsumexp)[: len(prompt) - 1]
    found = [score.top[0] for score in output.prompt_logprobs]
    np.testing.assert_allclose([value for _, value in found], expected, rtol=0, atol=2e-3)
    likeliest = np.array([token_id for token_id, _ in found])
    assert (likeliest == reference.argmax[: len(prompt) - 1]).mean() > 0.99
    for score, token in zip(output.prompt_logprobs, prompt[1:], strict=True):
        assert (score.rank == 1) == (score.logprob == score.top[0][1]) >= (token == score.top[0][0])


def test_preempted_sequences_give_the_same(runner: DeviceRunner, text: np.ndarray) -> None:
    requests = mixed_requests(text, max_prompt=24, min_output=30)
    undisturbed = run(runner, requests, max_step_tokens=64)
    found = run(runner, requests, num_pages=78, max_step_tokens=64)
    assert undisturbed.stats.num_preemptions == 0
    assert found.stats.num_preemptions >= 5
    assert_equal(undisturbed.outputs, found.outputs)


def test_more_devices_give_the_same(demo_model_path: Path, requests: list[Request], alone: dict[str, Output]) -> None:
    """Two, which divide neither 9 query heads nor 3 KV heads; `test_equality` has four."""
    runner = checkpoint_runner(demo_model_path, dataclasses.replace(ENGINE, tensor_parallel=2), BUCKETS)
    assert_equal(alone, run(runner, requests).outputs)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "water"]}, "maxItems": 2},
        "address": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 15}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "likes", "address"],
    "additionalProperties": False,
}


def test_json_is_as_its_schema_has_it_however_it_runs(runner: DeviceRunner, demo_model_path: Path) -> None:
    with open_checkpoint(demo_model_path) as checkpoint:
        tokenizer = _tokenizer(checkpoint)
        eos = model_config_from_hf(checkpoint.config).eos_token_ids
    constraint = Constraints(tokenizer, runner.limits.vocab_size, eos).of(
        SamplingParams(grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)))
    )
    requests = [
        Request(
            request_id=str(index),
            prompt=tuple(tokenizer.encode(f"Person number {index} as JSON:\n")),
            params=SamplingParams(temperature=0.0 if index < 4 else 0.8, seed=index, max_tokens=120),
            constraint=constraint,
        )
        for index in range(8)
    ]
    num_compiles = runner.compiles_since_ready  # of other runners in this process, if any
    expected = run(runner, requests, overlap=False, eos_token_ids=eos)
    for output in expected.outputs.values():
        assert output.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(tokenizer.decode(output.tokens)), PERSON)
    for options in ({"overlap": True}, {"jump": JumpForward((1, 32))}, {"jump": JumpForward((1, 32)), "overlap": False}):
        found = run(runner, requests, eos_token_ids=eos, **options)
        assert {name: output.tokens for name, output in found.outputs.items()} == {
            name: output.tokens for name, output in expected.outputs.items()
        }
    assert found.stats.num_steps < expected.stats.num_steps
    assert runner.compiles_since_ready == num_compiles
