"""The demo model gives the logits and tokens that `transformers` gave on three real texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.special import logsumexp

from tests.cached import CACHED
from tests.paged_model import PagedModel, assert_greedy_tokens
from tests.references.load import DEMO_NAMES, load_demo

pytestmark = [pytest.mark.slow, *CACHED]

TOLERANCE = 1e-3
NUM_GREEDY = 64


@pytest.fixture(scope="module", params=[1, 2], ids=lambda n: f"tp{n}")
def model(demo_model_path: Path, request: pytest.FixtureRequest) -> PagedModel:
    return PagedModel.load(demo_model_path, request.param, capacity=700)


@pytest.mark.parametrize("name", DEMO_NAMES)
def test_logits_agree(model: PagedModel, name: str) -> None:
    reference = load_demo(name)
    model.restart()
    logits = model.feed_all(reference.input_ids, width=128)
    positions = np.arange(len(logits))

    def agree(found: np.ndarray, expected: np.ndarray) -> None:
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)

    agree(logits[positions, reference.argmax], reference.argmax_logit)
    agree(logits.max(axis=1), reference.argmax_logit)  # so where another id is first, it is a near-tie
    agree(logsumexp(logits, axis=1), reference.logsumexp)
    agree(logits[:, reference.sampled_ids], reference.sampled_logits)
    agree(logits[-1], reference.last_logits)
    assert np.mean(logits.argmax(axis=1) == reference.argmax) > 0.99


@pytest.mark.parametrize("name", DEMO_NAMES)
def test_greedy_tokens_agree(model: PagedModel, name: str) -> None:
    reference = load_demo(name)
    model.restart()
    last = model.feed_all(reference.input_ids, width=128)[-1]
    assert_greedy_tokens(model, last, reference, TOLERANCE)
