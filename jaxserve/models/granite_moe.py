"""Granite 3 with a mixture of experts in place of each MLP, all experts of a layer in one tensor."""

from __future__ import annotations

from typing import Any

from jaxserve.model_config import ExpertsConfig
from jaxserve.models import granite
from jaxserve.models.decoder_params import TensorNames
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig


def read(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    fields = granite.read(config)
    experts = ExpertsConfig(
        num=config.num_experts(),
        per_token=config.count("num_experts_per_tok"),
        width=fields["intermediate_size"],
    )
    return fields | {"experts": experts}


FAMILY = Family(
    architectures=("GraniteMoeForCausalLM", "granitemoe"),
    read=read,
    names=TensorNames(
        router="block_sparse_moe.router.layer",
        expert_gate_up=("block_sparse_moe.input_linear",),
        expert_down="block_sparse_moe.output_linear",
    ),
)
