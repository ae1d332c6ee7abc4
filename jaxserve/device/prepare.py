"""What a step needs done before it and most steps do not: pages copied, and per-slot state of sequences that enter.

Owns small programs of their own, compiled once, so that a step which needs none of them pays nothing: inside the step, a copy
would cost its time in every step, wanted or not. Dispatched before the step, they are done before it, since programs run in
order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, Num

from jaxserve.device.sampler import SlotState
from jaxserve.device.step import DeviceState
from jaxserve.plan import PlanRow, RunnerLimits, StepPlan
from jaxserve.request import MAX_LOGIT_BIAS


class Preparation:
    """The programs, compiled for a state's shapes.

    Args:
        everywhere: sharding of what every device has.
    """

    def __init__(self, state: DeviceState, limits: RunnerLimits, everywhere: NamedSharding) -> None:
        self._limits = limits
        self._everywhere = everywhere
        pools, slots = state.pools, state.slots
        one, pairs = self._abstract_upload(()), self._abstract_upload((limits.max_seqs, 2))
        ids = self._abstract_upload((MAX_LOGIT_BIAS,))
        values = jax.ShapeDtypeStruct((MAX_LOGIT_BIAS,), np.float32, sharding=everywhere)
        history = self._abstract_upload((state.slots.tokens.shape[1],))
        self._copy_pages = compile_update(copy_pages, pools, pairs, one)
        self._set_bias = compile_update(_set_bias, slots, one, ids, values)
        self._set_history = compile_update(_set_history, slots, one, history)

    def _abstract_upload(self, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=self._everywhere)

    def prepare(self, state: DeviceState, plan: StepPlan) -> DeviceState:
        """`state`, which is donated, as `plan` needs it; the same object where it needs nothing."""
        for row in plan.rows:
            if row.fresh:
                state = self._enter(state, row)
        if plan.copies:
            pairs = np.zeros((self._limits.max_seqs, 2), np.int32)
            pairs[: len(plan.copies)] = plan.copies
            uploaded = jax.device_put((pairs, np.int32(len(plan.copies))), self._everywhere)
            state = dataclasses.replace(state, pools=self._copy_pages(state.pools, *uploaded))
        return state

    def _enter(self, state: DeviceState, row: PlanRow) -> DeviceState:
        params = row.params
        if params.logit_bias:
            ids = np.full(MAX_LOGIT_BIAS, self._limits.vocab_size, np.int32)
            values = np.zeros(MAX_LOGIT_BIAS, np.float32)
            ids[: len(params.logit_bias)] = [token_id for token_id, _ in params.logit_bias]
            values[: len(params.logit_bias)] = [value for _, value in params.logit_bias]
            uploaded = jax.device_put((np.int32(row.slot), ids, values), self._everywhere)
            state = dataclasses.replace(state, slots=self._set_bias(state.slots, *uploaded))
        # Nothing but penalties reads tokens whose K and V are there.
        if row.history and (params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0):
            history = np.zeros(state.slots.tokens.shape[1], np.int32)
            history[: len(row.history)] = row.history
            uploaded = jax.device_put((np.int32(row.slot), history), self._everywhere)
            state = dataclasses.replace(state, slots=self._set_history(state.slots, *uploaded))
        return state


def copy_pages(
    pools: tuple[Num[Array, "_ ..."], ...], pairs: Int[Array, "S 2"], num_pairs: Int[Array, ""]
) -> tuple[Num[Array, "_ ..."], ...]:
    """Copy whole pages in every layer, from the first of each pair to the second, one pair after the other. In place."""

    def copy(index: Int[Array, ""], pools: tuple[Num[Array, "_ ..."], ...]) -> tuple[Num[Array, "_ *page"], ...]:
        source, destination = pairs[index, 0], pairs[index, 1]
        pages = [lax.dynamic_index_in_dim(pool, source) for pool in pools]
        return tuple(
            lax.dynamic_update_slice_in_dim(pool, page, destination, axis=0) for pool, page in zip(pools, pages, strict=True)
        )

    return lax.fori_loop(0, num_pairs, copy, pools)


def _set_bias(
    slots: SlotState, slot: Int[Array, ""], ids: Int[Array, " max_bias"], values: Float[Array, " max_bias"]
) -> SlotState:
    return dataclasses.replace(
        slots, bias_ids=slots.bias_ids.at[slot].set(ids), bias_values=slots.bias_values.at[slot].set(values)
    )


def _set_history(slots: SlotState, slot: Int[Array, ""], tokens: Int[Array, " C"]) -> SlotState:
    return dataclasses.replace(slots, tokens=slots.tokens.at[slot].set(tokens))


def compile_update(function: Callable[..., Any], state: Any, *others: Any) -> Any:
    """A program that updates `state`, its first argument and its result, in place. Arguments are arrays or abstract."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(function, donate_argnums=(0,), out_shardings=shardings).lower(state, *others).compile()
