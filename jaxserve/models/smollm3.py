"""SmolLM 3: Llama, but for every fourth layer, which does not rotate queries and keys."""

from __future__ import annotations

from typing import Any

from jaxserve.models import llama
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig


def read(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    num_layers = config.count("num_hidden_layers")
    interval = config.count("no_rope_layer_interval", 4)
    rotary = config.get("no_rope_layers", [(layer + 1) % interval != 0 for layer in range(num_layers)])
    return llama.read(config) | {
        "rope_theta": config.rope_theta(2_000_000.0),
        "rotary": tuple(bool(rotates) for rotates in rotary),
        "window": config.get("sliding_window") if config.flag("use_sliding_window") else None,
        "windowed": config.windowed(()) if config.flag("use_sliding_window") else (),
    }


FAMILY = Family(architectures=("SmolLM3ForCausalLM", "smollm3"), read=read)
