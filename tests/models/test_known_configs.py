"""What the `config.json` of models that people bring says: keys as they are found, none of which may be in the way."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.models.families import model_config_from_hf

COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.48.0",
}


def sizes(vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, context: int) -> dict[str, Any]:
    return COMMON | {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
    }


CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama 3.2 1B": (
        {
            **sizes(128_256, 2048, 8192, 16, 32, 8, 131_072),
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "head_dim": 64,
            "hidden_act": "silu",
            "mlp_bias": False,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "tie_word_embeddings": True,
        },
        {"family": "llama", "head_dim": 64, "tie_embeddings": True},
    ),
    "Qwen 2.5 0.5B": (
        {
            **sizes(151_936, 896, 4864, 24, 14, 2, 32_768),
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_act": "silu",
            "max_window_layers": 21,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "sliding_window": 32_768,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
        },
        {"family": "qwen2", "windowed": (), "qkv_bias": True},
    ),
    "Gemma 2 2B": (
        {
            **sizes(256_000, 2304, 9216, 26, 8, 4, 8192),
            "architectures": ["Gemma2ForCausalLM"],
            "attention_bias": False,
            "attn_logit_softcapping": 50.0,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "sliding_window": 4096,
        },
        {"family": "gemma2", "window": 4096, "attention_scale": 0.0625, "embedding_scale": 48.0},
    ),
    "Gemma 3 1B": (
        {
            **sizes(262_144, 1152, 6912, 26, 4, 1, 32_768),
            "architectures": ["Gemma3ForCausalLM"],
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-6,
            "rope_local_base_freq": 10_000,
            "rope_scaling": None,
            "rope_theta": 1_000_000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
        {"family": "gemma3", "window": 512, "local_rope_theta": 1e4, "rope_theta": 1e6, "logits_soft_cap": None},
    ),
    "Phi 4 mini": (
        {
            **sizes(200_064, 3072, 8192, 32, 24, 8, 131_072),
            "architectures": ["Phi3ForCausalLM"],
            "attention_bias": False,
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
            "embd_pdrop": 0.0,
            "full_attn_mod": 1,
            "hidden_act": "silu",
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "mlp_bias": False,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "resid_pdrop": 0.0,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
            "rope_theta": 10_000.0,
            "sliding_window": 262_144,
            "tie_word_embeddings": True,
        },
        {"family": "phi3", "rotary_dim": 96, "head_dim": 128},
    ),
    "OLMo 3 7B": (
        {
            **sizes(100_278, 4096, 11_008, 32, 32, 32, 65_536),
            "architectures": ["Olmo3ForCausalLM"],
            "attention_bias": False,
            "hidden_act": "silu",
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
            "rope_theta": 500_000,
            "sliding_window": 4096,
        },
        {"family": "olmo3", "window": 4096, "local_rope_theta": 5e5, "qk_norm": "projection"},
    ),
    "Granite 3 2B": (
        {
            **sizes(49_155, 2048, 8192, 40, 32, 8, 131_072),
            "architectures": ["GraniteForCausalLM"],
            "attention_bias": False,
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "hidden_act": "silu",
            "logits_scaling": 8.0,
            "mlp_bias": False,
            "residual_multiplier": 0.22,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 10_000_000.0,
            "tie_word_embeddings": True,
        },
        {"family": "granite", "attention_scale": 1 / 64, "logits_scale": 1 / 8},
    ),
    "SmolLM 3 3B": (
        {
            **sizes(128_256, 2048, 11_008, 36, 16, 4, 65_536),
            "architectures": ["SmolLM3ForCausalLM"],
            "attention_bias": False,
            "hidden_act": "silu",
            "layer_types": ["full_attention"] * 36,
            "max_window_layers": 28,
            "mlp_bias": False,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "pretraining_tp": 2,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 5_000_000.0,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        {"family": "smollm3", "rotary": (True, True, True, False) * 9, "windowed": (), "tie_embeddings": True},
    ),
    "Mistral Small 3.1": (
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "multimodal_projector_bias": False,
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
            "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
            "text_config": {
                **sizes(131_072, 5120, 32_768, 40, 32, 8, 131_072),
                "head_dim": 128,
                "hidden_act": "silu",
                "model_type": "mistral",
                "rms_norm_eps": 1e-5,
                "rope_theta": 1_000_000_000.0,
                "sliding_window": None,
            },
        },
        {"family": "mistral", "window": None, "head_dim": 128, "tie_embeddings": False},
    ),
    "Ministral 3": (
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "text_config": {
                **sizes(131_072, 3072, 9216, 26, 32, 8, 262_144),
                "head_dim": 128,
                "hidden_act": "silu",
                "model_type": "ministral3",
                "rms_norm_eps": 1e-5,
                "rope_parameters": {
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "factor": 16.0,
                    "llama_4_scaling_beta": 0.1,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "original_max_position_embeddings": 16_384,
                    "rope_theta": 1_000_000.0,
                    "rope_type": "yarn",
                    "type": "yarn",
                },
                "sliding_window": None,
                "tie_word_embeddings": True,
            },
        },
        {"family": "mistral", "window": None, "rope_theta": 1e6, "tie_embeddings": True},
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_known_models_are_read(name: str) -> None:
    values, fields = CONFIGS[name]
    config = model_config_from_hf(values)
    assert {field: getattr(config, field) for field in fields} == fields
