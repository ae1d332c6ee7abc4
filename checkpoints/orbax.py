"""Reads and writes Orbax directories: a flat tree of arrays under Hugging Face names, with the small files beside it.

Written, by Orbax: `config.json` and tokenizer files as in a Hugging Face directory, and the tree in the directory `weights`.
Read, by TensorStore: the same, and any Orbax tree of arrays that has `config.json` beside it; names of a nested tree are
joined by dots. Orbax itself is left out of reading because its import takes two seconds, because it reads one array of many
three times slower than TensorStore, and because a damaged checkpoint leaves it with event loops that print tracebacks.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from checkpoints.checkpoint import CheckpointBase, CheckpointError, TensorInfo, TokenizerFiles
from checkpoints.files import ORBAX_METADATA, aligned_empty, new_directory, orbax_root, read_json_object
from checkpoints.hf_files import read_config, read_tokenizer, write_config, write_tokenizer

WEIGHTS = "weights"
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
        super().__init__(path, config, read_tokenizer(path), tensors)

    def read(self, name: str) -> np.ndarray:
        info = self.info(name)
        with _naming(self._root):
            values = aligned_empty(info.shape, info.dtype)
            ts.array(values, copy=False).write(self._stores[name]).result()
        return values

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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Orbax from logging the traceback of an error that it also raises."""
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _open_stores(root: Path) -> dict[str, ts.TensorStore]:
    """A handle for each array, by its dotted name. The arrays' headers are read here, all at once."""
    path = root / ORBAX_METADATA
    metadata = read_json_object(path)
    context = ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    opening = {}
    for name in _array_names(metadata, path):
        spec = {
            "driver": driver,
            "kvstore": _key_value_store(root, name, ocdbt=bool(metadata.get("use_ocdbt", True))),
            # The manifest is then read once and not for each array.
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
        }
        opening[name] = ts.open(spec, open=True, read=True, context=context)
    return {name: future.result() for name, future in opening.items()}


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
) -> None:
    """Write an Orbax directory. It appears whole or not at all. All arrays are in memory at once, since Orbax takes a tree.

    Args:
        tensors: what to write.
        read: gives the array of a name; it must be as `tensors` says.
        replace: whether `target` may exist; it is deleted once the new one is complete.

    Raises:
        CheckpointError: `target` exists, or cannot be written, or a tensor is empty, which Orbax cannot hold.
    """
    empty = [name for name, info in tensors.items() if info.nbytes == 0]
    if empty or not tensors:
        raise CheckpointError(f"{target}: Orbax cannot hold empty arrays: {', '.join(empty) or 'no tensors at all'}")
    import orbax.checkpoint as ocp

    with new_directory(target, replace=replace) as directory:
        tree = {name: read(name) for name in tensors}
        with _naming(target), _quiet(), contextlib.closing(ocp.PyTreeCheckpointer()) as checkpointer:
            checkpointer.save((directory / WEIGHTS).absolute(), tree)
        write_config(directory, config)
        write_tokenizer(directory, tokenizer)
