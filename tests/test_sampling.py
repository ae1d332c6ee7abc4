"""Sampling through whole engines: seeded requests give the same tokens alone and in any batch, and what is drawn follows the
exact distribution."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy import stats

from jaxserve.config import EngineConfig
from jaxserve.device.runner import DeviceRunner
from jaxserve.request import Request, SamplingParams
from tests.cached import CACHED
from tests.real_engines import TINY_MODEL, Output, run, run_alone, tiny_runner

pytestmark = [*CACHED, pytest.mark.slow]

VOCAB = 20
"""As many as there are top log probabilities, so that an engine tells its whole distribution."""
MODEL = dataclasses.replace(TINY_MODEL, vocab_size=VOCAB)
ENGINE = EngineConfig(dtype="float32", max_seqs=8, max_step_tokens=64, max_context=160, num_pages=160, page_size=8)
SEEDS = range(10_000, 12_000)


@pytest.fixture(scope="module")
def runner() -> DeviceRunner:
    return tiny_runner(ENGINE, MODEL)


# --- the same tokens in any company -----------------------------------------------------------------------------------


def mixed_requests(num_requests: int) -> list[Request]:
    """Requests of every kind, most of them seeded and sampled."""
    rng = np.random.default_rng(0)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.4, "top_p": 0.8, "min_p": 0.02},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"repetition_penalty": 1.3, "temperature": 0.9, "logprobs": 3},
        {"logit_bias": ((3, 2.0), (4, -100.0))},
        {"min_tokens": 6, "stop_token_ids": (1, 2, 3)},
        {"temperature": 0.0, "frequency_penalty": 1.0},
        {"temperature": 0.0},
    ]
    requests = []
    for index in range(num_requests):
        prompt = tuple(rng.integers(0, VOCAB, rng.integers(1, 90)).tolist())
        params = SamplingParams(
            **{"seed": int(rng.integers(0, 2**63)), "max_tokens": int(rng.integers(6, 41)), **kinds[index % len(kinds)]}
        )
        requests.append(Request(request_id=str(index), prompt=prompt, params=params))
    return requests


def tokens_of(outputs: dict[str, Output]) -> dict[str, list[int]]:
    return {key: output.tokens for key, output in outputs.items()}


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return mixed_requests(36)


@pytest.fixture(scope="module")
def alone(runner: DeviceRunner, requests: list[Request]) -> dict[str, list[int]]:
    return tokens_of(run_alone(runner, requests, overlap=False))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False},
        {"prefill_chunk": 7},
        {"max_seqs": 3, "max_step_tokens": 16},
        {"num_pages": 18},
    ],
    ids=str,
)
def test_seeded_requests_give_the_same_alone_and_in_any_batch(
    runner: DeviceRunner, requests: list[Request], alone: dict[str, list[int]], options: dict[str, Any]
) -> None:
    """Uniform numbers have 24 bits and logits are exact to 1e-5, so about one draw in a hundred thousand could differ."""
    found = run(runner, requests, **options)
    assert tokens_of(found.outputs) == alone
    if "num_pages" in options:
        assert found.stats.num_preemptions > 0


def test_company_and_order_do_not_matter(runner: DeviceRunner, requests: list[Request], alone: dict[str, list[int]]) -> None:
    order = np.random.default_rng(1).permutation(len(requests))[:20]
    found = run(runner, [requests[index] for index in order])
    assert tokens_of(found.outputs) == {key: alone[key] for key in found.outputs}


def test_requests_differ_in_their_seeds_alone(runner: DeviceRunner) -> None:
    """The same prompt under the same seed gives the same, under others or none something else."""
    prompt = (1, 2, 3)
    seeds = [7, 7, 8, 7 + 2**32, -1, None, None]
    requests = [
        Request(request_id=str(index), prompt=prompt, params=SamplingParams(seed=seed, max_tokens=30, temperature=2.0))
        for index, seed in enumerate(seeds)
    ]
    outputs = tokens_of(run(runner, requests).outputs)
    assert outputs["0"] == outputs["1"]
    assert len({tuple(tokens) for tokens in outputs.values()}) == len(seeds) - 1


@pytest.mark.slow
def test_two_devices_give_the_same(requests: list[Request], alone: dict[str, list[int]]) -> None:
    found = run(tiny_runner(dataclasses.replace(ENGINE, tensor_parallel=2), MODEL), requests)
    assert tokens_of(found.outputs) == alone


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-4, 9.99e-4, 1e-3])
def test_tiny_temperatures_are_greedy(runner: DeviceRunner, temperature: float) -> None:
    """vllm PR2937: logits over 1e-4 were not numbers. The last one is drawn, from logits that lie 1 apart on average."""
    texts = {}
    for kind in (0.0, temperature):
        params = SamplingParams(temperature=kind, max_tokens=30, logprobs=1, top_k=5, top_p=0.9)
        (output,) = run(runner, [Request(request_id="r", prompt=(1, 2, 3), params=params)]).outputs.values()
        assert np.isfinite([entry.logprob for entry in output.logprobs]).all()
        texts[kind] = output.tokens
    assert texts[temperature] == texts[0.0]
    assert len(texts[0.0]) == 30


# --- what penalties, bias and bans do to a whole sequence -------------------------------------------------------------


def greedy_by_hand(runner: DeviceRunner, request: Request) -> list[int]:
    """The request's tokens, each from the model's own distribution after the whole prefix, adjusted by counting."""
    params, num_prompt = request.params, len(request.prompt)
    tokens = list(request.prompt)
    asked = SamplingParams(temperature=0.0, max_tokens=1, logprobs=VOCAB)
    while len(tokens) - num_prompt < (params.max_tokens or 0):
        outputs = tokens[num_prompt:]
        prefix = Request(request_id="prefix", prompt=tuple(tokens), params=asked)
        scores = dict(run(runner, [prefix]).outputs["prefix"].logprobs[0].top)
        for token in scores:
            scores[token] -= params.frequency_penalty * outputs.count(token) + params.presence_penalty * (token in outputs)
            scores[token] += dict(params.logit_bias).get(token, 0.0)
            if token in params.stop_token_ids and len(outputs) < params.min_tokens:
                scores[token] = -np.inf
        tokens.append(max(scores, key=scores.__getitem__))
        if tokens[-1] in params.stop_token_ids:
            break
    return tokens[num_prompt:]


@pytest.mark.parametrize("options", [{}, {"num_pages": 14, "prefill_chunk": 7}], ids=str)
def test_penalties_follow_the_whole_sequence(runner: DeviceRunner, options: dict[str, Any]) -> None:
    """Over chunks, slots that others had before, and preemptions, which compute outputs again as if they were a prompt."""
    rng = np.random.default_rng(4)
    kinds: list[dict[str, Any]] = [
        {"frequency_penalty": 0.4},
        {"presence_penalty": 1.5, "frequency_penalty": -0.1},
        {"logit_bias": ((2, 1.0), (9, -3.0)), "presence_penalty": 0.5},
        {"min_tokens": 9, "stop_token_ids": tuple(range(10)), "frequency_penalty": 1.0},
    ]
    requests = [
        Request(
            request_id=str(index),
            prompt=tuple(rng.integers(0, VOCAB, 1 if index < len(kinds) else rng.integers(2, 30)).tolist()),
            params=SamplingParams(temperature=0.0, max_tokens=24, **kinds[index % len(kinds)]),
        )
        for index in range(12)
    ]
    found = run(runner, requests, **options)
    for request in requests:
        assert found.outputs[request.request_id].tokens == greedy_by_hand(runner, request), request
    if "num_pages" in options:
        assert found.stats.num_preemptions > 0


# --- the exact distribution -------------------------------------------------------------------------------------------

PROMPT = (3, 16, 13, 7)


@pytest.fixture(scope="module")
def logits(runner: DeviceRunner) -> np.ndarray:
    """The model's log probabilities after `PROMPT`, of every token."""
    asked = SamplingParams(temperature=0.0, max_tokens=1, logprobs=VOCAB)
    (top,) = run(runner, [Request(request_id="a", prompt=PROMPT, params=asked)]).outputs["a"].logprobs
    assert len(top.top) == VOCAB
    return np.array([value for _, value in sorted(top.top)])


def exact(
    logits: np.ndarray, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """The distribution that a request asks for, by sorting: min_p, then top_k, then top_p."""
    probabilities = np.exp(logits / temperature)
    probabilities[probabilities < min_p * probabilities.max()] = 0
    order = np.argsort(-probabilities)
    if top_k > 0:
        probabilities[order[top_k:]] = 0
    probabilities /= probabilities.sum()
    reached = np.cumsum(probabilities[order]) >= top_p
    if top_p < 1:
        probabilities[order[np.argmax(reached) + 1 :]] = 0
    return probabilities / probabilities.sum()


def drawn(runner: DeviceRunner, **params: Any) -> np.ndarray:
    """How often each token was drawn first after `PROMPT`, over `SEEDS`."""
    requests = [
        Request(request_id=str(seed), prompt=PROMPT, params=SamplingParams(seed=seed, max_tokens=1, **params))
        for seed in SEEDS
    ]
    counts = Counter(output.tokens[0] for output in run(runner, requests).outputs.values())
    return np.array([counts[token] for token in range(VOCAB)])


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Of a chi-square test, tokens that are expected fewer than 5 times taken together; 0 if one is impossible."""
    expected = probabilities * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    observed, expected = ([*values[~rare], values[rare].sum()] for values in (counts, expected))
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    return float(stats.chisquare(observed, expected).pvalue) if len(expected) > 1 else 1.0


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 4},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.parametrize(
    "settings", [*SETTINGS[-2:], *(pytest.param(settings, marks=pytest.mark.slow) for settings in SETTINGS[:-2])], ids=str
)
def test_what_is_drawn_follows_the_exact_distribution(
    runner: DeviceRunner, logits: np.ndarray, settings: dict[str, Any]
) -> None:
    probabilities = exact(logits, **settings)
    assert np.sum(probabilities * len(SEEDS) > 5) >= 3, "a distribution over one or two tokens would show little"
    assert p_value(drawn(runner, **settings), probabilities) > 1e-4


def test_a_wrong_distribution_would_be_seen(runner: DeviceRunner, logits: np.ndarray) -> None:
    counts = drawn(runner)
    for wrong in ({"temperature": 0.85}, {"temperature": 1.2}, {"top_k": 12}, {"top_p": 0.95}):
        assert p_value(counts, exact(logits, **wrong)) < 1e-6, wrong


@pytest.mark.slow
def test_a_bias_moves_the_distribution(runner: DeviceRunner, logits: np.ndarray) -> None:
    moved = logits.copy()
    bias = {7: 1.5, 8: -2.0}
    for token, value in bias.items():
        moved[token] += value
    counts = drawn(runner, logit_bias=tuple(bias.items()))
    assert p_value(counts, exact(moved)) > 1e-4
    assert p_value(counts, exact(logits)) < 1e-6


def test_later_positions_draw_other_numbers(runner: DeviceRunner) -> None:
    """Of one sequence's draws, none depends on the last: under a flat distribution pairs of tokens are as likely as each
    other."""
    request = [
        Request(request_id=str(seed), prompt=PROMPT, params=SamplingParams(seed=seed, max_tokens=100, temperature=100.0))
        for seed in range(60)
    ]
    pairs = np.zeros((VOCAB, VOCAB))
    for output in run(runner, request).outputs.values():
        np.add.at(pairs, (output.tokens[:-1], output.tokens[1:]), 1)
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-4
