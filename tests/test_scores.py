"""Log probabilities of prompts and embeddings, on a real engine: what `transformers` says, and the same for a request alone or
in any batch, whatever the chunks, preempted or not, with the prefix cache or without."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.device.buckets import Bucket
from jaxserve.device.runner import DeviceRunner
from jaxserve.request import FinishReason, Request, SamplingParams, TokenLogprobs
from tests.cached import CACHED
from tests.real_engines import Output, PlanLog, checkpoint_runner, run, run_alone
from tests.references.load import TinyReference, load_tiny, write_hf_directory

pytestmark = [pytest.mark.slow, *CACHED]

PAGE = 4
ENGINE = EngineConfig(dtype="float32", max_seqs=8, max_step_tokens=96, max_context=96, num_pages=256, page_size=PAGE)
BUCKETS = (Bucket(8, 0, 8), Bucket(16, 2, 8), Bucket(96, 8, 8))
ASKS = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, prompt_logprobs=5)
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def reference() -> TinyReference:
    return load_tiny("mha_untied")


@pytest.fixture(scope="module")
def runner(reference: TinyReference, tmp_path_factory: pytest.TempPathFactory) -> DeviceRunner:
    path = write_hf_directory(reference, tmp_path_factory.mktemp("model"))
    return checkpoint_runner(path, ENGINE, BUCKETS)


@pytest.fixture(scope="module")
def requests(reference: TinyReference) -> list[Request]:
    """Prompts of all lengths near a page's that begin alike; every third asks for nothing, every third for no output."""
    ids = tuple(reference.input_ids.tolist())
    rng = np.random.default_rng(0)
    prompts = [ids, *(ids[: rng.integers(1, len(ids) + 1)] for _ in range(20)), ids]
    kinds = (ASKS, dataclasses.replace(ASKS, prompt_logprobs=None), dataclasses.replace(ASKS, max_tokens=0, prompt_logprobs=1))
    return [Request(request_id=str(i), prompt=prompt, params=kinds[i % 3]) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def alone(runner: DeviceRunner, requests: list[Request]) -> dict[str, Output]:
    return run_alone(runner, requests)


def assert_same_scores(expected: Mapping[str, Output], found: Mapping[str, Output]) -> None:
    for key, output in expected.items():
        assert len(found[key].tokens) == len(output.tokens)
        assert_close(found[key].prompt_logprobs, output.prompt_logprobs)


def assert_close(found: tuple[TokenLogprobs, ...], expected: tuple[TokenLogprobs, ...]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 7, 96])
def test_they_are_what_transformers_gives(runner: DeviceRunner, reference: TinyReference, chunk: int) -> None:
    prompt = tuple(reference.input_ids.tolist())
    log = PlanLog(runner)
    found = run(log, [Request(request_id="a", prompt=prompt, params=ASKS)], prefill_chunk=chunk).outputs["a"]
    assert log.largest == min(chunk, len(prompt))
    logits = reference.logits.astype(np.float64)
    logprobs = logits - np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
    logprobs -= logits.max(axis=1, keepdims=True)
    assert len(found.prompt_logprobs) == len(prompt) - 1
    for score, row, token in zip(found.prompt_logprobs, logprobs[:-1], prompt[1:], strict=True):
        assert score.logprob == pytest.approx(row[token], abs=TOLERANCE)
        assert score.rank is not None
        ranked = np.sort(row)[::-1]
        assert ranked[score.rank - 1] == pytest.approx(row[token], abs=TOLERANCE), "a token's place, but for near-ties"
        assert [value for _, value in score.top] == pytest.approx(ranked[:5], abs=TOLERANCE)
        assert [row[token_id] for token_id, _ in score.top] == pytest.approx(ranked[:5], abs=TOLERANCE)
        for place, (token_id, value) in enumerate(score.top, start=1):
            if token_id == token:
                assert (score.logprob, score.rank) == (value, place), "equal to the last bit where it is among the likeliest"


@pytest.mark.parametrize("chunk", [1, 16, 96])
@pytest.mark.parametrize("prefixes", [False, True], ids=["no_cache", "cache"])
def test_a_batch_gives_what_each_gives_alone(
    runner: DeviceRunner, requests: list[Request], alone: dict[str, Output], chunk: int, prefixes: bool
) -> None:
    found = run(runner, requests, prefill_chunk=chunk, prefixes=prefixes)
    assert_same_scores(alone, found.outputs)
    assert (found.stats.num_prefix_hit_tokens > 0) == prefixes, "who does not ask still finds what the others computed"
    for request in requests:
        output, params = found.outputs[request.request_id], request.params
        wants = params.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == (len(request.prompt) - 1 if wants else 0)
        assert len(output.tokens) == params.max_tokens
        assert output.finish_reason is FinishReason.LENGTH
        assert output.num_cached == 0 or not wants


@pytest.mark.parametrize("prefixes", [False, True], ids=["no_cache", "cache"])
def test_preempted_ones_give_the_same(runner: DeviceRunner, requests: list[Request], prefixes: bool) -> None:
    """In steps of 8 tokens, so that prompts lose their pages half-way."""
    longer = [
        dataclasses.replace(
            request, params=dataclasses.replace(request.params, max_tokens=20 if request.params.max_tokens else 0)
        )
        for request in requests
    ]
    found = run(runner, longer, num_pages=24, max_step_tokens=8, prefill_chunk=5, prefixes=prefixes)
    assert found.stats.num_preemptions >= 3
    assert_same_scores(run_alone(runner, longer), found.outputs)


def test_a_prompt_again_gives_the_same(runner: DeviceRunner) -> None:
    """Cold and then with all of it cached: at a multiple of the page size and on either side of it."""
    for length in (8 * PAGE - 1, 8 * PAGE, 8 * PAGE + 1):
        prompt = tuple(np.random.default_rng(length).integers(0, 64, length).tolist())
        again = [Request(request_id=name, prompt=prompt, params=ASKS) for name in "ab"]
        outputs = run(runner, again, prefixes=True, max_seqs=1).outputs
        assert len(outputs["a"].prompt_logprobs) == length - 1
        assert outputs["a"] == outputs["b"]


def test_the_last_hidden_state_is_what_the_head_reads(
    runner: DeviceRunner, reference: TinyReference, requests: list[Request]
) -> None:
    """The same vector alone, in a batch, in chunks and with a cached prefix; its product with the head is the logits."""
    embed = SamplingParams(max_tokens=0)
    asking = [Request(request_id=request.request_id, prompt=request.prompt, params=embed, embed=True) for request in requests]
    alone = run_alone(runner, asking)
    np.testing.assert_allclose(
        reference.weights["lm_head.weight"] @ np.array(alone["0"].hidden), reference.logits[-1], rtol=0, atol=TOLERANCE
    )
    variants = [run(runner, asking, prefill_chunk=chunk, prefixes=cached) for chunk in (1, 5, 96) for cached in (False, True)]
    assert variants[-1].stats.num_prefix_hit_tokens > 0
    for variant in variants:
        for key, output in alone.items():
            np.testing.assert_allclose(variant.outputs[key].hidden, output.hidden, rtol=0, atol=TOLERANCE)
            assert variant.outputs[key].tokens == []
        assert variant.stats.num_output_tokens == 0
    assert runner.compiles_since_ready == 0


def test_two_devices_give_the_same(
    reference: TinyReference, alone: dict[str, Output], requests: list[Request], tmp_path: Path
) -> None:
    """Whose vocabulary is split between them."""
    path = write_hf_directory(reference, tmp_path / "model")
    runner = checkpoint_runner(path, dataclasses.replace(ENGINE, tensor_parallel=2), BUCKETS)
    assert_same_scores(alone, run(runner, requests).outputs)
    embed = Request(request_id="a", prompt=requests[0].prompt, params=SamplingParams(max_tokens=0), embed=True)
    hidden = run(runner, [embed]).outputs["a"].hidden
    logits = reference.weights["lm_head.weight"] @ np.array(hidden)
    np.testing.assert_allclose(logits, reference.logits[-1], rtol=0, atol=TOLERANCE)
