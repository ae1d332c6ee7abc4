"""Weights of all layers in one memory, and steps that run the layers in one loop."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device.buckets import Bucket
from jaxserve.device.layer_memory import LayerMemory, has_stacked_step, layer_memory, stacked_abstract
from jaxserve.errors import ConfigError
from jaxserve.model_config import ModelConfig
from jaxserve.models.decoder_params import DecoderParams, StackedLayers
from jaxserve.models.families import FAMILIES
from jaxserve.models.params import abstract_params, random_params
from jaxserve.models.sharding import make_mesh
from tests.paged_model import UNOPTIMISED, load_tiny_model
from tests.references.load import load_family, load_tiny

FLOAT32 = np.dtype(np.float32)
MODEL = ModelConfig(
    family="llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=8, max_position=64,
)  # fmt: skip


def abstract(config: ModelConfig = MODEL, num_devices: int = 1) -> DecoderParams:
    params: DecoderParams = abstract_params(FAMILIES[config.family].specs(config), make_mesh(num_devices), FLOAT32)
    return params


def params_of(config: ModelConfig = MODEL) -> DecoderParams:
    params: DecoderParams = random_params(FAMILIES[config.family].specs(config), make_mesh(1), FLOAT32, seed=0)
    return params


def test_a_layers_arrays_and_those_of_all_layers_are_the_same_memory() -> None:
    before = params_of()
    params, stacked = LayerMemory(abstract().layers).adopt(before)
    assert isinstance(params.layers, tuple)
    assert isinstance(stacked.layers, StackedLayers)
    leaves = [jax.tree.leaves(layer) for layer in params.layers]
    for place, whole in enumerate(stacked.layers.arrays):
        for index, layer in enumerate(leaves):
            assert layer[place].unsafe_buffer_pointer() == whole.unsafe_buffer_pointer() + index * layer[place].nbytes
    jax.tree.map(np.testing.assert_array_equal, params, before)
    for index, layer in enumerate(before.layers):
        block = stacked.layers.block([whole[index] for whole in stacked.layers.arrays])
        jax.tree.map(np.testing.assert_array_equal, block, layer)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), (stacked_abstract(abstract()), stacked))
    assert shapes[0] == shapes[1]


def test_what_is_made_in_its_place_is_not_copied() -> None:
    memory = LayerMemory(abstract().layers)
    before = params_of()
    for layer, places in zip(before.layers, memory.places, strict=True):
        jax.tree.map(np.copyto, places, layer)
    sharding = before.embedding.sharding
    made = jax.tree.map(lambda place: jax.device_put(place, sharding, may_alias=True), memory.places)
    params, _ = memory.adopt(dataclasses.replace(before, layers=made))
    for now, then in zip(jax.tree.leaves(params.layers), jax.tree.leaves(made), strict=True):
        assert now is then


def test_parameters_too_small_to_share_memory_are_right_all_the_same() -> None:
    odd = dataclasses.replace(MODEL, hidden_size=9)  # norms of 72 bytes a layer
    before = params_of(odd)
    params, stacked = LayerMemory(abstract(odd).layers).adopt(before)
    jax.tree.map(np.testing.assert_array_equal, params, before)
    assert isinstance(stacked.layers, StackedLayers)
    for index, layer in enumerate(before.layers):
        block = stacked.layers.block([whole[index] for whole in stacked.layers.arrays])
        jax.tree.map(np.testing.assert_array_equal, block, layer)


def test_it_takes_nothing_before_it_is_wanted_and_says_how_much_there_is_not() -> None:
    huge = dataclasses.replace(MODEL, intermediate_size=1 << 52)
    memory = LayerMemory(abstract(huge).layers)
    with pytest.raises(ConfigError, match=r"takes \d+ bytes, which there is no memory for"):
        _ = memory.places


@pytest.mark.parametrize(
    ("config", "num_devices", "platform", "there"),
    [
        (MODEL, 1, "cpu", True),
        (MODEL, 2, "cpu", False),
        (MODEL, 1, "gpu", False),
        (dataclasses.replace(MODEL, window=16, windowed=(True, False, True)), 1, "cpu", False),
        (dataclasses.replace(MODEL, rotary=(True, True, False)), 1, "cpu", False),
    ],
)
def test_there_is_some_where_one_loop_can_run_all_layers(
    config: ModelConfig, num_devices: int, platform: str, there: bool
) -> None:
    assert (layer_memory(config, abstract(config, num_devices), num_devices, platform) is not None) == there


def test_only_steps_of_few_decodes_run_so() -> None:
    assert has_stacked_step(Bucket(8, 0, 8))
    assert not has_stacked_step(Bucket(16, 0, 16))
    assert not has_stacked_step(Bucket(8, 1, 4))


@pytest.mark.parametrize("name", ["nine_heads_tied", "qwen3-head_dim", "granite-biases", "mistral-window", "olmo2-all_heads"])
@pytest.mark.parametrize("kv_dtype", ["", "int8"])
def test_layers_in_one_loop_say_what_unrolled_ones_do(name: str, kv_dtype: str, tmp_path: Path) -> None:
    """Over one pool that all layers share; chunks, which are unrolled, write to the same."""
    reference = load_tiny(name) if name == "nine_heads_tied" else load_family(name)
    options = {"kv_dtype": kv_dtype, "compiler_options": UNOPTIMISED}
    plain = load_tiny_model(reference, tmp_path, **options)
    heads = plain.config.num_kv_heads
    if kv_dtype:
        options["kv_scales"] = jnp.linspace(0.01, 0.03, plain.config.num_layers * heads * 2).reshape(-1, heads, 2)
        plain = load_tiny_model(reference, tmp_path, **options)
    stacked = load_tiny_model(reference, tmp_path, as_on_cpu=True, **options)
    tokens = np.random.default_rng(0).integers(0, plain.config.vocab_size, 40)
    expected = plain.feed_all(tokens[:33], width=16)
    np.testing.assert_allclose(stacked.feed_all(tokens[:33], width=16), expected, atol=2e-5)
    for token in tokens[33:]:
        found, expected = stacked.feed([token], width=1), plain.feed([token], width=1)
        np.testing.assert_allclose(found, expected, atol=2e-5)
