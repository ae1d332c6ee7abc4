"""A decoder's forward pass over one step's batch: blocks of attention over paged KV and a gated MLP or experts.

One for all families: what they differ in is in `ModelConfig`, and each difference that a model has not got leaves no operation
in its program. Runs inside `shard_map`: all shapes are local.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num, UInt

from jaxserve.model_config import ModelConfig
from jaxserve.models.adapters import Adapters, TokenAdapters, add_down, add_gate_up, add_output, add_qkv, without_overflow
from jaxserve.models.batch import NO_PAGE, StepBatch
from jaxserve.models.decoder_params import DecoderParams, Experts, Layer, Mlp, StackedLayers
from jaxserve.models.layers import ACTIVATIONS, embed, linear, psum, rms_norm, scaled, soft_cap
from jaxserve.models.moe import mixture
from jaxserve.models.rope import Rotary, rotary_table, rotate, rotate_tokens_first
from jaxserve.models.sharding import DEVICES
from pallas_kernels.kv_update import kv_update
from pallas_kernels.paged_attention import IMPLEMENTATIONS, paged_attention, schedule


def forward(
    params: DecoderParams,
    pools: tuple[Num[Array, "_ K B D2"] | Num[Array, "_ _ K B D2"], ...],
    batch: StepBatch,
    config: ModelConfig,
    *,
    num_single: int,
    attention_impl: str,
    experts_impl: str = "xla",
    kv_scales: Float[Array, "L K 2"] | None = None,
    attention_options: Mapping[str, int] | None = None,
    adapters: Adapters | None = None,
) -> tuple[Float[Array, "E T"], tuple[Num[Array, "..."], ...]]:
    """Run one step's tokens through all layers.

    Args:
        params: with `StackedLayers` for a step of few tokens, without adapters, of a model that `has_layers_alike`.
        pools: one KV pool a layer, or pools that layers share, where a page holds one of each layer: see `pools_of_layers`.
            Dispatching takes time for each array.
        num_single: leading rows that own one token each at most, as `paged_attention` has it.
        experts_impl: of `grouped_matmul`, for which `moe.lay_out` has laid out the experts, where there are any.
        kv_scales: of pools in eight bits: what is stored times these is K and V of each layer's heads.
        attention_options: tuned ones, as `schedule` has them.
        adapters: what `batch.adapters` names, a layer each; None where no token has one.

    Returns:
        What `head` takes of each token, and the pools with this step's K and V.
    """
    windows = [config.layer_window(layer) for layer in range(config.num_layers)]
    rows: dict[int | None, StepBatch] = dict.fromkeys(windows, batch)
    if batch.local is not None:
        own = {field.name: getattr(batch.local, field.name) for field in fields(batch.local)}
        rows = {window: batch if window is None else replace(batch, **own) for window in rows}
    are_shared = pools[0].ndim == 5
    if are_shared:
        places = pools_of_layers(config, has_local=batch.local is not None)
        num_sharing = {window: pools[place].shape[1] for window, place in zip(windows, places, strict=True)}
        rows = {window: _in_shared_pages(seen, num_sharing[window]) for window, seen in rows.items()}
    lay_out = partial(
        schedule,
        num_tokens=batch.token_ids.shape[0],
        num_single=num_single,
        page_size=pools[0].shape[-2],
        impl=attention_impl,
        options=attention_options,
    )
    rotary = _rotary_tables(batch, config)
    work = {window: lay_out(seen.block_table, seen.row_offsets, seen.lengths, window=window) for window, seen in rows.items()}
    x = scaled(embed(params.embedding, batch.token_ids, DEVICES), config.embedding_scale)
    block = partial(_block, config=config, impl=attention_impl, experts_impl=experts_impl)
    if isinstance(params.layers, StackedLayers):
        (pool,), (window,) = pools, rows
        run = partial(block, rotary=rotary[_rotary_kind(config, 0)], batch=rows[window], work=work[window])
        x, pool = _run_stacked(run, params.layers, pool, kv_scales, x)
        return x, (pool,)
    held = list(pools)
    # Numbers that the compiler does not know, so that all layers' kernels are the same, and compiled once.
    first_pages = [jax.lax.optimization_barrier(jnp.uint32(0)) if are_shared else None for _ in pools]
    for index, layer in enumerate(params.layers):
        where = places[index] if are_shared else index
        first_page = first_pages[where]
        low = None if adapters is None or batch.adapters is None else TokenAdapters(adapters[index], batch.adapters)
        window = windows[index]
        x, held[where] = block(
            layer,
            held[where],
            first_page,
            None if kv_scales is None else kv_scales[index],
            x,
            adapters=low,
            rotary=rotary[_rotary_kind(config, index)],
            batch=rows[window],
            work=work[window],
        )
        if first_page is not None:
            first_pages[where] = jax.lax.optimization_barrier(first_page + 1)
    return x, tuple(held)


def pools_of_layers(config: ModelConfig, *, has_local: bool) -> list[int]:
    """Of pools that layers share, which of them each layer has. Those that have one lie in it in their order.

    Args:
        has_local: whether layers with a window have pages of their own, in a second pool.
    """
    return [int(has_local and config.layer_window(layer) is not None) for layer in range(config.num_layers)]


def has_layers_alike(config: ModelConfig) -> bool:
    """Whether one loop may run all layers: dense ones of one kind, as `StackedLayers` has them."""
    kinds = {(config.layer_window(layer), _rotary_kind(config, layer)) for layer in range(config.num_layers)}
    return config.experts is None and len(kinds) == 1


def _in_shared_pages(batch: StepBatch, num_layers: int) -> StepBatch:
    """`batch` with the ids that pages of the first layer have where each page has one of every layer, in their order."""
    page_ids = jnp.where(batch.page_ids < NO_PAGE, batch.page_ids * num_layers, NO_PAGE)
    return replace(batch, page_ids=page_ids, block_table=batch.block_table * num_layers)


def _run_stacked(
    run: Callable[..., tuple[Array, Array]],
    layers: StackedLayers,
    pool: Num[Array, "P L K B D2"],
    kv_scales: Float[Array, "L K 2"] | None,
    x: Float[Array, "E T"],
) -> tuple[Float[Array, "E T"], Num[Array, "P L K B D2"]]:
    """All layers in one loop, compiled as one. Products must read weights where they lie, as sums do: others copy them."""

    def one(carry: tuple[Array, Array], of_layer: tuple[Any, Array, Array | None]) -> tuple[tuple[Array, Array], None]:
        x, held = carry
        parts, first_page, scales = of_layer
        return run(layers.block(parts), held, first_page, scales, x, adapters=None), None

    first_pages = jnp.arange(pool.shape[1], dtype=jnp.uint32)
    (x, held), _ = jax.lax.scan(one, (x, pool), (layers.arrays, first_pages, kv_scales))
    return x, held


def _rotary_kind(config: ModelConfig, layer: int) -> str:
    """Which of the rotary tables a layer has."""
    if config.rotary and not config.rotary[layer]:
        return "none"
    return "local" if config.local_rope_theta is not None and config.layer_window(layer) is not None else "global"


def _rotary_tables(batch: StepBatch, config: ModelConfig) -> dict[str, Rotary | None]:
    kinds = {_rotary_kind(config, layer) for layer in range(config.num_layers)}
    dim = config.rotary_dim or config.head_dim
    how: dict[str, Any] = {
        "global": (config.rope_theta, config.rope_scaling),
        "local": (config.local_rope_theta, None),
    }
    # Without the barrier XLA computes sines and cosines again inside every layer's rotation.
    tables: dict[str, Rotary | None] = {
        kind: jax.lax.optimization_barrier(rotary_table(batch.positions, dim, *how[kind])) for kind in sorted(kinds & set(how))
    }
    return tables | {"none": None}


def head(
    params: DecoderParams, x: Float[Array, "E R"], config: ModelConfig
) -> tuple[Float[Array, "V R"], Float[Array, "E R"]]:
    """float32 logits of tokens as they leave the layers, whole on every device; and their hidden states, which are normed."""
    hidden = rms_norm(x, params.final_norm, config.rms_norm_eps)
    logits = linear(params.embedding if params.lm_head is None else params.lm_head, hidden).astype(jnp.float32)
    if jax.lax.axis_size(DEVICES) > 1:
        logits = jax.lax.all_gather(logits, DEVICES, axis=0, tiled=True)
    return soft_cap(scaled(logits[: config.vocab_size], config.logits_scale), config.logits_soft_cap), hidden


# Traced once for all layers of a kind. The compiler inlines it, and the layers stay unrolled but where `StackedLayers` come: a
# library's product would copy each layer's slice of stacked weights before use.
@partial(jax.jit, static_argnames=("config", "impl", "experts_impl"))
def _block(
    layer: Layer,
    pool: Num[Array, "*P K B D2"],
    first_page: UInt[Array, ""] | None,
    kv_scales: Float[Array, "K 2"] | None,
    x: Float[Array, "E T"],
    *,
    adapters: TokenAdapters | None,
    rotary: Rotary | None,
    batch: StepBatch,
    work: Any,
    config: ModelConfig,
    impl: str,
    experts_impl: str,
) -> tuple[Float[Array, "E T"], Num[Array, "*P K B D2"]]:
    norms = iter(layer.norms)
    before, after = config.norms != "post", config.norms != "pre"

    def norm(h: Float[Array, "E T"], here: bool) -> Float[Array, "E T"]:
        return rms_norm(h, next(norms), config.rms_norm_eps) if here else h

    here = pool, first_page, kv_scales
    attended, pool = _attention(layer, adapters, *here, norm(x, before), rotary, batch, work, config, impl)
    x = x + scaled(norm(attended, after), config.residual_scale)
    out = _mlp_or_experts(layer.mlp, norm(x, before), adapters, batch, config, experts_impl)
    return x + scaled(norm(out, after), config.residual_scale), pool


def _attention(
    layer: Layer,
    adapters: TokenAdapters | None,
    pool: Num[Array, "*P K B D2"],
    first_page: UInt[Array, ""] | None,
    kv_scales: Float[Array, "K 2"] | None,
    h: Float[Array, "E T"],
    rotary: Rotary | None,
    batch: StepBatch,
    work: Any,
    config: ModelConfig,
    impl: str,
) -> tuple[Float[Array, "E T"], Num[Array, "*P K B D2"]]:
    parts, dim, tokens = config.num_heads // config.num_kv_heads + 2, config.head_dim, h.shape[1]
    qkv = linear(layer.qkv, h).reshape(-1, parts, dim, tokens)  # [K, G+2, D, T]
    if adapters is not None:
        qkv = add_qkv(qkv, h, adapters)
    if layer.qkv_bias is not None:
        qkv = qkv + layer.qkv_bias[..., None]
    queries, keys, values = qkv[:, :-2], qkv[:, -2], qkv[:, -1]
    queries, keys = _norm_queries_and_keys(layer, queries, keys, config)
    if adapters is not None:
        keys, values = without_overflow(keys), without_overflow(values)
    if rotary is not None:
        turn = rotate_tokens_first if impl == "tpu" else rotate
        queries, keys = turn(queries, rotary.cos, rotary.sin), turn(keys, rotary.cos, rotary.sin)
        if rotary.query_scale is not None:
            queries = queries * rotary.query_scale.astype(queries.dtype)
    pool = kv_update(
        pool,
        keys.transpose(2, 0, 1),
        values.transpose(2, 0, 1),
        batch.page_ids if first_page is None else batch.page_ids + first_page.astype(jnp.int32),
        batch.page_offsets,
        layout=IMPLEMENTATIONS[impl].layout,
        kv_scales=kv_scales,
        impl=IMPLEMENTATIONS[impl].kv_update,
    )
    attended = paged_attention(
        queries.transpose(3, 0, 1, 2).reshape(tokens, -1, dim),
        pool,
        work,
        scale=dim**-0.5 if config.attention_scale is None else config.attention_scale,
        soft_cap=config.attention_soft_cap,
        kv_scales=kv_scales,
        first_page=first_page,
        impl=impl,
    )
    # With the barrier the product finds its operand as it wants it; without, oneDNN transposes it at half the speed.
    attended = jax.lax.optimization_barrier(attended.reshape(tokens, -1).T)
    out = linear(layer.output, attended)
    if adapters is not None:
        out = add_output(out, attended, adapters)
    out = psum(out, DEVICES)
    return out if layer.output_bias is None else out + layer.output_bias[:, None], pool


def _norm_queries_and_keys(
    layer: Layer, queries: Float[Array, "K G D T"], keys: Float[Array, "K D T"], config: ModelConfig
) -> tuple[Float[Array, "K G D T"], Float[Array, "K D T"]]:
    """Queries and keys as they are to be rotated: normed a head at a time, over all heads, or not at all."""
    if layer.query_key_norms is not None:
        of_queries, of_keys = layer.query_key_norms
        norm = partial(rms_norm, epsilon=config.rms_norm_eps)
        return norm(queries, of_queries), norm(keys, of_keys)
    if layer.projection_norms is not None:
        of_queries, of_keys = layer.projection_norms[:, :-1], layer.projection_norms[:, -1]
        epsilon, dim = config.rms_norm_eps, config.head_dim
        return (
            _norm_over_heads(queries, of_queries, config.num_heads * dim, epsilon),
            _norm_over_heads(keys, of_keys, config.num_kv_heads * dim, epsilon),
        )
    return queries, keys


def _norm_over_heads(
    x: Float[Array, "*shape T"], weight: Float[Array, "*shape"], size: int, epsilon: float
) -> Float[Array, "*shape T"]:
    """Root mean square norm over all heads of all devices: `size` numbers, besides padded heads, which are zeros."""
    wide = x.astype(jnp.float32)
    squares = psum(jnp.sum(wide * wide, axis=tuple(range(x.ndim - 1))), DEVICES)
    return (wide * jax.lax.rsqrt(squares / size + epsilon)).astype(x.dtype) * weight[..., None]


def _mlp_or_experts(
    layer: Mlp | Experts,
    h: Float[Array, "E T"],
    adapters: TokenAdapters | None,
    batch: StepBatch,
    config: ModelConfig,
    experts_impl: str,
) -> Float[Array, "E T"]:
    if isinstance(layer, Mlp):
        out = psum(_mlp(layer, h, config, adapters), DEVICES)
        return out if layer.down_bias is None else out + layer.down_bias[:, None]
    assert config.experts is not None
    real = batch.page_ids < NO_PAGE
    out = mixture(layer, h, real, config.experts, activation=config.activation, impl=experts_impl)
    if layer.shared is not None:
        shared = _mlp(layer.shared, h, config, None)
        out = out + (shared if layer.shared_gate is None else shared * jax.nn.sigmoid(linear(layer.shared_gate, h)))
    return psum(out, DEVICES)


def _mlp(layer: Mlp, h: Float[Array, "E T"], config: ModelConfig, adapters: TokenAdapters | None) -> Float[Array, "E T"]:
    """This device's share of what the MLP makes, less the last bias."""
    gate_up = linear(layer.gate_up, h).reshape(2, -1, h.shape[1])
    if adapters is not None:
        gate_up = add_gate_up(gate_up, h, adapters)
    if layer.gate_up_bias is not None:
        gate_up = gate_up + layer.gate_up_bias[..., None]
    hidden = ACTIVATIONS[config.activation](gate_up[0]) * gate_up[1]
    out = linear(layer.down, hidden)
    return out if adapters is None else add_down(out, hidden, adapters)
