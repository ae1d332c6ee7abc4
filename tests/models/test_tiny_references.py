"""Every tiny reference model gives the logits and tokens that `transformers` gave, however it is fed and sharded."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.cached import CACHED
from tests.paged_model import PagedModel, load_tiny_model
from tests.references.load import TINY_NAMES, TinyReference, load_tiny

pytestmark = CACHED

TOLERANCE = 2e-4
QUICK = ("biases-tp1", "rope_llama3-tp1", "mqa_theta-tp4", "nine_heads_tied-tp1", "nine_heads_tied-tp2")
"""With biases, scaled, with fewer heads than devices and with a number that they do not divide; the rest is slow."""


def models() -> Iterator[object]:
    for name in TINY_NAMES:
        for tensor_parallel in (1, 2, 4):
            test_id = f"{name}-tp{tensor_parallel}"
            yield pytest.param((name, tensor_parallel), id=test_id, marks=[pytest.mark.slow] * (test_id not in QUICK))


@pytest.fixture(scope="module", params=models())
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyReference, PagedModel]:
    name, tensor_parallel = request.param
    reference = load_tiny(name)
    return reference, load_tiny_model(reference, tmp_path_factory.mktemp("tiny"), tensor_parallel)


@pytest.mark.parametrize("width", [48, 7], ids=["in_one_chunk", "in_chunks_of_7"])
def test_logits_agree(loaded: tuple[TinyReference, PagedModel], width: int) -> None:
    reference, model = loaded
    model.restart()
    logits = model.feed_all(reference.input_ids, width=width)
    np.testing.assert_allclose(logits, reference.logits, rtol=0, atol=TOLERANCE)


def test_greedy_decode_agrees(loaded: tuple[TinyReference, PagedModel]) -> None:
    reference, model = loaded
    model.restart()
    last = model.feed_all(reference.input_ids, width=48)[-1]
    for token, gap in zip(reference.greedy_tokens, reference.greedy_gaps, strict=True):
        runner_up, best = np.sort(last)[-2:]
        assert last.argmax() == token
        assert best - runner_up == pytest.approx(gap, abs=2 * TOLERANCE)
        (last,) = model.feed([token], width=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tensor_parallel"),
    [
        ("rope_llama3", 1),
        pytest.param("rope_llama3", 2, marks=pytest.mark.slow),
        pytest.param("nine_heads_tied", 2, marks=pytest.mark.slow),
    ],
)
def test_bfloat16_is_near(name: str, tensor_parallel: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Eight bits of mantissa through two or three layers: a percent or two of logits whose deviation is 1.5."""
    reference = load_tiny(name)
    model = load_tiny_model(reference, tmp_path_factory.mktemp("tiny"), tensor_parallel, dtype="bfloat16")
    logits = model.feed_all(reference.input_ids[:40], width=40)
    logits = np.concatenate([logits, *(model.feed([token], width=1) for token in reference.input_ids[40:])])
    difference = np.sqrt(np.mean((logits - reference.logits) ** 2))
    assert 1e-3 < difference < 0.06, "not bfloat16" if difference < 1e-3 else "too far"
