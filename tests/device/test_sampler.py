"""Choosing tokens against slow, obvious NumPy: argmax, filters by sorting, penalties by counting, log_softmax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax, softmax

from jaxserve.device.pack import MAX_FORBIDDEN, SampleRows
from jaxserve.device.sampler import (
    Sampled,
    SlotState,
    add_at_once,
    add_by_row,
    adjust,
    choose_draw,
    choose_tokens,
    draw,
    first_argmax,
    sample,
)
from jaxserve.request import MAX_LOGIT_BIAS, MAX_LOGPROBS
from pallas_kernels.sample.xla import keep_top_k, keep_top_p
from tests.cached import CACHED
from tests.kernels.ladder.interpret import DMA_MODES, run_interpreted

pytestmark = CACHED

NUM_SLOTS, CONTEXT = 6, 12


def make_rows(num_rows: int, **values: Any) -> SampleRows:
    """Rows 0, 1, ... of slots 0, 1, ... that ask for nothing but greedy tokens, except what `values` say."""
    defaults: dict[str, Any] = {
        "slot": np.arange(num_rows), "last_token": 0, "next_position": 1, "top_k": 0, "num_prompt": 1, "min_tokens": 0,
        "num_logprobs": -1, "has_bias": 0, "waits": 0, "uniform": 0.5, "temperature": 0.0, "top_p": 1.0, "min_p": 0.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    fields = {name: np.broadcast_to(value, num_rows) for name, value in {**defaults, **values}.items() if name != "forbidden"}
    floats = ("uniform", "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    arrays = {name: jnp.asarray(value, jnp.float32 if name in floats else jnp.int32) for name, value in fields.items()}
    forbidden = values.get("forbidden", np.full((num_rows, MAX_FORBIDDEN), 2**30))
    return SampleRows(forbidden=jnp.asarray(forbidden, jnp.int32), **arrays)  # type: ignore[call-arg]


def make_state(vocab: int, tokens: np.ndarray | None = None, bias: dict[int, dict[int, float]] | None = None) -> SlotState:
    """Slots with the histories `tokens` [NUM_SLOTS, CONTEXT], and biases by slot."""
    history = np.zeros((NUM_SLOTS + 1, CONTEXT + 1), np.int32)
    if tokens is not None:
        history[:NUM_SLOTS, :CONTEXT] = tokens
    ids = np.full((NUM_SLOTS + 1, MAX_LOGIT_BIAS), vocab, np.int32)
    values = np.zeros((NUM_SLOTS + 1, MAX_LOGIT_BIAS), np.float32)
    for slot, entries in (bias or {}).items():
        ids[slot, : len(entries)] = list(entries)
        values[slot, : len(entries)] = list(entries.values())
    return SlotState(tokens=jnp.asarray(history), bias_ids=jnp.asarray(ids), bias_values=jnp.asarray(values))  # type: ignore[call-arg]


def random_logits(seed: int, num_rows: int, vocab: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (num_rows, vocab)).astype(np.float32)


_sample = jax.jit(sample, static_argnames="draw_impl")
_draw = jax.jit(draw)


def choose(logits: np.ndarray, rows: SampleRows, state: SlotState) -> Sampled:
    """`sample` of logits [R, V], as NumPy arrays."""
    return jax.tree.map(np.asarray, _sample(jnp.asarray(logits.T), rows, state))


# --- greedy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 5, 97, 128, 300, 1000, 49152])
@given(seed=st.integers(0, 2**32 - 1), levels=st.integers(1, 6))
def test_first_argmax_is_argmax(vocab: int, seed: int, levels: int) -> None:
    """With few levels nearly everything is a tie, of which the first id wins; some are minus infinity."""
    values = np.array([-np.inf, -3.0, -0.0, 0.5, 2.0, 3e38], np.float32)
    logits = np.random.default_rng(seed).choice(values[:levels], (3, vocab))
    np.testing.assert_array_equal(first_argmax(jnp.asarray(logits.T)), logits.argmax(axis=1))


def test_greedy_rows_take_the_most_likely_token_beside_rows_that_do_not() -> None:
    logits = random_logits(0, 6, 97)
    rows = make_rows(6, temperature=[0, 1, 0, 0.5, 0, 0], repetition_penalty=[1, 1, 1, 1, 1, 1.5], has_bias=[0, 0, 0, 0, 0, 0])
    state = make_state(97)
    tokens = choose(logits, rows, state).tokens
    np.testing.assert_array_equal(tokens[[0, 2, 4]], logits.argmax(axis=1)[[0, 2, 4]])
    np.testing.assert_array_equal(choose(logits, make_rows(6), state).tokens, logits.argmax(axis=1))


# --- filters ----------------------------------------------------------------------------------------------------------


def kept_by_top_k(weights: np.ndarray, k: int) -> np.ndarray:
    if k == 0 or k >= len(weights):
        return weights > -1
    return weights >= np.sort(weights)[::-1][k - 1]


def kept_by_top_p(weights: np.ndarray, p: float) -> np.ndarray:
    if p >= 1:
        return weights > -1
    order = np.sort(weights)[::-1]
    smallest = order[np.argmax(np.cumsum(order) >= p * weights.sum())]
    return weights >= smallest


# Multiples of 1/64 and of 1/16, whose sums and products are exact in float32: no threshold is a matter of rounding.
exact_weights = st.lists(st.integers(0, 64), min_size=20, max_size=20).map(lambda w: np.array([64, *w], np.float32) / 64)


@pytest.mark.slow
@given(
    weights=st.permutations(range(21)).flatmap(lambda order: exact_weights.map(lambda w: w[list(order)])), k=st.integers(0, 25)
)
def test_top_k_keeps_the_k_largest_and_their_equals(weights: np.ndarray, k: int) -> None:
    found = keep_top_k(jnp.asarray(weights)[None], jnp.array([k]))[0]
    np.testing.assert_array_equal(found, np.where(kept_by_top_k(weights, k), weights, 0))


@pytest.mark.slow
@given(weights=exact_weights, sixteenths=st.integers(1, 16))
def test_top_p_keeps_the_smallest_set_that_reaches_p_and_equals(weights: np.ndarray, sixteenths: int) -> None:
    found = keep_top_p(jnp.asarray(weights)[None], jnp.array([sixteenths / 16]))[0]
    np.testing.assert_array_equal(found, np.where(kept_by_top_p(weights, sixteenths / 16), weights, 0))


@pytest.mark.parametrize("top_p", [1e-30, 1e-9, 0.5, 0.999999, 1.0])
def test_top_p_never_keeps_nothing(top_p: float) -> None:
    weights = jnp.asarray(
        softmax(random_logits(1, 4, 1000), axis=1) / softmax(random_logits(1, 4, 1000), axis=1).max(1)[:, None]
    )
    kept = np.asarray(keep_top_p(weights, jnp.full(4, top_p))) > 0
    assert (kept.sum(axis=1) >= 1).all()
    assert kept[np.arange(4), np.asarray(weights).argmax(axis=1)].all()
    if top_p == 1.0:
        assert kept.all()


def filtered(logits: np.ndarray, *, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The exact distribution: min_p, then top_k, then top_p of what is left."""
    weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    weights = np.where(weights >= np.float32(min_p), weights, 0)
    weights = np.where(kept_by_top_k(weights, top_k), weights, 0)
    weights = np.where(kept_by_top_p(weights, top_p), weights, 0)
    return weights / weights.sum()


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"temperature": 100.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.6},
    {"top_p": 0.01},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 1.7, "top_k": 30, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.6, "top_k": 5, "top_p": 0.95},
]


@pytest.mark.parametrize("asked", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [12, pytest.param(700, marks=pytest.mark.slow)])
def test_draws_follow_the_exact_distribution(vocab: int, asked: dict[str, float]) -> None:
    """Over uniform numbers that are spread evenly, each token is drawn as often as its probability says, give or take one
    draw at either end of its interval."""
    num_draws = 4096
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **asked}
    logits = random_logits(vocab, 1, vocab)
    rows = make_rows(num_draws, slot=0, uniform=(np.arange(num_draws) + 0.5) / num_draws, **settings)
    tokens = np.asarray(draw(jnp.asarray(np.repeat(logits, num_draws, axis=0)), rows))
    expected = filtered(logits[0], **settings)  # type: ignore[arg-type]
    found = np.bincount(tokens, minlength=vocab)
    np.testing.assert_allclose(found, expected * num_draws, rtol=0, atol=1.1)
    assert not found[expected == 0].any(), "a token that was filtered out is never drawn"
    assert (np.diff(tokens) >= 0).all(), "the draw is the inverse of the running sum"


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_the_ends_of_the_interval_draw_a_token_that_is_there(uniform: float) -> None:
    vocab = 1000
    logits = np.full((1, vocab), -np.inf, np.float32)
    logits[0, [300, 301, 700]] = [1.0, 0.0, 1.0]
    rows = make_rows(1, temperature=1.0, uniform=uniform)
    assert draw(jnp.asarray(logits), rows)[0] == (300 if uniform == 0 else 700)


def test_each_row_has_its_own_filters() -> None:
    num_rows, vocab = 6, 97
    logits = random_logits(5, num_rows, vocab)
    asked = [{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **FILTERS[index]} for index in (1, 4, 5, 6, 8, 10)]
    columns = {name: [settings[name] for settings in asked] for name in asked[0]}
    expected = np.array([filtered(row, **settings) for row, settings in zip(logits, asked, strict=True)])  # type: ignore[arg-type]
    for uniform in np.linspace(0.005, 0.995, 50):
        tokens = np.asarray(_draw(jnp.asarray(logits), make_rows(num_rows, uniform=uniform, **columns)))
        before = np.cumsum(expected, axis=1)[np.arange(num_rows), tokens] - expected[np.arange(num_rows), tokens]
        assert (before <= uniform + 1e-5).all()
        assert (uniform - 1e-5 <= before + expected[np.arange(num_rows), tokens]).all()
        assert (expected[np.arange(num_rows), tokens] > 0).all()


# --- penalties, bias, min_tokens --------------------------------------------------------------------------------------


def adjusted_by_hand(
    logits: np.ndarray,
    prompt: list[int],
    outputs: list[int],
    params: dict[str, Any],
    bias: dict[int, float],
    forbidden: list[int],
) -> np.ndarray:
    """One row, one token at a time, as OpenAI (presence, frequency) and CTRL (repetition) define it."""
    out = logits.astype(np.float64).copy()
    for token in range(len(out)):
        if token in prompt or token in outputs:
            out[token] = (
                out[token] / params["repetition_penalty"] if out[token] > 0 else out[token] * params["repetition_penalty"]
            )
        out[token] -= params["frequency_penalty"] * outputs.count(token) + params["presence_penalty"] * (token in outputs)
        out[token] += bias.get(token, 0.0)
        if token in forbidden and len(outputs) < params["min_tokens"]:
            out[token] = -np.inf
    return out


biases = st.dictionaries(st.integers(0, 19), st.sampled_from([-100.0, 2.5]), max_size=5)
row_settings = st.fixed_dictionaries(
    {
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.5, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.5, -1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.7]),
        "min_tokens": st.integers(0, 6),
    }
)


@given(
    tokens=st.lists(st.lists(st.integers(0, 19), min_size=CONTEXT, max_size=CONTEXT), min_size=NUM_SLOTS, max_size=NUM_SLOTS),
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=4, max_size=4),
    slots=st.permutations(range(NUM_SLOTS)),
    settings=st.lists(row_settings, min_size=4, max_size=4),
    bias=st.dictionaries(st.integers(0, NUM_SLOTS - 1), biases),
    has_bias=st.lists(st.booleans(), min_size=4, max_size=4),
    forbidden=st.lists(st.lists(st.integers(0, 19), max_size=3, unique=True), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_adjustments_are_what_counting_gives(
    tokens: list[list[int]],
    lengths: list[tuple[int, int]],
    slots: list[int],
    settings: list[dict[str, Any]],
    bias: dict[int, dict[int, float]],
    has_bias: list[bool],
    forbidden: list[list[int]],
    seed: int,
) -> None:
    """Four rows in any slots; what lies in the history past a row's position is another request's and must not count."""
    vocab, num_rows = 20, 4
    logits = random_logits(seed, num_rows, vocab)
    padded = np.full((num_rows, MAX_FORBIDDEN), vocab)
    for row, ids in enumerate(forbidden):
        padded[row, : len(ids)] = ids
    rows = make_rows(
        num_rows,
        slot=slots[:num_rows],
        num_prompt=[prompt for prompt, _ in lengths],
        next_position=[prompt + output for prompt, output in lengths],
        has_bias=has_bias,
        forbidden=padded,
        **{name: [row[name] for row in settings] for name in settings[0]},
    )
    found = jax.jit(adjust)(jnp.asarray(logits), rows, make_state(vocab, np.array(tokens), bias))
    for row, (num_prompt, num_output) in enumerate(lengths):
        history = tokens[slots[row]]
        expected = adjusted_by_hand(
            logits[row],
            history[:num_prompt],
            history[num_prompt : num_prompt + num_output],
            settings[row],
            bias.get(slots[row], {}) if has_bias[row] else {},
            forbidden[row],
        )
        np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("add", [add_at_once, add_by_row])
def test_amounts_are_added_at_their_ids(add: Callable[..., jax.Array]) -> None:
    rng = np.random.default_rng(0)
    values, amounts = rng.normal(size=(5, 7)).astype(np.float32), rng.normal(size=(5, 30)).astype(np.float32)
    ids = rng.integers(0, 9, size=(5, 30))  # each more than once, and two that are none
    expected = np.pad(values, ((0, 0), (0, 2)))
    np.add.at(expected, (np.arange(5)[:, None], ids), amounts)
    np.testing.assert_allclose(jax.jit(add)(values, ids, amounts), expected[:, :7], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_adjustments_decide_the_token(temperature: float) -> None:
    """Each through `sample`: a ban, a bias and a penalty move the choice away from, or to, a token."""
    vocab = 50
    logits = np.zeros((4, vocab), np.float32)
    logits[:, 7] = 30.0
    tokens = np.zeros((NUM_SLOTS, CONTEXT), int)
    tokens[:, 3:6] = 7
    forbidden = np.full((4, MAX_FORBIDDEN), vocab)
    forbidden[1, 0] = 7
    rows = make_rows(
        4, temperature=temperature, num_prompt=3, next_position=6, has_bias=[0, 0, 1, 0], min_tokens=[0, 4, 0, 0],
        frequency_penalty=[0, 0, 0, 2.0], repetition_penalty=[1, 1, 1, 100.0], forbidden=forbidden,
    )  # fmt: skip
    logits[:, 9] = 5.0
    state = make_state(vocab, tokens, {2: {11: 80.0}})
    assert choose(logits, rows, state).tokens.tolist() == [7, 9, 11, 9]


# --- log probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [5, 97, 1000])
@pytest.mark.parametrize("temperature", [0.0, 0.7], ids=["greedy", "sampled"])
def test_logprobs_are_of_the_models_own_distribution(vocab: int, temperature: float) -> None:
    """Whatever temperature, filters, penalties and bias do to the choice."""
    num_rows = 5
    logits = random_logits(3, num_rows, vocab)
    rows = make_rows(
        num_rows, num_logprobs=[-1, 0, 5, 20, -1], temperature=temperature, top_k=3, repetition_penalty=1.5, has_bias=1,
        uniform=np.linspace(0.1, 0.9, num_rows),
    )  # fmt: skip
    sampled = choose(logits, rows, make_state(vocab, bias={slot: {1: 9.0} for slot in range(num_rows)}))
    expected = log_softmax(logits.astype(np.float64), axis=1)
    row = np.arange(num_rows)
    np.testing.assert_allclose(sampled.logprob, expected[row, sampled.tokens], rtol=0, atol=1e-5)
    num_top = min(MAX_LOGPROBS, vocab)
    assert sampled.top_ids.shape == (num_rows, num_top)
    np.testing.assert_array_equal(sampled.top_ids, np.argsort(-logits, axis=1, kind="stable")[:, :num_top])
    np.testing.assert_allclose(sampled.top_logprobs, -np.sort(-expected, axis=1)[:, :num_top], rtol=0, atol=1e-5)


def test_nothing_is_spent_on_logprobs_that_nobody_asked_for() -> None:
    sampled = choose(random_logits(3, 5, 97), make_rows(5), make_state(97))
    assert not sampled.logprob.any()
    assert not sampled.top_logprobs.any()


# --- implementations of the draw --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "vocab", "impl", "word"),
    [
        ("cpu", 49_152, "xla", "platform cpu"),
        ("gpu", 49_152, "xla", "platform gpu"),
        ("tpu", 262_144, "tpu", "262144"),
        ("tpu", 2**20, "xla", "up to"),
    ],
)
def test_the_draw_is_chosen_by_platform(platform: str, vocab: int, impl: str, word: str) -> None:
    chosen, reason = choose_draw(platform, vocab)
    assert chosen == impl
    assert word in reason


@pytest.mark.slow
@pytest.mark.parametrize("dma_mode", DMA_MODES)
def test_the_tpu_kernel_chooses_the_same_tokens(dma_mode: str) -> None:
    """Through `sample`, on rows that mix greedy ones, filters, bans and biases. Uniform numbers lie off the sums' rounding."""
    num_rows, vocab = 11, 3000
    rng = np.random.default_rng(4)
    forbidden = np.full((num_rows, MAX_FORBIDDEN), vocab)
    forbidden[::2, 0] = 17
    rows = make_rows(
        num_rows, slot=rng.integers(0, NUM_SLOTS, num_rows), uniform=(rng.integers(0, 99, num_rows) + 0.5) / 99,
        temperature=[0, 0.7, 1, 0, 1.5, 1, 0.3, 1, 1, 0, 2], top_k=[0, 0, 40, 5, 0, 3, 0, 1000, 1, 0, 0],
        top_p=[1, 0.9, 1, 1, 0.5, 0.95, 1, 1, 1, 1, 1], min_p=[0, 0, 0, 0, 0.1, 0, 0.2, 0, 0, 0, 0],
        min_tokens=4, has_bias=rng.integers(0, 2, num_rows), presence_penalty=rng.choice([0, 1.5], num_rows), num_logprobs=2,
        forbidden=forbidden,
    )  # fmt: skip
    logits = jnp.asarray(random_logits(9, vocab, num_rows))
    state = make_state(vocab, rng.integers(0, vocab, (NUM_SLOTS, CONTEXT)), {1: {5: 9.0}, 3: {17: 50.0, 40: 3.0}})
    expected = _sample(logits, rows, state)
    assert len(np.unique(expected.tokens)) > num_rows // 2
    found = run_interpreted(jax.jit(partial(sample, draw_impl="tpu")), logits, rows, state, dma_mode=dma_mode)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_nothing_is_chosen_where_all_rows_wait() -> None:
    """A step of constrained rows alone leaves choosing to what has their masks; beside one that does not wait all choose."""
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((40, 3)), jnp.float32)
    best = np.asarray(logits).argmax(axis=0)
    for waits, expected in (((1, 1, 1), (0, 0, 0)), ((1, 0, 1), best), ((0, 0, 0), best)):
        found = choose_tokens(logits, make_rows(3, waits=np.array(waits)), make_state(40), "xla")
        np.testing.assert_array_equal(found, expected)
