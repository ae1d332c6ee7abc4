"""OLMoE: queries and keys normed over all heads together, and a mixture of experts whose weights are of all scores."""

from __future__ import annotations

from typing import Any

from jaxserve.model_config import ExpertsConfig
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig


def read(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    biased, fields = config.flag("attention_bias"), config.common()
    experts = ExpertsConfig(
        num=config.num_experts(),
        per_token=config.count("num_experts_per_tok", 8),
        width=fields["intermediate_size"],
        renormalise=config.flag("norm_topk_prob"),
    )
    return fields | {
        "qk_norm": "projection",
        "rms_norm_eps": config.positive("rms_norm_eps", 1e-5),
        "qkv_bias": biased,
        "output_bias": biased,
        "experts": experts,
    }


FAMILY = Family(architectures=("OlmoeForCausalLM", "olmoe"), read=read)
