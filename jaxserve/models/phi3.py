"""Phi 3 and 4: Llama with one product for queries, keys and values and one for gate and up, and long rope."""

from __future__ import annotations

from typing import Any

from jaxserve.models.decoder_params import TensorNames
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig

NAMES = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def read(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    window = config.get("sliding_window")
    all_layers = (window is not None,) * config.count("num_hidden_layers")
    return config.common() | {"window": window, "windowed": config.windowed(all_layers)}


FAMILY = Family(architectures=("Phi3ForCausalLM", "phi3"), read=read, names=NAMES)
