"""Random LoRA adapters: as PEFT directories, and merged into the weights that they change. Knows numpy and no JAX."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

MODULES = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


@dataclass(frozen=True)
class RandomAdapter:
    """An adapter for a checkpoint's products.

    Attributes:
        tensors: as `adapter_model.safetensors` has them.
        config: as `adapter_config.json` has it.
    """

    tensors: dict[str, np.ndarray]
    config: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path, **changes: Any) -> Path:
        """A PEFT directory, and its path."""
        from safetensors.numpy import save_file

        path.mkdir(parents=True)
        (path / "adapter_config.json").write_text(json.dumps(self.config | changes))
        save_file(self.tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
        return path

    def merged(self, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """`weights` with what PEFT's `merge_and_unload` makes of them: W + scale * B @ A, here in float64."""
        rank = self.config["r"]
        scale = self.config["lora_alpha"] / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        merged = dict(weights)
        for name, a in self.tensors.items():
            if name.endswith("lora_A.weight"):
                b = self.tensors[name.replace("lora_A", "lora_B")]
                target = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
                delta = scale * b.astype(np.float64) @ a.astype(np.float64)
                merged[target] = (weights[target] + delta).astype(np.float32)
        return merged


def random_adapter(
    weights: Mapping[str, np.ndarray],
    seed: int,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    modules: Collection[str] = MODULES,
    strength: float = 0.5,
    **config: Any,
) -> RandomAdapter:
    """One whose changes are about `strength` times as large as the weights that it changes."""
    rng = np.random.default_rng(seed)
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    tensors = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if not module.endswith(tuple(modules)):
            continue
        width, inputs = weight.shape
        size = strength * float(weight.std()) / (scale * math.sqrt(rank))
        tensors[f"base_model.model.{module}.lora_A.weight"] = rng.standard_normal((rank, inputs)).astype(np.float32)
        tensors[f"base_model.model.{module}.lora_B.weight"] = (size * rng.standard_normal((width, rank))).astype(np.float32)
    common = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "task_type": "CAUSAL_LM"}
    names = sorted({module.rsplit(".", 1)[-1] for module in modules})
    return RandomAdapter(tensors, common | {"target_modules": names} | config)
