"""Small checkpoints, written by the libraries that define the formats and not by the code under test."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.numpy import save_file

from checkpoints.checkpoint import Checkpoint

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, LAYERS = 256, 4, 2, 512, 2
HEAD_DIM = HIDDEN // HEADS
BYTES = [chr(b) for b in range(33, 127)] + ["Ġ", "Ċ", "é"]
TOKENS = ["<s>", "</s>", *BYTES, "he", "ll", "hell", "hello"]
MERGES = ["h e", "l l", "he ll", "hell o"]
TEMPLATE = "{% for m in messages %}{{ m.content }} é ✓\n{% endfor %}"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FEED_FORWARD,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": len(TOKENS),
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def llama_shapes(*, vocab: int = len(TOKENS), layers: int = LAYERS) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of a tied model without biases."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(layers):
        prefix = f"model.layers.{i}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}.mlp.gate_proj.weight": (FEED_FORWARD, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (FEED_FORWARD, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, FEED_FORWARD),
        }
    return shapes


def random_tensors(shapes: Mapping[str, tuple[int, ...]], dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()}


GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GGUF_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """llama.cpp's name for a Hugging Face tensor."""
    stem, _, kind = name.rpartition(".")
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.{kind}"
    _, _, layer, module = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_LAYER_NAMES[module]}.{kind}"


def interleave(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """What the conversion to GGUF does to query and key rows, as llama.cpp's `LlamaModel.permute` defines it."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)


def add_hyperparameters(writer: gguf.GGUFWriter) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HEAD_DIM)


def raw_blocks(kind: GGMLQuantizationType, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Random bytes of a quantised tensor, whose float16 scales are all small and finite: [..., row bytes] uint8."""
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // block_size, block_bytes), np.uint8)
    scale = np.float16(0.01).tobytes()
    if kind is GGMLQuantizationType.IQ1_M:
        # Its scale is spread over the upper halves of four bytes.
        nibbles = np.frombuffer(scale, "<u2")[0] >> np.array([0, 4, 8, 12], np.uint16) & 15
        blocks[..., 49:56:2] = blocks[..., 49:56:2] & 15 | nibbles.astype(np.uint8) << 4
        return blocks.reshape(*shape[:-1], -1)
    places = {
        "Q4_1": [0, 2],
        "Q5_1": [0, 2],
        "Q4_K": [0, 2],
        "Q5_K": [0, 2],
        "Q2_K": [80, 82],
        "Q3_K": [108],
        "Q6_K": [208],
        "TQ1_0": [52],
        "TQ2_0": [64],
    }
    for start in places.get(kind.name, [0]):
        blocks[..., start : start + 2] = np.frombuffer(scale, np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(
    path: Path,
    tensors: Mapping[str, tuple[np.ndarray, GGMLQuantizationType]],
    *parts: Callable[[gguf.GGUFWriter], None],
    arch: str = "llama",
) -> Path:
    """Write a GGUF file of stored tensors; `parts` add the metadata."""
    writer = gguf.GGUFWriter(path, arch)
    for part in parts:
        part(writer)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_gguf(path: Path, tensors: Mapping[str, np.ndarray] | None = None, *parts: Callable[[gguf.GGUFWriter], None]) -> Path:
    """A whole float32 model in GGUF, of Hugging Face tensors; `parts` add more metadata."""
    stored = {}
    for name, values in (random_tensors(llama_shapes()) if tensors is None else tensors).items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        stored[gguf_name(name)] = (interleave(values, heads) if heads else values, GGMLQuantizationType.F32)
    return write_gguf(path, stored, add_hyperparameters, add_tokenizer, *parts)


def tiny_hf(directory: Path, tensors: Mapping[str, np.ndarray] | None = None, *, shards: int = 1) -> Path:
    """A Hugging Face directory without tokenizer."""
    tensors = dict(random_tensors(llama_shapes()) if tensors is None else tensors)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    names = list(tensors)
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)] if shards > 1 else ["model.safetensors"]
    weight_map = {name: files[i % shards] for i, name in enumerate(names)}
    for file in files:
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, directory / file, {"format": "pt"})
    if shards > 1:
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def read_all(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def assert_same_arrays(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Equal names, shapes, dtypes and bits."""
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert found[name].shape == values.shape, name
        assert found[name].dtype == values.dtype, name
        assert found[name].tobytes() == values.tobytes(), name
