"""Mistral and Ministral: Llama with a window over all layers, over some, or over none."""

from __future__ import annotations

from typing import Any

from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig


def read(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    window = config.get("sliding_window")
    all_layers = (window is not None,) * config.count("num_hidden_layers")
    return config.common() | {"window": window, "windowed": config.windowed(all_layers)}


FAMILY = Family(architectures=("MistralForCausalLM", "MinistralForCausalLM", "mistral", "ministral"), read=read)
