"""Makes the reference values of mixtures of experts (`moe_*.npz`). Run by hand, as `make_references.py` is, never by tests.

Owns the models' shapes, and that neither their tokens nor their routing have near-ties.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.references.make_references import double_error, greedy, random_weight

HERE = Path(__file__).parent
NUM_GREEDY = 32
NUM_INPUT = 48
MIN_GAP = 0.01  # fifty times the tolerance on logits
MIN_ROUTER_GAP = 2e-3  # scores are exact to 1e-5

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
# What each is there to prove; everything else is `BASE`. Numbers of experts and widths that two devices do not divide.
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 21},
    "mixtral_window": {
        "model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 1, "sliding_window": 19,
        "num_key_value_heads": 1, "head_dim": 10,
    },
    "qwen3": {
        "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 10, "head_dim": 8,
        "norm_topk_prob": True,
    },
    "qwen3_mixed": {
        "model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 9, "head_dim": 8,
        "norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 4,
        "tie_word_embeddings": True,
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 7, "num_experts_per_tok": 3, "num_key_value_heads": 4},
    "qwen2": {
        "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 9,
        "shared_expert_intermediate_size": 15, "norm_topk_prob": False, "num_key_value_heads": 4,
    },
    "granite": {
        "model_type": "granitemoe", "num_local_experts": 5, "num_experts_per_tok": 2, "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.0, "tie_word_embeddings": True,
    },
}  # fmt: skip


def random_model(config: dict[str, Any], seed: int) -> tuple[Any, list[int]]:
    """A model of random weights, exact in float16 to halve the files, and an input for it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), attn_implementation="eager", experts_implementation="eager"
    )
    model = model.eval().float()
    for path, parameter in model.named_parameters():
        parameter.data = random_weight(path, parameter).to(torch.float16).float()
    return model, torch.randint(0, config["vocab_size"], (NUM_INPUT,)).tolist()


def router_gap(model: Any, ids: list[int], per_token: int) -> float:
    """By how much the last score that is taken exceeds the first that is not, at least, in any layer at any token."""
    gaps: list[float] = []

    def note(module: Any, inputs: Any, output: Any) -> None:
        scores = output[0].float().topk(per_token + 1, dim=-1).values
        gaps.append(float((scores[:, -2] - scores[:, -1]).min()))

    hooks = [module.register_forward_hook(note) for _, module in model.named_modules() if "Router" in type(module).__name__]
    assert hooks, "no router found"
    with torch.inference_mode():
        model(torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return min(gaps)


def checkpoint(model: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """`config.json` and the tensors, as `save_pretrained` writes them."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return config, load_file(Path(folder) / "model.safetensors")


def make(name: str, changes: dict[str, Any], output: Path) -> None:
    """Record one tiny random model, whole: config, weights, input, logits of every position, greedy tokens."""
    for seed in range(3000):
        model, ids = random_model(BASE | changes, seed)
        if router_gap(model, ids, model.config.num_experts_per_tok) < MIN_ROUTER_GAP:
            continue
        tokens, gaps = greedy(model, ids, NUM_GREEDY)
        gap = router_gap(model, ids + tokens, model.config.num_experts_per_tok)
        if min(gaps) > MIN_GAP and gap > MIN_ROUTER_GAP:
            break
    else:
        raise SystemExit(f"{name}: no seed without near-ties")
    logits, error = double_error(model, ids)
    assert error < 2e-5, f"{name}: float32 is off by {error:.2e}"
    assert 0.5 < logits.std() < 6, f"{name}: logits have deviation {logits.std():.2f}"
    config, weights = checkpoint(model)
    np.savez_compressed(
        output / f"moe_{name}.npz",
        config=np.array(json.dumps(config)),
        input_ids=np.array(ids, np.int32),
        logits=logits.numpy(),
        greedy_tokens=np.array(tokens, np.int32),
        greedy_gaps=np.array(gaps, np.float32),
        router_gap=np.array(gap, np.float32),
        **{f"weight:{path}": value.astype(np.float16) for path, value in weights.items()},
    )
    print(f"moe_{name}: seed {seed}, logits {logits.std():.2f}, float32 error {error:.1e}, "
          f"smallest gaps {min(gaps):.3f} and, of the router, {gap:.4f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=HERE, help="where the files go (default: beside this script)")
    parser.add_argument("names", nargs="*", default=list(MODELS), help="models to make (default: all)")
    args = parser.parse_args()
    for name in args.names:
        make(name, MODELS[name], args.output)


if __name__ == "__main__":
    main()
