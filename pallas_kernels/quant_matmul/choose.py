"""Which implementation of `quant_matmul` a platform gets, and why: decided once, at start-up, and never silently."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.paged_attention.choose import is_hopper


def choose(platform: str, device_kind: str, dtype: Any, asked: str = "auto") -> tuple[str, str]:
    """Name of the implementation and the reason for it, in words for the log.

    Args:
        platform, device_kind: as `jax.Device` has them.
        dtype: of the activations.
        asked: an implementation to take whatever the platform; "auto" leaves the choice here.

    Raises:
        ValueError: the implementation that was asked for does not run here.
    """
    if asked != "auto":
        problem = _problem(asked, platform, device_kind, dtype)
        if problem:
            raise ValueError(f'quant_matmul "{asked}" {problem}; take "auto" or "xla"')
        return asked, "it was asked for"
    match platform:
        case "tpu":
            return "tpu", f"the Pallas kernel takes all shapes on {device_kind}"
        case "cpu":
            return "xla", "on CPU plain XLA is the fast path"
        case "gpu" | "cuda":
            problem = _problem("gpu", platform, device_kind, dtype)
            not_proven = 'has been compiled and interpreted but not yet run on a GPU; quant_matmul "gpu" asks for it'
            return "xla", f"the GPU kernel {problem or not_proven}"
        case _:
            return "xla", f"no kernel is written for platform {platform}"


def _problem(impl: str, platform: str, device_kind: str, dtype: Any) -> str:
    """Why an implementation does not run there; nothing if it does."""
    platforms = {"tpu": ("tpu",), "gpu": ("gpu", "cuda")}
    if platform not in platforms.get(impl, (platform,)):
        return f"does not run on platform {platform}"
    if impl == "gpu" and not is_hopper(device_kind):
        return f"is for Hopper, and this is {device_kind}"
    if impl == "gpu" and jnp.dtype(dtype) != jnp.bfloat16:
        return f"takes activations in bfloat16, and these are {jnp.dtype(dtype).name}"
    return ""


def options_for(impl: str, platform: str) -> dict[str, int]:
    """Sizes for `lay_out`, where the implementation's own are another platform's."""
    # Elsewhere than on a CPU, XLA fuses the conversion into a product of the whole matrix.
    return {"digits": 0, "few_tokens": 0, "tile_weights": 2**62} if impl == "xla" and platform != "cpu" else {}
