"""Weights in eight-bit floating point with scales: which methods of quantisation are read, and the arithmetic.

Owns what `quantization_config` may say, which tensor holds a weight's scales, and how both become float32. Knows no file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.checkpoint import CheckpointError, TensorInfo
from checkpoints.files import aligned_empty

FP8 = frozenset(np.dtype(kind) for kind in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
FLOAT32 = np.dtype(np.float32)
SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""Of a weight's name. DeepSeek calls "inverse" what multiplies, like everybody else's."""
ACTIVATION_SCALES = ("input_scale", "input_global_scale", "input_activation_scale", "output_scale")
"""Beside a weight, where activations were quantised too. Ours are not."""
CHUNK_VALUES = 1 << 18
"""Values dequantised at once, so that they are scaled while they are in the cache."""
READ_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors (8-bit float)", "modelopt (FP8)")


def check_method(config: Mapping[str, Any], where: str) -> None:
    """Raise a `CheckpointError` that names the method if weights were quantised by one that is not read."""
    found = _quantization_config(config)
    if not found:
        return
    method = str(found.get("quant_method") or found.get("quant_algo") or "an unnamed method")
    problem = _CHECKS.get(method, _unknown)(found)
    if problem is not None:
        raise CheckpointError(
            f"{where}: weights are quantised by {method}{problem}, which is not read; read are {', '.join(READ_METHODS)}. "
            "Take the model without quantisation, one in FP8 with scales, or a GGUF file of it."
        )


def without_method(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` as it is of the weights that are read, which are no longer quantised."""
    plain = {key: value for key, value in config.items() if key not in _CONFIG_KEYS}
    nested = plain.get("text_config")
    return plain | {"text_config": without_method(nested)} if isinstance(nested, Mapping) else plain


_CONFIG_KEYS = ("quantization_config", "compression_config")


def _quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    parts = [config, nested] if isinstance(nested, Mapping) else [config]
    found = [part[key] for part in parts for key in _CONFIG_KEYS if isinstance(part.get(key), Mapping)]
    return found[0] if found else {}


def _nothing_wrong(config: Mapping[str, Any]) -> str | None:
    return None


def _unknown(config: Mapping[str, Any]) -> str | None:
    bits = config.get("bits") or config.get("w_bit")
    if config.get("load_in_4bit") or config.get("load_in_8bit"):
        bits = 4 if config.get("load_in_4bit") else 8
    return f" ({bits} bits)" if type(bits) is int else ""


def _compressed_tensors(config: Mapping[str, Any]) -> str | None:
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and (weights.get("type"), weights.get("num_bits")) != ("float", 8):
            return f" ({weights.get('num_bits')}-bit {weights.get('type')})"
    sparsity = config.get("sparsity_config")
    form = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) and sparsity else "dense"
    return None if form == "dense" else f" ({form})"


def _modelopt(config: Mapping[str, Any]) -> str | None:
    algorithm = config.get("quant_algo")
    return None if algorithm in ("FP8", None) else f" ({algorithm})"


_CHECKS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "fp8": _nothing_wrong,
    "fbgemm_fp8": _nothing_wrong,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "FP8": _nothing_wrong,
}


@dataclass(frozen=True, slots=True)
class ScaledWeights:
    """Which tensors are weights with scales.

    Attributes:
        scales: name of each weight in eight bits to that of its scales.
        hidden: names of tensors that nobody else needs to see: those scales, and those of activations.
    """

    scales: Mapping[str, str]
    hidden: frozenset[str]


def find_scaled(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], where: str) -> ScaledWeights:
    """Find the scales of all weights in eight bits.

    Raises:
        CheckpointError: `config` says that weights have scales and one has none, or their shape fits no weight's.
    """
    scales: dict[str, str] = {}
    for name, info in tensors.items():
        if info.dtype in FP8:
            scale = next((name + suffix for suffix in SCALE_SUFFIXES if name + suffix in tensors), None)
            if scale is not None:
                _groups(info.shape, tensors[scale].shape, _block(config), f"{where}: {scale}")
                scales[name] = scale
            elif _quantization_config(config):
                raise CheckpointError(f"{where}: {name} is {info}, but there is no {name}_scale or {name}_scale_inv beside it")
    stems = {name.rpartition(".")[0] for name in scales}
    unused = {f"{stem}.{kind}" for stem in stems for kind in ACTIVATION_SCALES}
    return ScaledWeights(scales, frozenset(scales.values()) | (unused & tensors.keys()))


def _block(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale where scales are a table: as declared, else what everybody takes."""
    found = _quantization_config(config)
    groups = found.get("config_groups")
    of_groups = [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    of_weights = [group["weights"] for group in of_groups if isinstance(group.get("weights"), Mapping)]
    declared = [found.get("weight_block_size"), *(weights.get("block_structure") for weights in of_weights)]
    for size in declared:
        if isinstance(size, list) and len(size) == 2 and all(type(side) is int and side > 0 for side in size):
            return size[0], size[1]
    return 128, 128


def _groups(shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int], where: str) -> tuple[int, int]:
    """How many rows and columns share a scale, once leading axes are rows."""
    rows, columns = int(np.prod(shape[:-1], dtype=np.int64)), shape[-1] if shape else 1
    if int(np.prod(scale, dtype=np.int64)) == 1:
        return max(rows, 1), max(columns, 1)
    if scale in (shape[:-1], (*shape[:-1], 1)):
        return 1, max(columns, 1)
    if len(scale) == len(shape) > 2 and all(have in (1, want) for have, want in zip(scale, (*shape[:-1], 1), strict=True)):
        return 1, max(columns, 1)
    blocks = tuple(-(-side // length) for side, length in zip(shape[-2:], block, strict=False))
    if len(shape) == 2 and scale == blocks:
        return block
    raise CheckpointError(
        f"{where}: scales of shape {scale} do not fit a weight of shape {shape}: expected one, one a row, or one for each "
        f"{block[0]} x {block[1]} block"
    )


def dequantise(
    info: TensorInfo,
    scale: np.ndarray,
    config: Mapping[str, Any],
    read_rows: Callable[[np.ndarray, int], None],
    where: str,
) -> np.ndarray:
    """A weight in float32: what is stored times its scales.

    Args:
        info: of the weight as stored.
        scale: as stored.
        read_rows: fills an array of bytes with the weight's, from this byte on.
    """
    if not math.prod(info.shape):
        return aligned_empty(info.shape, FLOAT32)
    block = _block(config)
    rows_of_scale, columns_of_scale = _groups(info.shape, scale.shape, block, where)
    columns = info.shape[-1] if info.shape else 1
    values = aligned_empty(info.shape, FLOAT32)
    flat = values.reshape(-1, columns)
    if scale.ndim == len(info.shape) > 2 and scale.size > 1:
        scale = np.broadcast_to(scale, (*info.shape[:-1], 1))
    factors = scale.astype(np.float32).reshape(-(-len(flat) // rows_of_scale), -1)
    if columns_of_scale < columns:
        factors = np.repeat(factors, columns_of_scale, axis=1)[:, :columns]
    table = np.arange(256, dtype=np.uint8).view(info.dtype).astype(np.float32)
    step = max(1, CHUNK_VALUES // max(columns, 1))
    if rows_of_scale > 1:
        step = min(rows_of_scale, step)
    start = 0
    while start < len(flat):
        # A chunk of rows lies within one row of scales, or has a row of them for each of its own.
        stop = min(len(flat), start + step, (start // rows_of_scale + 1) * rows_of_scale if rows_of_scale > 1 else len(flat))
        raw = np.empty((stop - start, columns), np.uint8)
        read_rows(raw, start * columns)
        chunk = flat[start:stop]
        np.take(table, raw, out=chunk, mode="clip")
        group = start // rows_of_scale
        chunk *= factors[group : group + 1] if rows_of_scale > 1 else factors[start:stop]
        start = stop
    return values
