"""Keys of `config.json` that change what a model computes: one that no family heeded is refused, by name.

Owns the list. What a family heeds is known from what it read; most other keys are for training, generation or tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.models.hf_config import HfConfig

OFF = (None, False, 0, 0.0)
ONE = (None, 1, 1.0)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # Who sees whom.
    "use_bidirectional_attention": OFF,
    "is_encoder_decoder": OFF,
    "add_cross_attention": OFF,
    "is_causal": (None, True),
    "use_sliding_window": OFF,
    "sliding_window_pattern": OFF,
    "attention_chunk_size": OFF,
    "layer_types": (None,),
    "attention_sinks": OFF,
    "add_swa_attention_sink_bias": OFF,
    "add_full_attention_sink_bias": OFF,
    # Queries, keys and values.
    "clip_qkv": (None,),
    "qk_norm": OFF,
    "use_qk_norm": OFF,
    "qk_layernorm": OFF,
    "query_pre_attn_scalar": (None,),
    "attn_logit_softcapping": (None,),
    "attn_temperature_tuning": OFF,
    "attention_multiplier": (None,),
    "attention_value_scale": ONE,
    "kv_lora_rank": OFF,
    "q_lora_rank": OFF,
    "num_kv_shared_layers": OFF,
    # Positions.
    "alibi": OFF,
    "use_alibi": OFF,
    "no_rope_layers": (None,),
    "no_rope_layer_interval": OFF,
    "rope_local_base_freq": (None,),
    "rope_interleave": OFF,
    "rope_interleaved": OFF,
    "rotary_pct": ONE,
    "use_mrope": OFF,
    # The rest of a block.
    "use_parallel_residual": OFF,
    "parallel_attn": OFF,
    "apply_residual_connection_post_layernorm": OFF,
    "residual_multiplier": ONE,
    "scale_depth": OFF,
    "num_experts": OFF,
    "num_local_experts": OFF,
    "n_routed_experts": OFF,
    "hidden_size_per_layer_input": OFF,
    # Embedding and head.
    "embedding_multiplier": ONE,
    "scale_emb": ONE,
    "logits_scaling": ONE,
    "logit_scale": ONE,
    "final_logit_softcapping": (None,),
    "mup_enabled": OFF,
}
"""Each such key, and the values with which it changes nothing. `sliding_window` is not one: families that have no windows, in
transformers too, find it in files that others' were made into."""


def refuse_unheeded(config: HfConfig, family: str) -> None:
    """Refuse a model that asks for something which its family does not do.

    Raises:
        ConfigError: naming the keys.
    """
    asked_for = {key: config.values[key] for key in NEUTRAL if key in config.values and not _is_neutral(config, key)}
    asked_for |= {f"rope_parameters.{key}": value for key, value in config.rope.items() if isinstance(value, Mapping)}
    unheeded = sorted(asked_for.keys() - config.heeded)
    if unheeded:
        asked = ", ".join(f"{key} = {asked_for[key]!r:.80}" for key in unheeded)
        raise ConfigError(
            f"{config.where}: {asked}: not supported with the family {family}, and would change what it computes"
        )


def _is_neutral(config: HfConfig, key: str) -> bool:
    value = config.values[key]
    if key == "layer_types" and isinstance(value, list):
        return all(kind == "full_attention" for kind in value)
    return any(value is neutral or value == neutral for neutral in NEUTRAL[key])
