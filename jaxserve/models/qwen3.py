"""Qwen 3: Llama with each head's queries and keys normed."""

from __future__ import annotations

from typing import Any

from jaxserve.models import qwen2
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig


def read(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    config = config.with_defaults(head_dim=128)
    biased = config.flag("attention_bias")
    fields = {"qk_norm": "head", "qkv_bias": biased, "output_bias": biased}
    return config.common() | qwen2.window(config) | fields


FAMILY = Family(architectures=("Qwen3ForCausalLM", "qwen3"), read=read)
