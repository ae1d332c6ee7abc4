"""Loads a checkpoint into an abstract tree: which tensors feed which parameter, checked first, then streamed to devices.

Owns `TensorSource`, the report of every mismatch, and the bound on host memory. Knows nothing of file formats, nor of what
the parameters mean.
"""

from __future__ import annotations

import collections
import contextlib
import fnmatch
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from checkpoints.checkpoint import Checkpoint, CheckpointError, TensorInfo, is_floating
from checkpoints.files import ALIGNMENT, aligned_empty

NUM_THREADS = 4


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where one parameter comes from.

    Attributes:
        names: the checkpoint's tensors, in the order in which `transform` takes them.
        transform: makes the parameter of the tensors. Runs on a worker thread, on arrays that hold something else once it
            has returned; it may return a view of one.
        shapes: what the tensors' shapes must be, one for each name. None means the parameter's own shape for a tensor as it
            is, and is not checked before loading otherwise.
        finish: makes what is kept of the parameter once it is on its devices, where that is something else. Runs for one
            parameter after the other.
        parts: where the parameter is the tensors side by side, of an array of its shape the views that they fill, each with
            as many values in the same order; whatever no view covers it sets itself. Without it and a transform the
            parameter is the only tensor as it is.
        memory: C-contiguous, of the parameter's shape and dtype, to make it in; None for memory of its own.
    """

    names: tuple[str, ...]
    transform: Callable[[list[np.ndarray]], np.ndarray] | None = None
    shapes: tuple[tuple[int, ...], ...] | None = None
    finish: Callable[[jax.Array], Any] | None = None
    parts: Callable[[np.ndarray], list[np.ndarray]] | None = None
    memory: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.transform and self.parts:
            raise ValueError(f"a source has a transform or parts, not both, as that of {self.names}")
        if self.is_tensor and len(self.names) != 1:
            raise ValueError(f"a source without a transform or parts takes one tensor, found {self.names}")
        if self.shapes is not None and len(self.shapes) != len(self.names):
            raise ValueError(f"{len(self.names)} names but {len(self.shapes)} shapes")

    @property
    def is_tensor(self) -> bool:
        """Whether the parameter is a tensor as it is."""
        return self.transform is None and self.parts is None


@dataclass(frozen=True, slots=True)
class _Leaf:
    path: str
    target: jax.ShapeDtypeStruct
    source: TensorSource


def load_tree(
    checkpoint: Checkpoint,
    abstract_tree: Any,
    mapping: Any,
    *,
    ignore: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """Load parameters, tensor by tensor, straight to where they are to be.

    Host memory stays under the bytes of the parameters (where the devices are CPUs; else none of them) plus the largest
    parameter with the tensors it is made of: the next parameters are read while the last one is transferred only as far
    as that bound allows.

    Args:
        abstract_tree: pytree of `jax.ShapeDtypeStruct`, whose sharding (None for the default device) says where to.
        mapping: pytree of the same structure with a `TensorSource` for each leaf.
        ignore: `fnmatch` patterns of tensors that the checkpoint may hold and nobody asks for.
        progress: called with bytes of parameters done and in all, after each parameter.

    Returns:
        A pytree of committed `jax.Array`s like `abstract_tree`, or what their sources make of these.

    Raises:
        CheckpointError: tensors are missing, surplus or of another shape or kind, all of them listed, before anything is
            loaded; or a tensor cannot be read; or a transform gave another shape.
        ValueError: `mapping` has another structure than `abstract_tree`.
    """
    leaves, treedef = _leaves(abstract_tree, mapping)
    _check(checkpoint, leaves, ignore)
    total = sum(_nbytes(leaf.target) for leaf in leaves)
    done = 0
    arrays: list[Any] = [None] * len(leaves)
    for index, array in _stream(checkpoint, leaves):
        finish = leaves[index].source.finish
        arrays[index] = array if finish is None else finish(array)
        del array
        done += _nbytes(leaves[index].target)
        if progress is not None:
            progress(done, total)
    return jax.tree.unflatten(treedef, arrays)


def check_tree(checkpoint: Checkpoint, abstract_tree: Any, mapping: Any, *, ignore: Sequence[str] = ()) -> None:
    """Raise what `load_tree` would before it loads anything; reads no data."""
    _check(checkpoint, _leaves(abstract_tree, mapping)[0], ignore)


def _leaves(abstract_tree: Any, mapping: Any) -> tuple[list[_Leaf], Any]:
    targets, _ = jax.tree_util.tree_flatten_with_path(abstract_tree)
    treedef: Any = jax.tree.structure(abstract_tree)
    sources = treedef.flatten_up_to(mapping)
    for (path, _), source in zip(targets, sources, strict=True):
        if not isinstance(source, TensorSource):
            raise ValueError(f"mapping{jax.tree_util.keystr(path)} must be a TensorSource, found {source!r}")
    leaves = [
        _Leaf(jax.tree_util.keystr(path), target, source) for (path, target), source in zip(targets, sources, strict=True)
    ]
    return leaves, treedef


def _check(checkpoint: Checkpoint, leaves: Sequence[_Leaf], ignore: Sequence[str]) -> None:
    """Raise one `CheckpointError` that lists every mismatch between the checkpoint's tensors and what is wanted."""
    problems: list[str] = []
    wanted: set[str] = set()
    for leaf in leaves:
        for position, name in enumerate(leaf.source.names):
            wanted.add(name)
            problems.extend(_problem(leaf, position, checkpoint.tensors.get(name)))
    surplus = [name for name in checkpoint.tensors if name not in wanted]
    for name in surplus:
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore):
            problems.append(f"surplus: {name}: expected nothing, found {checkpoint.tensors[name]}")
    if problems:
        count = f"{len(problems)} tensors do" if len(problems) > 1 else "1 tensor does"
        raise CheckpointError(f"{checkpoint.path}: {count} not fit the model:\n  " + "\n  ".join(problems))


def _problem(leaf: _Leaf, position: int, found: TensorInfo | None) -> Iterator[str]:
    source = leaf.source
    shape = source.shapes[position] if source.shapes else leaf.target.shape if source.is_tensor else None
    where = f"{source.names[position]} (for {leaf.path})"
    expected = f"shape {shape}" if shape is not None else "a tensor"
    if found is None:
        yield f"missing: {where}: expected {expected}, found nothing"
    elif shape is not None and found.shape != tuple(shape):
        yield f"mis-shaped: {where}: expected {expected}, found {found}"
    elif source.is_tensor and is_floating(found.dtype) != is_floating(np.dtype(leaf.target.dtype)):
        yield f"of another kind: {where}: expected {np.dtype(leaf.target.dtype).name}, found {found}"


def _nbytes(target: jax.ShapeDtypeStruct) -> int:
    return math.prod(target.shape) * np.dtype(target.dtype).itemsize


def _host_cost(checkpoint: Checkpoint, leaf: _Leaf) -> int:
    """Host bytes while this parameter is made: its tensors and itself."""
    return sum(checkpoint.tensors[name].nbytes for name in leaf.source.names) + _nbytes(leaf.target)


def _stream(checkpoint: Checkpoint, leaves: Sequence[_Leaf]) -> Iterator[tuple[int, jax.Array]]:
    """Yield the index and array of each leaf. Leaves in the making cost no more host memory together than the dearest."""
    costs = [_host_cost(checkpoint, leaf) for leaf in leaves]
    budget = max(costs, default=0)
    in_flight: collections.deque[tuple[int, Future[np.ndarray]]] = collections.deque()
    held = 0
    scratch = _Scratch()
    # Memory that is kept for the next parameter fits where the last ones will be; for them there is none.
    kept = NUM_THREADS * max((_host_cost(checkpoint, leaf) for leaf in leaves if not leaf.source.is_tensor), default=0)
    after = [*itertools.accumulate(_nbytes(leaf.target) for leaf in reversed(leaves))][::-1]
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="load") as pool:
        try:
            for index, leaf in enumerate(leaves):
                while in_flight and held + costs[index] > budget:
                    finished, future = in_flight.popleft()
                    yield finished, _to_device(future.result(), leaves[finished].target)
                    del future
                    held -= costs[finished]
                in_flight.append((index, pool.submit(_make, checkpoint, leaf, scratch, after[index] >= kept)))
                held += costs[index]
            while in_flight:
                finished, future = in_flight.popleft()
                yield finished, _to_device(future.result(), leaves[finished].target)
                del future
        finally:
            for _, future in in_flight:
                future.cancel()


class _Scratch:
    """Memory for tensors that a parameter is made of, which the next one uses again: to clear pages that it gives anew takes
    the system as long as to read as many."""

    def __init__(self) -> None:
        self._free: collections.deque[np.ndarray] = collections.deque()

    @contextlib.contextmanager
    def arrays(self, infos: Sequence[TensorInfo], is_kept: bool) -> Iterator[list[np.ndarray]]:
        """An array for each, and what held them is used again if `is_kept`; else nothing is any more."""
        starts = [0]
        for info in infos:
            starts.append(-(-(starts[-1] + info.nbytes) // ALIGNMENT) * ALIGNMENT)
        try:
            raw = self._free.pop()
        except IndexError:
            raw = np.empty(0, np.uint8)
        if not is_kept:
            self._free.clear()
        if raw.nbytes < starts[-1] or not is_kept:
            del raw
            raw = aligned_empty((starts[-1],), np.dtype(np.uint8))
        places = zip(starts[:-1], infos, strict=True)
        arrays = [raw[start : start + info.nbytes].view(info.dtype).reshape(info.shape) for start, info in places]
        kept = raw if is_kept else None
        del raw  # so that whoever clears the list frees what is not kept
        yield arrays
        if kept is not None:
            self._free.append(kept)


def _make(checkpoint: Checkpoint, leaf: _Leaf, scratch: _Scratch, scratch_is_kept: bool) -> np.ndarray:
    """Read a parameter's tensors and make of them an array that a CPU device can take over."""
    source, target = leaf.source, leaf.target
    if source.transform is None:
        made = _memory(source, tuple(target.shape), np.dtype(target.dtype))
        views = [made] if source.parts is None else source.parts(made)
        for name, view in zip(source.names, views, strict=True):
            _fill(checkpoint, leaf, name, view, scratch, scratch_is_kept)
        return made
    infos = [checkpoint.tensors[name] for name in source.names]
    with scratch.arrays(infos, is_kept=scratch_is_kept) as tensors:
        for position, name in enumerate(source.names):
            checkpoint.read_into(name, tensors[position])
        values = source.transform(tensors)
        if values.shape != tuple(target.shape):
            raise _misshapen(checkpoint, leaf, tuple(target.shape), values.shape)
        dtype = np.dtype(target.dtype)
        is_own = not any(np.may_share_memory(values, tensor) for tensor in tensors)
        may_stay = is_own and source.memory is None
        if may_stay and values.dtype == dtype and values.flags.c_contiguous and values.ctypes.data % ALIGNMENT == 0:
            return values
        if is_own:
            tensors.clear()
        made = _memory(source, values.shape, dtype)
        np.copyto(made, values, casting="unsafe")
    return made


def _fill(checkpoint: Checkpoint, leaf: _Leaf, name: str, view: np.ndarray, scratch: _Scratch, scratch_is_kept: bool) -> None:
    """Read a tensor into its part of a parameter."""
    info = checkpoint.tensors[name]
    if math.prod(info.shape) != view.size or (leaf.source.is_tensor and info.shape != view.shape):
        raise _misshapen(checkpoint, leaf, view.shape, info.shape)
    if view.flags.c_contiguous:
        checkpoint.read_into(name, view.reshape(info.shape))
        return
    with scratch.arrays([info], is_kept=scratch_is_kept) as tensors:
        checkpoint.read_into(name, tensors[0])
        np.copyto(view, tensors[0].reshape(view.shape), casting="unsafe")


def _memory(source: TensorSource, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    return aligned_empty(shape, dtype) if source.memory is None else source.memory


def _misshapen(checkpoint: Checkpoint, leaf: _Leaf, expected: tuple[int, ...], found: tuple[int, ...]) -> CheckpointError:
    made_of = ", ".join(leaf.source.names)
    return CheckpointError(f"{checkpoint.path}: {leaf.path} made of {made_of}: expected shape {expected}, found {found}")


def _to_device(values: np.ndarray, target: jax.ShapeDtypeStruct) -> jax.Array:
    if target.sharding is None:
        array = jax.device_put(values, jax.devices()[0])
    else:
        array = jax.make_array_from_callback(values.shape, target.sharding, lambda index: values[index])
    # The host copy is freed on return, so the transfer must have ended.
    return array.block_until_ready()
