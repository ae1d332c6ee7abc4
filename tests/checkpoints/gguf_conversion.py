"""Writes a Hugging Face model as the GGUF file that llama.cpp's conversion would make of it.

Names are those of the `gguf` package; what becomes of rows and norms, and the metadata, are spelled out here once more, not
taken from the code under test. `python -m tests.checkpoints.gguf_conversion FOLDER` writes all reference models, for other
programs to read.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType

from tests.checkpoints.builders import TOKENS, interleave, write_gguf
from tests.references.load import FAMILY_NAMES, MIXTURE_NAMES, TINY_NAMES, load_family, load_mixture, load_tiny

MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
}
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "SmolLM3ForCausalLM": "smollm3",
    "GraniteForCausalLM": "granite",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "OlmoeForCausalLM": "olmoe",
    "Ministral3ForCausalLM": "mistral3",
}
PERMUTED = {"llama", "smollm3", "granite", "mistral3"}
NORMS_PLUS_ONE = {"gemma2", "gemma3"}
# What the conversion does not write: windows of these families, other layers without rotation, dense layers among mixtures,
# a head that is not Gemma's embedding, YaRN between whole dimensions; and mixtures of which there is no row.
LOST = {
    *("family:qwen2-upper_windows", "family:qwen3-biases_windows", "family:smollm3-listed_windows"),
    *("family:ministral-some_windows", "mixture:qwen3_mixed", "family:gemma2-no_caps", "family:llama-yarn_mscale"),
    *("mixture:granite", "mixture:qwen2"),
}
LOADERS: dict[str, tuple[Any, Callable[[str], Any]]] = {
    "tiny": (TINY_NAMES, load_tiny),
    "family": (FAMILY_NAMES, load_family),
    "mixture": (MIXTURE_NAMES, load_mixture),
}
Config = Mapping[str, Any]
THETAS = {"smollm3": 2_000_000.0, "gemma3": 1_000_000.0, "olmo3": 500_000.0}


def load(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Config and weights of the reference model `KIND:NAME`, as far as llama.cpp has what it has."""
    kind, _, own = name.partition(":")
    reference = LOADERS[kind][1](own)
    config = dict(reference.config)
    if "query_pre_attn_scalar" in config:
        # It follows from the sizes there.
        config["query_pre_attn_scalar"] = _head_dim(config)
    return config, reference.weights


def _architecture(config: Config) -> str:
    return (config.get("architectures") or [MODEL_TYPES.get(config["model_type"])])[0]


def convertible() -> list[str]:
    """Names of the reference models that llama.cpp converts with nothing lost."""
    names = [f"{kind}:{name}" for kind, (own, _) in LOADERS.items() for name in own]
    return [name for name in names if name not in LOST]


def convert(config: Config, tensors: Mapping[str, np.ndarray], path: Path) -> Path:
    """Write a model to `path`, in float32."""
    arch = ARCHITECTURES[_architecture(config)]
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    stored: dict[str, np.ndarray] = {}
    for name, values in _merge_experts(tensors).items():
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        if arch in NORMS_PLUS_ONE and name.endswith("norm.weight"):
            values = values + np.float32(1)
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        stored[own] = interleave(values, config[heads]) if heads and arch in PERMUTED else values
    rope = _rope(config)
    if rope.get("long_factor"):
        stored["rope_factors_long.weight"] = np.array(rope["long_factor"], np.float32)
        stored["rope_factors_short.weight"] = np.array(rope["short_factor"], np.float32)
    if rope.get("rope_type", rope.get("type")) == "llama3":
        stored["rope_freqs.weight"] = _llama3_factors(rope, _theta(config, rope), _head_dim(config))
    kinds = {name: (np.ascontiguousarray(values), GGMLQuantizationType.F32) for name, values in stored.items()}
    metadata = _metadata(config, arch)

    def add(writer: gguf.GGUFWriter) -> None:
        for key, value in metadata.items():
            _add(writer, f"{arch}.{key}", value)

    return write_gguf(path, kinds, add, partial(_add_vocabulary, config["vocab_size"]), arch=arch)


def _add_vocabulary(size: int, writer: gguf.GGUFWriter) -> None:
    tokens = [*TOKENS[:size], *(f"[PAD{number}]" for number in range(len(TOKENS), size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (size - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _merge_experts(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    merged: dict[str, Any] = {}
    for name, values in tensors.items():
        expert = re.fullmatch(r"(model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight", name)
        if expert is None:
            merged[name] = values
            continue
        prefix, module = expert[1], expert[3]
        short = prefix.removeprefix("model.")
        stem = f"{prefix}.mlp.experts.{module}" if module.endswith("proj") else f"{short}.feed_forward.experts.{module}"
        merged.setdefault(f"{stem}.weight", {})[int(expert[2])] = values
    return {
        name: np.stack([values[i] for i in range(len(values))]) if isinstance(values, dict) else values
        for name, values in merged.items()
    }


def _rope(config: Config) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return dict(rope.get("full_attention", rope))


def _theta(config: Config, rope: Config) -> float:
    kind = config["model_type"].removesuffix("_text")
    return float(config.get("rope_theta") or rope.get("rope_theta") or THETAS.get(kind, 10_000.0))


def _head_dim(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _llama3_factors(rope: Config, theta: float, dim: int) -> np.ndarray:
    factors = []
    for i in range(dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / dim)
        low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _metadata(config: Config, arch: str) -> dict[str, Any]:
    rope = _rope(config)
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config.get("num_key_value_heads", config["num_attention_heads"]),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": _head_dim(config),
        "attention.value_length": _head_dim(config),
        "rope.freq_base": _theta(config, rope),
        **_rope_scaling(rope),
    }
    if arch in ("llama", "smollm3", "granite", "mistral3"):
        keys |= {"vocab_size": config["vocab_size"], "rope.dimension_count": _head_dim(config)}
    if experts := config.get("num_local_experts", config.get("num_experts")):
        keys |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
    if width := config.get("moe_intermediate_size"):
        keys["expert_feed_forward_length"] = width
    # Of Llama's architecture llama.cpp knows no window and the conversion writes none; files of others have one.
    if arch != "qwen2" and config.get("sliding_window"):
        keys["attention.sliding_window"] = config["sliding_window"]
        if kinds := config.get("layer_types"):
            keys["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in kinds]
        elif period := config.get("sliding_window_pattern"):
            keys["attention.sliding_window_pattern"] = period
    return keys | OWN.get(arch, lambda config, rope: {})(config, rope)


def _rope_scaling(rope: Config) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if kind != "yarn":
        return {}
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }
    for own, name in (("attention_factor", "attn"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
        if rope.get(own) is not None:
            keys[f"rope.scaling.yarn_{name}" + ("_factor" if name == "attn" else "")] = float(rope[own])
    if rope.get("mscale") == 1.0:
        keys["rope.scaling.yarn_log_multiplier"] = float(rope["mscale_all_dim"])
    return keys


def _caps(config: Config, rope: Config) -> dict[str, Any]:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {cap: float(config[cap]) for cap in caps if config.get(cap)}


def _gemma3(config: Config, rope: Config) -> dict[str, Any]:
    local = (config.get("rope_parameters") or {}).get("sliding_attention", {}).get("rope_theta")
    local = local or config.get("rope_local_base_freq")
    return _caps(config, rope) | ({"rope.freq_base_swa": float(local)} if local else {})


def _granite(config: Config, rope: Config) -> dict[str, Any]:
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {key: float(config[name]) for name, key in names.items() if name in config}


def _phi3(config: Config, rope: Config) -> dict[str, Any]:
    part = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    longest = config["max_position_embeddings"]
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or longest
    keys = {
        "rope.dimension_count": int(part * config["hidden_size"]) // config["num_attention_heads"],
        "rope.scaling.original_context_length": original,
        "attention.sliding_window": config.get("sliding_window") or 0,
    }
    if rope.get("long_factor"):
        scale = longest / original
        keys["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    return keys


def _mistral3(config: Config, rope: Config) -> dict[str, Any]:
    return {
        "rope.scaling.yarn_log_multiplier": float(rope["mscale_all_dim"]),
        "attention.temperature_scale": float(rope["llama_4_scaling_beta"]),
    }


OWN: dict[str, Callable[[Config, Config], dict[str, Any]]] = {
    "gemma2": _caps,
    "gemma3": _gemma3,
    "granite": _granite,
    "phi3": _phi3,
    "mistral3": _mistral3,
}


def main() -> None:
    folder = Path(sys.argv[1])
    for name in convertible():
        convert(*load(name), folder / f"{name.replace(':', '-')}.gguf")


if __name__ == "__main__":
    main()
