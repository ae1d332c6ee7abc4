"""Pages in host memory: copied out of the pools before a step gives them away, and back in before one reads them.

Owns the host's memory for pages and the programs that gather and scatter them, compiled once for a few sizes. Does not know
which prefix a slot holds (`host.tier`).

A save is dispatched and read back later, so that no step waits for it. Since programs run in order, the pages may be written
over by whatever is dispatched after it. A load first waits for the saves before it: its slots may be among them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Num

from jaxserve.device.prepare import compile_update
from jaxserve.device.step import DeviceState

BATCHES = (8, 2, 1)
"""Pages that a program moves: many at once cost less a page, and any number is a sum of these."""

MAX_UNREAD = 4
"""Batches that stay on the device, on their way to the host, before the oldest is waited for. They take room that nobody set
aside; but a step seldom saves more than one, so that the oldest is of an earlier step and has long arrived."""

TIMED_LOADS = 5
"""Of each size, the median of which counts."""


class HostPages:
    """Slots, and what moves pages between them and pools as `state` has them, abstract or not.

    Args:
        num_slots: pages of all layers that the host holds.
    """

    def __init__(self, state: DeviceState, num_slots: int) -> None:
        pool = state.pools[0]
        sharding = pool.sharding
        assert isinstance(sharding, NamedSharding)
        self._pages_sharding = NamedSharding(sharding.mesh, PartitionSpec(None, None, *sharding.spec[1:]))
        self._everywhere = NamedSharding(sharding.mesh, PartitionSpec())
        self._shape = (len(state.pools), *pool.shape[1:])
        self._dtype = np.dtype(pool.dtype)
        self._slots = np.empty((num_slots, *self._shape), self._dtype)
        self._unread: deque[tuple[jax.Array, list[int]]] = deque()
        self._gather = {size: self._compile_gather(state, size) for size in BATCHES}
        self._scatter = {size: self._compile_scatter(state, size) for size in BATCHES}

    def _compile_gather(self, state: DeviceState, size: int) -> Any:
        jitted = jax.jit(gather_pages, out_shardings=self._pages_sharding)
        return jitted.lower(state.pools, self._abstract_ids(size)).compile()

    def _compile_scatter(self, state: DeviceState, size: int) -> Any:
        pages = jax.ShapeDtypeStruct((size, *self._shape), self._dtype, sharding=self._pages_sharding)
        return compile_update(scatter_pages, state.pools, self._abstract_ids(size), pages)

    def _abstract_ids(self, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), np.int32, sharding=self._everywhere)

    def save(self, pools: tuple[jax.Array, ...], saves: tuple[tuple[int, int], ...]) -> None:
        """Dispatch copies of (page, slot) pairs."""
        for batch in _batches(saves):
            ids = jax.device_put(np.array([page for page, _ in batch], np.int32), self._everywhere)
            pages = self._gather[len(batch)](pools, ids)
            pages.copy_to_host_async()
            self._unread.append((pages, [slot for _, slot in batch]))
            if len(self._unread) > MAX_UNREAD:
                self._read_oldest()

    def load(self, pools: tuple[jax.Array, ...], loads: tuple[tuple[int, int], ...]) -> tuple[jax.Array, ...]:
        """`pools`, which are donated, with (slot, page) pairs copied into them."""
        while loads and self._unread:
            self._read_oldest()
        for batch in _batches(loads):
            pages = self._slots[[slot for slot, _ in batch]]  # a copy, since slots may be written while it is on its way
            ids = np.array([page for _, page in batch], np.int32)
            uploaded = jax.device_put((ids, pages), (self._everywhere, self._pages_sharding))
            pools = self._scatter[len(batch)](pools, *uploaded)
        return pools

    def _read_oldest(self) -> None:
        pages, slots = self._unread.popleft()
        self._slots[slots] = np.asarray(pages)

    def time_loads(self, pools: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], dict[int, float]]:
        """Seconds of a load of each batch size until the device has it, and `pools`, which are donated and written over."""
        seconds: dict[int, float] = {}
        num_pages, num_slots = pools[0].shape[0], len(self._slots)
        for size in BATCHES:
            # Slots and pages far apart, as they are found; in a small pool some of them twice, which costs the same.
            loads = tuple((index * 7 % num_slots, index * 5 % num_pages) for index in range(size))
            self._slots[[slot for slot, _ in loads]] = 0  # memory that was never written is read too fast
            taken = []
            for _ in range(TIMED_LOADS + 1):
                jax.block_until_ready(pools)
                started = time.perf_counter()
                pools = jax.block_until_ready(self.load(pools, loads))
                taken.append(time.perf_counter() - started)
            seconds[size] = sorted(taken[1:])[TIMED_LOADS // 2]
        return pools, seconds


def gather_pages(pools: tuple[Num[Array, "P *page"], ...], pages: Int[Array, " n"]) -> Num[Array, "n pools *page"]:
    """Copies of whole pages in every layer."""
    return jnp.stack([pool[pages] for pool in pools], axis=1)


def scatter_pages(
    pools: tuple[Num[Array, "P *page"], ...], pages: Int[Array, " n"], contents: Num[Array, "n pools *page"]
) -> tuple[Num[Array, "P *page"], ...]:
    """Write whole pages in every layer, one after the other. In place."""

    def write(index: Int[Array, ""], pools: tuple[Num[Array, "P *page"], ...]) -> tuple[Num[Array, "P *page"], ...]:
        content = lax.dynamic_index_in_dim(contents, index, keepdims=False)
        return tuple(
            lax.dynamic_update_slice_in_dim(pool, content[layer][None], pages[index], axis=0)
            for layer, pool in enumerate(pools)
        )

    return lax.fori_loop(0, len(pages), write, pools)


def _batches(moves: tuple[tuple[int, int], ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    first = 0
    while first < len(moves):
        size = next(size for size in BATCHES if size <= len(moves) - first)
        yield moves[first : first + size]
        first += size
