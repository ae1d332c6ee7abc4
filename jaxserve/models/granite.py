"""Granite 3: Llama with multipliers on the embedding, on scores, on what each part of a block adds, and on logits."""

from __future__ import annotations

from typing import Any

from jaxserve.models import llama
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig


def read(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    return llama.read(config) | {
        "embedding_scale": config.number("embedding_multiplier", 1.0),
        "attention_scale": config.positive("attention_multiplier", 1.0),
        "residual_scale": config.number("residual_multiplier", 1.0),
        "logits_scale": 1.0 / config.positive("logits_scaling", 1.0),
    }


FAMILY = Family(architectures=("GraniteForCausalLM", "granite"), read=read)
