"""Which implementation of `paged_attention` a platform gets, and why: decided once, at start-up, and never silently.

Knows the kernels' limits by their own checks; knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
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


def choose(platform: str, device_kind: str, shape: Shape, asked: str = "auto") -> tuple[str, str]:
    """Name of the implementation and the reason for it, in words for the log.

    Args:
        platform: as `jax.Device.platform` has it.
        device_kind: as `jax.Device.device_kind` has it.
        asked: an implementation to take whatever the platform; "auto" leaves the choice here.

    Raises:
        ValueError: the implementation that was asked for does not take this model or does not run on this platform.
    """
    if asked != "auto":
        _check_asked(asked, platform, device_kind, shape)
        return asked, "it was asked for"
    match platform:
        case "tpu":
            return _choose_tpu(device_kind, shape)
        case "cpu":
            return _choose_cpu(shape)
        case "gpu" | "cuda":
            return "xla", _not_gpu(device_kind, shape)
        case _:
            return "xla", f"no kernel is written for platform {platform}"


def _check_asked(asked: str, platform: str, device_kind: str, shape: Shape) -> None:
    platforms = {"cpu": ("cpu",), "tpu": ("tpu",), "gpu": ("gpu", "cuda")}
    if platform not in platforms.get(asked, (platform,)):
        raise ValueError(f'attention "{asked}" does not run on platform {platform}; take "auto" or "xla"')
    if asked == "cpu":
        _check_cpu(shape)
    elif asked == "tpu":
        _check_tpu(shape)
    elif asked == "gpu":
        if not is_hopper(device_kind):
            raise ValueError(f'attention "gpu" is for Hopper, and this is {device_kind}; take "auto" or "xla"')
        _check_gpu(shape)


def _choose_cpu(shape: Shape) -> tuple[str, str]:
    try:
        _check_cpu(shape)
    except ValueError as error:
        return "xla", f"the kernels for CPUs do not take this model: {error}"
    return "cpu", "the kernels for CPUs take this model"


def _check_cpu(shape: Shape) -> None:
    from pallas_kernels.paged_attention import cpu

    stored = str(pool_dtype("cpu", shape.kv_dtype))
    cpu.check(shape.num_heads // shape.num_kv_heads, shape.head_dim, shape.page_size, stored)


def _check_gpu(shape: Shape) -> None:
    from pallas_kernels.paged_attention import gpu

    has_scales = jnp.dtype(shape.kv_dtype) != jnp.dtype(shape.dtype)
    gpu.check(**{field.name: getattr(shape, field.name) for field in fields(shape)}, has_scales=has_scales)


def is_hopper(device_kind: str) -> bool:
    """Whether a GPU has what the kernels for GPUs are written for."""
    from pallas_kernels.paged_attention import gpu

    return any(name in device_kind for name in gpu.HOPPER)


def _not_gpu(device_kind: str, shape: Shape) -> str:
    """Why no GPU has the kernel by default."""
    from pallas_kernels.paged_attention import gpu

    if not is_hopper(device_kind):
        return f"the GPU kernel is for Hopper ({', '.join(gpu.HOPPER)}), and this is {device_kind}"
    try:
        _check_gpu(shape)
    except ValueError as error:
        return f"the GPU kernel does not take this model: {error}"
    return 'the GPU kernel has been compiled and interpreted but not yet run on a GPU; attention "gpu" asks for it'


def _choose_tpu(device_kind: str, shape: Shape) -> tuple[str, str]:
    try:
        _check_tpu(shape)
    except ValueError as error:
        return "xla", f"the TPU kernel does not take this model: {error}"
    return "tpu", f"the Pallas kernel takes this model on {device_kind}"


def _check_tpu(shape: Shape) -> None:
    from pallas_kernels.paged_attention import tpu

    dtypes = jnp.dtype(shape.dtype), jnp.dtype(shape.kv_dtype)
    tpu.check(*dtypes, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.page_size)


def pool_dtype(impl: str, kv_dtype: Any) -> Any:
    """Data type in which an implementation wants its pool. XLA's CPU backend scatters into float8 by converting the whole pool
    and back, so what is read and written there are its bits."""
    kv_dtype = jnp.dtype(kv_dtype)
    return jnp.dtype(jnp.uint8) if impl in ("cpu", "xla") and kv_dtype == jnp.float8_e4m3fn else kv_dtype


def pool_width(impl: str, head_dim: int) -> int:
    """Width of the KV pool's rows for an implementation: K and V side by side, and padding where it needs some."""
    if impl != "tpu":
        return 2 * head_dim
    from pallas_kernels.paged_attention import tpu_kernel  # what other platforms need not import

    return tpu_kernel.pool_width(head_dim)
