"""Mixtral: Mistral with a mixture of experts in place of each MLP, what the chosen make weighted by their scores alone."""

from __future__ import annotations

from typing import Any

from jaxserve.model_config import ExpertsConfig
from jaxserve.models.decoder_params import TensorNames
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig


def read(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    config = config.with_defaults(rms_norm_eps=1e-5, num_key_value_heads=8, num_experts_per_tok=2)
    fields, window = config.common(), config.optional_count("sliding_window")
    experts = ExpertsConfig(
        num=config.num_experts(),
        per_token=config.count("num_experts_per_tok"),
        width=fields["intermediate_size"],
    )
    rope_theta = config.rope_theta(1_000_000.0)
    return fields | {
        "window": window,
        "windowed": config.windowed_if(window),
        "rope_theta": rope_theta,
        "experts": experts,
    }


FAMILY = Family(
    architectures=("MixtralForCausalLM", "mixtral"),
    read=read,
    names=TensorNames(
        router="block_sparse_moe.gate",
        expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
    ),
)
