"""A step's program from shapes alone, for devices that need not be here: what ahead-of-time compilation lowers.

Owns the shape of the KV pool and the abstract parameters and state of an engine; the step itself is `step.py`'s.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import ModelConfig
from jaxserve.device.buckets import Bucket
from jaxserve.device.pack import abstract_upload
from jaxserve.device.sampler import empty_state
from jaxserve.device.step import POOL_AXES, DeviceState, jit_step, make_step, state_shardings
from jaxserve.models.families import FAMILIES
from jaxserve.models.params import abstract_params
from jaxserve.models.sharding import padded_shape
from jaxserve.plan import RunnerLimits
from pallas_kernels.paged_attention.choose import pool_width


def pool_shape(
    config: ModelConfig, num_pages: int, page_size: int, mesh: Mesh, attention_impl: str = "xla"
) -> tuple[int, ...]:
    """Shape of one layer's KV pool on the mesh, padded heads included, as wide as the implementation wants it."""
    width = pool_width(attention_impl, config.head_dim)
    return padded_shape((num_pages, config.num_kv_heads, page_size, width), POOL_AXES, mesh)


def abstract_state(config: ModelConfig, limits: RunnerLimits, mesh: Mesh, dtype: np.dtype, attention_impl: str) -> DeviceState:
    """The tree of `jax.ShapeDtypeStruct` with shardings that a runner of these limits holds."""
    shape = pool_shape(config, limits.num_pages, limits.page_size, mesh, attention_impl)

    def make() -> DeviceState:
        slots = empty_state(limits.max_seqs, limits.max_context, config.vocab_size)
        return DeviceState(pools=tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)), slots=slots)

    def placed(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(placed, jax.eval_shape(make), state_shardings(mesh, config.num_layers))


def abstract_step(
    config: ModelConfig, limits: RunnerLimits, bucket: Bucket, mesh: Mesh, dtype: np.dtype, attention_impl: str
) -> tuple[Any, tuple[Any, ...]]:
    """The jitted step of one bucket and its abstract arguments; the second of them, the state, is donated."""
    params = abstract_params(FAMILIES[config.family].specs(config), mesh, dtype)
    state = abstract_state(config, limits, mesh, dtype, attention_impl)
    upload = abstract_upload(bucket, limits, NamedSharding(mesh, PartitionSpec()))
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, params)
    step = jit_step(make_step(config, limits, bucket, attention_impl), mesh, specs, config.num_layers)
    return step, (params, state, upload)
