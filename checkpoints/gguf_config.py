"""A GGUF file's metadata and tensor names, as Hugging Face's `config.json` and names.

Owns one `Architecture` row for each `general.architecture` that it knows. Knows no bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.checkpoint import CheckpointError
from checkpoints.gguf_metadata import GgufMetadata

ROPE_FACTORS = "rope_freqs.weight"
# What every published model with Llama 3's rotary scaling uses; GGUF stores only the factors that come of it.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL = 1.0, 4.0, 8192

GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture's GGUF differs from its Hugging Face checkpoint.

    Attributes:
        interleaved: query and key rows were permuted so that rotary pairs are neighbours.
    """

    hf_architecture: str
    model_type: str
    interleaved: bool


ARCHITECTURES = {"llama": Architecture("LlamaForCausalLM", "llama", interleaved=True)}


def architecture_of(metadata: GgufMetadata) -> Architecture:
    """The row for the file's `general.architecture`."""
    name = metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        raise metadata.error("general.architecture", f"one of those supported: {', '.join(sorted(ARCHITECTURES))}")
    return ARCHITECTURES[name]


def hf_name(stored: str) -> str:
    """Hugging Face's name for a GGUF tensor; a name that is not known stays as it is."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", stored)
    if layer and layer[2] in LAYER_NAMES:
        return f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, kind = stored.rpartition(".")
    return f"{GLOBAL_NAMES[stem]}.{kind}" if stem in GLOBAL_NAMES else stored


def rows_from_interleaved(num_rows: int, num_heads: int) -> np.ndarray:
    """Indices that take query or key rows from GGUF's order (rotary pairs adjacent) to Hugging Face's (halves)."""
    return np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2).swapaxes(1, 2).reshape(-1)


def config_from_metadata(
    metadata: GgufMetadata, shapes: Mapping[str, tuple[int, ...]], rope_factors: Callable[[], np.ndarray]
) -> dict[str, Any]:
    """A dictionary shaped like `config.json`.

    Args:
        shapes: of the tensors, by stored name.
        rope_factors: reads the rotary factors; called only if the file has them.

    Raises:
        CheckpointError: a key is missing or has a wrong value, or asks for what is not supported.
    """
    architecture = architecture_of(metadata)
    prefix = metadata.text("general.architecture")
    num_heads, num_kv_heads, head_dim = _heads(metadata, f"{prefix}.")
    rope_theta = metadata.positive(f"{prefix}.rope.freq_base", 10_000.0)
    vocab_size = _vocab_size(metadata, shapes)
    if ROPE_FACTORS in shapes:
        rope_scaling = _llama3_scaling(rope_factors(), rope_theta, head_dim, metadata.path)
    else:
        rope_scaling = _rope_scaling(metadata, f"{prefix}.rope.scaling")
    return {
        "architectures": [architecture.hf_architecture],
        "model_type": architecture.model_type,
        "hidden_size": metadata.count(f"{prefix}.embedding_length"),
        "intermediate_size": metadata.count(f"{prefix}.feed_forward_length"),
        "num_hidden_layers": metadata.count(f"{prefix}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.count(f"{prefix}.context_length"),
        "rms_norm_eps": metadata.positive(f"{prefix}.attention.layer_norm_rms_epsilon"),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "bos_token_id": metadata.index("tokenizer.ggml.bos_token_id", vocab_size),
        "eos_token_id": _eos_token_ids(metadata, vocab_size),
    }


def _heads(metadata: GgufMetadata, prefix: str) -> tuple[int, int, int]:
    """Query heads, key-value heads and head size."""
    if f"{prefix}expert_count" in metadata:
        raise CheckpointError(f"{metadata.path}: mixture-of-experts GGUF files are not supported")
    num_heads = metadata.count(f"{prefix}attention.head_count")
    num_kv_heads = metadata.count(f"{prefix}attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise metadata.error(f"{prefix}attention.head_count_kv", f"a divisor of the {num_heads} heads")
    hidden_size = metadata.count(f"{prefix}embedding_length")
    head_dim = metadata.count(f"{prefix}attention.key_length", max(1, hidden_size // num_heads))
    for key in (f"{prefix}rope.dimension_count", f"{prefix}attention.value_length"):
        if metadata.count(key, head_dim) != head_dim:
            raise metadata.error(key, f"the head size ({head_dim}), which alone is supported")
    return num_heads, num_kv_heads, head_dim


def _vocab_size(metadata: GgufMetadata, shapes: Mapping[str, tuple[int, ...]]) -> int:
    shape = shapes.get("token_embd.weight", ())
    if len(shape) != 2:
        raise CheckpointError(
            f"{metadata.path}: token_embd.weight must have two dimensions, found {shape or 'no such tensor'}"
        )
    return shape[0]


def _eos_token_ids(metadata: GgufMetadata, vocab_size: int) -> int | list[int] | None:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    found = dict.fromkeys(metadata.index(key, vocab_size) for key in keys)
    ids = [token_id for token_id in found if token_id is not None]
    return ids if len(ids) > 1 else ids[0] if ids else None


def _rope_scaling(metadata: GgufMetadata, prefix: str) -> dict[str, Any] | None:
    kind = metadata.text(f"{prefix}.type")
    if kind in (None, "none"):
        return None
    if kind != "linear":
        raise metadata.error(f"{prefix}.type", "'none' or 'linear', which alone are supported")
    factor = metadata.positive(f"{prefix}.factor")
    return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def llama3_factors(factor: float, theta: float, head_dim: int) -> np.ndarray:
    """What Llama 3's scaling divides each rotary frequency by: [head_dim / 2]."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((LLAMA3_ORIGINAL / wavelength - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _llama3_scaling(factors: np.ndarray, theta: float, head_dim: int, path: Path) -> dict[str, Any] | None:
    factor = float(f"{factors.max():.7g}") if factors.shape == (head_dim // 2,) and np.isfinite(factors).all() else 0.0
    if factor < 1.0 or not np.allclose(factors, llama3_factors(factor, theta, head_dim), rtol=1e-4):
        raise CheckpointError(
            f"{path}: {ROPE_FACTORS} {factors.shape} holds rotary factors other than Llama 3's scaling gives with "
            f"low_freq_factor {LLAMA3_LOW}, high_freq_factor {LLAMA3_HIGH} and {LLAMA3_ORIGINAL} original positions; "
            "no other is supported"
        )
    if factor == 1.0:
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_ORIGINAL,
    }


def layer_head_counts(config: Mapping[str, Any]) -> dict[str, int]:
    """Heads of the tensors that `rows_from_interleaved` concerns, by the last module in their Hugging Face name."""
    return {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}


def known_names(stored: Collection[str]) -> dict[str, str]:
    """Hugging Face name to stored name, without the rotary factors, which are in the config instead."""
    return {hf_name(name): name for name in stored if name != ROPE_FACTORS}
