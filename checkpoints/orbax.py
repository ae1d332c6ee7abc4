"""Reads and writes Orbax directories: a flat tree of arrays under Hugging Face names, with the small files beside it.

Written: `config.json` and tokenizer files as in a Hugging Face directory, and Orbax's own directory `weights`. Read: the
same, and any Orbax tree of arrays that has `config.json` beside it; names of a nested tree are joined by dots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from checkpoints.checkpoint import CheckpointBase, CheckpointError, TensorInfo, TokenizerFiles
from checkpoints.files import aligned_empty, new_directory, orbax_root
from checkpoints.hf_files import read_config, read_tokenizer, write_config, write_tokenizer

WEIGHTS = "weights"


class OrbaxCheckpoint(CheckpointBase):
    """An open Orbax directory. `read` restores one array and touches no other."""

    def __init__(self, path: Path) -> None:
        root = orbax_root(path)
        if root is None:
            raise CheckpointError(f"{path}: not an Orbax checkpoint: there is no _METADATA in it or in a directory in it")
        config = read_config(path)
        self._root = root.absolute()
        self._checkpointer = ocp.PyTreeCheckpointer()
        with _naming(root):
            self._keys, tensors = _flatten(self._checkpointer.metadata(self._root).item_metadata.tree, root)
        super().__init__(path, config, read_tokenizer(path), tensors)

    def read(self, name: str) -> np.ndarray:
        info = self.info(name)
        with _naming(self._root):
            item: Any = 0
            for key in reversed(self._keys[name]):
                item = {key: item}
            restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
            args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
            (found,) = jax.tree.leaves(self._checkpointer.restore(self._root, args=args))
        values = np.asarray(found)
        if values.shape != info.shape or values.dtype != info.dtype:
            found_info = TensorInfo(values.shape, values.dtype)
            raise CheckpointError(f"{self._root}: {name}: the metadata says {info}, but the array is {found_info}")
        aligned = aligned_empty(info.shape, info.dtype)
        aligned[...] = values
        return aligned

    def close(self) -> None:
        self._checkpointer.close()


@contextlib.contextmanager
def _naming(root: Path) -> Iterator[None]:
    """Name the directory in whatever Orbax raises.

    Orbax and TensorStore answer a damaged checkpoint with errors of some ten classes, from ValueError and KeyError to those
    of JSON, with no base of their own.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise CheckpointError(
            f"{root}: not a readable Orbax checkpoint, or a damaged one: {type(error).__name__}: {lines[0]}"
        ) from error


def _flatten(tree: Any, root: Path) -> tuple[dict[str, tuple[str, ...]], dict[str, TensorInfo]]:
    """Keys and info of each array of a tree of dictionaries, by its dotted name."""
    keys: dict[str, tuple[str, ...]] = {}
    tensors: dict[str, TensorInfo] = {}

    def visit(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, Mapping):
            for key, child in node.items():
                visit(child, (*path, key))
            return
        name = ".".join(path)
        if not hasattr(node, "shape") or node.dtype is None:
            raise CheckpointError(f"{root}: {name!r} is not an array in a tree of dictionaries")
        if name in tensors:
            raise CheckpointError(f"{root}: two arrays have the name {name!r}")
        keys[name], tensors[name] = path, TensorInfo(tuple(node.shape), np.dtype(node.dtype))

    visit(tree, ())
    return keys, tensors


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
    with new_directory(target, replace=replace) as directory:
        tree = {name: read(name) for name in tensors}
        with _naming_write(target), contextlib.closing(ocp.PyTreeCheckpointer()) as checkpointer:
            checkpointer.save((directory / WEIGHTS).absolute(), tree)
        write_config(directory, config)
        write_tokenizer(directory, tokenizer)


@contextlib.contextmanager
def _naming_write(target: Path) -> Iterator[None]:
    try:
        yield
    # As in `_naming`: no common base.
    except Exception as error:
        raise CheckpointError(f"{target}: cannot be written: {type(error).__name__}: {error}") from error
