"""SmolLM 3: Llama, but for every fourth layer, which does not rotate queries and keys."""

from __future__ import annotations

from typing import Any

from jaxserve.models import llama
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig


def read(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    config = config.with_defaults(tie_word_embeddings=True)
    num_layers = config.count("num_hidden_layers")
    interval = config.count("no_rope_layer_interval", 4)
    # In spite of its name, the list says which layers do rotate.
    listed = config.get("no_rope_layers", [(layer + 1) % interval != 0 for layer in range(num_layers)])
    if not isinstance(listed, list) or not all(rotates in (0, 1) for rotates in listed):
        raise config.error("no_rope_layers", "a list of 0 and 1")
    rotary = tuple(map(bool, listed))
    fields = {"rope_theta": config.rope_theta(2_000_000.0), "rotary": rotary}
    window = config.optional_count("sliding_window")
    if config.flag("use_sliding_window") and window is not None:
        fields |= {"window": window, "windowed": config.windowed(tuple(not rotates for rotates in rotary))}
    return llama.read(config) | fields


FAMILY = Family(architectures=("SmolLM3ForCausalLM", "smollm3"), read=read)
