"""What follows from a `ParamSpec`: padded shapes, shardings, the abstract tree, random values, what a checkpoint holds."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from checkpoints.checkpoint import CheckpointError, open_checkpoint
from jaxserve.errors import ConfigError
from jaxserve.model_config import ModelConfig
from jaxserve.models.families import FAMILIES, model_config_from_hf
from jaxserve.models.params import ParamSpec, abstract_params, map_specs, pad_to, random_params
from jaxserve.models.sharding import DEVICES, make_mesh, padded_shape, partition_spec
from jaxserve.weights import load_params
from tests.references.load import TINY_NAMES, load_tiny, write_hf_directory

MESHES = [1, 2, 4]


def tiny_config(name: str) -> ModelConfig:
    return model_config_from_hf(load_tiny(name).config)


def leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, ParamSpec))


@pytest.mark.parametrize(
    ("shape", "axes", "devices", "padded"),
    [
        ((3, 5, 64, 576), ("kv_heads", "heads_of_group", "head_dim", "embed"), 1, (3, 5, 64, 576)),
        ((3, 5, 64, 576), ("kv_heads", "heads_of_group", "head_dim", "embed"), 2, (4, 5, 64, 576)),
        ((3, 5, 64, 576), ("kv_heads", "heads_of_group", "head_dim", "embed"), 4, (4, 5, 64, 576)),
        ((1, 6, 10, 40), ("kv_heads", "heads_of_group", "head_dim", "embed"), 4, (4, 6, 10, 40)),
        ((97, 32), ("vocab", "embed"), 4, (100, 32)),
        ((97, 32), ("vocab", "embed"), 2, (98, 32)),
        ((33,), ("embed",), 4, (33,)),
        ((2, 6, 8), ("gate_and_up", "mlp", "embed"), 4, (2, 8, 8)),
    ],
)
def test_padded_shapes(shape: tuple[int, ...], axes: tuple[str, ...], devices: int, padded: tuple[int, ...]) -> None:
    assert padded_shape(shape, axes, make_mesh(devices)) == padded


def test_experts_are_padded_to_the_rows_of_the_mesh_and_their_width_to_its_columns() -> None:
    axes = ("experts", "gate_and_up", "expert_mlp", "embed")
    assert padded_shape((5, 2, 7, 8), axes, make_mesh(2, 2)) == (6, 2, 8, 8)
    assert padded_shape((5, 2, 7, 8), axes, make_mesh(1, 4)) == (8, 2, 7, 8)
    assert padded_shape((5, 2, 7, 8), axes, make_mesh(4)) == (5, 2, 8, 8)
    assert padded_shape((3, 7), ("kv_heads", "mlp"), make_mesh(2, 2)) == (4, 8), "the rest lies on all devices"


def test_partition_specs_follow_the_one_table() -> None:
    assert partition_spec(("kv_heads", "heads_of_group", "head_dim", "embed")) == PartitionSpec(DEVICES, None, None, None)
    assert partition_spec(("embed", "mlp")) == PartitionSpec(None, DEVICES)
    assert partition_spec(("experts", "gate_and_up", "expert_mlp", "embed")) == PartitionSpec("expert", None, "tensor", None)
    with pytest.raises(KeyError):
        partition_spec(("no_such_axis",))


def test_a_mesh_needs_devices() -> None:
    found = len(jax.devices())
    with pytest.raises(ConfigError, match=f"tensor_parallel is {found + 1} but JAX sees {found} cpu device"):
        make_mesh(found + 1)
    with pytest.raises(
        ConfigError, match=f"1 times expert_parallel {found + 1} but JAX sees {found} .*device_count={found + 1}"
    ):
        make_mesh(1, found + 1)


def test_pad_to_adds_zeros_at_the_end() -> None:
    values = np.arange(1, 7).reshape(2, 3)
    np.testing.assert_array_equal(pad_to(values, (3, 4)), [[1, 2, 3, 0], [4, 5, 6, 0], [0, 0, 0, 0]])
    assert pad_to(values, (2, 3)) is values


@pytest.mark.parametrize("devices", MESHES)
@pytest.mark.parametrize("name", ["nine_heads_tied", "biases", "mqa_theta"])
def test_the_abstract_tree_is_what_random_params_makes(name: str, devices: int) -> None:
    mesh, specs = make_mesh(devices), FAMILIES["llama"].specs(tiny_config(name))
    abstract = abstract_params(specs, mesh, np.dtype(np.float32))
    concrete = random_params(specs, mesh, np.dtype(np.float32), seed=0)
    assert jax.tree.structure(abstract) == jax.tree.structure(concrete)
    for spec, expected, found in zip(leaves(specs), leaves(abstract), leaves(concrete), strict=True):
        assert found.shape == expected.shape == padded_shape(spec.shape, spec.axes, mesh)
        assert found.dtype == expected.dtype == np.float32
        assert found.sharding == expected.sharding == NamedSharding(mesh, partition_spec(spec.axes))
        shards = {shard.data.shape for shard in found.addressable_shards}
        assert len(shards) == 1, "devices hold equal parts"


@pytest.mark.parametrize("name", ["nine_heads_tied", "biases"])
def test_random_params_are_the_same_on_every_mesh(name: str) -> None:
    specs = FAMILIES["llama"].specs(tiny_config(name))
    plain = leaves(random_params(specs, make_mesh(1), np.dtype(np.float32), seed=3))
    other_seed = leaves(random_params(specs, make_mesh(1), np.dtype(np.float32), seed=4))
    for devices in (2, 4):
        padded = leaves(random_params(specs, make_mesh(devices), np.dtype(np.float32), seed=3))
        for spec, one, many, other in zip(leaves(specs), plain, padded, other_seed, strict=True):
            logical = tuple(slice(size) for size in spec.shape)
            np.testing.assert_array_equal(np.asarray(many)[logical], np.asarray(one))
            assert np.abs(np.asarray(many)).sum() == pytest.approx(np.abs(np.asarray(one)).sum()), "padding holds zeros"
            assert (spec.scale == 0) == np.array_equal(one, other)


def test_random_params_have_the_declared_deviation() -> None:
    spec = ParamSpec((300, 400), ("mlp", "embed"), (), scale=0.5)
    norm = ParamSpec((300,), ("embed",), (), scale=0)
    values, ones = random_params((spec, norm), make_mesh(1), np.dtype(np.float32), seed=0)
    assert np.std(values) == pytest.approx(0.5, rel=0.02)
    assert np.mean(values) == pytest.approx(0, abs=0.01)
    np.testing.assert_array_equal(ones, np.ones(300))


def built_of(spec: ParamSpec, tensors: list[np.ndarray]) -> np.ndarray:
    """The parameter that a checkpoint's tensors make."""
    if spec.parts is None:
        return tensors[0] if spec.build is None else spec.build(tensors)
    whole = np.full(spec.shape, np.nan, tensors[0].dtype)
    for view, tensor in zip(spec.parts(whole), tensors, strict=True):
        view[...] = tensor.reshape(view.shape)
    return whole


@pytest.mark.parametrize("name", TINY_NAMES)
def test_specs_name_each_tensor_of_the_checkpoint_once(name: str) -> None:
    """Those that `transformers` wrote, with their shapes; and each spec's shape is what it builds of them."""
    reference = load_tiny(name)
    specs = leaves(FAMILIES["llama"].specs(tiny_config(name)))
    named = [tensor for spec in specs for tensor in spec.tensors]
    assert dict(named) == {path: values.shape for path, values in reference.weights.items()}
    assert len(dict(named)) == len(named)
    for spec in specs:
        tensors = [reference.weights[path] for path, _ in spec.tensors]
        built = built_of(spec, tensors)
        assert built.shape == spec.shape
        assert sorted(built.ravel()) == sorted(np.concatenate([tensor.ravel() for tensor in tensors])), "values are only moved"


def test_map_specs_keeps_the_tree() -> None:
    specs = FAMILIES["llama"].specs(tiny_config("mha_untied"))
    shapes = map_specs(lambda spec: len(spec.shape), specs)
    assert shapes.layers[1].qkv == 4
    assert shapes.layers[0].qkv_bias is None


# --- checkpoints ------------------------------------------------------------------------------------------------------


def load_with(name: str, extra: dict[str, np.ndarray], tmp_path: Any) -> Any:
    """The tiny model `name` from a directory that holds `extra` tensors too."""
    reference = load_tiny(name)
    reference.weights.update(extra)
    with open_checkpoint(write_hf_directory(reference, tmp_path / name)) as checkpoint:
        return load_params(checkpoint, tiny_config(name), make_mesh(2), np.dtype(np.float32))


def test_tensors_that_nobody_needs_are_ignored(tmp_path: Any) -> None:
    table = load_tiny("gqa_tied").weights["model.embed_tokens.weight"]
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32), "lm_head.weight": table + 1}
    params = load_with("gqa_tied", extra, tmp_path)
    assert params.lm_head is None
    np.testing.assert_array_equal(params.embedding, table)


def test_a_tensor_that_has_no_place_is_an_error(tmp_path: Any) -> None:
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_with("gqa_tied", {"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}, tmp_path)
