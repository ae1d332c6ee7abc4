"""The same greedy tokens for a request alone or in any batch, overlapped or not, preempted or not, whatever the chunks, on
one device or more."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.device.runner import DeviceRunner
from jaxserve.model_config import ExpertsConfig
from jaxserve.request import FinishReason, Request, SamplingParams, TokenLogprobs
from tests.cached import CACHED
from tests.near_ties import assert_same_or_near_tie, assert_same_outputs
from tests.real_engines import TINY_MODEL, Output, PlanLog, mixed_requests, run, run_alone, tiny_runner

pytestmark = CACHED

# --- a tiny random model ----------------------------------------------------------------------------------------------

ENGINE = EngineConfig(dtype="float32", max_seqs=32, max_step_tokens=64, max_context=2304, num_pages=2048, page_size=8)
TEXT = np.random.default_rng(0).integers(0, TINY_MODEL.vocab_size, 4000)


@pytest.fixture(scope="module")
def runner() -> DeviceRunner:
    """Room for chunks of 2048; but for them, tests run it with a budget of 64 tokens a step."""
    return tiny_runner(dataclasses.replace(ENGINE, max_step_tokens=2048))


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return mixed_requests(TEXT, longest=2100)


@pytest.fixture(scope="module")
def alone(runner: DeviceRunner, requests: list[Request]) -> dict[str, Output]:
    outputs = run_alone(runner, requests, overlap=False, max_step_tokens=64)
    tokens = {token for output in outputs.values() for token in output.tokens}
    assert len(tokens) > TINY_MODEL.vocab_size // 2, "a model that says little would make equality mean little"
    for request in requests:
        assert len(outputs[request.request_id].tokens) == request.params.max_tokens
    return outputs


def assert_equal(expected: dict[str, Output], found: dict[str, Output]) -> None:
    """Logits of this model lie 1 apart on average and are exact to 1e-5."""
    assert_same_outputs(expected, found, tolerance=2e-4, max_near_ties=1)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["in_turn", "overlapped"])
def test_a_batch_gives_what_each_gives_alone(
    runner: DeviceRunner, requests: list[Request], alone: dict[str, Output], overlap: bool
) -> None:
    log = PlanLog(runner)
    assert_equal(alone, run(log, requests, overlap=overlap, max_step_tokens=256).outputs)
    assert max(len(step) for step in log.steps) >= 24, "the requests must run together"
    assert any(1 in step and max(step) > 1 for step in log.steps), "decodes and chunks must share steps"


@pytest.mark.slow
def test_order_and_number_of_slots_do_not_matter(
    runner: DeviceRunner, requests: list[Request], alone: dict[str, Output]
) -> None:
    order = np.random.default_rng(1).permutation(len(requests))
    assert_equal(alone, run(runner, [requests[index] for index in order], max_seqs=7, max_step_tokens=64).outputs)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [16, 64, 2048])
def test_chunks_of_any_size_give_the_same(
    runner: DeviceRunner, requests: list[Request], alone: dict[str, Output], chunk: int
) -> None:
    log = PlanLog(runner)
    assert_equal(alone, run(log, requests, prefill_chunk=chunk).outputs)
    assert log.largest == chunk


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["in_turn", "overlapped"])
@pytest.mark.parametrize("num_pages", [24, 78])
def test_preempted_sequences_give_the_same(runner: DeviceRunner, num_pages: int, overlap: bool) -> None:
    requests = mixed_requests(TEXT, max_prompt=24, min_output=30)
    alone = run_alone(runner, requests)
    found = run(runner, requests, num_pages=num_pages, overlap=overlap)
    assert found.stats.num_preemptions >= 5
    assert_equal(alone, found.outputs)


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel", [2, 4])
def test_more_devices_give_the_same(requests: list[Request], alone: dict[str, Output], tensor_parallel: int) -> None:
    runner = tiny_runner(dataclasses.replace(ENGINE, tensor_parallel=tensor_parallel))
    assert_equal(alone, run(runner, requests).outputs)


@pytest.mark.slow
def test_logprobs_of_a_batch_are_those_of_each_alone(
    runner: DeviceRunner, requests: list[Request], alone: dict[str, Output]
) -> None:
    found = run(runner, requests, max_step_tokens=64).outputs
    for key, output in alone.items():
        expected, batched = ([entry.logprob for entry in one.logprobs] for one in (output, found[key]))
        np.testing.assert_allclose(batched, expected, rtol=0, atol=2e-4)


@pytest.mark.slow
def test_asking_for_logprobs_changes_no_token(runner: DeviceRunner, requests: list[Request], alone: dict[str, Output]) -> None:
    plain = [dataclasses.replace(r, params=dataclasses.replace(r.params, logprobs=None)) for r in requests]
    found = run(runner, plain, max_step_tokens=64).outputs
    different = [key for key in alone if found[key].tokens != alone[key].tokens]
    assert len(different) <= 1
    assert not any(output.logprobs for output in found.values())


@pytest.mark.slow
def test_log_probabilities_of_a_prompt_in_a_batch_are_those_alone(runner: DeviceRunner, requests: list[Request]) -> None:
    """Those of `transformers`, chunks of any size, the prefix cache and preemption are in `test_scores.py`."""
    asks = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=2)
    asking = [Request(request_id=r.request_id, prompt=r.prompt, params=asks) for r in requests[1:9]]
    found = run(runner, asking, max_step_tokens=64).outputs
    expected = run_alone(runner, asking[:3])
    for request in asking[:3]:
        key = request.request_id
        output = expected[key]
        values, batched = ([score.logprob for score in one.prompt_logprobs] for one in (output, found[key]))
        assert len(values) == len(request.prompt) - 1
        np.testing.assert_allclose(batched, values, rtol=0, atol=2e-4)


# --- the comparison itself --------------------------------------------------------------------------------------------


def output(*tokens: int, gap: float = 1.0, runner_up: int = 9) -> Output:
    """Tokens that each lead `runner_up` by `gap`."""
    logprobs = [TokenLogprobs(-0.5, ((token, -0.5), (runner_up, -0.5 - gap))) for token in tokens]
    return Output(list(tokens), logprobs, FinishReason.LENGTH)


def test_equal_outputs_do_not_part() -> None:
    assert not assert_same_or_near_tie(output(1, 2, 3), output(1, 2, 3), tolerance=0.1)


def test_a_near_tie_is_let_pass_and_counted() -> None:
    expected, found = output(1, 2, 5, gap=0.05, runner_up=3), output(1, 3, 7, gap=0.02, runner_up=2)
    assert assert_same_or_near_tie(expected, found, tolerance=0.1)
    with pytest.raises(AssertionError, match="too many near-ties"):
        assert_same_outputs({"a": expected}, {"a": found}, tolerance=0.1, max_near_ties=0)


@pytest.mark.parametrize(
    ("expected", "found", "message"),
    [
        (output(1, 2, runner_up=3), output(1, 3, runner_up=2), "no near-tie"),
        (output(1, 2, gap=0.05, runner_up=3), output(1, 3, runner_up=2), "gap of 1.00e\\+00 in found"),
        (output(1, 2, gap=0.05), output(1, 3, gap=0.05), "has 2 and 9 ahead"),
        (dataclasses.replace(output(1), finish_reason=FinishReason.STOP), output(1), "ended by length"),
        (output(1, 2), output(1), "shorter"),
        (output(4, gap=0.05, runner_up=3), dataclasses.replace(output(3), tokens=[4, 4]), "longer"),
    ],
)  # fmt: skip
def test_any_other_difference_is_an_error(expected: Output, found: Output, message: str) -> None:
    with pytest.raises((AssertionError, ValueError), match=message):
        assert_same_or_near_tie(expected, found, tolerance=0.1)


# --- a mixture of experts ---------------------------------------------------------------------------------------------

MIXTURE = dataclasses.replace(
    TINY_MODEL, family="qwen3_moe", qk_norm="head", experts=ExpertsConfig(num=5, per_token=2, width=21, renormalise=False)
)
SMALL = dataclasses.replace(ENGINE, max_seqs=4, max_step_tokens=16, prefill_chunk=16, max_context=64, num_pages=40)


@pytest.mark.slow
def test_a_mixture_gives_the_same_alone_in_a_batch_and_on_more_devices() -> None:
    requests = mixed_requests(TEXT, max_prompt=40, max_output=12)[:12]
    runner = tiny_runner(SMALL, MIXTURE)
    alone = run_alone(runner, requests)
    assert_equal(alone, run(runner, requests).outputs)
    more = tiny_runner(dataclasses.replace(SMALL, tensor_parallel=2, expert_parallel=2), MIXTURE)
    assert_equal(alone, run(more, requests).outputs)
    assert more.compiles_since_ready == 0
