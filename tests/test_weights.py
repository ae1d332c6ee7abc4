"""Weights as the runner has them: the same whatever the format, and on whatever mesh they were saved and are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from checkpoints.convert import convert
from jaxserve.models.families import model_config_from_hf
from jaxserve.models.sharding import make_mesh
from jaxserve.weights import load_params, open_model
from tests.checkpoints.builders import CONFIG, llama_shapes, random_tensors, tiny_hf

TIED = CONFIG | {"tie_word_embeddings": True}


def tied_hf(path: Path, seed: int = 0) -> Path:
    tiny_hf(path, random_tensors(llama_shapes(), seed=seed))
    (path / "config.json").write_text(json.dumps(TIED))
    return path


def params_of(path: Path, tensor_parallel: int) -> Any:
    with open_model(str(path)) as checkpoint:
        config = model_config_from_hf(checkpoint.config)
        return load_params(checkpoint, config, make_mesh(tensor_parallel), np.dtype(np.float32))


def assert_same(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.sharding == other.sharding
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_a_checkpoint_is_restored_onto_any_mesh(tmp_path: Path, tensor_parallel: int) -> None:
    source = tied_hf(tmp_path / "hf")
    convert(source, tmp_path / "orbax", form="orbax")
    assert_same(params_of(tmp_path / "orbax", tensor_parallel), params_of(source, tensor_parallel))


@pytest.mark.slow
@pytest.mark.parametrize("saved_on", [2, 4])
@pytest.mark.parametrize("tensor_parallel", [1, 4])
def test_what_orbax_saved_from_a_mesh_is_restored_onto_another(tmp_path: Path, saved_on: int, tensor_parallel: int) -> None:
    tensors = random_tensors(llama_shapes())
    mesh = jax.make_mesh((saved_on,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:saved_on])
    rows = NamedSharding(mesh, PartitionSpec("x"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    tree = {
        name: jax.device_put(values, everywhere if values.shape[0] % saved_on else rows) for name, values in tensors.items()
    }
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved" / "params", tree)
    (tmp_path / "saved" / "config.json").write_text(json.dumps(TIED))
    assert_same(params_of(tmp_path / "saved", tensor_parallel), params_of(tied_hf(tmp_path / "hf"), tensor_parallel))
