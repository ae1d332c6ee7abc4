"""Hugging Face directories: read what the `safetensors` library writes, and write what it reads."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from safetensors import safe_open
from safetensors.numpy import load, load_file, save_file

from checkpoints.checkpoint import CheckpointError, TensorInfo, open_checkpoint
from checkpoints.files import FileReader
from checkpoints.safetensors import DTYPES, INDEX, Entry, SafetensorsCheckpoint, read_header, write_safetensors
from tests.checkpoints.builders import (
    CONFIG,
    assert_same_arrays,
    llama_shapes,
    random_tensors,
    read_all,
    tiny_gguf,
    tiny_hf,
)


def infos(tensors: dict[str, np.ndarray]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(values.shape, values.dtype) for name, values in tensors.items()}


def write(target: Path, tensors: dict[str, np.ndarray], **options: Any) -> None:
    write_safetensors(target, infos(tensors), tensors.__getitem__, CONFIG, None, **options)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_reads_what_the_library_writes(tmp_path: Path, dtype: Any, shards: int) -> None:
    tensors = random_tensors(llama_shapes(), dtype)
    with open_checkpoint(tiny_hf(tmp_path, tensors, shards=shards)) as checkpoint:
        assert isinstance(checkpoint, SafetensorsCheckpoint)
        assert dict(checkpoint.tensors) == infos(tensors)
        assert_same_arrays(read_all(checkpoint), tensors)
        assert checkpoint.config == CONFIG
        assert checkpoint.tokenizer is None


def test_arrays_are_fresh_aligned_and_outlive_the_checkpoint(tmp_path: Path) -> None:
    tensors = random_tensors(llama_shapes())
    checkpoint = open_checkpoint(tiny_hf(tmp_path, tensors))
    found = read_all(checkpoint)
    checkpoint.close()
    assert all(values.flags.writeable and values.ctypes.data % 64 == 0 for values in found.values())
    assert_same_arrays(found, tensors)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda name: name != "__metadata__"),
        st.sampled_from(sorted(DTYPES)).flatmap(
            lambda code: npst.arrays(np.uint8, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)).map(
                lambda a: a.astype(DTYPES[code])
            )
        ),
        max_size=5,
    ),
    st.integers(1, 200),
)
def test_any_tensors_come_back_and_the_library_agrees(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, np.ndarray], shard_bytes: int
) -> None:
    target = tmp_path_factory.mktemp("any") / "out"
    write(target, tensors, shard_bytes=shard_bytes)
    with open_checkpoint(target) as checkpoint:
        assert_same_arrays(read_all(checkpoint), tensors)
    for path in target.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as library:
            for name in library.keys():  # noqa: SIM118 (not a mapping)
                assert tuple(library.get_slice(name).get_shape()) == tensors[name].shape


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    tensors = random_tensors(llama_shapes(), ml_dtypes.bfloat16)
    write(tmp_path / "out", tensors)
    assert_same_arrays(load_file(tmp_path / "out" / "model.safetensors"), tensors)


def test_shards_stay_under_their_size_and_have_an_index(tmp_path: Path) -> None:
    tensors = random_tensors(llama_shapes())
    largest = max(values.nbytes for values in tensors.values())
    write(tmp_path / "out", tensors, shard_bytes=largest)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(values.nbytes for values in tensors.values())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert set(index["weight_map"].values()) == set(files)
    for file in files:
        found = load_file(tmp_path / "out" / file)
        assert sum(values.nbytes for values in found.values()) <= largest
        assert {name for name, shard in index["weight_map"].items() if shard == file} == set(found)


def test_a_tensor_larger_than_a_shard_gets_its_own(tmp_path: Path) -> None:
    tensors = {"a": np.zeros(4, np.int8), "b": np.zeros(100, np.int8), "c": np.zeros(4, np.int8)}
    write(tmp_path / "out", tensors, shard_bytes=8)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3


def test_one_file_of_another_name_is_taken(tmp_path: Path) -> None:
    tiny_hf(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint.tensors) == len(llama_shapes())


def test_a_complete_series_needs_no_index(tmp_path: Path) -> None:
    tensors = random_tensors(llama_shapes())
    (tiny_hf(tmp_path, tensors, shards=3) / INDEX).unlink()
    with open_checkpoint(tmp_path) as checkpoint:
        assert_same_arrays(read_all(checkpoint), tensors)


def test_files_outside_the_index_are_left_alone(tmp_path: Path) -> None:
    tensors = random_tensors(llama_shapes())
    tiny_hf(tmp_path, tensors, shards=2)
    for other in ("consolidated.safetensors", "model-00001-of-00009.safetensors"):
        save_file({"model.norm.weight": np.zeros(3, np.float32)}, tmp_path / other)
    with open_checkpoint(tmp_path) as checkpoint:
        assert_same_arrays(read_all(checkpoint), tensors)


def test_safetensors_win_over_gguf_in_one_directory(tmp_path: Path) -> None:
    tensors = random_tensors(llama_shapes(), seed=1)
    tiny_hf(tmp_path, tensors)
    tiny_gguf(tmp_path / "other.gguf")
    with open_checkpoint(tmp_path) as checkpoint:
        assert_same_arrays(read_all(checkpoint), tensors)


def test_paths_need_not_be_ascii(tmp_path: Path) -> None:
    tensors = random_tensors(llama_shapes())
    directory = tmp_path / "modèle 模型 \udcff"
    tiny_hf(directory, tensors, shards=2)
    with open_checkpoint(directory) as checkpoint:
        write_safetensors(tmp_path / "копия ✓", checkpoint.tensors, checkpoint.read, CONFIG, None)
    with open_checkpoint(tmp_path / "копия ✓") as checkpoint:
        assert_same_arrays(read_all(checkpoint), tensors)


def index_of(directory: Path, change: Any) -> None:
    path = directory / INDEX
    index = json.loads(path.read_text())
    path.write_text(json.dumps(change(index)))


def break_missing_shard(directory: Path) -> None:
    (directory / "model-00002-of-00003.safetensors").unlink()


def break_missing_shard_without_index(directory: Path) -> None:
    (directory / INDEX).unlink()
    (directory / "model-00002-of-00003.safetensors").unlink()


def break_surplus_shard(directory: Path) -> None:
    save_file({"x": np.zeros(1)}, directory / "model-00004-of-00003.safetensors")


def break_unclear_files(directory: Path) -> None:
    (directory / INDEX).unlink()
    save_file({"x": np.zeros(1)}, directory / "other.safetensors")


def break_index_pointing_to_nothing(directory: Path) -> None:
    index_of(directory, lambda index: index | {"weight_map": index["weight_map"] | {"x": "gone.safetensors"}})


def break_index_of_absent_tensor(directory: Path) -> None:
    shard = "model-00001-of-00003.safetensors"
    index_of(directory, lambda index: index | {"weight_map": index["weight_map"] | {"absent.weight": shard}})


def break_index_escaping(directory: Path) -> None:
    index_of(directory, lambda index: index | {"weight_map": {"x": "../../etc/passwd"}})


def break_index_without_map(directory: Path) -> None:
    index_of(directory, lambda index: {})


def break_duplicate(directory: Path) -> None:
    path = directory / "model-00002-of-00003.safetensors"
    save_file(load_file(path) | {"model.embed_tokens.weight": np.zeros(1, np.float32)}, path)


def break_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def break_config_json(directory: Path) -> None:
    (directory / "config.json").write_text("[1, 2]")


def break_generation_config(directory: Path) -> None:
    (directory / "generation_config.json").write_bytes(b"\xff\xfe{}")


BROKEN = {
    break_missing_shard: r"model-00002-of-00003\.safetensors: missing; model\.safetensors\.index\.json lists 3 shards",
    break_missing_shard_without_index: r"of the 3 shards model-\*\.safetensors number \[2\] is missing",
    break_surplus_shard: r"model-00004-of-00003\.safetensors: a shard that model\.safetensors\.index\.json does not list",
    break_unclear_files: r"index\.json is missing, and .*other\.safetensors are not one numbered series",
    break_index_pointing_to_nothing: r"gone\.safetensors: missing",
    break_index_of_absent_tensor: r"index\.json: says that model-00001-of-00003\.safetensors holds 'absent\.weight'",
    break_index_escaping: r"index\.json: '\.\./\.\./etc/passwd' is not the name of a file beside it",
    break_index_without_map: r"index\.json: weight_map must be an object",
    break_duplicate: r"model-0000\d-of-00003\.safetensors: tensor 'model\.embed_tokens\.weight' is also in model-0000\d",
    break_config: r"config\.json: missing; a checkpoint directory must have one",
    break_config_json: r"config\.json: expected a JSON object, found list",
    break_generation_config: r"generation_config\.json: not UTF-8",
}


@pytest.mark.parametrize("damage", BROKEN, ids=lambda damage: damage.__name__)
def test_a_broken_directory_is_an_error_that_names_the_file(tmp_path: Path, damage: Any) -> None:
    tiny_hf(tmp_path, shards=3)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=str(tmp_path)) as caught:
        open_checkpoint(tmp_path)
    caught.match(BROKEN[damage])


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS: dict[str, tuple[Any, str]] = {
    "list": ([], "expected a JSON object, found list"),
    "entry": ({"a": 3}, "corrupt header entry 3"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, "corrupt header entry"),
    "dtype": ({"a": GOOD | {"dtype": "F4"}}, r"dtype 'F4' is not read; supported: F64"),
    "dtype kind": ({"a": GOOD | {"dtype": ["F32"]}}, r"dtype \['F32'\] is not read"),
    "shape": ({"a": GOOD | {"shape": [-2]}}, r"corrupt shape \[-2\]"),
    "shape kind": ({"a": GOOD | {"shape": [2.0]}}, r"corrupt shape \[2\.0\]"),
    "huge shape": ({"a": GOOD | {"shape": [1 << 62, 1 << 62]}}, "corrupt shape"),
    "huge sides of nothing": ({"a": {"dtype": "F32", "shape": [0, 1 << 62], "data_offsets": [0, 0]}}, "corrupt shape"),
    "rank": ({"a": GOOD | {"shape": [1] * 40}}, "corrupt shape"),
    "offsets": ({"a": GOOD | {"data_offsets": [0]}}, "corrupt data_offsets"),
    "reversed": ({"a": GOOD | {"data_offsets": [8, 0]}}, "span another number"),
    "past the end": ({"a": GOOD | {"data_offsets": [8, 16]}}, "truncated: it ends at byte"),
    "hole": ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}, r"starts at byte \d+, expected"),
    "overlap": ({"a": GOOD, "b": GOOD}, r"tensor 'b' starts at byte"),
    "garbage": ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, "but the file has"),
}


def raw_file(path: Path, header: bytes, data: bytes = bytes(8)) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def header_of(path: Path) -> dict[str, Entry]:
    with contextlib.closing(FileReader(path)) as file:
        return read_header(file)


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_lies_is_refused(tmp_path: Path, case: str) -> None:
    header, message = HEADERS[case]
    path = raw_file(tmp_path / "m.safetensors", json.dumps(header).encode())
    with pytest.raises(CheckpointError, match=r"m\.safetensors.*" + message):
        header_of(path)


def test_a_name_that_occurs_twice_in_a_header_is_refused(tmp_path: Path) -> None:
    entry = json.dumps({"dtype": "U8", "shape": [8], "data_offsets": [0, 8]})
    path = raw_file(tmp_path / "m.safetensors", f'{{"a": {entry}, "a": {entry}}}'.encode())
    with pytest.raises(CheckpointError, match=r"m\.safetensors: header: tensor 'a' occurs twice"):
        header_of(path)


@pytest.mark.slow
def test_a_name_that_occurs_twice_is_found_among_very_many(tmp_path: Path) -> None:
    entry = json.dumps({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
    names = [*range(100_000), 99_999]
    path = raw_file(tmp_path / "m.safetensors", f"{{{','.join(f'"{name}":{entry}' for name in names)}}}".encode(), b"")
    with pytest.raises(CheckpointError, match="tensor '99999' occurs twice"):
        header_of(path)


def test_metadata_and_padding_of_a_header_are_skipped(tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {"format": "pt"}, "a": GOOD}).encode() + b"   "
    path = raw_file(tmp_path / "m.safetensors", header)
    assert header_of(path)["a"].info == TensorInfo((2,), np.dtype(np.float32))
    assert load(path.read_bytes())["a"].shape == (2,)


def test_a_dtype_without_a_name_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"safetensors cannot hold 'a', which is complex64\[2\]"):
        write(tmp_path / "out", {"a": np.zeros(2, np.complex64)})
    assert not (tmp_path / "out").exists()
