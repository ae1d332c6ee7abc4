"""Makes `families/*.npz` with PyTorch and `transformers`: tiny random models of every family. Run by hand, never by the tests.

Owns which models there are and what is recorded of them; `load.py` draws their weights and reads the records. See README.md
for the command.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.references.load import HERE, drawn_weights
from tests.references.make_references import MIN_TINY_GAP, double_error, greedy

NUM_PROMPT = 40
NUM_DECODE = 32
MIN_KINDS = 5  # of tokens in the continuation: one that repeats itself would hide what decoding gets wrong
MAX_ERROR = 2e-5  # of float32 against float64, a tenth of the tests' tolerance

BASE: dict[str, Any] = {
    "vocab_size": 47,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOW, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# Of six pairs of a head: each with a factor of its own, so that none can be mistaken for another.
LONG_ROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.0],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0],
}
GEMMA2: dict[str, Any] = {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "tie_word_embeddings": True,
    "head_dim": 12,
    "query_pre_attn_scalar": 20,
    "sliding_window": 9,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 5.0,
}
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "tie_word_embeddings": True,
    "head_dim": 12,
    "query_pre_attn_scalar": 20,
    "sliding_window": 9,
}
PHI3: dict[str, Any] = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_size": 48, "sliding_window": None}

# What each is there to prove is in its name; all else is `BASE`. Old and new spellings of `config.json` mix on purpose.
MODELS: dict[str, dict[str, Any]] = {
    "llama-yarn": {"model_type": "llama", "head_dim": 16, "rope_parameters": {**YARN, "rope_theta": 10000.0}},
    "llama-yarn_mscale": {
        "model_type": "llama",
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_theta": 1000.0,
        "rope_scaling": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.6, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    },
    "smollm3-every_fourth": {
        "model_type": "smollm3",
        "num_hidden_layers": 4,
        "rope_theta": 500.0,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
    "smollm3-listed_windows": {
        "model_type": "smollm3",
        "num_hidden_layers": 3,
        "no_rope_layers": [0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": 9,
        "mlp_bias": True,
    },
    "mistral-window": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 10},
    "mistral-head_dim": {
        "model_type": "mistral",
        "sliding_window": None,
        "head_dim": 12,
        "num_attention_heads": 8,
        "rope_theta": 1e6,
    },
    "ministral-some_windows": {
        "model_type": "ministral",
        "architectures": ["MinistralForCausalLM"],
        "num_hidden_layers": 3,
        "head_dim": 10,
        "sliding_window": 7,
        "layer_types": [WINDOW, FULL, WINDOW],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "ministral3-scaled_queries": {
        "model_type": "ministral3",
        "architectures": ["Ministral3ForCausalLM"],
        "head_dim": 16,
        "rope_parameters": {
            "type": "yarn",
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "qwen2-window_off": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": 8,
        "max_window_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "hidden_size": 36,
    },
    "qwen2-upper_windows": {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "qwen3-head_dim": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 12,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "hidden_size": 40,
        "tie_word_embeddings": True,
        "sliding_window": None,
        "max_window_layers": 2,
    },
    "qwen3-biases_windows": {
        "model_type": "qwen3",
        "head_dim": 8,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": [WINDOW, FULL],
    },
    "gemma2-caps_windows": {**GEMMA2, "num_hidden_layers": 3},
    "gemma2-no_caps": {
        **GEMMA2,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "layer_types": [FULL, WINDOW],
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
    },
    "gemma3-five_to_one": {
        **GEMMA3,
        "num_hidden_layers": 7,
        "num_key_value_heads": 1,
        "rope_theta": 5000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "gemma3-rope_parameters": {
        **GEMMA3,
        "num_hidden_layers": 3,
        "hidden_size": 36,
        "num_attention_heads": 6,
        "layer_types": [FULL, WINDOW, WINDOW],
        "rope_parameters": {
            FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 3000.0},
            WINDOW: {"rope_type": "default", "rope_theta": 50.0},
        },
        "final_logit_softcapping": 5.0,
    },
    "gemma3-pattern_of_two": {**GEMMA3, "num_hidden_layers": 4, "sliding_window_pattern": 2, "hidden_size": 40},
    "phi3-long": {**PHI3, "rope_scaling": LONG_ROPE, "original_max_position_embeddings": 32},
    "phi3-short": {**PHI3, "rope_scaling": LONG_ROPE, "original_max_position_embeddings": 80, "context": 80},
    "phi3-partial": {
        **PHI3,
        "hidden_size": 64,
        "partial_rotary_factor": 0.75,
        "rope_scaling": LONG_ROPE,
        "original_max_position_embeddings": 32,
        "tie_word_embeddings": True,
    },
    "phi3-window": {**PHI3, "sliding_window": 11, "num_key_value_heads": 4, "original_max_position_embeddings": 128},
    "olmo2-all_heads": {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "num_key_value_heads": 4},
    "olmo2-three_groups": {
        "model_type": "olmo2",
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "hidden_size": 36,
        "attention_bias": True,
        "rope_theta": 500000.0,
    },
    "granite-multipliers": {
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
        "tie_word_embeddings": True,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.22,
        "logits_scaling": 1.6,
        "rope_theta": 10000000.0,
    },
    "granite-biases": {
        "model_type": "granite",
        "attention_bias": True,
        "mlp_bias": True,
        "attention_multiplier": 0.5,
        "logits_scaling": 2,
        "num_key_value_heads": 1,
    },
    "olmo3-three_to_one": {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "hidden_size": 36,
        "sliding_window": 9,
        "rope_theta": 500000.0,
        "rope_scaling": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.2},
    },
    "olmo3-rope_parameters": {
        "model_type": "olmo3",
        "sliding_window": 9,
        "layer_types": [FULL, WINDOW],
        "rope_parameters": {
            FULL: {**YARN, "rope_theta": 8000.0},
            WINDOW: {"rope_type": "default", "rope_theta": 8000.0},
        },
    },
}


def config_of(name: str) -> tuple[dict[str, Any], int]:
    """`config.json` of a model, and the context that it is to be served with."""
    config = {**BASE, **MODELS[name]}
    context = config.pop("context", config["max_position_embeddings"])
    return config, context


def shapes_of(model: PreTrainedModel) -> dict[str, list[int]]:
    """Shapes of the parameters by their paths; one that two share has the first's."""
    return {path: list(parameter.shape) for path, parameter in model.named_parameters()}


def drawn_model(config: dict[str, Any], seed: int, norm_center: int) -> tuple[PreTrainedModel, list[int]]:
    """A model of drawn weights, and a prompt for it."""
    model_type = config["model_type"]
    arguments = json.loads(json.dumps({key: value for key, value in config.items() if key != "model_type"}))
    hf_config = AutoConfig.for_model(model_type, **arguments)
    model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager", dtype=torch.float32).eval()
    weights = drawn_weights(shapes_of(model), seed, norm_center)
    for path, parameter in model.named_parameters():
        parameter.data = torch.from_numpy(weights[path])
    prompt = np.random.RandomState(seed).randint(0, config["vocab_size"], NUM_PROMPT)
    return model, prompt.tolist()


def make(name: str, output: Path) -> None:
    """Record one model: what its weights are drawn from, a prompt with its greedy continuation, logits of every position."""
    config, context = config_of(name)
    norm_center = 0 if config["model_type"].startswith("gemma") else 1
    for seed in range(300):
        model, prompt = drawn_model(config, seed, norm_center)
        tokens, gaps = greedy(model, prompt, NUM_DECODE)
        if min(gaps) < MIN_TINY_GAP or len(set(tokens)) < MIN_KINDS:
            continue
        logits, error = double_error(model, prompt + tokens)
        if error < MAX_ERROR:
            break
    else:
        raise AssertionError(f"{name}: no seed without near-ties and repetition whose float32 is near float64")
    assert 0.5 < logits.std() < 4, f"{name}: logits have deviation {logits.std():.2f}"
    recipe = {
        "config": config,
        "context": context,
        "num_prompt": NUM_PROMPT,
        "shapes": shapes_of(model),
        "seed": seed,
        "norm_center": norm_center,
    }
    np.savez_compressed(
        output / f"{name}.npz",
        recipe=np.array(json.dumps(recipe)),
        input_ids=np.array(prompt + tokens, np.int32),
        logits=logits.numpy(),
    )
    print(f"{name}: seed {seed}, logits {logits.std():.2f}, float32 error {error:.1e}, smallest gap {min(gaps):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MODELS), help="models to make (default: all)")
    parser.add_argument("--output", type=Path, default=HERE / "families", help="where the files go")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name in args.names:
        make(name, args.output)


if __name__ == "__main__":
    main()
