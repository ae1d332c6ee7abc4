"""Products of decodes alone, which another library computes on CPU, give what the compiler's own code gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.device.buckets import Bucket
from jaxserve.device.compiler import ONEDNN_DECODES
from jaxserve.request import Request, SamplingParams
from tests.cached import CACHED
from tests.near_ties import assert_same_outputs
from tests.real_engines import checkpoint_runner, run, run_alone
from tests.references.load import load_tiny, write_hf_directory

pytestmark = [*CACHED, pytest.mark.slow]


def test_a_product_with_two_sums_after_it(tmp_path: Path) -> None:
    """A bias and the residual: taken into one call of oneDNN, both sums were wrong."""
    reference = load_tiny("biases")
    path = write_hf_directory(reference, tmp_path / "model")
    num = ONEDNN_DECODES
    engine = EngineConfig(dtype="float32", max_seqs=num, max_step_tokens=64, max_context=64, num_pages=64, page_size=8)
    runner = checkpoint_runner(path, engine, (Bucket(1, 0, 1), Bucket(num, 0, num), Bucket(64, num, num)))
    prompts = np.random.default_rng(0).integers(0, reference.config["vocab_size"], (num, 6)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
    requests = [Request(request_id=str(i), prompt=tuple(prompt), params=params) for i, prompt in enumerate(prompts)]
    assert_same_outputs(run_alone(runner, requests), run(runner, requests).outputs, tolerance=2e-4, max_near_ties=1)
