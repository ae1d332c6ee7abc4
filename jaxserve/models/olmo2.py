"""OLMo 2: norms after attention and MLP instead of before, and queries and keys normed over all heads together."""

from __future__ import annotations

from typing import Any

from jaxserve.models.decoder_params import TensorNames
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig


def read(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    biased = config.flag("attention_bias")
    fields = {"norms": "post", "qk_norm": "projection", "qkv_bias": biased, "output_bias": biased}
    return config.with_defaults(rms_norm_eps=1e-5).common() | fields


NAMES = TensorNames(norms=("post_attention_layernorm", "post_feedforward_layernorm"))

FAMILY = Family(architectures=("Olmo2ForCausalLM", "olmo2"), read=read, names=NAMES)
