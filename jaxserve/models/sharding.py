"""Which logical axis lies on which mesh axis, and the padding where the mesh does not divide it.

The one table of the house. Models name logical axes; they see local shapes inside `shard_map` and never the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxserve.errors import ConfigError
from jaxserve.model_config import ModelConfig

AnyMesh = Mesh | AbstractMesh
"""Of devices that are here, or of ones that only count."""

EXPERT = "expert"
TENSOR = "tensor"
DEVICES = (EXPERT, TENSOR)
"""All devices. What they share is summed over them: `psum(x, DEVICES)`."""

MESH_AXES: dict[str, str | tuple[str, ...] | None] = {
    "vocab": DEVICES,
    "kv_heads": DEVICES,  # with each its group of query heads
    "mlp": DEVICES,
    "experts": EXPERT,
    "expert_mlp": TENSOR,
    "embed": None,
    "heads_of_group": None,
    "head_dim": None,
    "gate_and_up": None,
    "experts_of_layer": None,  # as the router scores them
    "shared_gate": None,
    "layers": None,
    "norms_of_layer": None,
    "query_and_key": None,
    "query_key_value": None,
    "adapters": None,
    "rank": None,
    "pages": None,
    "page": None,
    "key_and_value": None,
}
"""Experts lie whole on one row of the mesh, whose devices split each one's width; everything else lies on all devices."""


def make_mesh(tensor_parallel: int, expert_parallel: int = 1) -> Mesh:
    """A mesh of `expert_parallel` times `tensor_parallel` devices; the engine has one even if of one device.

    Raises:
        ConfigError: there are fewer devices.
    """
    devices, wanted = jax.devices(), tensor_parallel * expert_parallel
    if wanted > len(devices):
        asked = f"tensor_parallel is {tensor_parallel}" + (f" times expert_parallel {expert_parallel}" * (expert_parallel > 1))
        raise ConfigError(
            f"{asked} but JAX sees {len(devices)} {devices[0].platform} device(s); on CPU, "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted} makes as many"
        )
    return mesh_of(devices[:wanted], expert_parallel)


def check_splits(config: ModelConfig, expert_parallel: int) -> None:
    """Raise `ConfigError` if `expert_parallel` devices would split experts that the model has not got."""
    if config.experts is None and expert_parallel > 1:
        raise ConfigError(f"expert_parallel is {expert_parallel} but the model has no experts; raise tensor_parallel")


def mesh_of(devices: Sequence[Any], expert_parallel: int = 1) -> Mesh:
    """The mesh of these devices, neighbours along `TENSOR`."""
    return Mesh(np.array(devices).reshape(expert_parallel, -1), DEVICES)


def partition_spec(axes: tuple[str, ...]) -> PartitionSpec:
    """Where an array with these logical axes lies."""
    return PartitionSpec(*(MESH_AXES[axis] for axis in axes))


def padded_shape(shape: tuple[int, ...], axes: tuple[str, ...], mesh: AnyMesh) -> tuple[int, ...]:
    """`shape` with each sharded axis rounded up to a multiple of its mesh axis. Padding holds zeros.

    A zero KV head with its zero query heads and zero output columns adds nothing to the result, nor do zero MLP columns;
    logits of padded vocabulary rows are cut off; no token is sent to a padded expert.
    """

    return tuple(-(-size // parts) * parts for size, parts in zip(shape, _num_parts(axes, mesh), strict=True))


def local_shape(shape: tuple[int, ...], axes: tuple[str, ...], mesh: AnyMesh) -> tuple[int, ...]:
    """What one device has of `padded_shape`."""
    return tuple(-(-size // parts) for size, parts in zip(shape, _num_parts(axes, mesh), strict=True))


def _num_parts(axes: tuple[str, ...], mesh: AnyMesh) -> list[int]:
    """Into how many parts the mesh splits each axis."""
    named = [MESH_AXES[axis] or () for axis in axes]
    return [math.prod(mesh.shape[name] for name in ((names,) if isinstance(names, str) else names)) for names in named]
