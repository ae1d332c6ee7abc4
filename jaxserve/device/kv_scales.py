"""Scales of KV pools in eight bits: static, one for K and one for V of each head of each layer, had once at start-up.

Owns how they are measured, by a forward pass over tokens whose K and V are kept as they are computed, and how a checkpoint's
own become ours. Knows no text and no file.

What is stored is K over its head's scale, cut off at the largest value that the pool's data type has. Random tokens show most
of a head's range, but not all of it, so what they show is given `HEADROOM`. With the demo model in float32 on three texts of
300 to 560 tokens, by largest value of a head in the text over that in random tokens: median 1.0 for K and 1.1 for V, and 1.6
and 1.9 at most. What comes of it there, beside KV in float32, is the mean divergence (KL) of the next token's distribution and
the share of positions whose most likely token stays the same: bfloat16 under 0.0001 and 0.996 or more; int8 0.005 to 0.007 and
0.944 to 0.960; float8 0.006 to 0.013 and 0.928 to 0.961. Scales from the texts themselves lower int8's by a third.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Num

from jaxserve.device.abstract import pool_shape, scales_shape
from jaxserve.device.step import SCALE_AXES
from jaxserve.errors import ConfigError
from jaxserve.model_config import ModelConfig
from jaxserve.models.batch import StepBatch
from jaxserve.models.families import FAMILIES
from jaxserve.models.sharding import partition_spec
from pallas_kernels.kv_update import LARGEST
from pallas_kernels.page_layout import keys_of, values_of

NUM_TOKENS = 256
PAGE_SIZE = 64
HEADROOM = {jnp.dtype(jnp.int8): 1.25, jnp.dtype(jnp.float8_e4m3fn): 2.0}
"""Room over the largest value seen. Small values lose precision for it in int8, and none in float8."""


def measure_scales(config: ModelConfig, params: Any, mesh: Mesh, dtype: np.dtype, kv_dtype: np.dtype) -> Float[Array, "L K 2"]:
    """Scales for what the model makes of random tokens, the same ones every time.

    Args:
        params: on the mesh, in `dtype`.

    Returns:
        As `DeviceState.kv_scales` has them, on the mesh.
    """
    token_ids = np.random.default_rng(0).integers(0, config.vocab_size, NUM_TOKENS, dtype=np.int32)
    largest = largest_by_head(config, params, mesh, dtype, token_ids)
    sharding = NamedSharding(mesh, partition_spec(SCALE_AXES))
    steps = LARGEST[jnp.dtype(kv_dtype)] / HEADROOM[jnp.dtype(kv_dtype)]
    # Heads that are padding hold zeros, and zeros over anything are zeros.
    return jax.jit(lambda x: jnp.where(x > 0, x / steps, 1.0), out_shardings=sharding)(largest)


def largest_by_head(
    config: ModelConfig, params: Any, mesh: Mesh, dtype: np.dtype, token_ids: Int[np.ndarray, " T"]
) -> Float[Array, "L K 2"]:
    """The largest absolute value of each head's rotated K and of its V over a sequence of `NUM_TOKENS` tokens."""
    position = np.arange(NUM_TOKENS, dtype=np.int32)
    num_pages = NUM_TOKENS // PAGE_SIZE
    batch = StepBatch(
        token_ids=jnp.asarray(token_ids),
        positions=jnp.asarray(position),
        page_ids=jnp.asarray(position // PAGE_SIZE),
        page_offsets=jnp.asarray(position % PAGE_SIZE),
        block_table=jnp.arange(num_pages, dtype=jnp.int32)[None],
        row_offsets=jnp.array([0, NUM_TOKENS], jnp.int32),
        lengths=jnp.array([NUM_TOKENS], jnp.int32),
    )
    forward = partial(FAMILIES[config.family].forward, config=config, num_single=0, attention_impl="xla")
    shape = pool_shape(config, num_pages, PAGE_SIZE, mesh)

    def run(params: Any, batch: StepBatch) -> Float[Array, "L K 2"]:
        local = (*shape[:1], shape[1] // mesh.size, *shape[2:])
        _, pools = forward(params, tuple(jnp.zeros(local, dtype) for _ in range(config.num_layers)), batch)
        return jnp.stack([_largest_of_page(pool) for pool in pools])

    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, params)
    sharded = jax.shard_map(
        run, mesh=mesh, in_specs=(specs, PartitionSpec()), out_specs=partition_spec(SCALE_AXES), check_vma=False
    )
    return jax.jit(sharded)(params, batch)


def _largest_of_page(pool: Num[Array, "P K B D2"]) -> Float[Array, "K 2"]:
    keys, values = keys_of(pool)[::2], values_of(pool)[1::2]
    return jnp.stack([jnp.abs(part).max(axis=(0, 2, 3)) for part in (keys, values)], axis=1).astype(jnp.float32)


def scales_of_checkpoint(
    config: ModelConfig, mesh: Mesh, scales: Sequence[tuple[np.ndarray, np.ndarray]]
) -> Float[Array, "L K 2"]:
    """A checkpoint's own scales of each layer's K and V, one for all heads or one a head, as we keep them.

    Raises:
        ConfigError: scales that are so many or so small that they cannot be meant.
    """
    padded = np.ones(scales_shape(config, mesh), np.float32)
    for layer, pair in enumerate(scales):
        for part, values in enumerate(np.asarray(values, np.float32).reshape(-1) for values in pair):
            if values.size not in (1, config.num_kv_heads) or not (values > 0).all():
                raise ConfigError(
                    f"layer {layer}: {'kv'[part]}_scale of the checkpoint: expected 1 or {config.num_kv_heads} numbers above "
                    f"0, found {values.tolist()}; choose another kv_dtype than fp8"
                )
            padded[layer, : config.num_kv_heads, part] = values
    return jax.device_put(padded, NamedSharding(mesh, partition_spec(SCALE_AXES)))
