"""Loading into an abstract tree: values, shardings, the report of mismatches, and what is not loaded when it fails."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from checkpoints.checkpoint import Checkpoint, CheckpointBase, CheckpointError, TensorInfo, open_checkpoint
from checkpoints.files import aligned_empty
from checkpoints.tree import TensorSource, load_tree
from tests.checkpoints.builders import random_tensors, tiny_gguf


class Memory(CheckpointBase):
    """A checkpoint of arrays in memory that records what is read, and can wait for leave to read."""

    def __init__(self, **tensors: np.ndarray) -> None:
        infos = {name: TensorInfo(values.shape, values.dtype) for name, values in tensors.items()}
        super().__init__(Path("memory"), {}, None, infos)
        self.arrays = tensors
        self.reads: list[str] = []

    def read(self, name: str) -> np.ndarray:
        self.reads.append(name)
        return self.arrays[name].copy()


def arrays(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return random_tensors(shapes)


def struct(*shape: int, dtype: Any = jnp.float32, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def source(*names: str, **options: Any) -> TensorSource:
    return TensorSource(names, **options)


def concatenate(tensors: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(tensors)


def test_values_land_in_the_tree() -> None:
    checkpoint = Memory(**arrays(a=(3, 4), b=(5,), c=()))
    tree = {"x": struct(3, 4), "y": [struct(5), {"z": struct()}]}
    loaded = load_tree(checkpoint, tree, {"x": source("a"), "y": [source("b"), {"z": source("c")}]})
    assert list(loaded) == ["x", "y"]
    for found, name in ((loaded["x"], "a"), (loaded["y"][0], "b"), (loaded["y"][1]["z"], "c")):
        assert isinstance(found, jax.Array)
        np.testing.assert_array_equal(found, checkpoint.arrays[name])


def test_sources_are_fused_in_order_and_a_tensor_may_feed_two_parameters() -> None:
    checkpoint = Memory(**arrays(q=(4, 3), k=(2, 3)))
    tree = {"qk": struct(6, 3), "kq": struct(6, 3)}
    mapping = {"qk": source("q", "k", transform=concatenate), "kq": source("k", "q", transform=concatenate)}
    loaded = load_tree(checkpoint, tree, mapping)
    q, k = checkpoint.arrays["q"], checkpoint.arrays["k"]
    np.testing.assert_array_equal(loaded["qk"], np.concatenate([q, k]))
    np.testing.assert_array_equal(loaded["kq"], np.concatenate([k, q]))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_tensors_side_by_side_are_read_to_where_they_stay(dtype: Any) -> None:
    """Those whose place is in one piece without an array between; and into memory that is given, where some is."""
    checkpoint = Memory(**arrays(q=(8, 3), k=(4, 3), v=(2, 2, 3)))
    memory = aligned_empty((2, 8, 3), np.dtype(dtype))
    memory[...] = np.nan

    def parts(whole: np.ndarray) -> list[np.ndarray]:
        return [whole[:, :4], whole[:, 4:6], whole[:, 6:]]

    mapping = source("q", "k", "v", parts=parts, memory=memory)
    loaded = load_tree(checkpoint, struct(2, 8, 3, dtype=dtype), mapping)
    expected = [checkpoint.arrays[name].reshape(2, -1, 3) for name in "qkv"]
    np.testing.assert_array_equal(loaded, np.concatenate(expected, axis=1).astype(dtype))
    assert loaded.unsafe_buffer_pointer() == memory.ctypes.data


def test_a_transform_fills_memory_that_is_given() -> None:
    checkpoint = Memory(**arrays(q=(4, 3), k=(2, 3)))
    memory = aligned_empty((6, 3), np.dtype(np.float32))
    loaded = load_tree(checkpoint, struct(6, 3), source("q", "k", transform=concatenate, memory=memory))
    np.testing.assert_array_equal(loaded, np.concatenate([checkpoint.arrays["q"], checkpoint.arrays["k"]]))
    assert loaded.unsafe_buffer_pointer() == memory.ctypes.data


def test_parts_of_another_size_than_their_tensor_are_refused() -> None:
    checkpoint = Memory(**arrays(q=(4, 3), k=(2, 3)))
    mapping = source("q", "k", parts=lambda whole: [whole[:3], whole[3:]])
    with pytest.raises(CheckpointError, match=r"made of q, k: expected shape \(3, 3\), found \(4, 3\)"):
        load_tree(checkpoint, struct(6, 3), mapping)


def test_a_source_has_one_way_to_make_its_parameter() -> None:
    with pytest.raises(ValueError, match="a transform or parts, not both"):
        source("q", transform=concatenate, parts=lambda whole: [whole])


def test_transposes_and_padding_are_transforms() -> None:
    checkpoint = Memory(**arrays(w=(4, 3)))
    mapping = source("w", transform=lambda t: np.pad(t[0].T, ((0, 0), (0, 2))), shapes=((4, 3),))
    loaded = load_tree(checkpoint, struct(3, 6), mapping)
    np.testing.assert_array_equal(loaded[:, :4], checkpoint.arrays["w"].T)
    np.testing.assert_array_equal(loaded[:, 4:], np.zeros((3, 2)))


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_values_are_cast_to_the_target_dtype(stored: Any, wanted: Any) -> None:
    values = random_tensors({"a": (7, 5)}, stored)["a"]
    loaded = load_tree(Memory(a=values), struct(7, 5, dtype=wanted), source("a"))
    assert loaded.dtype == wanted
    np.testing.assert_array_equal(np.asarray(loaded), values.astype(np.dtype(wanted)))


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("x"), PartitionSpec(None, "x"), PartitionSpec("x", None)])
def test_values_go_straight_to_their_sharding(spec: PartitionSpec) -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, spec)
    checkpoint = Memory(**arrays(a=(8, 12)))
    loaded = load_tree(checkpoint, struct(8, 12, sharding=sharding), source("a"))
    assert loaded.sharding == sharding
    assert loaded.committed
    np.testing.assert_array_equal(loaded, checkpoint.arrays["a"])
    for shard in loaded.addressable_shards:
        np.testing.assert_array_equal(shard.data, checkpoint.arrays["a"][shard.index])


def test_loaded_parameters_do_not_change_with_what_was_read(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    with open_checkpoint(path) as checkpoint:
        expected = checkpoint.read("model.norm.weight")
        name = "model.norm.weight"
        loaded = load_tree(checkpoint, struct(*expected.shape), source(name), ignore=["*"])
    path.write_bytes(b"")
    np.testing.assert_array_equal(loaded, expected)


def test_zero_length_tensors_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": np.zeros((0, 3), np.float32), "b": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        loaded = load_tree(checkpoint, [struct(0, 3), struct(2)], [source("a"), source("b")])
    assert loaded[0].shape == (0, 3)
    np.testing.assert_array_equal(loaded[1], [1, 1])


def test_an_empty_tree_is_fine() -> None:
    assert load_tree(Memory(), {}, {}) == {}


def test_every_mismatch_is_in_one_error_and_nothing_is_read() -> None:
    checkpoint = Memory(
        good=np.zeros(3, np.float32),
        mis=np.zeros((2, 3), np.float32),
        q=np.zeros((4, 2), np.float32),
        ids=np.zeros(3, np.int32),
        **{"extra.one": np.zeros(1, np.float32), "rotary.inv_freq": np.zeros(4, np.float32)},
    )
    tree = {"a": struct(3), "b": [struct(3, 2), struct(9)], "c": struct(8, 2), "d": struct(3)}
    mapping = {
        "a": source("good"),
        "b": [source("mis"), source("absent")],
        "c": source("q", "k", transform=concatenate, shapes=((5, 2), (3, 2))),
        "d": source("ids"),
    }
    with pytest.raises(CheckpointError) as caught:
        load_tree(checkpoint, tree, mapping, ignore=["*.inv_freq"])
    assert str(caught.value).splitlines() == [
        "memory: 6 tensors do not fit the model:",
        "  mis-shaped: mis (for ['b'][0]): expected shape (3, 2), found float32[2, 3]",
        "  missing: absent (for ['b'][1]): expected shape (9,), found nothing",
        "  mis-shaped: q (for ['c']): expected shape (5, 2), found float32[4, 2]",
        "  missing: k (for ['c']): expected shape (3, 2), found nothing",
        "  of another kind: ids (for ['d']): expected float32, found int32[3]",
        "  surplus: extra.one: expected nothing, found float32[1]",
    ]
    assert checkpoint.reads == []


def test_one_mismatch_is_told_in_the_singular() -> None:
    with pytest.raises(CheckpointError, match="memory: 1 tensor does not fit the model:\n  surplus: a"):
        load_tree(Memory(a=np.zeros(1)), {}, {})


def test_a_transform_that_gives_another_shape_is_an_error() -> None:
    checkpoint = Memory(**arrays(a=(2, 3), b=(2, 3)))
    with pytest.raises(CheckpointError, match=r"memory: \['w'\] made of a, b: expected shape \(4, 4\), found \(4, 3\)"):
        load_tree(checkpoint, {"w": struct(4, 4)}, {"w": source("a", "b", transform=concatenate)})


def test_a_failure_while_reading_comes_through() -> None:
    class Failing(Memory):
        def read(self, name: str) -> np.ndarray:
            if name == "b":
                raise CheckpointError("file x is gone")
            return super().read(name)

    names = "abcdef"
    checkpoint = Failing(**arrays(**dict.fromkeys(names, (3,))))
    with pytest.raises(CheckpointError, match="file x is gone"):
        load_tree(checkpoint, [struct(3)] * 6, [source(name) for name in names])
    assert threading.active_count() < 50


def test_a_mapping_of_another_structure_is_a_programming_error() -> None:
    checkpoint = Memory(**arrays(a=(1,)))
    with pytest.raises(ValueError, match="TensorSource"):
        load_tree(checkpoint, {"x": struct(1)}, {"x": "a"})
    with pytest.raises(ValueError, match="y"):
        load_tree(checkpoint, {"x": struct(1)}, {"y": source("a")})
    with pytest.raises(ValueError, match="takes one tensor"):
        source("a", "b")
    with pytest.raises(ValueError, match="2 names but 1 shapes"):
        source("a", "b", transform=concatenate, shapes=((1,),))


def test_progress_counts_the_bytes_of_the_parameters() -> None:
    checkpoint = Memory(**arrays(a=(10,), b=(5, 5), c=(1,)))
    calls: list[tuple[int, int]] = []
    tree = [struct(10), struct(5, 5, dtype=jnp.bfloat16), struct(1)]
    load_tree(checkpoint, tree, [source(n) for n in "abc"], progress=lambda done, total: calls.append((done, total)))
    assert calls == [(40, 94), (90, 94), (94, 94)]


class Counting(Memory):
    """Counts the bytes of tensors that were read and whose parameter is not on its device yet."""

    def __init__(self, **tensors: np.ndarray) -> None:
        super().__init__(**tensors)
        self.lock = threading.Lock()
        self.held = self.peak = 0

    def read(self, name: str) -> np.ndarray:
        with self.lock:
            self.held += self.tensors[name].nbytes
            self.peak = max(self.peak, self.held)
        return super().read(name)

    def delivered(self, done: int) -> None:
        with self.lock:
            self.held -= done


@pytest.mark.parametrize("sizes", [[1000] * 20, [10, 5000, 10, 10, 4000, 3000, 10], [1, 2, 4, 8, 16, 4096, 1, 4096]])
def test_tensors_read_ahead_stay_under_the_largest(sizes: list[int]) -> None:
    names = [f"t{i}" for i in range(len(sizes))]
    checkpoint = Counting(**{name: np.zeros(size, np.float32) for name, size in zip(names, sizes, strict=True)})
    before = 0

    def progress(done: int, total: int) -> None:
        nonlocal before
        checkpoint.delivered(done - before)
        before = done

    load_tree(checkpoint, [struct(size) for size in sizes], [source(name) for name in names], progress=progress)
    assert checkpoint.peak <= 4 * max(sizes)
    assert checkpoint.held == 0


def test_small_tensors_are_read_ahead_of_a_slow_one() -> None:
    """While one parameter is being made, another thread makes the next, as far as memory allows."""
    second_was_read = threading.Event()

    class Waiting(Memory):
        def read(self, name: str) -> np.ndarray:
            if name == "b":
                second_was_read.set()
            elif name == "a":
                assert second_was_read.wait(20), "nothing was read ahead"
            return super().read(name)

    checkpoint: Checkpoint = Waiting(**arrays(a=(4,), b=(4,), big=(100,)))
    load_tree(checkpoint, [struct(4), struct(4), struct(100)], [source("a"), source("b"), source("big")])
