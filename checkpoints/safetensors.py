"""Reads and writes Hugging Face directories of safetensors files, one or sharded.

Owns the container (https://github.com/huggingface/safetensors#format) and the shard index. It reads at offsets into fresh
aligned arrays instead of through the `safetensors` library, which maps the file: so the pages of the file do not count as
memory of ours, an array can go to a CPU device without a copy, and writing needs one tensor in memory, not a whole shard.
"""

from __future__ import annotations

import collections
import json
import math
import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from checkpoints.checkpoint import CheckpointBase, CheckpointError, TensorInfo, TokenizerFiles
from checkpoints.files import FileReader, aligned_empty, new_directory, parse_json_object, read_json_object
from checkpoints.fp8 import FLOAT32, check_method, dequantise, find_scaled, without_method
from checkpoints.hf_files import read_config, read_tokenizer, write_config, write_tokenizer

INDEX = "model.safetensors.index.json"
# The library's own limit on a header.
MAX_HEADER_BYTES = 100_000_000
DEFAULT_SHARD_BYTES = 4 << 30
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: `offset` counts bytes from the start of the file."""

    info: TensorInfo
    offset: int


class SafetensorsCheckpoint(CheckpointBase):
    """An open Hugging Face directory. `read` gives float32 for weights in FP8 that have scales."""

    def __init__(self, path: Path) -> None:
        stored_config = read_config(path)
        check_method(stored_config, str(path / "config.json"))
        self._files: list[FileReader] = []
        self._entries: dict[str, tuple[FileReader, Entry]] = {}
        try:
            for shard in shard_paths(path):
                self._add(shard)
            self._check_index(path)
            stored = {name: entry.info for name, (_, entry) in self._entries.items()}
            self._scaled = find_scaled(stored, stored_config, str(path))
            self._stored_config = stored_config
            tensors = {name: info for name, info in stored.items() if name not in self._scaled.hidden}
            tensors |= {name: TensorInfo(stored[name].shape, FLOAT32) for name in self._scaled.scales}
            super().__init__(path, without_method(stored_config), read_tokenizer(path), tensors)
        except BaseException:
            self.close()
            raise

    def read(self, name: str) -> np.ndarray:
        self.info(name)
        scale = self._scaled.scales.get(name)
        if scale is None:
            return self._read_stored(name)
        file, entry = self._entries[name]
        return dequantise(
            entry.info,
            self._read_stored(scale),
            self._stored_config,
            lambda target, start: file.read_into(target, entry.offset + start),
            f"{self.path}: {scale}",
        )

    def read_into(self, name: str, target: np.ndarray) -> None:
        self.info(name)
        if name in self._scaled.scales:
            super().read_into(name, target)
            return
        file, entry = self._entries[name]
        file.read_converted(target, entry.info.dtype, entry.offset)

    def _read_stored(self, name: str) -> np.ndarray:
        file, entry = self._entries[name]
        values = aligned_empty(entry.info.shape, entry.info.dtype)
        file.read_into(values, entry.offset)
        return values

    def stored_bytes(self) -> Mapping[str, int]:
        counts: collections.Counter[str] = collections.Counter()
        for _, entry in self._entries.values():
            counts[entry.info.dtype.name] += entry.info.nbytes
        return counts

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _add(self, shard: Path) -> None:
        file = FileReader(shard)
        self._files.append(file)
        for name, entry in read_header(file).items():
            if name in self._entries:
                raise CheckpointError(f"{shard}: tensor {name!r} is also in {self._entries[name][0].path.name}")
            self._entries[name] = file, entry

    def _check_index(self, directory: Path) -> None:
        """Every tensor that the index, if there is one, puts in a shard must be in that shard."""
        path = directory / INDEX
        if not path.is_file():
            return
        for name, shard in _weight_map(path).items():
            if name not in self._entries or self._entries[name][0].path.name != shard:
                raise CheckpointError(f"{path}: says that {shard} holds {name!r}, but it does not")


def shard_paths(directory: Path) -> list[Path]:
    """The safetensors files that make up a Hugging Face directory.

    They are those of the index; else `model.safetensors`; else the only file, or a complete numbered series.

    Raises:
        CheckpointError: a shard is missing, the index does not know one that is there, or it is not clear which files belong
            together.
    """
    index = directory / INDEX
    if index.is_file():
        paths = [directory / name for name in sorted(set(_weight_map(index).values()))]
        for path in paths:
            if not path.is_file():
                raise CheckpointError(f"{path}: missing; {INDEX} lists {len(paths)} shards")
        _check_surplus(directory, paths)
        return paths
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1 and not re.search(r"-of-\d+", found[0].name):
        return found
    return _numbered_series(directory, found)


def _check_surplus(directory: Path, listed: list[Path]) -> None:
    """No other file may be numbered as one of the same series; files of other names and series are others' affair."""

    def around_the_number(path: Path) -> tuple[str, ...]:
        return tuple(re.split(r"\d+(?=-of-\d)", path.name, maxsplit=1))

    series = {around_the_number(path) for path in listed}
    for path in sorted(directory.glob("*-of-*.safetensors")):
        if path not in listed and around_the_number(path) in series:
            raise CheckpointError(f"{path}: a shard that {INDEX} does not list; is the index of another save?")


def _numbered_series(directory: Path, found: list[Path]) -> list[Path]:
    matches = [re.fullmatch(r"(.*)-(\d+)-of-(\d+)\.safetensors", path.name) for path in found]
    series = {(match[1], int(match[3])) for match in matches if match}
    if len(series) != 1 or None in matches:
        names = ", ".join(path.name for path in found[:6])
        raise CheckpointError(f"{directory}: {INDEX} is missing, and {names} are not one numbered series")
    ((stem, count),) = series
    present = {int(match[2]) for match in matches if match}
    missing = sorted(set(range(1, count + 1)) - present)[:6] if count <= 100_000 else [count]
    if missing or len(present) != count:
        raise CheckpointError(f"{directory}: of the {count} shards {stem}-*.safetensors number {missing} is missing")
    return found


def _weight_map(path: Path) -> dict[str, str]:
    mapping = read_json_object(path).get("weight_map")
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(shard, str) for shard in mapping.values()):
        raise CheckpointError(f"{path}: weight_map must be an object from tensor names to file names, and not empty")
    for shard in mapping.values():
        if Path(shard).name != shard:
            raise CheckpointError(f"{path}: {shard!r} is not the name of a file beside it")
    return mapping


def read_header(file: FileReader) -> dict[str, Entry]:
    """Read and check the header of a safetensors file; every tensor it lists lies within the file.

    Raises:
        CheckpointError: naming the file.
    """
    if file.size < 8:
        raise CheckpointError(f"{file.path}: not a safetensors file: it has {file.size} bytes")
    prefix = np.empty(8, np.uint8)
    file.read_into(prefix, 0)
    (length,) = struct.unpack("<Q", prefix.tobytes())
    if length > min(MAX_HEADER_BYTES, file.size - 8):
        raise CheckpointError(
            f"{file.path}: truncated, corrupt or not a safetensors file: a header of {length} bytes in a file of {file.size}"
        )
    raw = np.empty(length, np.uint8)
    file.read_into(raw, 8)
    header = _unique_object(raw.tobytes(), f"{file.path}: header")
    header.pop("__metadata__", None)
    entries = {name: _entry(name, value, 8 + length, file) for name, value in header.items()}
    _check_layout(entries, 8 + length, file)
    return entries


def _unique_object(text: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object in which no name may occur twice at the top."""
    header = parse_json_object(text, where)
    seen: list[list[tuple[str, Any]]] = []

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen.append(pairs)
        return dict(pairs)

    json.loads(text, object_pairs_hook=keep)
    if len(seen[-1]) != len(header):
        counts = collections.Counter(name for name, _ in seen[-1])
        twice = next(name for name, number in counts.items() if number > 1)
        raise CheckpointError(f"{where}: tensor {twice!r} occurs twice")
    return header


def _entry(name: str, value: Any, start: int, file: FileReader) -> Entry:
    def is_count(number: Any) -> bool:
        return type(number) is int and 0 <= number < 1 << 63

    where = f"{file.path}: tensor {name!r}"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise CheckpointError(f"{where}: corrupt header entry {value!r:.200}")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise CheckpointError(f"{where}: dtype {code!r:.80} is not read; supported: {', '.join(DTYPES)}")
    # Of an empty tensor, too, the other sides must make an array that there can be.
    if not (isinstance(shape, list) and len(shape) <= 32 and all(map(is_count, shape)) and is_count(_volume(shape))):
        raise CheckpointError(f"{where}: corrupt shape {shape!r:.200}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)):
        raise CheckpointError(f"{where}: corrupt data_offsets {offsets!r:.200}")
    info = TensorInfo(tuple(shape), DTYPES[code])
    if offsets[1] - offsets[0] != info.nbytes:
        raise CheckpointError(f"{where}: {info} takes {info.nbytes} bytes, but data_offsets {offsets} span another number")
    if start + offsets[1] > file.size:
        raise CheckpointError(f"{where}: truncated: it ends at byte {start + offsets[1]}, but the file has {file.size}")
    return Entry(info, start + offsets[0])


def _volume(shape: list[int]) -> int:
    return 16 * math.prod(max(1, size) for size in shape)


def _check_layout(entries: Mapping[str, Entry], start: int, file: FileReader) -> None:
    """The format requires that tensors fill the file without holes or overlaps, which also finds trailing garbage."""
    at = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].info.nbytes)):
        if entry.offset != at:
            raise CheckpointError(f"{file.path}: tensor {name!r} starts at byte {entry.offset}, expected {at}")
        at += entry.info.nbytes
    if at != file.size:
        raise CheckpointError(f"{file.path}: tensors end at byte {at}, but the file has {file.size}")


def write_safetensors(
    target: Path,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], np.ndarray],
    config: Mapping[str, Any],
    tokenizer: TokenizerFiles | None,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    replace: bool = False,
) -> None:
    """Write a Hugging Face directory, with one tensor in memory at a time. It appears whole or not at all.

    Args:
        tensors: what to write, in this order.
        read: gives the array of a name; it must be as `tensors` says.
        shard_bytes: tensor bytes in a file at most, unless one tensor alone has more.
        replace: whether `target` may exist; it is deleted once the new one is complete.

    Raises:
        CheckpointError: `target` exists, or cannot be written, or a dtype has no name in the format.
    """
    for name, info in tensors.items():
        if info.dtype not in NAMES:
            raise CheckpointError(f"{target}: safetensors cannot hold {name!r}, which is {info}")
    shards = _split(tensors, shard_bytes)
    count = len(shards)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] if count > 1 else ["model.safetensors"]
    with new_directory(target, replace=replace) as directory:
        for file_name, shard in zip(names, shards, strict=True):
            with (directory / file_name).open("wb") as file:
                _write_shard(file, shard, read)
        if count > 1:
            weight_map = {name: file_name for file_name, shard in zip(names, shards, strict=True) for name in shard}
            total = sum(info.nbytes for info in tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        write_config(directory, config)
        write_tokenizer(directory, tokenizer)


def _split(tensors: Mapping[str, TensorInfo], shard_bytes: int) -> list[dict[str, TensorInfo]]:
    shards: list[dict[str, TensorInfo]] = [{}]
    size = 0
    for name, info in tensors.items():
        if shards[-1] and size + info.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = info
        size += info.nbytes
    return shards


def _write_shard(file: BinaryIO, shard: Mapping[str, TensorInfo], read: Callable[[str], np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, info in shard.items():
        header[name] = {
            "dtype": NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [at, at + info.nbytes],
        }
        at += info.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    # Spaces at the end of the header keep the tensors aligned to eight bytes, as the library writes them.
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name, info in shard.items():
        values = np.ascontiguousarray(read(name))
        assert (values.dtype, values.nbytes) == (info.dtype, info.nbytes), name
        file.write(memoryview(values.reshape(-1).view(np.uint8)))
    file.flush()
    os.fsync(file.fileno())
