"""Weights in eight and four bits: the same whatever the mesh and the implementation, near those in floats, and refused where
they cannot be."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from checkpoints.checkpoint import open_checkpoint
from jaxserve.config import EngineConfig
from jaxserve.device.build import choose_weight_form, weight_bytes
from jaxserve.errors import ConfigError
from jaxserve.model_config import ExpertsConfig, ModelConfig
from jaxserve.models.families import FAMILIES, model_config_from_hf
from jaxserve.models.params import map_specs, random_params
from jaxserve.models.quant import QuantMatrix, WeightForm, held_params, quantize_tree
from jaxserve.models.sharding import make_mesh
from jaxserve.weights import load_params
from pallas_kernels.quant_matmul import quantize_weights
from pallas_kernels.quant_matmul.weights import dequantize_weights
from tests.cached import CACHED
from tests.checkpoints import builders
from tests.checkpoints.builders import llama_shapes, random_tensors, tiny_hf
from tests.kernels.ladder.interpret import interpreted
from tests.near_ties import assert_same_outputs
from tests.paged_model import PagedModel
from tests.real_engines import TINY_MODEL, _spread, mixed_requests, run, run_alone, tiny_runner, unoptimised
from tests.references.load import load_demo

pytestmark = CACHED

FLOAT32 = np.dtype(np.float32)
MODEL = dataclasses.replace(
    TINY_MODEL, hidden_size=64, intermediate_size=256, num_heads=6, num_kv_heads=3, head_dim=16, qkv_bias=True
)
"""Heads and MLP of which up to four devices have whole groups of 32 inputs."""
TOKENS = np.random.default_rng(0).integers(0, MODEL.vocab_size, 41)

INT8 = WeightForm(8, None, "float32", rounds_activations=False, impl="xla")
INT4 = WeightForm(4, 32, "float32", rounds_activations=False, impl="xla")
FORMS = {
    "int8": INT8,
    "int8, activations too": dataclasses.replace(INT8, rounds_activations=True),
    "int4": INT4,
}


def specs() -> Any:
    return map_specs(_spread, FAMILIES[MODEL.family].specs(MODEL))


def params(form: WeightForm | None, tensor_parallel: int = 1) -> Any:
    mesh = make_mesh(tensor_parallel)
    return quantize_tree(specs(), random_params(specs(), mesh, FLOAT32, seed=0), mesh, form)


def logits(form: WeightForm | None, tensor_parallel: int = 1) -> np.ndarray:
    """Of a chunk of 40 tokens and of a decode. They lie 1 apart."""
    made = params(form, tensor_parallel)
    model = PagedModel(MODEL, made, tensor_parallel, dtype="float32", capacity=len(TOKENS))
    return np.concatenate([model.feed_all(TOKENS[:-1], width=32), model.feed(TOKENS[-1:], width=1)])


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2)))


# --- a tiny random model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "least", "most"), [("int8", 0.03, 0.08), ("int8, activations too", 0.05, 0.15), ("int4", 0.2, 0.8)]
)
def test_logits_move_by_little(name: str, least: float, most: float) -> None:
    expected = logits(None)
    assert 0.5 < expected.std() < 2
    assert least < distance(logits(FORMS[name]), expected) < most


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel", [2, 4])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_more_devices_give_the_same(name: str, tensor_parallel: int) -> None:
    np.testing.assert_allclose(logits(FORMS[name], tensor_parallel), logits(FORMS[name]), rtol=0, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["reference", "tpu"])
@pytest.mark.parametrize("name", FORMS)
def test_every_implementation_gives_the_same(name: str, impl: str) -> None:
    form = dataclasses.replace(FORMS[name], impl=impl)
    if impl == "tpu":
        with interpreted("on_wait"):
            found = logits(form)
    else:
        found = logits(form)
    # Rounded activations move by a step where what is rounded moves by anything.
    np.testing.assert_allclose(found, logits(FORMS[name]), rtol=0, atol=0.1 if form.rounds_activations else 2e-3)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("form", [None, *FORMS.values()], ids=["floats", *FORMS])
def test_the_abstract_tree_is_what_comes(form: WeightForm | None, tensor_parallel: int) -> None:
    mesh = make_mesh(tensor_parallel)
    abstract, made = held_params(specs(), mesh, FLOAT32, form), params(form, tensor_parallel)
    assert jax.tree.structure(abstract) == jax.tree.structure(made)
    for expected, found in zip(jax.tree.leaves(abstract), jax.tree.leaves(made), strict=True):
        assert (found.shape, found.dtype, found.sharding) == (expected.shape, expected.dtype, expected.sharding)
    on_one = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(made))
    assert weight_bytes(MODEL, mesh, FLOAT32, form) == on_one


def test_what_is_rounded_is_given_up() -> None:
    mesh = make_mesh(1)
    floats = random_params(specs(), mesh, FLOAT32, seed=0)
    made = quantize_tree(specs(), floats, mesh, INT8)
    assert floats.layers[0].qkv.is_deleted()
    assert made.layers[0].norms is floats.layers[0].norms
    assert isinstance(made.embedding, QuantMatrix)


def test_bytes_are_a_quarter_and_less() -> None:
    mesh = make_mesh(1)
    wide = dataclasses.replace(MODEL, hidden_size=512, intermediate_size=1024, vocab_size=64)
    floats, int8, int4 = (weight_bytes(wide, mesh, FLOAT32, form) for form in (None, INT8, INT4))
    assert 0.25 < int8 / floats < 0.26
    assert 0.18 < int4 / floats < 0.20


# --- what is refused --------------------------------------------------------------------------------------------------


def test_groups_that_devices_would_split_are_refused() -> None:
    narrow = dataclasses.replace(MODEL, intermediate_size=80)
    with pytest.raises(ConfigError, match=r"groups of 32 inputs, and of model.layers.0.mlp.down_proj.weight a device has 80"):
        held_params(FAMILIES[narrow.family].specs(narrow), make_mesh(1), FLOAT32, INT4)
    held_params(FAMILIES[narrow.family].specs(narrow), make_mesh(1), FLOAT32, INT8)


def test_settings_that_mean_nothing_are_refused() -> None:
    def choose(**settings: str) -> WeightForm | None:
        return choose_weight_form(EngineConfig(**settings), MODEL, "cpu", "cpu", FLOAT32)

    assert choose() is None
    assert choose(weight_dtype="int8") == INT8
    assert choose(weight_dtype="int4", activation_dtype="int8") == dataclasses.replace(INT4, rounds_activations=True)
    for settings, message in (
        ({"activation_dtype": "int8"}, "activation_dtype int8 needs a weight_dtype"),
        ({"quant_matmul": "xla"}, "quant_matmul xla needs a weight_dtype"),
        ({"weight_dtype": "int8", "quant_matmul": "tpu"}, "does not run on platform cpu"),
        ({"weight_dtype": "int2"}, "weight_dtype must be auto, int8 or int4, found 'int2'"),
    ):
        with pytest.raises(ConfigError, match=message):
            choose(**settings)


def test_mixtures_are_refused() -> None:
    model = dataclasses.replace(MODEL, experts=ExpertsConfig(num=4, per_token=2, width=48))
    with pytest.raises(ConfigError, match="weight_dtype int8 is for models without experts"):
        choose_weight_form(EngineConfig(weight_dtype="int8"), model, "cpu", "cpu", FLOAT32)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_what_is_loaded_is_the_checkpoint_rounded(tmp_path: Path) -> None:
    path = tiny_hf(
        tmp_path / "model", random_tensors(llama_shapes() | {"lm_head.weight": (len(builders.TOKENS), builders.HIDDEN)})
    )
    for form in FORMS.values():
        rounded, floats = (loaded(path, each) for each in (form, None))
        config = model_config(path)
        expected = quantize_tree(FAMILIES[config.family].specs(config), floats, make_mesh(1), form)
        assert jax.tree.structure(rounded) == jax.tree.structure(expected)
        for found, wanted in zip(jax.tree.leaves(rounded), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(found, wanted)


def model_config(path: Path) -> ModelConfig:
    with open_checkpoint(path) as checkpoint:
        return model_config_from_hf(checkpoint.config)


def loaded(path: Path, form: WeightForm | None) -> Any:
    with open_checkpoint(path) as checkpoint:
        return load_params(checkpoint, model_config(path), make_mesh(1), FLOAT32, None, form)


def test_four_bits_keep_what_a_q4_1_file_has() -> None:
    """Whoever made the file chose among the same sixteen values of each group."""
    matrix = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    stored = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType.Q4_1)
    expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.Q4_1)
    assert np.abs(expected - matrix).max() > 0.1
    found = dequantize_weights(quantize_weights(jnp.asarray(expected), bits=4, group=32, symmetric=False))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_demo_model_says_nearly_the_same(demo_model_path: Path) -> None:
    """By the mean divergence of the next token's distribution from that of its weights in float32, and by greedy tokens."""
    tokens = load_demo("english").input_ids

    def distribution(form: WeightForm | None) -> np.ndarray:
        made, config = loaded(demo_model_path, form), model_config(demo_model_path).for_context(320)
        model = PagedModel(config, made, 1, dtype="float32", capacity=320)
        return log_softmax(model.feed_all(tokens, width=128).astype(np.float64), axis=1)

    expected = distribution(None)
    for name, most, least_same in (("int8", 6e-3, 0.95), ("int8, activations too", 0.05, 0.85), ("int4", 2e-3, 0.97)):
        found = distribution(FORMS[name])
        assert most / 10 < np.mean(np.sum(np.exp(expected) * (expected - found), axis=1)) < most, name
        assert np.mean(expected.argmax(axis=1) == found.argmax(axis=1)) > least_same, name


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_a_batch_gives_what_each_gives_alone(weight_dtype: str) -> None:
    """Activations are rounded to 15 bits of a token's largest, where rounding elsewhere moves them by a bit now and then."""
    engine = EngineConfig(
        dtype="float32",
        weight_dtype=weight_dtype,
        max_seqs=8,
        max_step_tokens=32,
        max_context=512,
        num_pages=512,
        page_size=8,
    )
    with unoptimised():
        runner = tiny_runner(engine, MODEL)
    requests = mixed_requests(np.tile(TOKENS, 4), max_prompt=120, min_output=8)
    alone = run_alone(runner, requests[:12], overlap=False)
    assert len({token for output in alone.values() for token in output.tokens}) > MODEL.vocab_size // 4
    found = run(runner, requests, prefixes=True).outputs
    assert_same_outputs(alone, {key: found[key] for key in alone}, tolerance=2e-3, max_near_ties=1)
    assert runner.compiles_since_ready == 0
    assert runner.weight_bytes < 0.4 * weight_bytes(MODEL, make_mesh(1), FLOAT32, None)
