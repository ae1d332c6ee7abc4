"""Mixtures of experts: which experts a token is sent to, and what they make of it.

Owns routing and the order of rows; `pallas_kernels.grouped_matmul` multiplies. Runs inside `shard_map`: shapes are local.

Every device has all tokens and routes them alike. It multiplies those that are sent to its own experts, and what all devices
have is summed, as it is after an MLP: no more is said between devices than there, at any number of them. Sending tokens to
where their experts are would have each device hold fewer of them, which pays where steps have thousands of tokens, and costs
two exchanges in place of the one sum in each layer.

Rows that are nobody's here, of padding or for other devices' experts, come last and belong to no group: `grouped_matmul` does
not multiply them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxserve.model_config import ExpertsConfig
from jaxserve.models.decoder_params import Experts
from jaxserve.models.layers import ACTIVATIONS
from jaxserve.models.sharding import EXPERT
from pallas_kernels.grouped_matmul import IMPLEMENTATIONS, grouped_matmul


def route(
    router: Float[Array, "X E"], h: Float[Array, "E T"], config: ExpertsConfig
) -> tuple[Int[Array, "T A"], Float[Array, "T A"]]:
    """The experts that each token is sent to, the best first, and their weights in what becomes of it. In float32."""
    scores = lax.dot_general(
        h, router, (((0,), (1,)), ((), ())), precision="highest", preferred_element_type=jnp.float32
    )  # [T, X]
    best, chosen = lax.top_k(scores, config.per_token)
    if config.renormalise:
        return chosen, jax.nn.softmax(best, axis=-1)
    return chosen, jnp.exp(best - jax.nn.logsumexp(scores, axis=-1, keepdims=True))


def mixture(
    experts: Experts,
    h: Float[Array, "E T"],
    real: Bool[Array, " T"],
    config: ExpertsConfig,
    *,
    activation: str,
    impl: str,
) -> Float[Array, "E T"]:
    """What this device's share of the experts makes of its tokens, to be summed over all devices.

    Args:
        real: tokens that are no padding; what becomes of padding is finite and otherwise unspecified.
        impl: of `grouped_matmul`, for which the matrices are laid out.
    """
    tokens, num_local = h.shape[1], experts.gate.shape[0]
    chosen, weights = route(experts.router, h, config)
    group = chosen - lax.axis_index(EXPERT) * num_local  # [T, A]
    mine = real[:, None] & (group >= 0) & (group < num_local)
    group = jnp.where(mine, group, num_local).reshape(-1)
    order = jnp.argsort(group, stable=True)  # rows of one expert stay in the order of tokens
    group_sizes = jnp.sum(group[:, None] == jnp.arange(num_local), axis=0, dtype=jnp.int32)
    rows = h.T[order // config.per_token]  # [M, E]
    gate, up = (grouped_matmul(rows, part, group_sizes, impl=impl) for part in (experts.gate, experts.up))
    made = grouped_matmul(ACTIVATIONS[activation](gate) * up, experts.down, group_sizes, impl=impl)  # [M, E]
    # Added in the order of a token's choices, whoever else is in the step.
    made = made[jnp.argsort(order)].reshape(tokens, config.per_token, -1).astype(jnp.float32)
    return jnp.sum(jnp.where(mine[..., None], made * weights[..., None], 0.0), axis=1).astype(h.dtype).T


def lay_out(params: Any, impl: str) -> Any:
    """`params` with the experts' matrices where `grouped_matmul` of `impl` wants them; arrays or abstract ones with shardings.

    Arrays that move are given up one by one, so that no two copies of all of them are held.
    """
    order = IMPLEMENTATIONS[impl].order
    if order == (0, 1, 2):
        return params

    def move(matrices: Any) -> Any:
        spec = tuple(matrices.sharding.spec) + (None,) * (3 - len(matrices.sharding.spec))
        sharding = NamedSharding(matrices.sharding.mesh, PartitionSpec(*(spec[axis] for axis in order)))
        if isinstance(matrices, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(tuple(matrices.shape[axis] for axis in order), matrices.dtype, sharding=sharding)
        moved = jax.jit(lambda x: x.transpose(order), out_shardings=sharding)(matrices).block_until_ready()
        matrices.delete()
        return moved

    def one(node: Any) -> Any:
        if not isinstance(node, Experts):
            return node
        return dataclasses.replace(node, gate=move(node.gate), up=move(node.up), down=move(node.down))

    return jax.tree.map(one, params, is_leaf=lambda node: isinstance(node, Experts))
