"""Weights in FP8 with scales, as the methods that are about store them; and methods that are not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints import fp8
from checkpoints.checkpoint import CheckpointError, TensorInfo, open_checkpoint
from checkpoints.convert import convert

FLOAT8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"} | weights}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


def model(path: Path, quantization: Any, **tensors: np.ndarray) -> Path:
    path.mkdir()
    config = {"model_type": "llama", "text_config": {"quantization_config": quantization}, "quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))
    save_file({name.replace("__", "."): values for name, values in tensors.items()}, path / "model.safetensors")
    return path


def random_fp8(shape: tuple[int, ...], kind: str = "e4m3") -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape, np.float32).astype(FLOAT8[kind])


def random_scale(*shape: int) -> np.ndarray:
    return np.random.default_rng(8).uniform(0.01, 2, shape).astype(np.float32)


# More rows than are dequantised at once, and sides that blocks do not divide.
SHAPE = (700, 450)
FORMS: dict[str, tuple[Any, str, np.ndarray]] = {
    "one, without axes": (compressed(strategy="tensor"), "weight_scale", random_scale()),
    "one": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "weight_scale", random_scale(1)),
    "one a row": (compressed(strategy="channel"), "weight_scale", random_scale(700, 1)),
    "one a row, flat": ({"quant_method": "fbgemm_fp8"}, "weight_scale", random_scale(700)),
    "blocks": (BLOCKS, "weight_scale_inv", random_scale(6, 4)),
    "blocks in bfloat16": (BLOCKS, "weight_scale_inv", random_scale(6, 4).astype(ml_dtypes.bfloat16)),
    "blocks, declared": (BLOCKS | {"weight_block_size": [100, 64]}, "weight_scale_inv", random_scale(7, 8)),
    "blocks of a group": (compressed(strategy="block", block_structure=[64, 32]), "weight_scale", random_scale(11, 15)),
    "undeclared": (None, "weight_scale", random_scale(700, 1)),
}


def expected(stored: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    values, scale = stored.astype(np.float32), scale.astype(np.float32)
    if scale.size > 1 and scale.ndim == 2 and scale.shape[1] > 1:
        scale = np.kron(scale, np.ones(block, np.float32))[: values.shape[0], : values.shape[1]]
    return values * (scale[:, None] if scale.ndim == 1 and scale.size > 1 else scale)


@pytest.mark.parametrize("kind", FLOAT8)
@pytest.mark.parametrize("form", FORMS)
def test_weights_are_what_is_stored_times_their_scales(tmp_path: Path, form: str, kind: str) -> None:
    quantization, suffix, scale = FORMS[form]
    stored = random_fp8(SHAPE, kind)
    block = {"blocks, declared": (100, 64), "blocks of a group": (64, 32)}.get(form, (128, 128))
    tensors = {"a__weight": stored, f"a__{suffix}": scale, "a__input_scale": random_scale(1), "b__weight": random_scale(3)}
    with open_checkpoint(model(tmp_path / "m", quantization, **tensors)) as checkpoint:
        assert dict(checkpoint.tensors) == {
            "a.weight": TensorInfo(SHAPE, np.dtype(np.float32)),
            "b.weight": TensorInfo((3,), np.dtype(np.float32)),
        }
        np.testing.assert_array_equal(checkpoint.read("a.weight"), expected(stored, scale, block))
        assert checkpoint.stored_bytes()[stored.dtype.name] == stored.nbytes


def test_what_is_dequantised_at_once_need_not_divide_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of 5120 columns, 51 rows of which are."""
    monkeypatch.setattr(fp8, "CHUNK_VALUES", 51 * SHAPE[1])
    stored, scale = random_fp8(SHAPE), random_scale(6, 4)
    with open_checkpoint(model(tmp_path / "m", BLOCKS, a__weight=stored, a__weight_scale_inv=scale)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("a.weight"), expected(stored, scale, (128, 128)))


@pytest.mark.parametrize("scale_shape", [(3, 1, 1), (3, 4, 1), (3, 4)])
def test_stacked_experts_are_scaled_each_by_its_own(tmp_path: Path, scale_shape: tuple[int, ...]) -> None:
    stored, scale = random_fp8((3, 4, 5)), random_scale(*scale_shape)
    tensors = {"experts__up": stored, "experts__up_scale": scale}
    with open_checkpoint(model(tmp_path / "m", compressed(), **tensors)) as checkpoint:
        in_rows = scale if scale.ndim == 3 else scale[..., None]
        np.testing.assert_array_equal(checkpoint.read("experts.up"), stored.astype(np.float32) * in_rows)


def test_eight_bits_without_scales_are_plain_numbers_where_nothing_says_otherwise(tmp_path: Path) -> None:
    stored = random_fp8((3, 4))
    with open_checkpoint(model(tmp_path / "m", None, a__weight=stored)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("a.weight"), stored)


def test_a_converted_checkpoint_no_longer_says_that_it_is_quantised(tmp_path: Path) -> None:
    stored, scale = random_fp8((130, 140)), random_scale(2, 2)
    source = model(tmp_path / "m", BLOCKS, a__weight=stored, a__weight_scale_inv=scale)
    convert(source, tmp_path / "out", dtype="bfloat16")
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert "quantization_config" not in json.dumps(checkpoint.config)
        wanted = expected(stored, scale, (128, 128)).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(checkpoint.read("a.weight"), wanted)


def test_weights_of_nothing_and_groups_that_are_none_do_no_harm(tmp_path: Path) -> None:
    odd = compressed() | {"config_groups": {"a": 5, "b": {"weights": None}}}
    none = random_fp8((0, 4))
    with open_checkpoint(model(tmp_path / "m", odd, a__weight=none, a__weight_scale=random_scale(1))) as checkpoint:
        assert checkpoint.read("a.weight").shape == (0, 4)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a__weight": random_fp8((4, 4))}, r"a\.weight is float8_e4m3fn\[4, 4\], but there is no a\.weight_scale"),
        (
            {"a__weight": random_fp8((300, 4)), "a__weight_scale_inv": random_scale(2, 1)},
            r"a\.weight_scale_inv: scales of shape \(2, 1\) do not fit a weight of shape \(300, 4\): .* 128 x 128",
        ),
    ],
)
def test_scales_that_are_missing_or_do_not_fit_are_an_error(tmp_path: Path, tensors: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(model(tmp_path / "m", BLOCKS, **tensors))


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, r"gptq \(4 bits\)"),
        ({"quant_method": "awq", "bits": 4}, r"awq \(4 bits\)"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"bitsandbytes \(4 bits\)"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        (compressed(type="int"), r"compressed-tensors \(8-bit int\)"),
        (compressed(num_bits=4, type="int"), r"compressed-tensors \(4-bit int\)"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"compressed-tensors \(sparse-24-bitmask\)"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"modelopt \(NVFP4\)"),
        ({"bits": 4}, r"an unnamed method \(4 bits\)"),
    ],
)
def test_other_methods_are_one_error_that_names_them(tmp_path: Path, quantization: Any, named: str) -> None:
    path = model(tmp_path / "m", quantization, a__qweight=np.zeros((2, 2), np.int32))
    with pytest.raises(CheckpointError, match=rf"config\.json: weights are quantised by {named}, which is not read; .*GGUF"):
        open_checkpoint(path)


def test_the_method_may_stand_in_a_file_of_its_own(tmp_path: Path) -> None:
    path = model(tmp_path / "m", None, a__weight=np.zeros((2, 2), np.float32))
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(CheckpointError, match=r"modelopt \(NVFP4\)"):
        open_checkpoint(path)
