"""Reference models of every family, written as llama.cpp would: config and weights come back as Hugging Face has them.

Their logits are held against `transformers` elsewhere, from a Hugging Face directory; equal configs and weights give equal
logits.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints.checkpoint import open_checkpoint
from checkpoints.gguf_architectures import ARCHITECTURES
from checkpoints.gguf_names import Part, parts_of
from jaxserve.models.families import model_config_from_hf
from jaxserve.models.rope import rotary_frequencies
from tests.checkpoints import gguf_conversion
from tests.checkpoints.builders import read_all


def assert_close(found: Any, expected: Any, where: str) -> None:
    """Equal, but for the last digits of numbers, which GGUF has in float32."""
    if dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_close(getattr(found, field.name), getattr(expected, field.name), f"{where}.{field.name}")
    elif isinstance(expected, float) or (isinstance(expected, tuple) and expected and isinstance(expected[0], float)):
        assert found == pytest.approx(expected, rel=1e-6), where
    else:
        assert found == expected, where


QUICK = {"family:gemma3-five_to_one", "family:phi3-partial", "mixture:mixtral"}
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in gguf_conversion.convertible()]


@pytest.mark.parametrize("name", NAMES)
def test_config_and_weights_come_back(name: str, tmp_path: Path) -> None:
    config, tensors = gguf_conversion.load(name)
    path = gguf_conversion.convert(config, tensors, tmp_path / "m.gguf")
    with open_checkpoint(path) as checkpoint:
        found = model_config_from_hf(checkpoint.config)
        expected = model_config_from_hf(config)
        if found.family == "llama" and expected.family == "mistral":
            expected = dataclasses.replace(expected, family="llama")
        if name.startswith("tiny:rope_llama3"):
            # Of another original context than Llama's, which GGUF does not store: the factors themselves must do.
            dim, frequencies = (
                expected.head_dim,
                rotary_frequencies(expected.head_dim, expected.rope_theta, found.rope_scaling),
            )
            wanted = rotary_frequencies(dim, expected.rope_theta, expected.rope_scaling)
            np.testing.assert_allclose(frequencies, wanted, rtol=1e-5)
            expected = dataclasses.replace(expected, rope_scaling=found.rope_scaling)
        tokens = {"bos_token_id": expected.bos_token_id, "eos_token_ids": expected.eos_token_ids}
        assert_close(dataclasses.replace(found, **tokens), expected, name)
        weights = read_all(checkpoint)
    assert set(weights) == set(tensors)
    for key, values in tensors.items():
        np.testing.assert_array_equal(weights[key], values, err_msg=key)


def test_gate_and_up_of_experts_may_be_one_tensor() -> None:
    """Within each expert gate comes before up."""
    stored = "blk.1.ffn_gate_up_exps.weight"
    parts = parts_of({stored: (3, 10, 4)}, ARCHITECTURES["qwen3moe"], {})
    assert parts == {
        f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight": Part(stored, 40 * expert + start, (5, 4))
        for expert in range(3)
        for name, start in (("gate", 0), ("up", 20))
    }
