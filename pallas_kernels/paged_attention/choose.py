"""Which implementation of `paged_attention` a platform gets, and why: decided once, at start-up, and never silently.

Knows the kernels' limits by their own checks; knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of an engine the choice depends on, on one device."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: Any
    kv_dtype: Any


def choose(platform: str, device_kind: str, shape: Shape) -> tuple[str, str]:
    """Name of the implementation and the reason for it, in words for the log.

    Args:
        platform: as `jax.Device.platform` has it.
        device_kind: as `jax.Device.device_kind` has it.
    """
    match platform:
        case "tpu":
            return _choose_tpu(device_kind, shape)
        case "cpu":
            return "xla", "on CPU plain XLA is the fast path"
        case "gpu" | "cuda":
            return "xla", f"no kernel is chosen for GPUs yet, nor for {device_kind}"
        case _:
            return "xla", f"no kernel is written for platform {platform}"


def _choose_tpu(device_kind: str, shape: Shape) -> tuple[str, str]:
    from pallas_kernels.paged_attention import tpu

    try:
        tpu.check(
            jnp.dtype(shape.dtype),
            jnp.dtype(shape.kv_dtype),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
        )
    except ValueError as error:
        return "xla", f"the TPU kernel does not take this model: {error}"
    return "tpu", f"the Pallas kernel takes this model on {device_kind}"


def pool_width(impl: str, head_dim: int) -> int:
    """Width of the KV pool's rows for an implementation: K and V side by side, and padding where it needs some."""
    if impl != "tpu":
        return 2 * head_dim
    from pallas_kernels.paged_attention import tpu_kernel  # what other platforms need not import

    return tpu_kernel.pool_width(head_dim)
