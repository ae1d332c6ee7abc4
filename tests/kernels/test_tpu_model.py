"""A model with TPU attention, interpreted, against the same model with attention in XLA, on one device and on four."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve.model_config import ModelConfig
from jaxserve.models.families import FAMILIES
from jaxserve.models.params import random_params
from jaxserve.models.sharding import make_mesh
from tests.kernels.ladder.interpret import interpreted
from tests.paged_model import PagedModel
from tests.real_engines import TINY_MODEL

TOKENS = np.random.default_rng(0).integers(0, TINY_MODEL.vocab_size, 41)


def logits(model: ModelConfig, attention_impl: str, tensor_parallel: int) -> np.ndarray:
    """Of a chunk of 40 tokens, half of them padding in its second step, and of a decode."""
    mesh = make_mesh(tensor_parallel)
    params = random_params(FAMILIES[model.family].specs(model), mesh, np.dtype(np.float32), seed=1)
    paged = PagedModel(model, params, tensor_parallel, dtype="float32", capacity=len(TOKENS), attention_impl=attention_impl)
    chunks = paged.feed_all(TOKENS[:-1], width=32)
    return np.concatenate([chunks, paged.feed(TOKENS[-1:], width=1)])


# Heads of 64: the widest whose K and V share a lane tile, so that the pool is as wide as in XLA.
LLAMA = dataclasses.replace(TINY_MODEL, num_layers=2, head_dim=64)
GEMMA = dataclasses.replace(
    LLAMA,
    family="gemma3",
    norms="both",
    norm_offset=1.0,
    qk_norm="head",
    window=11,
    windowed=(True, False),
    local_rope_theta=100.0,
    attention_soft_cap=0.2,  # of scores that these weights leave as small
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "tensor_parallel"), [(LLAMA, 1), (LLAMA, 4), (GEMMA, 1)], ids=["llama-1", "llama-4", "gemma-1"]
)
def test_a_model_gives_the_same_logits(model: ModelConfig, tensor_parallel: int) -> None:
    expected = logits(model, "xla", tensor_parallel)
    with interpreted("on_wait"):
        found = logits(model, "tpu", tensor_parallel)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
