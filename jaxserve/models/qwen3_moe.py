"""Qwen 3 with mixtures of experts in place of MLPs, in all layers or some."""

from __future__ import annotations

from typing import Any

from jaxserve.model_config import ExpertsConfig
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig


def read(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    biased = config.flag("attention_bias")
    fields = {"qk_norm": "head", "qkv_bias": biased, "output_bias": biased}
    return config.common() | fields | {"experts": experts(config)}


def experts(config: HfConfig) -> ExpertsConfig:
    """The experts, as Qwen's models spell them: every so many layers has some, but for those that are named."""
    num_layers, step = config.count("num_hidden_layers"), config.count("decoder_sparse_step", 1)
    plain = config.get("mlp_only_layers", [])
    if not isinstance(plain, list) or not all(type(layer) is int for layer in plain):
        raise config.error("mlp_only_layers", "a list of layers")
    return ExpertsConfig(
        num=config.num_experts(),
        per_token=config.count("num_experts_per_tok"),
        width=config.count("moe_intermediate_size"),
        renormalise=config.flag("norm_topk_prob"),
        layers=tuple(layer not in plain and (layer + 1) % step == 0 for layer in range(num_layers)),
    )


FAMILY = Family(architectures=("Qwen3MoeForCausalLM", "qwen3_moe"), read=read)
