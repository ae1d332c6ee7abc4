"""Reads GGUF files: dequantises, and undoes what the conversion to GGUF did to names and rows.

Owns which tensor types are read. The header is `gguf_header`'s business, what is which part of which tensor is
`gguf_names`'s, the config is `gguf_config`'s, the tokenizer is `gguf_tokenizer`'s.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from checkpoints.checkpoint import CheckpointBase, CheckpointError, TensorInfo
from checkpoints.files import FileReader, aligned_empty
from checkpoints.gguf_architectures import architecture_of
from checkpoints.gguf_config import config_from_metadata
from checkpoints.gguf_header import GgufTensor, read_header
from checkpoints.gguf_names import Part, parts_of, rows_from_interleaved
from checkpoints.gguf_tokenizer import tokenizer_from_metadata

PLAIN: dict[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
# NVFP4 is left out: its tensors have a second scale, in a tensor of their own.
QUANTISED: dict[GGMLQuantizationType, Any] = {
    kind.qtype: kind
    for kind in (
        *(quants.Q4_0, quants.Q4_1, quants.Q5_0, quants.Q5_1, quants.Q8_0),
        *(quants.Q2_K, quants.Q3_K, quants.Q4_K, quants.Q5_K, quants.Q6_K),
        *(quants.IQ1_S, quants.IQ1_M, quants.IQ2_XXS, quants.IQ2_XS, quants.IQ2_S),
        *(quants.IQ3_XXS, quants.IQ3_S, quants.IQ4_NL, quants.IQ4_XS),
        *(quants.TQ1_0, quants.TQ2_0, quants.MXFP4),
    )
}
# Values dequantised at once: the temporaries of so many stay in the cache. `quants.dequantize` takes 16 rows at a time and
# copies the results together, which is three to ten times slower.
CHUNK_VALUES = 65_536


class GgufCheckpoint(CheckpointBase):
    """An open GGUF file. `read` gives float32 for quantised tensors."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        num_files = header.metadata.optional_count("split.count") or 1
        if num_files > 1:
            raise CheckpointError(
                f"{path}: is one of {num_files} files of a model; "
                "join them first: llama-gguf-split --merge FIRST.gguf WHOLE.gguf"
            )
        _prepare(header.tensors, path)
        self._file = FileReader(path)
        try:
            self._stored = header.tensors
            shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
            row = architecture_of(header.metadata)
            config = config_from_metadata(header.metadata, shapes, self._read_stored)
            self._parts = _parts(shapes, row, config, path)
            tensors = {name: self._info(part) for name, part in self._parts.items()}
            super().__init__(path, config, tokenizer_from_metadata(header.metadata), tensors)
        except BaseException:
            self._file.close()
            raise

    def read(self, name: str) -> np.ndarray:
        self.info(name)
        return self._read(self._parts[name])

    def read_into(self, name: str, target: np.ndarray) -> None:
        part = self._parts.get(name)
        if part is None or part.offset or self._stored[part.stored].kind in PLAIN:
            super().read_into(name, target)
        else:
            _dequantise(self._read_raw(part), self._stored[part.stored].kind, target)

    def stored_bytes(self) -> Mapping[str, int]:
        counts: collections.Counter[str] = collections.Counter()
        for tensor in self._stored.values():
            counts[tensor.kind.name] += tensor.nbytes
        return counts

    def close(self) -> None:
        self._file.close()

    def _info(self, part: Part) -> TensorInfo:
        stored = PLAIN.get(self._stored[part.stored].kind)
        return TensorInfo(part.shape, np.dtype(np.float32) if stored is None or part.offset else stored)

    def _read_stored(self, stored: str) -> np.ndarray:
        return self._read(Part(stored, 0, self._stored[stored].shape)).astype(np.float32, copy=False)

    def _read(self, part: Part) -> np.ndarray:
        kind = self._stored[part.stored].kind
        raw, plain = self._read_raw(part), PLAIN.get(kind)
        if plain is None:
            values = aligned_empty(part.shape, np.dtype(np.float32))
            _dequantise(raw, kind, values)
        else:
            values = raw.view(plain).reshape(part.shape)
        return values if not part.offset else values.astype(np.float32) + np.float32(part.offset)

    def _read_raw(self, part: Part) -> np.ndarray:
        """Bytes of a part, its rows in the order that it wants."""
        tensor = self._stored[part.stored]
        # Rows are whole blocks, and parts are whole rows.
        block_size, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        raw = aligned_empty((math.prod(part.shape) // block_size * block_bytes,), np.dtype(np.uint8))
        self._file.read_into(raw, tensor.offset + part.start // block_size * block_bytes)
        if part.heads:
            # Quantised rows are put in order before they grow to float32.
            rows = raw.reshape(part.shape[0], -1)
            order = rows_from_interleaved(part.shape[0], part.heads)
            raw = np.take(rows, order, axis=0, out=aligned_empty(rows.shape, rows.dtype)).reshape(-1)
        return raw


def _parts(shapes: dict[str, tuple[int, ...]], row: Any, config: dict[str, Any], path: Path) -> dict[str, Part]:
    try:
        return parts_of(shapes, row, config)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _prepare(tensors: dict[str, GgufTensor], path: Path) -> None:
    """Check that all types are known, and make the tables that some need, which threads would otherwise make at once."""
    wrong = {t.name: t.kind.name for t in tensors.values() if t.kind not in PLAIN and t.kind not in QUANTISED}
    if wrong:
        name, kind = next(iter(wrong.items()))
        supported = ", ".join(sorted(k.name for k in (*PLAIN, *QUANTISED)))
        raise CheckpointError(
            f"{path}: tensor type {kind} of {name} (and of {len(wrong) - 1} more) is not read; supported: {supported}"
        )
    for quantised in {t.kind for t in tensors.values()} & set(QUANTISED):
        QUANTISED[quantised].init_grid()


def _dequantise(raw: np.ndarray, quantisation: GGMLQuantizationType, target: np.ndarray) -> None:
    """Write what the bytes mean into `target`, C-contiguous, converted to its dtype."""
    kind = QUANTISED[quantisation]
    block_size, block_bytes = GGML_QUANT_SIZES[quantisation]
    blocks = raw.reshape(-1, block_bytes)
    values = target.reshape(len(blocks), block_size)
    step = max(1, CHUNK_VALUES // block_size)
    # A damaged scale may be infinite or NaN; that no checksum covers it is the format's weakness, not worth a warning.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(blocks), step):
            values[start : start + step] = kind.dequantize_blocks(blocks[start : start + step])
