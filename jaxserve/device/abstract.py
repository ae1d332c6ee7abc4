"""A step's program from shapes alone, for devices that need not be here: what ahead-of-time compilation lowers.

Owns the shape of the KV pool and the abstract parameters and state of an engine; the step itself is `step.py`'s.
"""

from __future__ import annotations

import collections
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.device.buckets import Bucket
from jaxserve.device.pack import abstract_upload
from jaxserve.device.sampler import empty_state, sample
from jaxserve.device.step import (
    POOL_AXES,
    SCALE_AXES,
    DeviceState,
    has_scales,
    jit_step,
    make_step,
    state_shardings,
)
from jaxserve.model_config import ModelConfig
from jaxserve.models.decoder import pools_of_layers
from jaxserve.models.families import FAMILIES
from jaxserve.models.moe import lay_out
from jaxserve.models.quant import WeightForm, held_params
from jaxserve.models.sharding import AnyMesh, padded_shape
from jaxserve.plan import RunnerLimits
from pallas_kernels.paged_attention.choose import pool_dtype, pool_width


def pool_shape(
    config: ModelConfig, num_pages: int, page_size: int, mesh: AnyMesh, attention_impl: str = "xla"
) -> tuple[int, ...]:
    """Shape of one layer's KV pool on the mesh, padded heads included, as wide as the implementation wants it."""
    width = pool_width(attention_impl, config.head_dim)
    return padded_shape((num_pages, config.num_kv_heads, page_size, width), POOL_AXES, mesh)


def page_bytes(config: ModelConfig, page_size: int, mesh: AnyMesh, dtype: np.dtype, attention_impl: str = "xla") -> int:
    """Bytes of one page in all layers, over all devices of the mesh."""
    return config.num_layers * math.prod(pool_shape(config, 1, page_size, mesh, attention_impl)) * dtype.itemsize


def pool_shapes(
    config: ModelConfig, limits: RunnerLimits, mesh: AnyMesh, attention_impl: str, *, shared: bool
) -> list[tuple[int, ...]]:
    """Shapes of the pools: one a layer, or such as `decoder.pools_of_layers` has them."""
    places = pools_of_layers(config, has_local=bool(limits.local_pages))
    num_pages = (limits.num_pages, limits.local_pages)
    shapes = [pool_shape(config, num_pages[place], limits.page_size, mesh, attention_impl) for place in places]
    if not shared:
        return shapes
    num_layers = collections.Counter(places)
    by_place = dict(zip(places, shapes, strict=True))
    return [(by_place[place][0], num_layers[place], *by_place[place][1:]) for place in sorted(by_place)]


def scales_shape(config: ModelConfig, mesh: Mesh) -> tuple[int, ...]:
    """Shape of the scales of pools in eight bits: layers, KV heads as the pools have them, K and V."""
    return padded_shape((config.num_layers, config.num_kv_heads, 2), SCALE_AXES, mesh)


def initial_state(
    config: ModelConfig,
    limits: RunnerLimits,
    mesh: Mesh,
    kv_dtype: np.dtype,
    attention_impl: str,
    *,
    shared_pools: bool = False,
) -> DeviceState:
    """Empty pools and slots, and scales of 1 where pools have any; for `jax.jit` or `jax.eval_shape`."""
    shapes = pool_shapes(config, limits, mesh, attention_impl, shared=shared_pools)
    return DeviceState(
        pools=tuple(jnp.zeros(shape, pool_dtype(attention_impl, kv_dtype)) for shape in shapes),
        slots=empty_state(limits.max_seqs, limits.max_context, config.vocab_size),
        kv_scales=jnp.ones(scales_shape(config, mesh)) if has_scales(kv_dtype) else None,
    )


def abstract_state(
    config: ModelConfig,
    limits: RunnerLimits,
    mesh: Mesh,
    kv_dtype: np.dtype,
    attention_impl: str,
    *,
    shared_pools: bool = False,
) -> DeviceState:
    """The tree of `jax.ShapeDtypeStruct` with shardings that a runner of these limits holds."""

    def placed(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    shapes = jax.eval_shape(lambda: initial_state(config, limits, mesh, kv_dtype, attention_impl, shared_pools=shared_pools))
    return jax.tree.map(placed, shapes, state_shardings(mesh, len(shapes.pools), kv_dtype, shared_pools=shared_pools))


def abstract_step(
    config: ModelConfig,
    limits: RunnerLimits,
    bucket: Bucket,
    mesh: Mesh,
    dtype: np.dtype,
    attention_impl: str,
    *,
    kv_dtype: np.dtype | None = None,
    draw_impl: str = "xla",
    experts_impl: str = "xla",
    weight_form: WeightForm | None = None,
) -> tuple[Any, tuple[Any, ...]]:
    """The jitted step of one bucket and its abstract arguments; the second of them, the state, is donated.

    Args:
        dtype: of weights and activations.
        kv_dtype: of the KV pools; `dtype` where None.
        draw_impl: of sampling, as `choose_draw` has it.
        experts_impl: of the products of experts, as `grouped_matmul.choose` has it.
        weight_form: how matrices are kept; None for `dtype`.
    """
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    params = lay_out(held_params(FAMILIES[config.family].specs(config), mesh, dtype, weight_form), experts_impl)
    state = abstract_state(config, limits, mesh, kv_dtype, attention_impl)
    upload = abstract_upload(bucket, limits, NamedSharding(mesh, PartitionSpec()))
    specs, state_specs = jax.tree.map(lambda leaf: leaf.sharding.spec, (params, state))
    choose = partial(sample, draw_impl=draw_impl)
    step = make_step(config, limits, bucket, attention_impl, choose, experts_impl=experts_impl)
    step = jit_step(step, mesh, specs, state_specs)
    return step, (params, state, upload)
