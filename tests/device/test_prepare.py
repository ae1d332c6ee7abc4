"""What is done before a step: pages copied in every layout's pool, and the history that penalties read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.device.abstract import initial_state
from jaxserve.device.prepare import Preparation
from jaxserve.device.step import DeviceState, state_shardings
from jaxserve.models.sharding import make_mesh
from jaxserve.plan import PlanRow, RunnerLimits, StepPlan
from jaxserve.request import SamplingParams
from tests.cached import CACHED
from tests.real_engines import TINY_MODEL

pytestmark = CACHED

LIMITS = RunnerLimits(num_pages=6, page_size=8, max_seqs=3, max_step_tokens=16, max_context=40, vocab_size=97)


def make(devices: int, dtype: str) -> tuple[Preparation, DeviceState, np.ndarray]:
    """Programs, a state whose pools differ everywhere, and the first layer's pool."""
    mesh = make_mesh(devices)
    kind = np.dtype(jnp.dtype(dtype))
    shardings = state_shardings(mesh, TINY_MODEL.num_layers, kind)

    def fill() -> DeviceState:
        state = initial_state(TINY_MODEL, LIMITS, mesh, kind, "xla")
        numbers = [jnp.arange(pool.size).reshape(pool.shape) % 251 for pool in state.pools]
        return DeviceState(
            tuple((n + layer).astype(pool.dtype) for layer, (n, pool) in enumerate(zip(numbers, state.pools, strict=True))),
            state.slots,
            state.kv_scales,
        )

    state = jax.jit(fill, out_shardings=shardings)()
    return Preparation(state, LIMITS, NamedSharding(mesh, PartitionSpec())), state, np.asarray(state.pools[0])


def row(**changes: object) -> PlanRow:
    values = {"seq_id": 0, "slot": 1, "start": 3, "count": 1, "tokens": (9,), "pages": [0], "sample": True, "num_prompt": 4}
    values |= {"params": SamplingParams(), "seed": 0, "stop_ids": (), "fresh": True, "history": (5, 6, 7)}
    return PlanRow(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("devices", "dtype"), [(1, "float32"), (2, "bfloat16"), (1, "int8")])
def test_pages_are_copied_one_after_the_other_and_nothing_else_is_touched(devices: int, dtype: str) -> None:
    preparation, state, before = make(devices, dtype)
    state = preparation.prepare(state, StepPlan(0, (), ((1, 4), (4, 5))))
    for layer, pool in enumerate(state.pools):
        expected = before + np.array(layer).astype(before.dtype) if layer else before.copy()
        expected[4] = expected[5] = expected[1]
        np.testing.assert_array_equal(np.asarray(pool), expected)


def test_a_plan_that_needs_nothing_gets_the_state_as_it_is() -> None:
    preparation, state, _ = make(1, "float32")
    assert preparation.prepare(state, StepPlan(0, (row(), row(fresh=False, history=())))) is state


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalties_see_cached_tokens(name: str) -> None:
    preparation, state, _ = make(1, "float32")
    state = preparation.prepare(state, StepPlan(0, (row(params=SamplingParams(**{name: 1.5})),)))
    assert np.asarray(state.slots.tokens[1, :4]).tolist() == [5, 6, 7, 0]
