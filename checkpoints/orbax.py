"""Reads and writes Orbax directories: a flat tree of arrays under Hugging Face names, with the small files beside it.

Written: `config.json` and tokenizer files as in a Hugging Face directory, and the tree in the directory `weights`.
Read: the same, and any Orbax tree of arrays that has `config.json` beside it; names of a nested tree are joined by dots.

TensorStore reads arrays that are compressed or cut into chunks. Orbax itself is left out of writing because it wants all
arrays in memory at once and cannot go on where it was killed; and of reading because its import takes two seconds, because it
reads one array of many three times slower than TensorStore, and because damage leaves it with event loops that print
tracebacks.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from checkpoints.checkpoint import CheckpointBase, CheckpointError, TensorInfo, TokenizerFiles
from checkpoints.files import ORBAX_METADATA, FileReader, aligned_empty, orbax_root, read_json_object, resumed_directory
from checkpoints.hf_files import read_config, read_tokenizer, write_config, write_tokenizer

WEIGHTS = "weights"
ZARR_HEADER = ".zarray"
INCOMPLETE = ".incomplete"
ARRAY_TYPES = ("np.ndarray", "jax.Array", "scalar")
DICTIONARY_KEY = 2
CACHE_BYTES = 100_000_000


class OrbaxCheckpoint(CheckpointBase):
    """An open Orbax directory. `read` touches no other array."""

    def __init__(self, path: Path) -> None:
        root = orbax_root(path)
        if root is None:
            raise CheckpointError(
                f"{path}: not an Orbax checkpoint: there is no {ORBAX_METADATA} in it or in a directory in it"
            )
        config = read_config(path)
        self._root = root.absolute()
        with _naming(root):
            self._stores = _open_stores(self._root)
            tensors = {
                name: TensorInfo(tuple(store.shape), np.dtype(store.dtype.numpy_dtype)) for name, store in self._stores.items()
            }
            self._plain = {
                name: file for name, store in self._stores.items() if (file := _plain_file(self._root, name, store))
            }
        super().__init__(path, config, read_tokenizer(path), tensors)

    def read(self, name: str) -> np.ndarray:
        info = self.info(name)
        values = aligned_empty(info.shape, info.dtype)
        if name in self._plain:
            self.read_into(name, values)
            return values
        with _naming(self._root):
            ts.array(values, copy=False).write(self._stores[name]).result()
        return values

    def read_into(self, name: str, target: np.ndarray) -> None:
        info = self.info(name)
        if name not in self._plain:
            super().read_into(name, target)
            return
        with contextlib.closing(FileReader(self._plain[name])) as file:
            if file.size != info.nbytes:
                raise CheckpointError(f"{file.path}: has {file.size} bytes, expected {info.nbytes}, those of {name} {info}")
            file.read_converted(target, info.dtype, 0)

    def close(self) -> None:
        self._stores = {}


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the directory in whatever TensorStore or Orbax raises.

    They answer damage, and a full disk, with errors of some ten classes, from ValueError and KeyError to those of JSON, with
    no base of their own.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise CheckpointError(f"{path}: Orbax checkpoint: {type(error).__name__}: {lines[0]}") from error


def _open_stores(root: Path) -> dict[str, ts.TensorStore]:
    """A handle for each array, by its dotted name. The arrays' headers are read here, all at once."""
    path = root / ORBAX_METADATA
    metadata = read_json_object(path)
    context = ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    # Where all chunks were written, one that is not there is damage, and not zeros.
    may_lack_chunks = not metadata.get("store_array_data_equal_to_fill_value", False)
    opening = {}
    for name in _array_names(metadata, path):
        spec = {
            "driver": driver,
            "kvstore": _key_value_store(root, name, ocdbt=bool(metadata.get("use_ocdbt", True))),
            # The manifest is then read once and not for each array.
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
            "fill_missing_data_reads": may_lack_chunks,
        }
        opening[name] = ts.open(spec, open=True, read=True, context=context)
    return {name: future.result() for name, future in opening.items()}


def _plain_file(root: Path, name: str, store: ts.TensorStore) -> Path | None:
    """The file that holds the array as it is in memory; None where there is none, as of compressed ones."""
    spec = store.spec().to_json()
    header = spec.get("metadata", {})
    if spec["driver"] != "zarr" or spec["kvstore"]["driver"] != "file" or header.get("dimension_separator", ".") != ".":
        return None
    if header.get("compressor") or header.get("filters") or header.get("order") != "C":
        return None
    is_whole = list(store.shape) == header.get("chunks") and np.dtype(store.dtype.numpy_dtype).byteorder != ">"
    path = root / name / _chunk_name(tuple(store.shape))
    return path if is_whole and path.is_file() else None


def _key_value_store(root: Path, name: str, *, ocdbt: bool) -> dict[str, Any]:
    """TensorStore's address of an array in the two layouts that Orbax has: a database of all arrays, or a folder for each."""
    if ocdbt:
        return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{root}/"}, "path": f"{name}/"}
    return {"driver": "file", "path": f"{root}/{name}/"}


def _array_names(metadata: Mapping[str, Any], path: Path) -> list[str]:
    tree = metadata.get("tree_metadata")
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: tree_metadata must be an object, found {type(tree).__name__}")
    names: dict[str, None] = {}
    for key, entry in tree.items():
        kind = entry["value_metadata"]["value_type"]
        parts = entry["key_metadata"]
        if kind not in ARRAY_TYPES or any(part["key_type"] != DICTIONARY_KEY for part in parts):
            raise CheckpointError(f"{path}: {key} is not an array in a tree of dictionaries, but of type {kind}")
        name = ".".join(part["key"] for part in parts)
        if not name or "\0" in name or name in names:
            raise CheckpointError(f"{path}: {key} has the name {name!r}, which is empty or another's")
        names[name] = None
    return list(names)


def write_orbax(
    target: Path,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], np.ndarray],
    config: Mapping[str, Any],
    tokenizer: TokenizerFiles | None,
    *,
    replace: bool = False,
    key: str = "",
) -> None:
    """Write an Orbax directory, with one array in memory at a time. It appears whole or not at all.

    Arrays are uncompressed, in a folder each: weights hardly shrink, and so they are read as fast as the disk gives them.

    Args:
        tensors: what to write.
        read: gives the array of a name; it must be as `tensors` says.
        replace: whether `target` may exist; it is deleted once the new one is complete.
        key: says what `read` reads. If a process was killed while it wrote the same, its arrays are kept and not read again;
            "" for never.

    Raises:
        CheckpointError: `target` exists or cannot be written, or Orbax cannot hold a tensor: it is empty, or its name no path.
    """
    empty = [name for name, info in tensors.items() if info.nbytes == 0]
    if empty or not tensors:
        raise CheckpointError(f"{target}: Orbax cannot hold empty arrays: {', '.join(empty) or 'no tensors at all'}")
    unfit = [name for name in tensors if any(part in ("", ".", "..") for part in name.split("/"))]
    if unfit:
        raise CheckpointError(f"{target}: Orbax keeps arrays under their names, and these are no paths: {', '.join(unfit)}")
    layout = {name: str(info) for name, info in tensors.items()}
    with resumed_directory(target, json.dumps([key or os.urandom(16).hex(), layout]), replace=replace) as directory:
        for name, info in tensors.items():
            _write_array(directory / WEIGHTS / name, info, partial(read, name))
        _write_tree(directory / WEIGHTS, tensors)
        write_config(directory, config)
        write_tokenizer(directory, tokenizer)


def _write_array(folder: Path, info: TensorInfo, read: Callable[[], np.ndarray]) -> None:
    """Write one array as zarr (version 2) has it, in a single chunk, unless it is there."""
    chunk = folder / _chunk_name(info.shape)
    if chunk.is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    dtype = info.dtype
    header = {
        "chunks": list(info.shape),
        "compressor": None,
        "dimension_separator": ".",
        "dtype": dtype.name if dtype.isbuiltin != 1 else dtype.newbyteorder("<").str,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(info.shape),
        "zarr_format": 2,
    }
    (folder / ZARR_HEADER).write_text(json.dumps(header), encoding="utf-8")
    values = np.ascontiguousarray(read())
    assert (values.dtype, values.nbytes) == (dtype, info.nbytes), folder
    incomplete = folder / INCOMPLETE
    with incomplete.open("wb") as file:
        file.write(memoryview(values.reshape(-1).view(np.uint8)))
        file.flush()
        os.fsync(file.fileno())
    incomplete.rename(chunk)


def _chunk_name(shape: tuple[int, ...]) -> str:
    """Of the only chunk of an array."""
    return ".".join("0" for _ in shape) or "0"


def _write_tree(root: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """Write what tells Orbax which arrays there are; before, it is no checkpoint."""
    entry = {"value_type": "np.ndarray", "skip_deserialize": False}
    tree = {
        str((name,)): {"key_metadata": [{"key": name, "key_type": DICTIONARY_KEY}], "value_metadata": entry}
        for name in tensors
    }
    metadata = {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    (root / ORBAX_METADATA).write_text(json.dumps(metadata), encoding="utf-8")
