"""Gemma 3's text model: Gemma 2 without caps, with normed queries and keys, and five layers with a window to one without, each
kind with a rotary base of its own."""

from __future__ import annotations

from typing import Any

from jaxserve.models import gemma2
from jaxserve.models.family import IGNORED_TENSORS, Family
from jaxserve.models.hf_config import HfConfig

# Of the class in transformers. The `text_config` of models that also see has only what differs from it.
DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


def read(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    config = config.with_defaults(**DEFAULTS)
    period = config.count("sliding_window_pattern", 6)
    pattern = tuple((layer + 1) % period != 0 for layer in range(config.count("num_hidden_layers")))
    local_theta = config.positive("rope_local_base_freq", 10_000.0)
    fields = {"qk_norm": "head", "windowed": config.windowed(pattern)}
    return gemma2.shared(config) | config.rope_of_kinds(1_000_000.0, local_theta) | fields


FAMILY = Family(
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "gemma3_text", "gemma3"),
    read=read,
    names=gemma2.NAMES,
    ignored_tensors=(*IGNORED_TENSORS, "*vision_tower.*", "*multi_modal_projector.*"),
)
