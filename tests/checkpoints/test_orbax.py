"""Orbax directories: round trips, trees that others wrote, and reading one array alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from checkpoints.checkpoint import CheckpointError, TensorInfo, TokenizerFiles, open_checkpoint
from checkpoints.orbax import OrbaxCheckpoint, write_orbax
from tests.checkpoints.builders import CONFIG, TEMPLATE, assert_same_arrays, llama_shapes, random_tensors, read_all

TOKENIZER = TokenizerFiles(tokenizer_json="{}", chat_template=TEMPLATE, bos_token="<s>", eos_token=None, add_bos=True)


def write(target: Path, tensors: dict[str, np.ndarray], tokenizer: TokenizerFiles | None = None) -> Path:
    infos = {name: TensorInfo(values.shape, values.dtype) for name, values in tensors.items()}
    write_orbax(target, infos, tensors.__getitem__, CONFIG, tokenizer)
    return target


def foreign(directory: Path, tree: Any) -> Path:
    """A directory as another program writes it: the tree, and `config.json` beside it."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(directory / "params", tree)
    return directory


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["f32", "f16", "bf16"])
def test_what_is_written_is_read_back(tmp_path: Path, dtype: Any) -> None:
    tensors = random_tensors(llama_shapes(), dtype)
    with open_checkpoint(write(tmp_path / "out", tensors, TOKENIZER)) as checkpoint:
        assert isinstance(checkpoint, OrbaxCheckpoint)
        assert_same_arrays(read_all(checkpoint), tensors)
        assert checkpoint.config == CONFIG
        assert checkpoint.tokenizer == TOKENIZER


def test_scalars_and_integers_come_back(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray] = {
        "s": np.array(2.5, np.float32),
        "i": np.arange(4, dtype=np.int8),
        "b": np.array([True, False]),
    }
    with open_checkpoint(write(tmp_path / "out", tensors)) as checkpoint:
        assert_same_arrays(read_all(checkpoint), tensors)


def test_names_with_slashes_and_dots_are_kept(tmp_path: Path) -> None:
    tensors = {"a/b": np.ones(2, np.float32), "a.b": np.zeros(3, np.float32), "é ✓": np.ones(1, np.float32)}
    with open_checkpoint(write(tmp_path / "out", tensors)) as checkpoint:
        assert_same_arrays(read_all(checkpoint), tensors)


def test_one_array_is_read_without_the_others(tmp_path: Path) -> None:
    tensors = random_tensors({"a": (300, 1000), "b": (300, 1000)})
    path = write(tmp_path / "out", tensors)
    os.truncate(path / "weights" / "a" / "0.0", 100_000)
    with open_checkpoint(path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("b"), tensors["b"])
        with pytest.raises(CheckpointError, match=r"weights/a/0\.0: has 100000 bytes, expected 1200000, those of a float32"):
            checkpoint.read("a")


@pytest.mark.parametrize("use_zarr3", [True, False, None])
def test_an_array_that_is_missing_is_not_zeros(tmp_path: Path, use_zarr3: bool | None) -> None:
    """As after a copy that lacks a file. None is what is written here."""
    tensors = random_tensors({"a": (3, 4), "b": (5,)})
    if use_zarr3 is None:
        write(tmp_path / "out", tensors)
    else:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "config.json").write_text("{}")
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=use_zarr3)) as checkpointer:
            checkpointer.save(tmp_path / "out" / "weights", tensors)
    ((tmp_path / "out" / "weights" / "a") / ("c/0/0" if use_zarr3 else "0.0")).unlink()
    with open_checkpoint(tmp_path / "out") as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("b"), tensors["b"])
        with pytest.raises(CheckpointError, match=r"weights: Orbax checkpoint: .* is missing"):
            checkpoint.read("a")


def test_more_than_there_is_memory_for_is_an_error(tmp_path: Path) -> None:
    header = write(tmp_path / "out", {"a": np.ones((2, 2), np.float32)}) / "weights" / "a" / ".zarray"
    header.write_text(json.dumps(json.loads(header.read_text()) | {"shape": [10**9, 10**9]}))
    with open_checkpoint(tmp_path / "out") as checkpoint, pytest.raises(CheckpointError, match="there is no memory for"):
        checkpoint.read("a")


class Interrupting:
    """Reads tensors, and is interrupted at the third."""

    def __init__(self, tensors: dict[str, np.ndarray], last: int) -> None:
        self.tensors, self.last, self.read_names = tensors, last, list[str]()

    def __call__(self, name: str) -> np.ndarray:
        if len(self.read_names) == self.last:
            raise KeyboardInterrupt
        self.read_names.append(name)
        return self.tensors[name]


def interrupted(target: Path, tensors: dict[str, np.ndarray], key: str) -> None:
    infos = {name: TensorInfo(values.shape, values.dtype) for name, values in tensors.items()}
    with pytest.raises(KeyboardInterrupt):
        write_orbax(target, infos, Interrupting(tensors, 3), CONFIG, None, key=key)


def test_a_save_that_was_interrupted_opens_nowhere_and_is_carried_on(tmp_path: Path) -> None:
    tensors = random_tensors(llama_shapes())
    infos = {name: TensorInfo(values.shape, values.dtype) for name, values in tensors.items()}
    interrupted(tmp_path / "out", tensors, "first")
    (partial,) = tmp_path.iterdir()
    assert partial.name == ".out.partial"
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        open_checkpoint(partial)
    rest = Interrupting(tensors, len(tensors))
    write_orbax(tmp_path / "out", infos, rest, CONFIG, TOKENIZER, key="first")
    assert rest.read_names == list(tensors)[3:]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert_same_arrays(read_all(checkpoint), tensors)


def test_what_was_interrupted_is_not_carried_on_for_something_else(tmp_path: Path) -> None:
    tensors = random_tensors(llama_shapes())
    interrupted(tmp_path / "out", random_tensors(llama_shapes(), seed=1), "first")
    infos = {name: TensorInfo(values.shape, values.dtype) for name, values in tensors.items()}
    write_orbax(tmp_path / "out", infos, tensors.__getitem__, CONFIG, None, key="second")
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert_same_arrays(read_all(checkpoint), tensors)


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    tensors = {"a": np.ones(2, np.float32)}

    def read(name: str) -> np.ndarray:
        with pytest.raises(CheckpointError, match=r"out: another process writes it now, in .*\.out\.partial"):
            write(tmp_path / "out", tensors)
        return tensors[name]

    write_orbax(tmp_path / "out", {"a": TensorInfo((2,), np.dtype(np.float32))}, read, CONFIG, None)
    assert (tmp_path / "out" / "weights" / "a" / "0").is_file()


@pytest.mark.parametrize("name", ["../a", "/a", "a//b", "."])
def test_names_that_are_no_paths_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="these are no paths"):
        write(tmp_path / "out", {name: np.ones(2, np.float32)})


@pytest.mark.parametrize("use_ocdbt", [True, False])
@pytest.mark.parametrize("use_zarr3", [True, False])
def test_every_layout_of_orbax_is_read(tmp_path: Path, use_ocdbt: bool, use_zarr3: bool) -> None:
    tensors = random_tensors({"a.w": (3, 4), "b": (5,)}) | {"c": np.ones((2, 2), ml_dtypes.bfloat16)}
    (tmp_path / "config.json").write_text("{}")
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "params", tensors)
    with open_checkpoint(tmp_path) as checkpoint:
        assert_same_arrays(read_all(checkpoint), tensors)


def test_what_the_standard_checkpointer_writes_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", {"a": {"b": jnp.arange(6.0).reshape(2, 3)}})
    with open_checkpoint(tmp_path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("a.b"), np.arange(6.0).reshape(2, 3))


def test_orbax_restores_what_is_written(tmp_path: Path) -> None:
    tensors = random_tensors(llama_shapes())
    path = write(tmp_path / "out", tensors)
    with ocp.PyTreeCheckpointer() as checkpointer:
        assert_same_arrays(checkpointer.restore(path / "weights"), tensors)


def test_reading_does_not_import_orbax(tmp_path: Path) -> None:
    path = write(tmp_path / "out", {"a": np.ones(3, np.float32)})
    script = "import sys; from checkpoints.checkpoint import open_checkpoint as o; o(sys.argv[1]).read('a'); "
    script += "assert 'orbax' not in sys.modules and 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", script, path], check=True, cwd=Path(__file__).parents[2])


def test_a_nested_tree_of_others_gets_dotted_names(tmp_path: Path) -> None:
    tree = {"model": {"norm": {"weight": jnp.arange(4.0)}, "layers": {"0": {"w": jnp.ones((2, 3), jnp.bfloat16)}}}}
    with open_checkpoint(foreign(tmp_path / "theirs", tree)) as checkpoint:
        assert dict(checkpoint.tensors) == {
            "model.norm.weight": TensorInfo((4,), np.dtype(np.float32)),
            "model.layers.0.w": TensorInfo((2, 3), np.dtype(ml_dtypes.bfloat16)),
        }
        np.testing.assert_array_equal(checkpoint.read("model.norm.weight"), np.arange(4.0))
        np.testing.assert_array_equal(checkpoint.read("model.layers.0.w"), np.ones((2, 3)))


def test_a_tree_with_lists_is_refused(tmp_path: Path) -> None:
    path = foreign(tmp_path / "theirs", {"a": [jnp.ones(2), jnp.ones(3)]})
    with pytest.raises(CheckpointError, match=r"theirs.*'a'.* is not an array in a tree of dictionaries"):
        open_checkpoint(path)


def test_empty_arrays_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"out: Orbax cannot hold empty arrays: z"):
        write(tmp_path / "out", {"a": np.ones(1, np.float32), "z": np.zeros((0, 3), np.float32)})
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "out", {"a": np.ones(1, np.float32)})
    (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: missing"):
        open_checkpoint(path)


def test_a_directory_can_be_moved_and_need_not_have_an_ascii_name(tmp_path: Path) -> None:
    tensors = random_tensors(llama_shapes())
    moved = tmp_path / "模型 é"
    shutil.move(write(tmp_path / "out", tensors), moved)
    with open_checkpoint(moved) as checkpoint:
        assert_same_arrays(read_all(checkpoint), tensors)


def test_a_tensor_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with (
        open_checkpoint(write(tmp_path / "out", {"a": np.ones(1, np.float32)})) as checkpoint,
        pytest.raises(CheckpointError, match="there is no tensor 'b'"),
    ):
        checkpoint.read("b")
