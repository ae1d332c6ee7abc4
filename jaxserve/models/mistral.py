"""Mistral and Ministral: Llama with a window over all layers, over some, or over none. Ministral 3 also scales its queries,
which is part of its rope scaling."""

from __future__ import annotations

from typing import Any

from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig


def read(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    third = config.get("model_type") == "ministral3"
    window = config.optional_count("sliding_window", None if third else 4096)
    if third:
        config = config.with_defaults(head_dim=128, rms_norm_eps=1e-5)
        if not config.rope:
            raise config.error("rope_parameters", "there: Ministral 3 does not rotate as others by default")
    return config.common() | {"window": window, "windowed": config.windowed_if(window)}


FAMILY = Family(
    architectures=(
        *("MistralForCausalLM", "MinistralForCausalLM", "Ministral3ForCausalLM"),
        *("mistral", "ministral", "ministral3"),
    ),
    read=read,
)
