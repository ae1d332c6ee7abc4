"""The stacked adapters of a runner: device memory for `max_adapters` of them, each in a slot, and the program that fills one.

Owns their arrays. Does not know whose a slot is, or when it may be filled; programs run in order, so that a step which was
dispatched before sees what was there before.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxserve.device.prepare import compile_update
from jaxserve.model_config import ModelConfig
from jaxserve.models import adapters
from jaxserve.models.families import FAMILIES
from jaxserve.models.params import ParamSpec, abstract_params, map_specs, pad_to
from jaxserve.models.sharding import padded_shape, partition_spec
from jaxserve.plan import RunnerLimits


def adapter_specs(config: ModelConfig, limits: RunnerLimits) -> adapters.Adapters:
    """Declarations of one adapter of the largest rank."""
    return adapters.specs(FAMILIES[config.family].specs(config).layers, limits.max_adapter_rank)


def abstract_adapters(config: ModelConfig, limits: RunnerLimits, mesh: Mesh, dtype: np.dtype) -> Any:
    """The tree of `jax.ShapeDtypeStruct` with shardings of all of them; None where there are none."""
    if not limits.max_adapters:
        return None
    return abstract_params(adapters.stacked(adapter_specs(config, limits), limits.max_adapters), mesh, dtype)


def adapters_bytes(config: ModelConfig, limits: RunnerLimits, mesh: Mesh, dtype: np.dtype) -> int:
    """Bytes that they take of each device."""
    leaves = jax.tree.leaves(abstract_adapters(config, limits, mesh, dtype))
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


class AdapterSlots:
    """The arrays, zeros at first, and `install`, compiled. One thread installs and reads `params`.

    Attributes:
        params: what a step takes as `adapters`.
    """

    def __init__(self, config: ModelConfig, limits: RunnerLimits, mesh: Mesh, dtype: np.dtype) -> None:
        one = adapter_specs(config, limits)
        every = adapters.stacked(one, limits.max_adapters)
        abstract = abstract_params(every, mesh, dtype)
        self._mesh = mesh
        self._specs = one
        self._abstract_one = abstract_params(one, mesh, dtype)
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        axes = map_specs(adapters.adapters_axis, every)
        slot = jax.ShapeDtypeStruct((), np.int32, sharding=self._everywhere)
        self._update = compile_update(partial(_put, axes), abstract, self._abstract_one, slot)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        zeros = jax.jit(
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract), out_shardings=shardings
        )
        self.params: Any = zeros()
        self.install(0, self.place(map_specs(lambda spec: np.zeros(spec.shape, np.float32), one)))

    def place(self, values: Any) -> Any:
        """`values`, as `models.adapters.arrange` has them, on the devices and in their types. Any thread may call it."""

        def place(spec: ParamSpec, value: np.ndarray, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            padded = pad_to(value, padded_shape(spec.shape, spec.axes, self._mesh)).astype(leaf.dtype)
            return jax.device_put(padded, NamedSharding(self._mesh, partition_spec(spec.axes)))

        is_spec = lambda node: isinstance(node, ParamSpec)  # noqa: E731
        return jax.tree.map(place, self._specs, values, self._abstract_one, is_leaf=is_spec)

    def install(self, slot: int, placed: Any) -> None:
        """Put what `place` gave into a slot that no row of a later step has yet. Dispatches a copy, and waits for nothing."""
        self.params = self._update(self.params, placed, jax.device_put(np.int32(slot), self._everywhere))


def _put(axes: Any, every: Any, one: Any, slot: Int[Array, ""]) -> Any:
    return jax.tree.map(
        lambda axis, all_of_it, values: lax.dynamic_update_index_in_dim(all_of_it, values, slot, axis), axes, every, one
    )
