"""Qwen 2 with mixtures of experts in place of MLPs, and beside them an MLP that all tokens meet, weighted by a sigmoid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.models import qwen3_moe
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig


def read(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    shared = config.count("shared_expert_intermediate_size")
    experts = replace(qwen3_moe.experts(config), shared_width=shared, shared_gate=True)
    return config.common() | {"qkv_bias": config.flag("qkv_bias", True), "experts": experts}


FAMILY = Family(architectures=("Qwen2MoeForCausalLM", "qwen2_moe"), read=read)
