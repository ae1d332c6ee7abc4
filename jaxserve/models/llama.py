"""The Llama family: RMSNorm, rotary embedding, grouped-query attention, SwiGLU; tied or not, with biases where configured.

Owns its parameters and their forward pass over one step's batch. Runs inside `shard_map`: all shapes are local.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from jaxserve.config import ModelConfig
from jaxserve.models.batch import StepBatch
from jaxserve.models.layers import embed, linear, psum, rms_norm, rotary_frequencies, rotate, rotate_tokens_first
from jaxserve.models.params import ParamSpec
from jaxserve.models.sharding import TENSOR
from pallas_kernels import pytree
from pallas_kernels.kv_update import kv_update
from pallas_kernels.paged_attention import IMPLEMENTATIONS, paged_attention, schedule

IGNORED_TENSORS = (
    "*.rotary_emb.inv_freq",
    "*.attention.masked_bias",
    "*.attention.bias",
    "*.self_attn.k_scale",
    "*.self_attn.v_scale",
)


@pytree.dataclass
class LlamaLayer:
    """One block. `G` is the number of query heads of a KV head, which come before their K and V in `qkv`.

    `norms` holds the one before attention and the one before the MLP.
    """

    norms: Float[Array, "2 E"]
    qkv: Float[Array, "K G+2 D E"]
    qkv_bias: Float[Array, "K G+2 D"] | None
    output: Float[Array, "E K G D"]
    output_bias: Float[Array, " E"] | None
    gate_up: Float[Array, "2 F E"]
    gate_up_bias: Float[Array, "2 F"] | None
    down: Float[Array, "E F"]
    down_bias: Float[Array, " E"] | None


@pytree.dataclass
class LlamaParams:
    """The whole model. `lm_head` is None where it is tied to `embedding`."""

    embedding: Float[Array, "V E"]
    layers: tuple[LlamaLayer, ...]
    final_norm: Float[Array, " E"]
    lm_head: Float[Array, "V E"] | None


def specs(config: ModelConfig) -> LlamaParams:
    """The parameters' declarations, in the shape of `LlamaParams`."""
    hidden = config.hidden_size
    table = (config.vocab_size, hidden)
    fields: dict[str, Any] = {
        "embedding": ParamSpec(table, ("vocab", "embed"), (("model.embed_tokens.weight", table),)),
        "layers": tuple(_layer_specs(config, f"model.layers.{index}.") for index in range(config.num_layers)),
        "final_norm": ParamSpec((hidden,), ("embed",), (("model.norm.weight", (hidden,)),), scale=0),
        "lm_head": None if config.tie_embeddings else ParamSpec(table, ("vocab", "embed"), (("lm_head.weight", table),)),
    }
    return LlamaParams(**fields)


def _layer_specs(config: ModelConfig, prefix: str) -> LlamaLayer:
    heads, group, dim = config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim
    hidden, mlp = config.hidden_size, config.intermediate_size
    widths = {"q": heads * group * dim, "k": heads * dim, "v": heads * dim, "gate": mlp, "up": mlp}
    head_axes = ("kv_heads", "heads_of_group", "head_dim")

    def tensors(module: str, *parts: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple((f"{prefix}{module}.{part}_proj.weight", (widths[part], hidden)) for part in parts)

    def biases(module: str, *parts: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple((f"{prefix}{module}.{part}_proj.bias", (widths[part],)) for part in parts)

    def output_bias(module: str) -> ParamSpec:
        return ParamSpec((hidden,), ("embed",), ((f"{prefix}{module}_proj.bias", (hidden,)),))

    def by_head(parts: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([part.reshape(heads, -1, dim, *part.shape[1:]) for part in parts], axis=1)

    norms = tuple((f"{prefix}{name}_layernorm.weight", (hidden,)) for name in ("input", "post_attention"))
    fields: dict[str, Any] = {
        "norms": ParamSpec((2, hidden), ("norms_of_layer", "embed"), norms, np.stack, scale=0),
        "qkv": ParamSpec((heads, group + 2, dim, hidden), (*head_axes, "embed"), tensors("self_attn", "q", "k", "v"), by_head),
        "qkv_bias": None,
        "output": ParamSpec(
            (hidden, heads, group, dim),
            ("embed", *head_axes),
            ((f"{prefix}self_attn.o_proj.weight", (hidden, heads * group * dim)),),
            lambda parts: parts[0].reshape(hidden, heads, group, dim),
        ),
        "output_bias": None,
        "gate_up": ParamSpec((2, mlp, hidden), ("gate_and_up", "mlp", "embed"), tensors("mlp", "gate", "up"), np.stack),
        "gate_up_bias": None,
        "down": ParamSpec((hidden, mlp), ("embed", "mlp"), ((f"{prefix}mlp.down_proj.weight", (hidden, mlp)),)),
        "down_bias": None,
    }
    if config.attention_bias:
        fields["qkv_bias"] = ParamSpec((heads, group + 2, dim), head_axes, biases("self_attn", "q", "k", "v"), by_head)
        fields["output_bias"] = output_bias("self_attn.o")
    if config.mlp_bias:
        fields["gate_up_bias"] = ParamSpec((2, mlp), ("gate_and_up", "mlp"), biases("mlp", "gate", "up"), np.stack)
        fields["down_bias"] = output_bias("mlp.down")
    return LlamaLayer(**fields)


def kv_scale_tensors(config: ModelConfig) -> tuple[tuple[str, str], ...]:
    """A checkpoint's tensors, where it has them, that hold each layer's scales of K and V in float8 pages."""
    prefixes = (f"model.layers.{index}.self_attn." for index in range(config.num_layers))
    return tuple((f"{prefix}k_scale", f"{prefix}v_scale") for prefix in prefixes)


def forward(
    params: LlamaParams,
    pools: tuple[Num[Array, "P K B D2"], ...],
    batch: StepBatch,
    config: ModelConfig,
    *,
    num_single: int,
    attention_impl: str,
    kv_scales: Float[Array, "L K 2"] | None = None,
    attention_options: Mapping[str, int] | None = None,
) -> tuple[Float[Array, "E T"], tuple[Num[Array, "P K B D2"], ...]]:
    """Run one step's tokens through all layers.

    Args:
        pools: one KV pool a layer. One for all would give each layer's kernels constants of their own, and the compiler
            would compile them thirty times instead of once.
        num_single: leading rows that own one token each, as `paged_attention` has it.
        kv_scales: of pools in eight bits: what is stored times these is K and V of each layer's heads.
        attention_options: tuned ones, as `schedule` has them.

    Returns:
        What `head` takes of each token, and the pools with this step's K and V.
    """
    frequencies = rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    angles = frequencies[:, None] * batch.positions.astype(jnp.float32)[None, :]
    # Without the barrier XLA computes sines and cosines again inside every layer's rotation.
    rotary = jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))
    work = schedule(
        batch.block_table,
        batch.row_offsets,
        batch.lengths,
        num_tokens=batch.token_ids.shape[0],
        num_single=num_single,
        page_size=pools[0].shape[2],
        impl=attention_impl,
        options=attention_options,
    )
    x = embed(params.embedding, batch.token_ids, TENSOR)
    new_pools = []
    for index, (layer, pool) in enumerate(zip(params.layers, pools, strict=True)):
        scales = None if kv_scales is None else kv_scales[index]
        x, pool = _block(layer, pool, scales, x, rotary, batch, work, config, attention_impl)
        new_pools.append(pool)
    return x, tuple(new_pools)


def head(params: LlamaParams, x: Float[Array, "E R"], config: ModelConfig) -> tuple[Float[Array, "V R"], Float[Array, "E R"]]:
    """float32 logits of tokens as they leave the layers, whole on every device; and their hidden states, which are normed."""
    hidden = rms_norm(x, params.final_norm, config.rms_norm_eps)
    logits = linear(params.embedding if params.lm_head is None else params.lm_head, hidden).astype(jnp.float32)
    if jax.lax.axis_size(TENSOR) > 1:
        logits = jax.lax.all_gather(logits, TENSOR, axis=0, tiled=True)
    return logits[: config.vocab_size], hidden


# Traced once for all layers. The compiler inlines it, and the layers stay unrolled: a scan over stacked weights copies each
# layer's slice before use, which on CPU doubles the bytes of a decode.
@partial(jax.jit, static_argnames=("config", "impl"))
def _block(
    layer: LlamaLayer,
    pool: Num[Array, "P K B D2"],
    kv_scales: Float[Array, "K 2"] | None,
    x: Float[Array, "E T"],
    rotary: tuple[Float[Array, "half T"], Float[Array, "half T"]],
    batch: StepBatch,
    work: Any,
    config: ModelConfig,
    impl: str,
) -> tuple[Float[Array, "E T"], Num[Array, "P K B D2"]]:
    h = rms_norm(x, layer.norms[0], config.rms_norm_eps)
    attended, pool = _attention(layer, pool, kv_scales, h, rotary, batch, work, impl)
    x = x + attended
    return x + _mlp(layer, rms_norm(x, layer.norms[1], config.rms_norm_eps)), pool


def _attention(
    layer: LlamaLayer,
    pool: Num[Array, "P K B D2"],
    kv_scales: Float[Array, "K 2"] | None,
    h: Float[Array, "E T"],
    rotary: tuple[Float[Array, "half T"], Float[Array, "half T"]],
    batch: StepBatch,
    work: Any,
    impl: str,
) -> tuple[Float[Array, "E T"], Num[Array, "P K B D2"]]:
    heads, parts, dim, hidden = layer.qkv.shape
    tokens = h.shape[1]
    qkv = linear(layer.qkv.reshape(-1, hidden), h).reshape(heads, parts, dim, tokens)
    if layer.qkv_bias is not None:
        qkv = qkv + layer.qkv_bias[..., None]
    turn = rotate_tokens_first if impl == "tpu" else rotate
    queries, keys, values = turn(qkv[:, :-2], *rotary), turn(qkv[:, -2], *rotary), qkv[:, -1]
    pool = kv_update(
        pool,
        keys.transpose(2, 0, 1),
        values.transpose(2, 0, 1),
        batch.page_ids,
        batch.page_offsets,
        layout=IMPLEMENTATIONS[impl].layout,
        kv_scales=kv_scales,
        impl="tpu" if impl == "tpu" else "xla",
    )
    attended = paged_attention(
        queries.transpose(3, 0, 1, 2).reshape(tokens, -1, dim),
        pool,
        work,
        scale=dim**-0.5,
        kv_scales=kv_scales,
        impl=impl,
    )
    # With the barrier the product finds its operand as it wants it; without, oneDNN transposes it at half the speed.
    attended = jax.lax.optimization_barrier(attended.reshape(tokens, -1).T)
    out = psum(linear(layer.output.reshape(hidden, -1), attended), TENSOR)
    return out if layer.output_bias is None else out + layer.output_bias[:, None], pool


def _mlp(layer: LlamaLayer, h: Float[Array, "E T"]) -> Float[Array, "E T"]:
    mlp = layer.down.shape[1]
    gate_up = linear(layer.gate_up.reshape(2 * mlp, -1), h).reshape(2, mlp, -1)
    if layer.gate_up_bias is not None:
        gate_up = gate_up + layer.gate_up_bias[..., None]
    out = psum(linear(layer.down, jax.nn.silu(gate_up[0]) * gate_up[1]), TENSOR)
    return out if layer.down_bias is None else out + layer.down_bias[:, None]
