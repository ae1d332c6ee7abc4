"""Gemma 3 270M, from its GGUF file, gives the logits and tokens that `transformers` gave with the same file on three texts.

One of them is longer than the model's window.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from checkpoints.checkpoint import open_checkpoint
from jaxserve.vocabulary import build_tokenizer
from tests.cached import CACHED
from tests.paged_model import PagedModel, assert_greedy_tokens
from tests.references.load import GEMMA_TEXTS, load_gemma

pytestmark = [pytest.mark.slow, *CACHED]

TOLERANCE = 1e-3
WIDTH = 128


@pytest.fixture(scope="module")
def model(gemma_model_path: Path) -> PagedModel:
    return PagedModel.load(gemma_model_path, capacity=1500)


@pytest.mark.parametrize("name", GEMMA_TEXTS)
def test_logits_and_greedy_tokens_agree(model: PagedModel, name: str) -> None:
    reference = load_gemma(name)
    assert name != "long" or len(reference.input_ids) > model.config.window
    model.restart()
    last = _logits_agree(model, name)
    assert_greedy_tokens(model, last, reference, TOLERANCE)


def _logits_agree(model: PagedModel, name: str) -> np.ndarray:
    """The logits of the last position; a chunk at a time, since those of a whole text are a gigabyte."""
    reference = load_gemma(name)
    same = []
    for start in range(0, len(reference.input_ids), WIDTH):
        part = slice(start, min(start + WIDTH, len(reference.input_ids)))
        logits = model.feed(reference.input_ids[part], width=WIDTH)
        for found, expected in (
            (logits[np.arange(len(logits)), reference.argmax[part]], reference.argmax_logit[part]),
            (logits.max(axis=1), reference.argmax_logit[part]),  # so where another id is first, it is a near-tie
            (_logsumexp(logits), reference.logsumexp[part]),
            (logits[:, reference.sampled_ids], reference.sampled_logits[part]),
        ):
            np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
        same.append(logits.argmax(axis=1) == reference.argmax[part])
    assert np.mean(np.concatenate(same)) > 0.99
    return logits[-1]


def _logsumexp(logits: np.ndarray) -> np.ndarray:
    """Of each row of `[tokens, V]`; SciPy's takes twenty times as long for rows of 262,144."""
    best = logits.max(axis=1)
    weights = logits - best[:, None]
    np.exp(weights, out=weights)
    return best + np.log(weights.sum(axis=1, dtype=np.float64))


def test_prompts_begin_with_bos_and_have_the_ids_of_transformers(gemma_model_path: Path) -> None:
    with open_checkpoint(gemma_model_path) as checkpoint:
        assert checkpoint.tokenizer is not None
        tokenizer = build_tokenizer(checkpoint.tokenizer)
    for reference in map(load_gemma, GEMMA_TEXTS):
        assert tokenizer.encode(reference.text) == reference.input_ids.tolist()
