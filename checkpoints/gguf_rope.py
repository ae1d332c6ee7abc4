"""How a GGUF file's rotary embedding reads in `config.json`: part of the head, base, and how frequencies are stretched.

GGUF stores some kinds as numbers and some as tensors of what each frequency is divided by. Knows no architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from checkpoints.checkpoint import CheckpointError
from checkpoints.gguf_metadata import ArchitectureKeys

ROPE_FREQS = "rope_freqs.weight"
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = {ROPE_FREQS, ROPE_LONG, ROPE_SHORT}
# What every published model with Llama 3's rotary scaling uses; GGUF stores only the factors that come of it.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def rope_settings(
    keys: ArchitectureKeys,
    config: Mapping[str, Any],
    stored: Collection[str],
    read: Callable[[str], np.ndarray],
    *,
    partial: bool,
) -> dict[str, Any]:
    """Keys of `config.json` about the rotary embedding.

    Args:
        config: the sizes that were read before.
        stored: names of the file's tensors.
        read: one of them, as float32.
        partial: whether an architecture may rotate less than whole heads.
    """
    head_dim = config["head_dim"]
    dim = keys.count("rope.dimension_count", head_dim)
    if dim > head_dim or dim % 2 or (dim < head_dim and not partial):
        raise keys.error("rope.dimension_count", f"the head size ({head_dim})")
    theta = keys.positive("rope.freq_base", 10_000.0)
    settings: dict[str, Any] = {"rope_theta": theta, "rope_scaling": _scaling(keys, config, stored, read, theta, dim)}
    if dim < head_dim:
        part = dim / head_dim
        settings["partial_rotary_factor"] = part if int(head_dim * part) == dim else math.nextafter(part, 1.0)
    return settings


def _scaling(
    keys: ArchitectureKeys,
    config: Mapping[str, Any],
    stored: Collection[str],
    read: Callable[[str], np.ndarray],
    theta: float,
    dim: int,
) -> dict[str, Any] | None:
    def factors(name: str) -> np.ndarray:
        values = read(name)
        if values.shape != (dim // 2,) or not (np.isfinite(values) & (values > 0)).all():
            raise CheckpointError(
                f"{keys.metadata.path}: {name} must hold {dim // 2} positive rotary factors, found {values.shape}: "
                f"{values.reshape(-1)[:4].tolist()}"
            )
        return values

    if ROPE_FREQS in stored:
        return _llama3_scaling(factors(ROPE_FREQS), theta, dim, keys.original_context(config))
    if ROPE_LONG in stored and ROPE_SHORT in stored:
        return _longrope(keys.positive("rope.scaling.attn_factor", 1.0), factors(ROPE_SHORT), factors(ROPE_LONG), keys, config)
    kind = keys.text("rope.scaling.type") or "linear"
    factor = keys.positive("rope.scaling.factor", keys.positive("rope.scale_linear", 1.0))
    if kind == "yarn":
        return _yarn(keys, config, factor)
    if kind not in ("none", "linear"):
        raise keys.error("rope.scaling.type", f"none, linear, yarn, or longrope with {ROPE_LONG} and {ROPE_SHORT}")
    return None if kind == "none" or factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _longrope(
    attention_factor: float, short: np.ndarray, long: np.ndarray, keys: ArchitectureKeys, config: Mapping[str, Any]
) -> dict[str, Any]:
    original = keys.original_context(config)
    return {
        "rope_type": "longrope",
        "factor": config["max_position_embeddings"] / original,
        "original_max_position_embeddings": original,
        "attention_factor": attention_factor,
        "short_factor": _decimals(short),
        "long_factor": _decimals(long),
    }


def _decimals(factors: np.ndarray) -> list[float]:
    return [float(f"{factor:.7g}") for factor in factors.tolist()]


def _yarn(keys: ArchitectureKeys, config: Mapping[str, Any], factor: float) -> dict[str, Any]:
    if keys.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise keys.error("rope.scaling.yarn_ext_factor", "1.0, which alone is supported")
    growth = 0.1 * math.log(max(factor, 1.0))
    divisor = 1.0 + growth * keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    if divisor <= 0:
        raise keys.error("rope.scaling.yarn_log_multiplier", f"above {-1 / growth:.3g}, where attention would vanish")
    attention = (1.0 + growth) / divisor
    attention = keys.positive("rope.scaling.yarn_attn_factor", attention)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.original_context(config),
        "beta_fast": keys.positive("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.positive("rope.scaling.yarn_beta_slow", 1.0),
        "attention_factor": attention * keys.positive("rope.scaling.attn_factor", 1.0),
    }


def llama3_factors(factor: float, theta: float, head_dim: int) -> np.ndarray:
    """What Llama 3's scaling divides each rotary frequency by: [head_dim / 2]."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((LLAMA3_ORIGINAL / wavelength - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _llama3_scaling(factors: np.ndarray, theta: float, dim: int, original: int) -> dict[str, Any] | None:
    factor = float(f"{factors.max():.7g}")
    if not np.allclose(factors, llama3_factors(factor, theta, dim), rtol=1e-4):
        # Made with other settings: the factors as they are, in every context, which is long rope with one set of them.
        own = _decimals(factors)
        return {
            "rope_type": "longrope",
            "factor": 1.0,
            "original_max_position_embeddings": original,
            "attention_factor": 1.0,
            "short_factor": own,
            "long_factor": own,
        }
    if factor == 1.0:
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_ORIGINAL,
    }
