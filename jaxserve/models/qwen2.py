"""Qwen 2 and 2.5: Llama with biases on queries, keys and values, and a window in the upper layers if switched on."""

from __future__ import annotations

from typing import Any

from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig


def window(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig` for the window of Qwen's models: off unless they say `use_sliding_window`."""
    size = config.optional_count("sliding_window", 4096)
    if not config.flag("use_sliding_window") or size is None:
        config.get("layer_types")
        return {}
    first = config.number("max_window_layers", 28)
    upper = tuple(layer >= first for layer in range(config.count("num_hidden_layers")))
    return {"window": size, "windowed": config.windowed(upper)}


def read(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    return config.common() | window(config) | {"qkv_bias": True}


FAMILY = Family(architectures=("Qwen2ForCausalLM", "qwen2"), read=read)
