"""`sample`: every implementation against NumPy in float64, and against the definition where no rounding decides."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.sample import IMPLEMENTATIONS, draw, reference
from pallas_kernels.sample.cases import SETTINGS, Settings, arguments, make_logits, misfit
from pallas_kernels.sample.check import check
from pallas_kernels.sample.xla import NUM_LARGEST, keep_top, keep_top_k, keep_top_p
from tests.cached import CACHED
from tests.kernels.ladder.interpret import DMA_MODES, run_interpreted

pytestmark = CACHED

_draw = jax.jit(draw, static_argnames="impl")
_keep_top = jax.jit(keep_top)
_keep_by_bisection = jax.jit(lambda weights, top_k, top_p: keep_top_p(keep_top_k(weights, top_k), top_p))


def drawn(logits: jax.Array, settings: list[Settings], uniform: np.ndarray, impl: str, dma_mode: str = "eager") -> np.ndarray:
    args = arguments(settings, uniform)
    if impl == "tpu":
        run = jax.jit(lambda logits, args: draw(logits, **args, impl=impl))
        return np.asarray(run_interpreted(run, logits, args, dma_mode=dma_mode))
    return np.asarray(_draw(logits, **args, impl=impl))


def assert_draws_fit(logits: np.ndarray, settings: list[Settings], uniform: np.ndarray, tokens: np.ndarray) -> None:
    """Each token's interval of the running sum contains the uniform number, give or take rounding."""
    for values, asked, number, token in zip(logits, settings, uniform, tokens, strict=True):
        assert misfit(values, asked, float(number), int(token)) <= 2e-5, (asked, number, token)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [12, 700, 20_000])
@pytest.mark.parametrize("impl", ["reference", "xla", "tpu"])
def test_draws_are_the_inverse_of_the_exact_running_sum(impl: str, vocab: int) -> None:
    """Rows of every kind side by side, so that some find their threshold near the top and some do not."""
    rng = np.random.default_rng(1)
    settings = [*SETTINGS, *SETTINGS]
    logits = make_logits(len(settings), vocab)
    for uniform in (rng.random(len(settings)), np.full(len(settings), 1 - 2.0**-24), np.zeros(len(settings))):
        assert_draws_fit(np.asarray(logits), settings, uniform, drawn(logits, settings, uniform, impl))


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("impl", ["reference", "xla"])
def test_each_setting_alone(impl: str, settings: Settings) -> None:
    """Alone, a setting takes whatever shortcut there is for it."""
    logits = make_logits(4, 20_000, seed=3)
    uniform = np.array([0.1, 0.4, 0.7, 0.95], np.float32)
    assert_draws_fit(np.asarray(logits), [settings] * 4, uniform, drawn(logits, [settings] * 4, uniform, impl))


@pytest.mark.slow
@pytest.mark.parametrize("dma_mode", DMA_MODES)
def test_tpu_samples_more_rows_than_a_block(dma_mode: str) -> None:
    settings = list(SETTINGS[:13])
    logits = make_logits(13, 5000, seed=5)
    uniform = np.random.default_rng(2).random(13)
    assert_draws_fit(np.asarray(logits), settings, uniform, drawn(logits, settings, uniform, "tpu", dma_mode))


# Weights that are multiples of 1/64: their sums are exact in float32, so no threshold is a matter of rounding.
exact_rows = st.lists(st.integers(0, 64), min_size=300, max_size=300).map(lambda w: np.array([64, *w], np.float32) / 64)


@given(
    rows=st.lists(exact_rows, min_size=3, max_size=3),
    k=st.integers(0, 320),
    sixteenths=st.integers(1, 16),
    zeros=st.integers(0, 290),
)
def test_filters_keep_what_sorting_keeps(rows: list[np.ndarray], k: int, sixteenths: int, zeros: int) -> None:
    """By the shortcut and by bisection; ties at the threshold, also past the largest that the shortcut looks at."""
    weights = np.stack(rows)
    weights[:, 1 : 1 + zeros] = 0
    expected = np.empty_like(weights)
    for row, values in enumerate(weights):
        kept = values if k == 0 else np.where(values >= np.sort(values)[::-1][min(k, len(values)) - 1], values, 0)
        if sixteenths < 16:
            order = np.sort(kept)[::-1]
            kept = np.where(kept >= order[np.argmax(np.cumsum(order) >= sixteenths / 16 * kept.sum())], kept, 0)
        expected[row] = kept
    top_k, top_p = jnp.full(3, k), jnp.full(3, sixteenths / 16)
    np.testing.assert_array_equal(_keep_top(jnp.asarray(weights), top_k, top_p), expected)
    np.testing.assert_array_equal(_keep_by_bisection(jnp.asarray(weights), top_k, top_p), expected)


@pytest.mark.parametrize("impl", ["reference", "xla", pytest.param("tpu", marks=pytest.mark.slow)])
def test_ties_are_kept_together(impl: str) -> None:
    """Of few different logits, which are all exact, so that every implementation keeps the same tokens."""
    settings = [Settings(top_k=k) for k in (1, 5, NUM_LARGEST - 1, NUM_LARGEST, NUM_LARGEST + 1, 900)]
    logits = np.array(make_logits(len(settings), 2000, levels=4))
    uniform = np.linspace(0.05, 0.95, len(settings))
    assert_draws_fit(logits, settings, uniform, drawn(jnp.asarray(logits), settings, uniform, impl))


def test_unknown_implementations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no implementation 'gpu'; there are reference, xla, tpu"):
        draw(make_logits(1, 10), **arguments([Settings()], np.zeros(1)), impl="gpu")
    with pytest.raises(ValueError, match="does not fit what a multiprocessor has"):
        draw(make_logits(1, 10), **arguments([Settings()], np.zeros(1)), impl="gpu")
    with pytest.raises(ValueError, match=r"no implementation 'other'.*anywhere\)$"):
        draw(make_logits(1, 10), **arguments([Settings()], np.zeros(1)), impl="other")


@pytest.mark.slow
def test_the_check_for_other_hardware_passes_here_and_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(passed for _, passed in check("xla").values())
    monkeypatch.setitem(
        IMPLEMENTATIONS, "off", lambda *args, **kwargs: (reference.draw(*args, **kwargs) + 1) % args[0].shape[1]
    )
    assert not any(passed for _, passed in check("off").values())


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_logits_that_are_no_numbers_give_a_token_all_the_same_and_harm_no_other_row(settings: Settings) -> None:
    """As of an adapter that overflows: an id past the vocabulary would be nobody's text."""
    logits, uniform = np.array(make_logits(4, 97, seed=3)), np.array([0.1, 0.4, 0.7, 0.95], np.float32)
    expected = drawn(jnp.asarray(logits), [settings] * 4, uniform, "xla")
    for value in (np.nan, np.inf):
        logits[1], logits[3, 5] = value, value
        found = drawn(jnp.asarray(logits), [settings] * 4, uniform, "xla")
        assert ((found >= 0) & (found < 97)).all()
        np.testing.assert_array_equal(found[[0, 2]], expected[[0, 2]])
