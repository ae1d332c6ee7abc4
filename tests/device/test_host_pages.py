"""Pages that go to host memory and come back the same, in every layer, whatever was written over them meanwhile."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device.abstract import initial_state
from jaxserve.device.host_pages import BATCHES, MAX_UNREAD, HostPages
from jaxserve.device.step import DeviceState, state_shardings
from jaxserve.models.sharding import make_mesh
from jaxserve.plan import RunnerLimits
from tests.cached import CACHED
from tests.real_engines import TINY_MODEL

pytestmark = [*CACHED, pytest.mark.slow]

NUM_PAGES = 48
LIMITS = RunnerLimits(num_pages=NUM_PAGES, page_size=4, max_seqs=3, max_step_tokens=16, max_context=40, vocab_size=97)


def make(devices: int, dtype: str, num_slots: int) -> tuple[HostPages, tuple[jax.Array, ...], list[np.ndarray]]:
    """Slots, pools that differ everywhere, and what they hold."""
    mesh = make_mesh(devices)
    kind = np.dtype(jnp.dtype(dtype))

    def fill() -> DeviceState:
        state = initial_state(TINY_MODEL, LIMITS, mesh, kind, "xla")
        keys = jax.random.split(jax.random.key(0), len(state.pools))
        numbers = [jax.random.randint(key, pool.shape, -120, 120) for key, pool in zip(keys, state.pools, strict=True)]
        return DeviceState(
            tuple(n.astype(pool.dtype) for n, pool in zip(numbers, state.pools, strict=True)), state.slots, state.kv_scales
        )

    state = jax.jit(fill, out_shardings=state_shardings(mesh, TINY_MODEL.num_layers, kind))()
    return HostPages(state, num_slots), state.pools, [np.array(pool) for pool in state.pools]


@pytest.mark.parametrize(("devices", "dtype"), [(1, "float32"), (2, "bfloat16"), (1, "int8"), (1, "float8_e4m3fn")])
def test_pages_come_back_elsewhere_and_nothing_else_is_touched(devices: int, dtype: str) -> None:
    pages, pools, before = make(devices, dtype, 16)
    pages.save(pools, tuple((page, 15 - page) for page in range(11)))  # three sizes of batch
    pools = pages.load(pools, ((15, 20), (5, 21), (15, 22)))
    pools = pages.load(pools, tuple((15 - page, page + 30) for page in range(11)))
    sources = [*range(20), 0, 10, 0, *range(23, 30), *range(11), *range(41, NUM_PAGES)]
    for expected, pool in zip(before, pools, strict=True):
        np.testing.assert_array_equal(np.asarray(pool), expected[sources])


def test_saves_are_of_what_was_there_and_the_last_one_of_a_slot_counts() -> None:
    """More than may be unread, of a pool that is written over after each of them."""
    pages, pools, before = make(1, "float32", 4)
    for number in range(3 * MAX_UNREAD):
        pages.save(pools, ((number, number % 4), (number + 1, (number + 1) % 4)))
        pools = pages.load(pools, ((number % 4, number + 2),)) if number % 5 == 4 else pools
        assert len(pages._unread) <= MAX_UNREAD
    before[0][[6, 11]] = before[0][[4, 9]]
    pools = pages.load(pools, ((0, 40), (1, 41), (2, 42), (3, 43)))
    np.testing.assert_array_equal(np.asarray(pools[0])[40:44], before[0][[12, 9, 10, 11]])


def test_loads_of_every_size_are_timed() -> None:
    pages, pools, _ = make(1, "float32", 3)
    pools, seconds = pages.time_loads(pools)
    assert seconds.keys() == set(BATCHES)
    assert all(0 < value < 10 for value in seconds.values())
    assert not any(pool.is_deleted() for pool in pools)
