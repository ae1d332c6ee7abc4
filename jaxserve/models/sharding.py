"""Which logical axis lies on which mesh axis, and the padding where the mesh does not divide it.

The one table of the house. Models name logical axes; they see local shapes inside `shard_map` and never the mesh.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxserve.errors import ConfigError

TENSOR = "tensor"

MESH_AXES: dict[str, str | None] = {
    "vocab": TENSOR,
    "kv_heads": TENSOR,  # with each its group of query heads
    "mlp": TENSOR,
    "embed": None,
    "heads_of_group": None,
    "head_dim": None,
    "gate_and_up": None,
    "layers": None,
    "norms_of_layer": None,
    "query_and_key": None,
    "pages": None,
    "page": None,
    "key_and_value": None,
}


def make_mesh(tensor_parallel: int) -> Mesh:
    """A mesh of `tensor_parallel` devices; the engine has one even if of one device.

    Raises:
        ConfigError: there are fewer devices.
    """
    devices = jax.devices()
    if tensor_parallel > len(devices):
        raise ConfigError(
            f"tensor_parallel is {tensor_parallel} but JAX sees {len(devices)} {devices[0].platform} device(s); on CPU, "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={tensor_parallel} makes as many"
        )
    return Mesh(np.array(devices[:tensor_parallel]), (TENSOR,))


def partition_spec(axes: tuple[str, ...]) -> PartitionSpec:
    """Where an array with these logical axes lies."""
    return PartitionSpec(*(MESH_AXES[axis] for axis in axes))


def padded_shape(shape: tuple[int, ...], axes: tuple[str, ...], mesh: Mesh) -> tuple[int, ...]:
    """`shape` with each sharded axis rounded up to a multiple of its mesh axis. Padding holds zeros.

    A zero KV head with its zero query heads and zero output columns adds nothing to the result, nor do zero MLP columns;
    logits of padded vocabulary rows are cut off.
    """

    def round_up(size: int, axis: str) -> int:
        mesh_axis = MESH_AXES[axis]
        parts = 1 if mesh_axis is None else mesh.shape[mesh_axis]
        return -(-size // parts) * parts

    return tuple(round_up(size, axis) for size, axis in zip(shape, axes, strict=True))
