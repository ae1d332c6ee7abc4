"""Llama 1 to 3, SmolLM 2 and what else calls itself Llama: the plain decoder."""

from __future__ import annotations

from typing import Any

from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig


def read(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    biased = config.flag("attention_bias")
    return config.common() | {"qkv_bias": biased, "output_bias": biased, "mlp_bias": config.flag("mlp_bias")}


FAMILY = Family(architectures=("LlamaForCausalLM", "llama"), read=read)
