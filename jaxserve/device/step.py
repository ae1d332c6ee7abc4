"""One engine step as a pure function: unpack, model, sample, update the slots' state. Compiled once a bucket.

Runs under `shard_map` over the whole mesh: parameters and KV heads are split, everything else is the same on each device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Num

from jaxserve.device.buckets import Bucket
from jaxserve.device.heads import head_of_rows
from jaxserve.device.pack import SampleRows, unpack
from jaxserve.device.sampler import Sampled, SlotState, sample
from jaxserve.device.scoring import pack_columns, score
from jaxserve.model_config import ModelConfig
from jaxserve.models.families import FAMILIES
from jaxserve.models.sharding import partition_spec
from jaxserve.plan import RunnerLimits
from jaxserve.request import MAX_LOGPROBS
from pallas_kernels import pytree
from pallas_kernels.kv_update import LARGEST

POOL_AXES = ("pages", "kv_heads", "page", "head_dim")
SHARED_POOL_AXES = ("pages", "layers", *POOL_AXES[1:])
SCALE_AXES = ("layers", "kv_heads", "key_and_value")


@pytree.dataclass
class DeviceState:
    """Everything that a step updates in place: KV pools and the slots' state. Donated.

    Attributes:
        pools: one a layer, or one that layers share: see `decoder.forward`.
        kv_scales: of pools in eight bits, and no other: what is stored times these is K and V. A step leaves them as they are.
    """

    pools: tuple[Num[Array, "_ K B D2"] | Num[Array, "_ _ K B D2"], ...]
    slots: SlotState
    kv_scales: Float[Array, "L K 2"] | None = None


@pytree.dataclass
class StepOutput:
    """What a step leaves on the device to be read, or not.

    Attributes:
        sampled: see `pack_sampled`.
        logits: of the rows that sample, for `constrained`.
        hidden: final hidden states of the rows that sample, at their last tokens; only where the bucket has chunks.
        scores: of known tokens, see `scoring.score`; likewise.
    """

    sampled: Int[Array, "R packed"]
    logits: Float[Array, "V R"]
    hidden: Float[Array, "R E"] | None = None
    scores: Int[Array, "T packed"] | None = None


def make_step(
    config: ModelConfig,
    limits: RunnerLimits,
    bucket: Bucket,
    attention_impl: str,
    choose: Callable[[Array, SampleRows, SlotState], Sampled] = sample,
    attention_options: Mapping[str, int] | None = None,
    experts_impl: str = "xla",
) -> Callable[..., tuple[DeviceState, StepOutput]]:
    """The step of one bucket, to be called inside `shard_map`.

    Args:
        choose: makes tokens of logits; another than `sample` is for measuring what sampling costs.
        attention_options: tuned ones, as `paged_attention.schedule` has them.
        experts_impl: of `grouped_matmul`, for which `moe.lay_out` has laid out the experts.

    Returns:
        A function of parameters, state, packed upload and, where `limits` have any, adapters to the new state and what is to
        be read.
    """
    family = FAMILIES[config.family]

    def step(
        params: Any, state: DeviceState, packed: Int[Array, " U"], adapters: Any = None
    ) -> tuple[DeviceState, StepOutput]:
        slots = state.slots
        batch, rows, token_slots, known = unpack(packed, slots.tokens, bucket, limits)
        # Read once, before they are written over: each use would read them again, and XLA copy them all for that.
        batch = dataclasses.replace(batch, token_ids=jax.lax.optimization_barrier(batch.token_ids))
        tokens_by_slot = slots.tokens.at[token_slots, batch.positions].set(batch.token_ids)
        slots = dataclasses.replace(slots, tokens=tokens_by_slot)
        states, pools = family.forward(
            params,
            state.pools,
            batch,
            config,
            num_single=bucket.num_single,
            attention_impl=attention_impl,
            experts_impl=experts_impl,
            kv_scales=state.kv_scales,
            attention_options=attention_options,
            adapters=adapters,
        )
        head = partial(family.head, params, config=config)
        of_rows = states.at[:, rows.last_token].get(mode="promise_in_bounds")
        if bucket.has_chunks:
            logits, hidden = head_of_rows(head, of_rows, jnp.sum(rows.slot < limits.max_seqs))
        else:
            logits, hidden = head(of_rows)
        sampled = choose(logits, rows, slots)
        slots = dataclasses.replace(slots, tokens=slots.tokens.at[rows.slot, rows.next_position].set(sampled.tokens))
        output = StepOutput(pack_sampled(sampled), logits)
        if bucket.has_chunks:
            scores = score(lambda x: head(x)[0], states, known, num_top_logprobs(config))
            output = dataclasses.replace(output, hidden=hidden.T.astype(jnp.float32), scores=scores)
        return DeviceState(pools=pools, slots=slots, kv_scales=state.kv_scales), output

    return step


def pack_sampled(sampled: Sampled) -> Int[Array, "R packed"]:
    """`Sampled` as `pack_columns` has it."""
    return pack_columns(sampled.tokens, sampled.logprob, sampled.top_ids, sampled.top_logprobs)


def num_top_logprobs(config: ModelConfig) -> int:
    """Top log probabilities in a packed result."""
    return min(MAX_LOGPROBS, config.vocab_size)


def state_shardings(mesh: Mesh, num_pools: int, kv_dtype: Any = None, *, shared_pools: bool = False) -> DeviceState:
    """Where the state lies: KV heads are split over the mesh. There are scales where `kv_dtype` has eight bits."""
    pool = NamedSharding(mesh, partition_spec(SHARED_POOL_AXES if shared_pools else POOL_AXES))
    everywhere = NamedSharding(mesh, PartitionSpec())
    slots = SlotState(tokens=everywhere, bias_ids=everywhere, bias_values=everywhere)  # type: ignore[arg-type]
    scales = NamedSharding(mesh, partition_spec(SCALE_AXES)) if has_scales(kv_dtype) else None
    return DeviceState(pools=(pool,) * num_pools, slots=slots, kv_scales=scales)  # type: ignore[arg-type]


def has_scales(kv_dtype: Any) -> bool:
    """Whether pools of this data type hold K and V divided by `DeviceState.kv_scales`."""
    return kv_dtype is not None and jnp.dtype(kv_dtype) in LARGEST


def jit_step(
    step: Callable[..., Any],
    mesh: Mesh,
    params_specs: Any,
    state_specs: DeviceState,
    adapters_specs: Any = None,
) -> Any:
    """`step` over the mesh, with its state donated. It takes adapters if `adapters_specs` say how they are split."""
    everywhere = PartitionSpec()
    arguments = (params_specs, state_specs, everywhere)
    sharded = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=arguments if adapters_specs is None else (*arguments, adapters_specs),
        out_specs=(state_specs, everywhere),
        check_vma=False,
    )
    return jax.jit(sharded, donate_argnums=(1,))
