"""What each `general.architecture` of GGUF is in Hugging Face's words: one row each.

Owns the names of a block's tensors, which rows llama.cpp's conversion permutes, what it adds to norms, and the metadata that
only some architectures have. What a file asks for beyond that is refused by key. Knows no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from checkpoints.gguf_metadata import ArchitectureKeys, GgufMetadata

Config = Mapping[str, Any]

GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
NORMS_BEFORE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
NORMS_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
NORMS_AROUND = NORMS_AFTER | {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
# {} is the number of the expert.
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
LLAMA = NORMS_BEFORE | ATTENTION | MLP

SIZES = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base"),
}
ROPE_SCALING = {
    *("rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.attn_factor", "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor"),
    *("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
}
WITHOUT_EFFECT = {"rope.scaling.finetuned", "tensor_data_layout", "pooling_type", "mm.tokens_per_image"}
# At these values a key changes nothing, whatever the architecture.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attention.scale": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),
    "nextn_predict_layers": (0,),
    "deepstack_mapping": (-1,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How one architecture's GGUF differs from its Hugging Face checkpoint.

    Attributes:
        layer_names: of a block's tensors, GGUF's to Hugging Face's.
        interleaved: query and key rows were permuted so that rotary pairs are neighbours.
        norm_offset: what the conversion added to the weights of all norms.
        keys: of the metadata, beyond those that all architectures have, that `settings` reads.
        settings: of `config.json` beyond those that all have; given the metadata and the others.
    """

    hf_architecture: str
    model_type: str
    layer_names: Mapping[str, str] = field(default_factory=lambda: LLAMA)
    interleaved: bool = False
    norm_offset: float = 0.0
    keys: frozenset[str] = frozenset()
    settings: Callable[[ArchitectureKeys, Config], dict[str, Any]] = lambda keys, config: {}


def _llama(keys: ArchitectureKeys, config: Config) -> dict[str, Any]:
    """Mistral and Mixtral are converted to the same architecture as Llama; a window or experts tell them."""
    window = keys.optional_count("attention.sliding_window")
    experts = keys.optional_count("expert_count")
    if experts:
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "sliding_window": window,
            "num_local_experts": experts,
            "num_experts_per_tok": keys.count("expert_used_count"),
        }
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window} if window else {}


def _mistral3(keys: ArchitectureKeys, config: Config) -> dict[str, Any]:
    """Ministral 3 also scales queries by how far they are, which its config has among the rope scaling."""
    window = keys.optional_count("attention.sliding_window")
    if keys.is_off("attention.temperature_scale"):
        return {"sliding_window": window}
    if config["rope_scaling"] is None or config["rope_scaling"]["rope_type"] != "yarn":
        raise keys.error("rope.scaling.type", "yarn, where attention.temperature_scale is there")
    scaling = config["rope_scaling"] | {"llama_4_scaling_beta": keys.positive("attention.temperature_scale")}
    own = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "rope_scaling": scaling}
    return own | {"sliding_window": window}


def _phi3(keys: ArchitectureKeys, config: Config) -> dict[str, Any]:
    # The conversion writes 0 for Phi 4, which has no window.
    window = keys.optional_count("attention.sliding_window")
    return {"sliding_window": window, "original_max_position_embeddings": keys.original_context(config)}


def _windows(keys: ArchitectureKeys, config: Config, window: int, period: int) -> dict[str, Any]:
    """The window and the layers that have it: all but the last of each `period`, unless the file says otherwise."""
    num_layers = config["num_hidden_layers"]
    key = "attention.sliding_window_pattern"
    pattern = keys.get(key)
    if isinstance(pattern, np.ndarray):
        if len(pattern) < num_layers:
            raise keys.error(key, f"an entry for each of {num_layers} layers")
        windowed = [bool(entry) for entry in pattern[:num_layers]]
    else:
        period = period if pattern is None else keys.count(key)
        windowed = [layer % period < period - 1 for layer in range(num_layers)]
    kinds = ["sliding_attention" if here else "full_attention" for here in windowed]
    return {"sliding_window": window, "layer_types": kinds}


def _same_base(keys: ArchitectureKeys, config: Config) -> None:
    if keys.positive("rope.freq_base_swa", config["rope_theta"]) != config["rope_theta"]:
        raise keys.error("rope.freq_base_swa", f"the base of all layers ({config['rope_theta']})")


def _gemma(keys: ArchitectureKeys, config: Config, *, divided_layers: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share. Their largest model, known by its layers, scales scores by another size than the head's."""
    whole = config["hidden_size"] // config["num_attention_heads"]
    divided = config["num_hidden_layers"] == divided_layers
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": whole if divided else config["head_dim"],
    }


def _gemma2(keys: ArchitectureKeys, config: Config) -> dict[str, Any]:
    _same_base(keys, config)
    return _gemma(keys, config, divided_layers=46) | {
        "attn_logit_softcapping": keys.positive("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.positive("final_logit_softcapping", 30.0),
        **_windows(keys, config, keys.count("attention.sliding_window", 4096), 2),
    }


def _gemma3(keys: ArchitectureKeys, config: Config) -> dict[str, Any]:
    window = keys.optional_count("attention.sliding_window")
    layers = ["full_attention"] * config["num_hidden_layers"]
    cap = "final_logit_softcapping"
    return _gemma(keys, config, divided_layers=62) | {
        "final_logit_softcapping": None if keys.is_off(cap) else keys.positive(cap),
        # Neither the base of layers with a window nor their pattern is in most files: the architecture has but one of each.
        "rope_local_base_freq": keys.positive("rope.freq_base_swa", 10_000.0),
        **(_windows(keys, config, window, 6) if window else {"layer_types": layers}),
    }


def _olmo2(keys: ArchitectureKeys, config: Config) -> dict[str, Any]:
    """OLMo 3 is converted to the same architecture; a window tells it."""
    window = keys.optional_count("attention.sliding_window")
    if not window:
        return {}
    _same_base(keys, config)
    return {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", **_windows(keys, config, window, 4)}


def _granite(keys: ArchitectureKeys, config: Config) -> dict[str, Any]:
    if keys.get("rope.scaling.finetuned") is False:
        raise keys.error("rope.scaling.finetuned", "true: without rotary embedding this architecture is not supported")
    return {
        "attention_multiplier": keys.positive("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": keys.positive("embedding_scale", 1.0),
        "residual_multiplier": keys.positive("residual_scale", 1.0),
        "logits_scaling": keys.positive("logit_scale", 1.0),
    }


def _smollm3(keys: ArchitectureKeys, config: Config) -> dict[str, Any]:
    return {"no_rope_layer_interval": 4}


def _experts(keys: ArchitectureKeys, config: Config) -> dict[str, Any]:
    return {"num_experts": keys.count("expert_count"), "num_experts_per_tok": keys.count("expert_used_count")}


def _qwen3_moe(keys: ArchitectureKeys, config: Config) -> dict[str, Any]:
    used = keys.count("expert_used_count")
    # Every layer has experts, and their weights are divided by their sum: llama.cpp knows no other.
    return _experts(keys, config) | {
        "moe_intermediate_size": keys.count("expert_feed_forward_length", config["intermediate_size"] // used),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _olmoe(keys: ArchitectureKeys, config: Config) -> dict[str, Any]:
    return _experts(keys, config) | {"norm_topk_prob": False, "clip_qkv": None}


WINDOW = frozenset({"attention.sliding_window"})
WINDOWS = WINDOW | {"attention.sliding_window_pattern", "rope.freq_base_swa"}
CAPS = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
EXPERT_COUNTS = frozenset({"expert_count", "expert_used_count"})
SCALES = frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"})

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        hf_architecture="LlamaForCausalLM",
        model_type="llama",
        layer_names=LLAMA | MIXTRAL_EXPERTS,
        interleaved=True,
        keys=WINDOW | EXPERT_COUNTS,
        settings=_llama,
    ),
    "mistral3": Architecture(
        hf_architecture="MistralForCausalLM",
        model_type="mistral",
        interleaved=True,
        keys=WINDOW | {"attention.temperature_scale"},
        settings=_mistral3,
    ),
    "smollm3": Architecture(hf_architecture="SmolLM3ForCausalLM", model_type="smollm3", interleaved=True, settings=_smollm3),
    "granite": Architecture(
        hf_architecture="GraniteForCausalLM", model_type="granite", interleaved=True, keys=SCALES, settings=_granite
    ),
    "qwen2": Architecture(hf_architecture="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen3": Architecture(hf_architecture="Qwen3ForCausalLM", model_type="qwen3"),
    "qwen3moe": Architecture(
        hf_architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        layer_names=NORMS_BEFORE | ATTENTION | EXPERTS,
        keys=EXPERT_COUNTS | {"expert_feed_forward_length"},
        settings=_qwen3_moe,
    ),
    "gemma2": Architecture(
        hf_architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        layer_names=NORMS_AROUND | ATTENTION | MLP,
        norm_offset=1.0,
        keys=WINDOWS | CAPS,
        settings=_gemma2,
    ),
    "gemma3": Architecture(
        hf_architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        layer_names=NORMS_AROUND | ATTENTION | MLP,
        norm_offset=1.0,
        keys=WINDOWS | {"final_logit_softcapping"},
        settings=_gemma3,
    ),
    "phi3": Architecture(
        hf_architecture="Phi3ForCausalLM",
        model_type="phi3",
        layer_names=LLAMA | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        keys=WINDOW,
        settings=_phi3,
    ),
    "olmo2": Architecture(
        hf_architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        layer_names=NORMS_AFTER | ATTENTION | MLP,
        keys=WINDOWS,
        settings=_olmo2,
    ),
    "olmoe": Architecture(
        hf_architecture="OlmoeForCausalLM",
        model_type="olmoe",
        layer_names=NORMS_BEFORE | ATTENTION | EXPERTS,
        keys=EXPERT_COUNTS,
        settings=_olmoe,
    ),
}


def architecture_of(metadata: GgufMetadata) -> Architecture:
    """The row for the file's `general.architecture`.

    Raises:
        CheckpointError: there is none, or the metadata has a key that the row does not know.
    """
    name = metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        raise metadata.error("general.architecture", f"one of those supported: {', '.join(sorted(ARCHITECTURES))}")
    row = ARCHITECTURES[name]
    keys = ArchitectureKeys(metadata, f"{name}.")
    known = SIZES | ROPE_SCALING | WITHOUT_EFFECT | row.keys
    for key, value in metadata.values.items():
        own = key.removeprefix(keys.prefix)
        if own != key and own not in known and (own not in NEUTRAL or not _among(value, NEUTRAL[own])):
            harmless = " or ".join(map(repr, NEUTRAL.get(own, ()))) or "absent"
            raise keys.error(own, f"{harmless}: this engine does not know what {name} would do with it")
    return row


def _among(value: Any, neutral: tuple[Any, ...]) -> bool:
    return bool(np.isin(np.asarray(value), neutral).all()) if not isinstance(value, (str, list)) else False
