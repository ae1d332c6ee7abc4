"""Gemma 2: norms before and after attention and MLP, whose weights count from 1; soft caps; a window in every other layer."""

from __future__ import annotations

import math
from typing import Any

from jaxserve.models.decoder_params import TensorNames
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig

NAMES = TensorNames(
    norms=("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
)


def shared(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig` that Gemma 2 and 3 have alike."""
    config = config.with_defaults(head_dim=256, tie_word_embeddings=True)
    biased = config.flag("attention_bias")
    return config.common() | {
        "activation": config.activation("hidden_activation", "gelu_pytorch_tanh"),
        "norms": "both",
        "norm_offset": 1.0,
        "qkv_bias": biased,
        "output_bias": biased,
        "attention_scale": config.positive("query_pre_attn_scalar", 256) ** -0.5,
        "attention_soft_cap": config.optional_positive("attn_logit_softcapping", 50.0),
        "logits_soft_cap": config.optional_positive("final_logit_softcapping", 30.0),
        "embedding_scale": math.sqrt(config.count("hidden_size")),
        "window": config.count("sliding_window", 4096),
    }


def read(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    alternating = tuple(layer % 2 == 0 for layer in range(config.count("num_hidden_layers")))
    return shared(config) | {"windowed": config.windowed(alternating)}


FAMILY = Family(architectures=("Gemma2ForCausalLM", "gemma2"), read=read, names=NAMES)
