"""Which implementation of `grouped_matmul` a platform gets, and why: decided once, at start-up, and never silently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallas_kernels.grouped_matmul import gpu
from pallas_kernels.paged_attention.choose import is_hopper


def choose(platform: str, device_kind: str, shapes: Sequence[tuple[int, int, int]], dtype: Any) -> tuple[str, str]:
    """Name of the implementation and the reason for it, in words for the log.

    Args:
        platform, device_kind: as `jax.Device` has them.
        shapes: `[X, out, in]` of the matrices that one device has.
    """
    match platform:
        case "tpu":
            return "tpu", "XLA has a kernel of its own there"
        case "cpu":
            return "xla", "on CPU a loop over tiles of rows is the fast path"
        case "gpu" | "cuda":
            return _choose_gpu(device_kind, shapes, dtype)
        case _:
            return "xla", f"no kernel is written for platform {platform}"


def _choose_gpu(device_kind: str, shapes: Sequence[tuple[int, int, int]], dtype: Any) -> tuple[str, str]:
    if not is_hopper(device_kind):
        return "xla", f"jax's kernel is for Hopper, and this is {device_kind}"
    try:
        for shape in shapes:
            gpu.check(shape, dtype)
    except ValueError as error:
        return "xla", str(error)
    return "gpu", "jax's kernel for Hopper takes these experts"
