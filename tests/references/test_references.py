"""A Llama in plain numpy agrees with the recorded logits, and disagrees once any feature is left out.

So the references were not made by one library's mistake, and each of them is able to fail a wrong implementation.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.references.load import DEMO_NAMES, TINY_NAMES, TinyReference, load_demo, load_tiny, load_tokenizer

TOLERANCE = 2e-4


def rope_frequencies(config: dict[str, Any], head_dim: int) -> np.ndarray:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta") or scaling["rope_theta"]
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        return frequencies / scaling["factor"]
    if kind == "llama3":
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = np.clip((turns - low) / (high - low), 0, 1)
        return keep * frequencies + (1 - keep) * frequencies / scaling["factor"]
    return frequencies


def llama(config: dict[str, Any], weights: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Logits [T, V] of one sequence, in float64, by the shortest code that says what the model is."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    length = len(ids)

    def linear(x: np.ndarray, path: str) -> np.ndarray:
        return x @ weights[f"{path}.weight"].T.astype(np.float64) + weights.get(f"{path}.bias", 0.0)

    def norm(x: np.ndarray, path: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weights[f"{path}.weight"]

    angles = np.arange(length)[:, None] * rope_frequencies(config, head_dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def rotate(x: np.ndarray) -> np.ndarray:
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = weights["model.embed_tokens.weight"][ids].astype(np.float64)
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        y = norm(x, f"{path}.input_layernorm")
        q = rotate(linear(y, f"{path}.self_attn.q_proj").reshape(length, heads, head_dim))
        k = rotate(linear(y, f"{path}.self_attn.k_proj").reshape(length, kv_heads, head_dim))
        v = linear(y, f"{path}.self_attn.v_proj").reshape(length, kv_heads, head_dim)
        k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (k, v))
        scores = np.einsum("tnd,snd->nts", q, k) / math.sqrt(head_dim)
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        probabilities = np.exp(scores - scores.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        attended = np.einsum("nts,snd->tnd", probabilities, v).reshape(length, -1)
        x = x + linear(attended, f"{path}.self_attn.o_proj")
        y = norm(x, f"{path}.post_attention_layernorm")
        gate = linear(y, f"{path}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, f"{path}.mlp.up_proj"), f"{path}.mlp.down_proj")
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return linear(norm(x, "model.norm"), head)


def error(reference: TinyReference, **changes: Any) -> float:
    """Largest difference from the recorded logits, with the config changed."""
    weights = {
        k: v for k, v in reference.weights.items() if not (k.endswith("bias") and changes.get("attention_bias") is False)
    }
    return float(np.abs(llama(reference.config | changes, weights, reference.input_ids) - reference.logits).max())


@pytest.mark.parametrize("name", TINY_NAMES)
def test_a_plain_llama_agrees(name: str) -> None:
    reference = load_tiny(name)
    assert error(reference) < TOLERANCE / 4
    ids = list(reference.input_ids)
    for token in reference.greedy_tokens:
        logits = llama(reference.config, reference.weights, np.array(ids))[-1]
        assert logits.argmax() == token
        ids.append(token)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("rope_linear", {"rope_scaling": None}),
        ("rope_llama3", {"rope_scaling": None}),
        ("rope_llama3_v5", {"rope_parameters": {"rope_theta": 10000.0}}),
        ("biases", {"attention_bias": False}),
        ("large_eps", {"rms_norm_eps": 1e-5}),
        ("mqa_theta", {"rope_theta": 10000.0}),
        ("nine_heads_tied", {"rope_theta": 10000.0}),
    ],
)
def test_a_feature_left_out_is_seen(name: str, changes: dict[str, Any]) -> None:
    assert error(load_tiny(name), **changes) > 100 * TOLERANCE


def test_tiny_references_are_well_formed() -> None:
    assert len(TINY_NAMES) == 10
    for name in TINY_NAMES:
        reference = load_tiny(name)
        assert reference.logits.shape == (len(reference.input_ids), reference.config["vocab_size"])
        assert reference.logits.dtype == np.float32
        assert reference.greedy_gaps.min() > 0.02
        assert len(reference.greedy_tokens) == 16


@pytest.mark.parametrize("name", DEMO_NAMES)
def test_demo_references_are_well_formed(name: str) -> None:
    reference = load_demo(name)
    length, vocab_size = len(reference.input_ids), len(reference.last_logits)
    assert length >= 200
    assert vocab_size == 49152
    assert reference.sampled_logits.shape == (length, len(reference.sampled_ids))
    assert reference.argmax.shape == reference.argmax_logit.shape == reference.logsumexp.shape == (length,)
    assert (reference.argmax_logit[:, None] >= reference.sampled_logits).all()
    assert (reference.logsumexp > reference.argmax_logit).all()
    assert reference.last_logits.argmax() == reference.argmax[-1] == reference.greedy_tokens[0]
    np.testing.assert_array_equal(reference.last_logits[reference.sampled_ids], reference.sampled_logits[-1])
    assert len(reference.greedy_tokens) == len(reference.greedy_gaps) == 64


def test_tokenizer_references_are_well_formed() -> None:
    reference = load_tokenizer()
    assert len(reference.encode) >= 40
    assert len(reference.chat) >= 5
    by_text = {entry.text: entry.ids for entry in reference.encode + reference.encode_special}
    assert by_text["Hello, world!"] == [19556, 28, 905, 17]
    assert by_text["text<|endoftext|>more"][1] == 0
    assert reference.chat[0].ids[0] == 1
