"""A GGUF file's metadata as Hugging Face's `config.json`: what all architectures have. Knows no bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from checkpoints.checkpoint import CheckpointError
from checkpoints.gguf_architectures import architecture_of
from checkpoints.gguf_metadata import ArchitectureKeys, GgufMetadata
from checkpoints.gguf_rope import rope_settings

MAX_LAYERS = 10_000
"""There is something for each, which for a number that is a mistake would take all memory."""


def config_from_metadata(
    metadata: GgufMetadata, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], np.ndarray]
) -> dict[str, Any]:
    """A dictionary shaped like `config.json`.

    Args:
        shapes: of the tensors, by stored name.
        read: a tensor as float32, by stored name; called only for rotary factors.

    Raises:
        CheckpointError: a key is missing or has a wrong value, or asks for what is not supported.
    """
    row = architecture_of(metadata)
    keys = ArchitectureKeys(metadata, f"{metadata.text('general.architecture')}.")
    vocab_size = _vocab_size(metadata, shapes)
    config: dict[str, Any] = {
        "architectures": [row.hf_architecture],
        "model_type": row.model_type,
        "hidden_size": keys.count("embedding_length"),
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count", most=MAX_LAYERS),
        **_heads(keys),
        "hidden_act": "silu",
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.positive("attention.layer_norm_rms_epsilon"),
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes or "blk.0.attn_qkv.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "bos_token_id": metadata.index("tokenizer.ggml.bos_token_id", vocab_size),
        "eos_token_id": _eos_token_ids(metadata, vocab_size),
    }
    if generation := _generation(metadata):
        config["generation_config"] = generation
    config |= rope_settings(keys, config, shapes, read, partial=not row.interleaved)
    return config | row.settings(keys, config)


SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""What `generation_config.json` calls these."""


def _generation(metadata: GgufMetadata) -> dict[str, Any]:
    """What the file says of sampling, under the names of `generation_config.json` as far as that has any."""
    numbers = {key: value for key, value in metadata.values.items() if isinstance(value, (int, float))}
    found = {key: value for key, value in numbers.items() if key.startswith("general.sampling.")}
    # Stored as float32; seven digits bring back the decimal that was meant.
    return {
        SAMPLING_KEYS.get(key, key): float(f"{value:.7g}") if isinstance(value, float) else value
        for key, value in found.items()
    }


def _heads(keys: ArchitectureKeys) -> dict[str, int]:
    """Query heads, key-value heads and head size."""
    num_heads = keys.count("attention.head_count")
    num_kv_heads = keys.count("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise keys.error("attention.head_count_kv", f"a divisor of the {num_heads} heads")
    head_dim = keys.count("attention.key_length", max(1, keys.count("embedding_length") // num_heads))
    if keys.count("attention.value_length", head_dim) != head_dim:
        raise keys.error("attention.value_length", f"the head size ({head_dim}), which alone is supported")
    return {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}


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
