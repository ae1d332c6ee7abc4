"""GGUF files: values against the `gguf` package, row order against the conversion's definition, and the config."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGMLQuantizationType

from checkpoints.checkpoint import CheckpointError, TensorInfo, open_checkpoint
from checkpoints.gguf import PLAIN, QUANTISED, GgufCheckpoint
from checkpoints.gguf_rope import llama3_factors
from tests.checkpoints.builders import (
    CONFIG,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    TEMPLATE,
    TOKENS,
    add_hyperparameters,
    add_tokenizer,
    assert_same_arrays,
    interleave,
    llama_shapes,
    random_tensors,
    raw_blocks,
    read_all,
    tiny_gguf,
    write_gguf,
)

F32 = GGMLQuantizationType.F32
SUPPORTED = [*PLAIN, *QUANTISED]
EMBEDDING = {"token_embd.weight": (np.zeros((len(TOKENS), HIDDEN), np.float32), F32)}


def test_the_supported_types_are_those_promised() -> None:
    promised = {
        *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
        *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4"),
    }
    assert {kind.name for kind in SUPPORTED} == promised


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_values_of_every_type_are_those_of_the_gguf_package(tmp_path: Path, kind: GGMLQuantizationType, rows: int) -> None:
    raw = raw_blocks(kind, (rows, 768), np.random.default_rng(rows)) if kind in QUANTISED else None
    plain = np.random.default_rng(1).standard_normal((rows, 768), np.float32)
    stored = raw if raw is not None else quants.quantize(plain, kind)
    path = write_gguf(tmp_path / "m.gguf", EMBEDDING | {"output.weight": (stored, kind)}, add_hyperparameters)
    with open_checkpoint(path) as checkpoint:
        found = checkpoint.read("lm_head.weight")
        rounded = np.empty(found.shape, ml_dtypes.bfloat16)
        checkpoint.read_into("lm_head.weight", rounded)
        assert checkpoint.tensors["lm_head.weight"] == TensorInfo(found.shape, found.dtype)
    expected = quants.dequantize(stored, kind)
    assert found.dtype == {"F16": np.float16, "BF16": ml_dtypes.bfloat16}.get(kind.name, np.float32)
    np.testing.assert_array_equal(found.astype(np.float32), expected.reshape(rows, 768))
    np.testing.assert_array_equal(rounded, found.astype(ml_dtypes.bfloat16))
    assert np.ptp(expected) > 0


@pytest.mark.parametrize("kind", [F32, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q6_K], ids=lambda kind: kind.name)
def test_query_and_key_rows_come_back_in_hugging_face_order(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    rng = np.random.default_rng(0)
    tensors = dict(EMBEDDING)
    expected = {}
    for name, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS), ("attn_v", 0)):
        rows = (heads or KV_HEADS) * HEAD_DIM
        plain = rng.standard_normal((rows, HIDDEN), np.float32)
        stored = plain if kind is F32 else raw_blocks(kind, plain.shape, rng)
        expected[name] = plain if kind is F32 else quants.dequantize(stored, kind)
        tensors[f"blk.0.{name}.weight"] = (interleave(stored, heads) if heads else stored, kind)
    path = write_gguf(tmp_path / "m.gguf", tensors, add_hyperparameters)
    with open_checkpoint(path) as checkpoint:
        for name, values in expected.items():
            found = checkpoint.read(f"model.layers.0.self_attn.{name.removeprefix('attn_')}_proj.weight")
            np.testing.assert_array_equal(found, values)


def test_biases_of_query_and_key_are_put_in_order_too(tmp_path: Path) -> None:
    bias = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    tensors = EMBEDDING | {"blk.0.attn_q.bias": (interleave(bias, HEADS), F32)}
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, add_hyperparameters)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("model.layers.0.self_attn.q_proj.bias"), bias)
        assert checkpoint.config["attention_bias"] is True


def test_a_whole_model_has_hugging_face_names_and_values(tmp_path: Path) -> None:
    tensors = random_tensors(llama_shapes())
    with open_checkpoint(tiny_gguf(tmp_path / "m.gguf", tensors)) as checkpoint:
        assert isinstance(checkpoint, GgufCheckpoint)
        assert_same_arrays(read_all(checkpoint), tensors)
        assert checkpoint.tokenizer is not None
        assert checkpoint.tokenizer.chat_template == TEMPLATE
        assert (checkpoint.tokenizer.bos_token, checkpoint.tokenizer.eos_token) == ("<s>", "</s>")
        assert checkpoint.tokenizer.add_bos


def test_arrays_outlive_the_checkpoint_and_are_aligned(tmp_path: Path) -> None:
    tensors = random_tensors(llama_shapes())
    checkpoint = open_checkpoint(tiny_gguf(tmp_path / "m.gguf", tensors))
    found = read_all(checkpoint)
    checkpoint.close()
    assert_same_arrays(found, tensors)
    assert all(values.ctypes.data % 64 == 0 for values in found.values())


def test_the_config_is_shaped_like_hugging_face(tmp_path: Path) -> None:
    with open_checkpoint(tiny_gguf(tmp_path / "m.gguf")) as checkpoint:
        config = checkpoint.config
    assert {key: config[key] for key in CONFIG} == CONFIG
    assert config["head_dim"] == HEAD_DIM
    assert config["rope_theta"] == 10_000.0
    assert config["rope_scaling"] is None
    assert config["tie_word_embeddings"] is True
    assert (config["attention_bias"], config["mlp_bias"]) == (False, False)


def test_an_output_tensor_unties_the_embedding(tmp_path: Path) -> None:
    tensors = EMBEDDING | {"output.weight": EMBEDDING["token_embd.weight"]}
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, add_hyperparameters)) as checkpoint:
        assert checkpoint.config["tie_word_embeddings"] is False


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rotary_factors_become_rope_scaling(tmp_path: Path, factor: float) -> None:
    factors = llama3_factors(factor, 10_000.0, HEAD_DIM).astype(np.float32)
    # The conversion's own loop, spelt out, so that the closed form is checked and not only inverted.
    for i, found in enumerate(factors):
        wavelength = 2 * np.pi / 10_000.0 ** (-2 * i / HEAD_DIM)
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        expected = 1.0 if wavelength < 8192 / 4 else factor if wavelength > 8192 / 1 else 1 / ((1 - smooth) / factor + smooth)
        assert found == pytest.approx(expected, rel=1e-6)
    tensors = EMBEDDING | {"rope_freqs.weight": (factors, F32)}
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, add_hyperparameters)) as checkpoint:
        assert list(checkpoint.tensors) == ["model.embed_tokens.weight"]
        assert checkpoint.config["rope_scaling"] == {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }


def test_rotary_factors_of_other_settings_are_taken_as_they_are(tmp_path: Path) -> None:
    factors = np.linspace(1, 9, HEAD_DIM // 2, dtype=np.float32)
    tensors = EMBEDDING | {"rope_freqs.weight": (factors, F32)}
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, add_hyperparameters)) as checkpoint:
        scaling = checkpoint.config["rope_scaling"]
    assert (scaling["rope_type"], scaling["attention_factor"]) == ("longrope", 1.0)
    for key in ("short_factor", "long_factor"):
        np.testing.assert_allclose(scaling[key], factors, rtol=1e-6)


@pytest.mark.parametrize("factors", [np.ones(3), np.full(HEAD_DIM // 2, np.nan), np.zeros(HEAD_DIM // 2)])
def test_rotary_factors_that_cannot_be_are_refused(tmp_path: Path, factors: np.ndarray) -> None:
    tensors = EMBEDDING | {"rope_freqs.weight": (factors.astype(np.float32), F32)}
    path = write_gguf(tmp_path / "m.gguf", tensors, add_hyperparameters)
    with pytest.raises(CheckpointError, match=r"m\.gguf: rope_freqs\.weight must hold 32 positive rotary factors"):
        open_checkpoint(path)


def test_linear_rope_scaling_is_kept(tmp_path: Path) -> None:
    def scale(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.5)

    with open_checkpoint(write_gguf(tmp_path / "m.gguf", EMBEDDING, add_hyperparameters, scale)) as checkpoint:
        assert checkpoint.config["rope_scaling"] == {"rope_type": "linear", "factor": 2.5}


def test_several_end_tokens_become_a_list(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", EMBEDDING, add_hyperparameters, add_tokenizer, lambda writer: writer.add_eot_token_id(5)
    )
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config["eos_token_id"] == [1, 5]


def yarn(writer: gguf.GGUFWriter) -> tuple[()]:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(2.0)
    return ()


REFUSED: dict[str, tuple[Callable[[gguf.GGUFWriter], None], str]] = {
    "long rope without factors": (
        lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
        r"llama\.rope\.scaling\.type must be .*, found 'longrope'",
    ),
    "part of yarn": (
        lambda w: (w.add_rope_scaling_type(gguf.RopeScalingType.YARN), w.add_rope_scaling_yarn_ext_factor(0.5)),
        r"llama\.rope\.scaling\.yarn_ext_factor must be 1\.0",
    ),
    "partial rotary": (lambda w: w.add_key_length(32), r"rope\.dimension_count .* found 64"),
    "two head sizes": (lambda w: w.add_value_length(32), r"llama\.attention\.value_length .* found 32"),
    "clamped projections": (lambda w: w.add_clamp_kqv(8.0), r"llama\.attention\.clamp_kqv must be 0\.0: .*found 8\.0"),
    "a cap that Llama has not": (lambda w: w.add_final_logit_softcapping(30.0), r"llama\.final_logit_softcapping must be 0"),
    "one of several files": (lambda w: w.add_uint16("split.count", 3), r"is one of 3 files of a model; join them first"),
    "a key nobody knows": (lambda w: w.add_uint32("llama.twist", 3), r"llama\.twist must be absent: .* found 3"),
    "a text for a number of files": (lambda w: w.add_string("split.count", "3"), r"split\.count must be a positive integer"),
    "a window for each layer": (
        lambda w: w.add_array("llama.attention.sliding_window", [4, 8]),
        r"llama\.attention\.sliding_window must be a positive integer, found array",
    ),
    "a text for a factor": (
        lambda w: (*yarn(w), w.add_string("llama.rope.scaling.yarn_log_multiplier", "x")),
        r"llama\.rope\.scaling\.yarn_log_multiplier must be a number, found 'x'",
    ),
    "factors for each layer": (
        lambda w: (*yarn(w), w.add_array("llama.rope.scaling.yarn_ext_factor", [1.0, 1.0])),
        r"llama\.rope\.scaling\.yarn_ext_factor must be a number, found array",
    ),
    "a factor that leaves nothing": (
        lambda w: (*yarn(w), w.add_float32("llama.rope.scaling.yarn_log_multiplier", -20.0)),
        r"llama\.rope\.scaling\.yarn_log_multiplier must be above -14\.4",
    ),
    "as many layers as would take all memory": (
        lambda w: (w.kv_data[0].pop("llama.block_count"), w.add_block_count(10**9)),
        r"llama\.block_count must be at most 10,000, found 1000000000",
    ),
    "heads": (lambda w: w.add_string("tokenizer.ggml.bos_token_id", "x"), r"bos_token_id must be an integer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, case: str) -> None:
    add, message = REFUSED[case]
    path = write_gguf(tmp_path / "m.gguf", EMBEDDING, add_hyperparameters, add)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_other_architectures_are_refused_with_the_list(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", EMBEDDING, arch="mamba")
    message = r"general\.architecture must be one of those supported: gemma2, .*, llama, .*, found 'mamba'"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_other_tensor_types_are_refused_with_the_list(tmp_path: Path) -> None:
    kind = GGMLQuantizationType.NVFP4
    tensors = EMBEDDING | {"output.weight": (raw_blocks(kind, (2, HIDDEN), np.random.default_rng(0)), kind)}
    path = write_gguf(tmp_path / "m.gguf", tensors, add_hyperparameters)
    with pytest.raises(CheckpointError, match=r"NVFP4 of output\.weight .* supported: BF16, F16"):
        open_checkpoint(path)


def test_a_tensor_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    queries, width = np.zeros((HIDDEN, HIDDEN), np.float32), (HEADS + 2 * KV_HEADS) * HEAD_DIM
    both = {"blk.0.attn_q.weight": (queries, F32), "blk.0.attn_qkv.weight": (np.zeros((width, HIDDEN), np.float32), F32)}
    path = write_gguf(tmp_path / "m.gguf", EMBEDDING | both, add_hyperparameters)
    with pytest.raises(
        CheckpointError, match=r"m\.gguf: blk\.0\.attn_qkv\.weight and blk\.0\.attn_q\.weight both hold .*q_proj"
    ):
        open_checkpoint(path)


def test_experts_that_take_no_room_are_refused_however_many_they_are(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", {"model.embed_tokens.weight": np.zeros((len(TOKENS), HIDDEN), np.float32)})
    name = b"token_embd.weight"
    entry = name + struct.pack("<IQQIQ", 2, HIDDEN, len(TOKENS), 0, 0)
    data = path.read_bytes()
    assert data.count(entry) == 1
    path.write_bytes(data.replace(entry, name + struct.pack("<IQQIQ", 2, 0, 1 << 60, 0, 0)))
    with pytest.raises(CheckpointError, match=rf"tensor 'token_embd.weight' of shape \({1 << 60}, 0\) is empty"):
        open_checkpoint(path)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", EMBEDDING)
    with pytest.raises(CheckpointError, match=r"m\.gguf: llama\.embedding_length is missing"):
        open_checkpoint(path)


def test_an_unknown_tensor_keeps_its_name_so_that_loading_reports_it(tmp_path: Path) -> None:
    tensors = EMBEDDING | {"blk.0.strange.weight": (np.zeros(3, np.float32), F32)}
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, add_hyperparameters)) as checkpoint:
        assert "blk.0.strange.weight" in checkpoint.tensors
        with pytest.raises(CheckpointError, match="there is no tensor 'foo'"):
            checkpoint.read("foo")


def test_layers_are_all_there(tmp_path: Path) -> None:
    with open_checkpoint(tiny_gguf(tmp_path / "m.gguf")) as checkpoint:
        assert len(checkpoint.tensors) == 2 + 9 * LAYERS
