"""The header of a GGUF file: metadata and where each tensor lies.

Owns the container format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), versions 2 and 3. Knows nothing of
what keys or tensors mean. The `gguf` package's own reader makes several arrays for each of some 100,000 strings, which takes
seconds, and answers a broken file with errors from inside NumPy; this one takes some 30 ms and checks every length.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from checkpoints.checkpoint import GGUF_MAGIC, CheckpointError
from checkpoints.files import naming
from checkpoints.gguf_metadata import GgufMetadata

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NAME_BYTES = 65_535
STRING, ARRAY = 8, 9
SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor as stored.

    Attributes:
        shape: in NumPy's order, the reverse of the file's.
        offset: bytes from the start of the file.
        nbytes: stored bytes.
    """

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata and tensors by stored name."""

    metadata: GgufMetadata
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of the GGUF file `path`; every tensor it lists lies within the file.

    Raises:
        CheckpointError: naming the file and the byte at which it stops making sense.
    """
    with naming(path), path.open("rb") as file:
        if path.stat().st_size < len(GGUF_MAGIC):
            raise CheckpointError(f"{path}: not a GGUF file: it has {path.stat().st_size} bytes")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).parse()


class _Parser:
    """A cursor over the mapped file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def parse(self) -> GgufHeader:
        magic = self.take(4, "magic")
        if magic != GGUF_MAGIC:
            raise self.error(f"not a GGUF file: it starts with {magic!r}, expected {GGUF_MAGIC!r}")
        version = self.u32("version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            found = "a big-endian file" if swapped else f"version {version}"
            raise self.error(f"GGUF versions 2 and 3, little-endian, are supported, found {found}")
        num_tensors, num_keys = self.u64("tensor count"), self.u64("metadata count")
        # The shortest entries there can be bound the counts, so that an absurd one fails here and not after hours.
        self.require(num_keys * 13 + num_tensors * 24, f"{num_keys} metadata entries and {num_tensors} tensors")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.name("metadata key")
            if key in metadata:
                raise self.error(f"metadata key {key!r} occurs twice")
            metadata[key] = self.value(self.u32(f"type of {key!r}"), key)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.error(f"general.alignment must be a power of two, found {alignment!r}")
        entries = [self.tensor_entry() for _ in range(num_tensors)]
        start = -(-self.at // alignment) * alignment
        return GgufHeader(GgufMetadata(self.path, metadata), self.place(entries, start, alignment))

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message} (at byte {self.at} of {self.size})")

    def require(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            raise self.error(f"truncated or corrupt: {what} would end after the end of the file")

    def take(self, count: int, what: str) -> bytes:
        self.require(count, what)
        start = self.at
        self.at += count
        return self.data[start : self.at]

    def u32(self, what: str) -> int:
        return U32.unpack(self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return U64.unpack(self.take(8, what))[0]

    def name(self, what: str) -> str:
        length = self.u64(f"length of a {what}")
        if length > MAX_NAME_BYTES:
            raise self.error(f"corrupt: a {what} of {length} bytes")
        return self.decode(self.take(length, what), what)

    def decode(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"corrupt: {what} is not UTF-8: {raw[:40]!r}") from error

    def value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self.decode(self.take(self.u64(f"length of {key!r}"), repr(key)), repr(key))
        if kind == ARRAY:
            return self.array(key)
        if kind not in SCALARS:
            raise self.error(f"corrupt: {key!r} has the unknown type {kind}")
        dtype = SCALARS[kind]
        return np.frombuffer(self.take(dtype.itemsize, repr(key)), dtype)[0].item()

    def array(self, key: str) -> Any:
        kind, count = self.u32(f"element type of {key!r}"), self.u64(f"length of {key!r}")
        if kind == STRING:
            return self.strings(count, key)
        if kind not in SCALARS:
            raise self.error(f"{key!r} is an array of type {kind}; arrays of numbers and strings are supported")
        dtype = SCALARS[kind]
        return np.frombuffer(self.take(count * dtype.itemsize, repr(key)), dtype)

    def strings(self, count: int, key: str) -> list[str]:
        self.require(count * 8, f"{count} strings of {key!r}")
        # A vocabulary is the bulk of a header, so this loop alone keeps the cursor in locals.
        data, size, at = self.data, self.size, self.at
        unpack: Callable[..., tuple[int]] = U64.unpack_from
        strings = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(data, at)[0]
                if at > size:
                    raise struct.error
                strings.append(data[start:at].decode("utf-8"))
        except struct.error:
            raise self.error(
                f"truncated or corrupt: string {len(strings)} of {key!r} ends after the end of the file"
            ) from None
        except UnicodeDecodeError as error:
            raise self.error(f"corrupt: string {len(strings)} of {key!r} is not UTF-8") from error
        self.at = at
        return strings

    def tensor_entry(self) -> GgufTensor:
        name = self.name("tensor name")
        num_dims = self.u32(f"rank of {name!r}")
        if num_dims > MAX_DIMS:
            raise self.error(f"corrupt: tensor {name!r} has {num_dims} dimensions, expected at most {MAX_DIMS}")
        shape = tuple(self.u64(f"shape of {name!r}") for _ in range(num_dims))[::-1]
        if 0 in shape:
            raise self.error(f"corrupt: tensor {name!r} of shape {shape} is empty")
        code = self.u32(f"type of {name!r}")
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise self.error(f"tensor {name!r} has the unknown type {code}") from None
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        if block_size > 1 and (not shape or shape[-1] % block_size):
            raise self.error(
                f"corrupt: tensor {name!r} of shape {shape} does not divide into {kind.name} blocks of {block_size}"
            )
        nbytes = math.prod(shape) // block_size * block_bytes
        return GgufTensor(name, kind, shape, self.u64(f"offset of {name!r}"), nbytes)

    def place(self, entries: list[GgufTensor], start: int, alignment: int) -> dict[str, GgufTensor]:
        """Turn offsets into the data section into offsets into the file, checking that each tensor lies inside."""
        tensors: dict[str, GgufTensor] = {}
        for entry in entries:
            if entry.name in tensors:
                raise self.error(f"tensor {entry.name!r} occurs twice")
            if entry.offset % alignment:
                raise self.error(f"corrupt: tensor {entry.name!r} at offset {entry.offset}, not a multiple of {alignment}")
            end = start + entry.offset + entry.nbytes
            if end > self.size:
                raise CheckpointError(
                    f"{self.path}: truncated or corrupt: tensor {entry.name!r} {entry.shape} {entry.kind.name} "
                    f"ends at byte {end}, but the file has {self.size}"
                )
            tensors[entry.name] = GgufTensor(entry.name, entry.kind, entry.shape, start + entry.offset, entry.nbytes)
        return tensors
