"""PEFT directories: names and scales as PEFT means them, and a reason for each that asks for more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints.checkpoint import CheckpointError
from checkpoints.peft import PeftAdapter, read_peft
from tests.peft_files import random_adapter

WEIGHTS = {
    f"model.layers.{layer}.{module}.weight": np.random.default_rng(0).standard_normal(shape)
    for layer in range(2)
    for module, shape in {"self_attn.q_proj": (8, 6), "mlp.down_proj": (6, 10)}.items()
}
Q0 = "model.layers.0.self_attn.q_proj"
DOWN1 = "model.layers.1.mlp.down_proj"


def read(folder: Path, **config: Any) -> PeftAdapter:
    return read_peft(random_adapter(WEIGHTS, 0, rank=2, alpha=6.0).write(folder / "adapter", **config))


def scale_of(adapter: PeftAdapter, module: str) -> float:
    """By what the file's B was multiplied."""
    b = random_adapter(WEIGHTS, 0, rank=2, alpha=6.0).tensors[f"base_model.model.{module}.lora_B.weight"]
    ratio = adapter.pairs[module][1] / b
    assert np.ptp(ratio) < 1e-5
    return float(ratio.mean())


def test_pairs_by_module(tmp_path: Path) -> None:
    adapter = read(tmp_path, base_model_name_or_path="org/base")
    assert adapter.base_model == "org/base"
    assert adapter.rank == 2
    assert list(adapter.pairs) == sorted(name.removesuffix(".weight") for name in WEIGHTS)
    a, b = adapter.pairs[Q0]
    assert (a.shape, b.shape, a.dtype, b.dtype) == ((2, 6), (8, 2), np.float32, np.float32)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 3.0),
        ({"use_rslora": True}, 6 / 2**0.5),
        ({"lora_alpha": 1}, 0.5),
        ({"alpha_pattern": {"q_proj": 8}}, 4.0),
        ({"alpha_pattern": {r"model\.layers\.0\..*": 8}}, 4.0),
        ({"alpha_pattern": {"proj": 8}}, 3.0),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 8}}, 3.0),
    ],
)
def test_scales(tmp_path: Path, config: dict[str, Any], expected: float) -> None:
    adapter = read(tmp_path, **config)
    assert scale_of(adapter, Q0) == pytest.approx(expected)


def test_patterns_are_of_the_names_in_the_whole_model(tmp_path: Path) -> None:
    """Of a model that also sees, whose text model's modules have longer names than they have here."""
    path = random_adapter(WEIGHTS, 0, rank=2).write(tmp_path / "adapter", alpha_pattern={"language_model.layers.0.*": 8})
    named = f"base_model.model.model.language_model.{Q0.removeprefix('model.')}.lora_{{}}.weight"
    save_file({named.format(side): np.ones((2, 2), np.float32) for side in "AB"}, path / "adapter_model.safetensors")
    assert read_peft(path).pairs[Q0][1].max() == 4.0


def test_a_rank_of_its_own(tmp_path: Path) -> None:
    adapter = read(tmp_path, r=16, rank_pattern={"q_proj": 2, "down_proj": 2}, use_rslora=True)
    assert scale_of(adapter, Q0) == pytest.approx(6 / 2**0.5)


@pytest.mark.parametrize(
    "spelled",
    [
        "base_model.model.layers.0.self_attn.q_proj.lora_{}.weight",
        "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_{}.weight",
        "base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_{}.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.default.weight",
    ],
)
def test_names_of_other_wrappings(tmp_path: Path, spelled: str) -> None:
    """Adapters of bare models, and of models that see."""
    path = random_adapter(WEIGHTS, 0, rank=2).write(tmp_path / "adapter")
    save_file({spelled.format(side): np.ones((2, 2), np.float16) for side in "AB"}, path / "adapter_model.safetensors")
    assert list(read_peft(path).pairs) == [Q0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type must be 'LORA', found 'LOHA'"),
        ({"use_dora": True}, r"use_dora is True: .*\(DoRA\)"),
        ({"bias": "lora_only"}, "bias is 'lora_only': biases were trained too"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]: whole modules"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"init_lora_weights": "pissa_niter_16"}, "'pissa_niter_16': the model's own weights were changed"),
        ({"r": 0}, "r must be a whole number of at least 1, found 0"),
        ({"r": 4}, r"has A of \(2, 6\) and B of \(8, 2\), expected rank 4"),
        ({"r": 10**400}, "expected rank 1000"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number, found '8'"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a number, found 1000"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern must have a positive number"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "alpha_pattern must have a positive number"),
        ({"alpha_pattern": {"(?i)q_proj": 2}}, "alpha_pattern must have a positive number"),
        ({"alpha_pattern": {"((a|b)+)+x": 2}}, "alpha_pattern: .* could take for ever"),
        ({"alpha_pattern": {r".*\..*\..*\..*\..*_proj": 2}}, "alpha_pattern: .* could take for ever"),
        ({"rank_pattern": {"q_proj(": 2}}, "rank_pattern must have a positive whole number"),
        ({"rank_pattern": {"q_proj": 0.5}}, "rank_pattern must have a positive whole number"),
    ],
)
def test_what_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, **config)


def test_everything_wrong_is_in_one_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, use_dora=True, bias="all", modules_to_save=["x"])
    assert all(name in str(caught.value) for name in ("use_dora", "bias", "modules_to_save", "adapter_config.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_model.model.model.embed_tokens.lora_embedding_A": (2, 9)}, "lora_embedding_A is no lora_A or lora_B"),
        ({f"base_model.model.{Q0}.lora_magnitude_vector": (8,)}, "lora_magnitude_vector is no lora_A"),
        ({f"base_model.model.{Q0}.lora_A.weight": None}, f"{Q0} has lora_B and no lora_A"),
        ({f"base_model.model.{Q0}.lora_B.weight": None}, f"{Q0} has lora_A and no lora_B"),
        ({f"base_model.model.{Q0}.lora_B.weight": (8, 2, 1)}, "expected a matrix of floats"),
        ({f"base_model.model.{Q0}.lora_A.other.weight": (2, 6)}, "lora_A.* comes after another of the same product"),
        (
            {f"base_model.{Q0}.lora_A.weight": (2, 6), f"base_model.{Q0}.lora_B.weight": (8, 2)},
            "is there under another name too",
        ),
    ],
)
def test_tensors_that_are_no_pairs(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    adapter = random_adapter(WEIGHTS, 0, rank=2)
    path = adapter.write(tmp_path / "adapter")
    tensors = adapter.tensors | {name: np.zeros(shape, np.float32) for name, shape in changes.items() if shape}
    for name, shape in changes.items():
        if shape is None:
            del tensors[name]
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        read_peft(path)


@pytest.mark.parametrize(("value", "side"), [(np.nan, "A"), (np.inf, "B"), (3.4e38, "A"), (2e38, "B")])
def test_numbers_that_are_not_finite(tmp_path: Path, value: float, side: str) -> None:
    """Nor those that are not in bfloat16, or once they are scaled: times the zeros of other rows they would be none at all."""
    adapter = random_adapter(WEIGHTS, 0, rank=2)
    adapter.tensors[f"base_model.model.{DOWN1}.lora_{side}.weight"][1, 1] = value
    with pytest.raises(CheckpointError, match=f"{DOWN1} has numbers that are not finite"):
        read_peft(adapter.write(tmp_path / "adapter"))


def test_files_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected a directory with adapter_config\.json"):
        read_peft(tmp_path / "nothing")
    path = random_adapter(WEIGHTS, 0).write(tmp_path / "adapter")
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"runs code when it is read: save it with safe_serialization=True"):
        read_peft(path)
    (path / "adapter_config.json").write_text(json.dumps([]))
    (path / "adapter_model.bin").rename(path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        read_peft(path)
