"""Reads GGUF files: dequantises, and undoes what the conversion to GGUF did to names and rows.

Owns which tensor types are read. The header is `gguf_header`'s business, names and config are `gguf_config`'s, the tokenizer
is `gguf_tokenizer`'s.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from checkpoints.checkpoint import CheckpointBase, CheckpointError, TensorInfo
from checkpoints.files import FileReader, aligned_empty
from checkpoints.gguf_config import (
    ROPE_FACTORS,
    architecture_of,
    config_from_metadata,
    known_names,
    layer_head_counts,
    rows_from_interleaved,
)
from checkpoints.gguf_header import GgufTensor, read_header
from checkpoints.gguf_tokenizer import tokenizer_from_metadata

PLAIN: dict[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
QUANTISED: dict[GGMLQuantizationType, Any] = {
    GGMLQuantizationType.Q4_0: quants.Q4_0,
    GGMLQuantizationType.Q4_1: quants.Q4_1,
    GGMLQuantizationType.Q5_0: quants.Q5_0,
    GGMLQuantizationType.Q5_1: quants.Q5_1,
    GGMLQuantizationType.Q8_0: quants.Q8_0,
    GGMLQuantizationType.Q4_K: quants.Q4_K,
    GGMLQuantizationType.Q5_K: quants.Q5_K,
    GGMLQuantizationType.Q6_K: quants.Q6_K,
}
# Values dequantised at once: the temporaries of so many stay in the cache. `quants.dequantize` takes 16 rows at a time and
# copies the results together, which is three to ten times slower.
CHUNK_VALUES = 65_536


class GgufCheckpoint(CheckpointBase):
    """An open GGUF file. `read` gives float32 for quantised tensors."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        _check_kinds(header.tensors, path)
        self._file = FileReader(path)
        try:
            self._stored = header.tensors
            self._names = known_names(header.tensors)
            self._permute = architecture_of(header.metadata).interleaved
            shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
            config = config_from_metadata(header.metadata, shapes, self._rope_factors)
            tensors = {name: _info(header.tensors[stored]) for name, stored in self._names.items()}
            super().__init__(path, config, tokenizer_from_metadata(header.metadata), tensors)
            self._heads = layer_head_counts(config)
            self._check_permuted_rows()
        except BaseException:
            self._file.close()
            raise

    def read(self, name: str) -> np.ndarray:
        self.info(name)
        return self._read(self._stored[self._names[name]], self._row_order(name))

    def stored_bytes(self) -> Mapping[str, int]:
        counts: collections.Counter[str] = collections.Counter()
        for tensor in self._stored.values():
            counts[tensor.kind.name] += tensor.nbytes
        return counts

    def close(self) -> None:
        self._file.close()

    def _rope_factors(self) -> np.ndarray:
        return self._read(self._stored[ROPE_FACTORS], None).astype(np.float32)

    def _heads_of(self, name: str) -> int | None:
        """Heads whose rows are interleaved in this tensor, or None."""
        parts = name.split(".")
        return self._heads.get(parts[-2]) if self._permute and len(parts) > 1 else None

    def _check_permuted_rows(self) -> None:
        for name, info in self.tensors.items():
            heads = self._heads_of(name)
            if heads is not None and (not info.shape or info.shape[0] % (2 * heads)):
                raise CheckpointError(f"{self.path}: {name} {info} does not divide into {heads} heads of even size")

    def _row_order(self, name: str) -> np.ndarray | None:
        heads = self._heads_of(name)
        return None if heads is None else rows_from_interleaved(self.tensors[name].shape[0], heads)

    def _read(self, tensor: GgufTensor, row_order: np.ndarray | None) -> np.ndarray:
        plain = PLAIN.get(tensor.kind)
        raw = aligned_empty((tensor.nbytes,), np.dtype(np.uint8))
        self._file.read_into(raw, tensor.offset)
        if row_order is not None:
            # Quantised rows are whole blocks, so they are put in order before they grow to float32.
            rows = raw.reshape(len(row_order), -1)
            raw = np.take(rows, row_order, axis=0, out=aligned_empty(rows.shape, rows.dtype)).reshape(-1)
        if plain is not None:
            return raw.view(plain).reshape(tensor.shape)
        return _dequantise(raw, tensor)


def _check_kinds(tensors: dict[str, GgufTensor], path: Path) -> None:
    wrong = {t.name: t.kind.name for t in tensors.values() if t.kind not in PLAIN and t.kind not in QUANTISED}
    if wrong:
        name, kind = next(iter(wrong.items()))
        supported = ", ".join(sorted(k.name for k in (*PLAIN, *QUANTISED)))
        raise CheckpointError(
            f"{path}: tensor type {kind} of {name} (and of {len(wrong) - 1} more) is not read; supported: {supported}"
        )


def _info(tensor: GgufTensor) -> TensorInfo:
    return TensorInfo(tensor.shape, PLAIN.get(tensor.kind, np.dtype(np.float32)))


def _dequantise(raw: np.ndarray, tensor: GgufTensor) -> np.ndarray:
    kind = QUANTISED[tensor.kind]
    block_size, block_bytes = GGML_QUANT_SIZES[tensor.kind]
    blocks = raw.reshape(-1, block_bytes)
    values = aligned_empty((len(blocks), block_size), np.dtype(np.float32))
    step = max(1, CHUNK_VALUES // block_size)
    # A damaged scale may be infinite or NaN; that no checksum covers it is the format's weakness, not worth a warning.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(blocks), step):
            values[start : start + step] = kind.dequantize_blocks(blocks[start : start + step])
    return values.reshape(tensor.shape)
