"""A program of each kernel for compilers, as the engine would run it: builders for `aot.py`.

Knows shapes and nothing else: no values, no engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import grouped_matmul as grouped
from pallas_kernels import quant_matmul as quant
from pallas_kernels.kv_update import kv_update as update
from pallas_kernels.paged_attention import IMPLEMENTATIONS
from pallas_kernels.paged_attention.choose import pool_width
from pallas_kernels.quant_matmul import quantize_activations, quantize_weights
from pallas_kernels.sample import draw

Program = tuple[Any, tuple[Any, ...]]


def attention(
    devices: Sequence[Any],
    *,
    impl: str,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 16,
    num_tokens: int = 64,
    num_rows: int = 64,
    num_single: int = 0,
    table_width: int = 512,
    num_pages: int = 1024,
    dtype: str = "bfloat16",
    kv_dtype: str = "",
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
) -> Program:
    """`schedule` and `paged_attention` of one layer."""

    def step(queries: Any, pages: Any, table: Any, offsets: Any, lengths: Any, sinks: Any, kv_scales: Any) -> Any:
        chosen = IMPLEMENTATIONS[impl]
        work = chosen.schedule(
            table, offsets, lengths, num_tokens=num_tokens, num_single=num_single, page_size=page_size, window=window
        )
        return chosen.paged_attention(
            queries, pages, work, scale=head_dim**-0.5, soft_cap=soft_cap, sinks=sinks, kv_scales=kv_scales
        )

    shape = jax.ShapeDtypeStruct
    arguments = (
        shape((num_tokens, num_heads, head_dim), dtype),
        shape((num_pages, num_kv_heads, page_size, pool_width(impl, head_dim)), kv_dtype or dtype),
        shape((num_rows, table_width), jnp.int32),
        shape((num_rows + 1,), jnp.int32),
        shape((num_rows,), jnp.int32),
        shape((num_heads,), jnp.float32) if sinks else None,
        shape((num_kv_heads, 2), jnp.float32) if kv_dtype else None,
    )
    return _on(devices, step, arguments)


def kv_update(
    devices: Sequence[Any],
    *,
    impl: str,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 16,
    num_tokens: int = 64,
    num_pages: int = 1024,
    dtype: str = "bfloat16",
    kv_dtype: str = "",
) -> Program:
    """A step's K and V into one layer's donated pool."""

    def step(pages: Any, keys: Any, values: Any, page_ids: Any, offsets: Any, kv_scales: Any) -> Any:
        return update(pages, keys, values, page_ids, offsets, kv_scales=kv_scales, impl=impl)

    shape = jax.ShapeDtypeStruct
    rows = shape((num_tokens, num_kv_heads, head_dim), dtype)
    arguments = (
        shape((num_pages, num_kv_heads, page_size, pool_width(impl, head_dim)), kv_dtype or dtype),
        rows,
        rows,
        shape((num_tokens,), jnp.int32),
        shape((num_tokens,), jnp.int32),
        shape((num_kv_heads, 2), jnp.float32) if kv_dtype else None,
    )
    return _on(devices, step, arguments, donate=(0,))


def quant_matmul(
    devices: Sequence[Any],
    *,
    impl: str,
    num_tokens: int = 64,
    num_in: int = 4096,
    num_out: int = 4096,
    bits: int = 4,
    group: int | None = 128,
    activations: str = "bfloat16",
    scales: str = "float32",
) -> Program:
    """One product; a scale a row where `group` is None, activations of 8 bits per token where they are "int8"."""

    def laid_out() -> Any:
        weights = quantize_weights(jnp.zeros((num_out, num_in)), bits=bits, group=group)
        return quant.lay_out(dataclasses.replace(weights, scales=weights.scales.astype(scales)), impl=impl)

    shape = jax.ShapeDtypeStruct
    x: Any = shape((num_in, num_tokens), jnp.bfloat16 if activations == "int8" else activations)
    if activations == "int8":
        x = jax.eval_shape(quantize_activations, x)
    return _on(devices, lambda x, weights: quant.quant_matmul(x, weights, impl=impl), (x, jax.eval_shape(laid_out)))


def grouped_matmul(
    devices: Sequence[Any], *, impl: str, num_rows: int = 512, num_groups: int = 8, num_in: int = 2048, num_out: int = 2048
) -> Program:
    """One product of rows with their experts' matrices."""

    def laid_out() -> Any:
        return grouped.lay_out(jnp.zeros((num_groups, num_out, num_in), jnp.bfloat16), impl=impl)

    shape = jax.ShapeDtypeStruct
    arguments = (shape((num_rows, num_in), jnp.bfloat16), jax.eval_shape(laid_out), shape((num_groups,), jnp.int32))
    return _on(devices, lambda x, weights, sizes: grouped.grouped_matmul(x, weights, sizes, impl=impl), arguments)


def sample(devices: Sequence[Any], *, impl: str, num_rows: int = 16, vocab_size: int = 262_144) -> Program:
    """A step's draws over the largest vocabulary."""

    def step(logits: Any, temperature: Any, min_p: Any, top_k: Any, top_p: Any, uniform: Any) -> Any:
        settings = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p, "uniform": uniform}
        return draw(logits, **settings, impl=impl)

    floats, ints = (jax.ShapeDtypeStruct((num_rows,), dtype) for dtype in (jnp.float32, jnp.int32))
    logits = jax.ShapeDtypeStruct((num_rows, vocab_size), jnp.float32)
    return _on(devices, step, (logits, floats, floats, ints, floats, floats))


def _on(
    devices: Sequence[Any], function: Callable[..., Any], arguments: tuple[Any, ...], donate: tuple[int, ...] = ()
) -> Program:
    """On one device, under `shard_map` as in the engine: a kernel that asks for the device is told this one."""
    mesh, whole = Mesh(np.array(devices[:1]), ("device",)), PartitionSpec()
    placed = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, whole))
    arguments = jax.tree.map(lambda leaf: placed(leaf.shape, leaf.dtype), arguments)
    sharded = jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return jax.jit(sharded, donate_argnums=donate), arguments
