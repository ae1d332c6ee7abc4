"""Bytes, JSON and directories on disk, with errors that name the file.

Knows no checkpoint format beyond telling where an Orbax one keeps its metadata.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.checkpoint import CheckpointError

# XLA's CPU client takes a host buffer over without a copy if it is aligned to this many bytes.
ALIGNMENT = 64
# Linux reads at most 2 GiB - 4 KiB in one call.
MAX_READ = 1 << 30
# What is read at once where it is converted on the way: little enough to be in the cache still.
CONVERTED_BYTES = 1 << 20
MAX_SMALL_BYTES = 1 << 28
ORBAX_METADATA = "_METADATA"
KEY = ".written-for"
"""Of a directory that is not complete: what it is written for."""


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An uninitialised C-contiguous array that a CPU device can take over without a copy.

    Raises:
        CheckpointError: there is not so much memory.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    except (MemoryError, ValueError) as error:
        raise CheckpointError(f"{dtype.name}{list(shape)} takes {nbytes} bytes, which there is no memory for") from error
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an `OSError` inside into a `CheckpointError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror or error}") from error


class FileReader:
    """A file read at offsets, from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with naming(path):
            self._file = path.open("rb", buffering=0)
            self.size = os.fstat(self._file.fileno()).st_size

    def read_into(self, target: np.ndarray, offset: int) -> None:
        """Fill the C-contiguous `target` from `offset` bytes into the file."""
        view = memoryview(target.reshape(-1).view(np.uint8))
        done = 0
        with naming(self.path):
            while done < len(view):
                count = os.preadv(self._file.fileno(), [view[done : done + MAX_READ]], offset + done)
                if count == 0:
                    raise CheckpointError(
                        f"{self.path}: ends at byte {offset + done}, expected at least {offset + len(view)}; "
                        "it was truncated while in use"
                    )
                done += count

    def read_converted(self, target: np.ndarray, dtype: np.dtype[Any], offset: int) -> None:
        """Fill the C-contiguous `target` with what is stored as `dtype` from `offset` bytes into the file."""
        if target.dtype == dtype:
            self.read_into(target, offset)
            return
        flat = target.reshape(-1)
        stored = np.empty(min(flat.size, CONVERTED_BYTES // dtype.itemsize), dtype)
        for start in range(0, flat.size, max(stored.size, 1)):
            part = stored[: flat.size - start]
            self.read_into(part, offset + start * dtype.itemsize)
            np.copyto(flat[start : start + part.size], part, casting="unsafe")

    def close(self) -> None:
        self._file.close()


def read_bytes(path: Path) -> bytes:
    """Read one of the small files of a checkpoint."""
    with naming(path):
        if path.stat().st_size > MAX_SMALL_BYTES:
            raise CheckpointError(f"{path}: is larger than {MAX_SMALL_BYTES} bytes, which no file of its kind is")
        return path.read_bytes()


def read_text(path: Path) -> str:
    """Read a UTF-8 file."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text: {error}") from error


def parse_json_object(text: str | bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object; `where` names it in errors. A byte order mark before it is skipped, as some editors write one."""
    try:
        value = json.loads(text.removeprefix("\ufeff") if isinstance(text, str) else text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    return parse_json_object(read_text(path), str(path))


def orbax_root(path: Path) -> Path | None:
    """The directory under `path` (itself or a child) that Orbax wrote its tree metadata to; None if there is none."""
    for candidate in (path, path / "weights", *sorted(entry for entry in path.iterdir() if entry.is_dir())):
        if (candidate / ORBAX_METADATA).is_file():
            return candidate
    return None


@contextlib.contextmanager
def new_directory(target: Path, *, replace: bool) -> Iterator[Path]:
    """A temporary sibling of `target` that takes its name if the body succeeds and vanishes if it fails.

    Raises:
        CheckpointError: `target` exists and is not an empty directory, and `replace` is false; or the disk says no.
    """
    if not replace and target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"{target}: already exists and is not an empty directory")
    with naming(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        with naming(target):
            temporary.chmod(0o755)
            yield temporary
            _swap(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def resumed_directory(target: Path, key: str, *, replace: bool) -> Iterator[Path]:
    """As `new_directory`, but what a body that was killed or interrupted had written is there for the next of the same `key`.

    The body tells by what it finds what is left to do. A failure, such as a full disk, leaves nothing.

    Raises:
        CheckpointError: as `new_directory`; or another process writes `target` now.
    """
    if not replace and target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"{target}: already exists and is not an empty directory")
    partial = target.parent / f".{target.name}.partial"
    with naming(target), contextlib.ExitStack() as stack:
        partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{target}: another process writes it now, in {partial}") from None
        try:
            _begin_or_resume(partial, key)
            yield partial
            (partial / KEY).unlink()
            _swap(partial, target)
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _begin_or_resume(partial: Path, key: str) -> None:
    """Leave in `partial` only what was written under `key`."""
    path = partial / KEY
    if path.is_file() and path.read_text(encoding="utf-8") == key:
        return
    for entry in partial.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    path.write_text(key, encoding="utf-8")


def _swap(temporary: Path, target: Path) -> None:
    """Give `target`'s name to `temporary`; what had it before is moved aside first, then deleted."""
    if not target.exists():
        os.rename(temporary, target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    try:
        os.rename(target, aside / "old")
        try:
            os.rename(temporary, target)
        except OSError:
            os.rename(aside / "old", target)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
