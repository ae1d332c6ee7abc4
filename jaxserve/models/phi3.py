"""Phi 3 and 4: Llama with one product for queries, keys and values and one for gate and up, and long rope."""

from __future__ import annotations

from typing import Any

from jaxserve.models.decoder_params import TensorNames
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig

NAMES = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def read(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    config = config.with_defaults(rms_norm_eps=1e-5, original_max_position_embeddings=4096)
    window = config.optional_count("sliding_window")
    fields = config.common() | {"window": window, "windowed": config.windowed_if(window)}
    # Early files call their long rope so.
    if config.rope.get("rope_type", config.rope.get("type")) == "yarn":
        fields["rope_scaling"] = config.rope_scaling({**config.rope, "rope_type": "longrope"})
    return fields


FAMILY = Family(architectures=("Phi3ForCausalLM", "phi3"), read=read, names=NAMES)
