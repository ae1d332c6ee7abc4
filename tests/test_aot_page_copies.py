"""Copies of pages, within pools, to the host and back, compiled ahead of time for devices that are not here: none needs room
for another pool, whatever the layout and the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.device.abstract import pool_shape
from jaxserve.device.host_pages import BATCHES, gather_pages, scatter_pages
from jaxserve.device.prepare import copy_pages
from jaxserve.device.step import POOL_AXES
from jaxserve.models.sharding import mesh_of, partition_spec
from pallas_kernels.aot import TARGETS
from tests.kernels.ladder.compiled import compile_all, job, require
from tests.kernels.ladder.programs import MODELS

pytestmark = pytest.mark.slow

NUM_PAGES, PAGE_SIZE, MAX_SEQS = 1024, 64, 64
CASES = (("v5e", 1, "tpu"), ("v6e", 4, "tpu"), ("h200", 1, "gpu"))


def page_copies(devices: Sequence[Any], *, impl: str) -> tuple[Any, tuple[Any, ...]]:
    """The program and its abstract arguments, for the pools of the 8B model."""
    pools, everywhere = pools_8b(devices, impl)
    pairs = jax.ShapeDtypeStruct((MAX_SEQS, 2), jnp.int32, sharding=everywhere)
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    program = jax.jit(copy_pages, donate_argnums=(0,), out_shardings=tuple(pool.sharding for pool in pools))
    return program, (pools, pairs, count)


def host_moves(devices: Sequence[Any], *, impl: str, back: bool) -> tuple[Any, tuple[Any, ...]]:
    """The program that gathers a batch of pages for the host, or the one that scatters them, and its abstract arguments."""
    pools, everywhere = pools_8b(devices, impl)
    ids = jax.ShapeDtypeStruct((BATCHES[0],), jnp.int32, sharding=everywhere)
    pages_sharding = NamedSharding(everywhere.mesh, PartitionSpec(None, None, *pools[0].sharding.spec[1:]))
    if not back:
        return jax.jit(gather_pages, out_shardings=pages_sharding), (pools, ids)
    shape = (BATCHES[0], len(pools), *pools[0].shape[1:])
    pages = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=pages_sharding)
    program = jax.jit(scatter_pages, donate_argnums=(0,), out_shardings=tuple(pool.sharding for pool in pools))
    return program, (pools, ids, pages)


def pools_8b(devices: Sequence[Any], impl: str) -> tuple[tuple[jax.ShapeDtypeStruct, ...], NamedSharding]:
    """Pools of the 8B model, and the sharding of what every device has."""
    model, mesh = MODELS["8b"], mesh_of(devices)
    shape = pool_shape(model, NUM_PAGES, PAGE_SIZE, mesh, impl)
    split = NamedSharding(mesh, partition_spec(POOL_AXES))
    pool = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=split)
    return (pool,) * model.num_layers, NamedSharding(mesh, PartitionSpec())


def test_pages_are_copied_in_place() -> None:
    for target, _, _ in CASES:
        require(target)
    jobs = [
        job(target, "tests.test_aot_page_copies:page_copies", num_devices=num_devices, impl=impl)
        for target, num_devices, impl in CASES
    ]
    model = MODELS["8b"]
    for (target, num_devices, _), figures in zip(CASES, compile_all(jobs), strict=True):
        assert not figures.error, f"{target}: {figures.error}"
        heads = model.num_kv_heads // num_devices
        pool_bytes = model.num_layers * NUM_PAGES * heads * PAGE_SIZE * 2 * model.head_dim * 2
        assert figures.alias_bytes == pool_bytes, target
        # A page of every layer may wait on its way, no pool may.
        assert figures.temp_bytes <= 2 * pool_bytes // NUM_PAGES + 2**20, f"{target}: {figures.temp_bytes} bytes"
        assert figures.temp_bytes < 0.05 * TARGETS[target].hbm_bytes


def test_pages_go_to_the_host_and_back_without_a_copy_of_a_pool() -> None:
    for target, _, _ in CASES:
        require(target)
    cases = [(case, back) for case in CASES for back in (False, True)]
    jobs = [
        job(target, "tests.test_aot_page_copies:host_moves", num_devices=num_devices, impl=impl, back=back)
        for (target, num_devices, impl), back in cases
    ]
    model = MODELS["8b"]
    for ((target, num_devices, _), back), figures in zip(cases, compile_all(jobs), strict=True):
        assert not figures.error, f"{target}: {figures.error}"
        heads = model.num_kv_heads // num_devices
        page_bytes = model.num_layers * heads * PAGE_SIZE * 2 * model.head_dim * 2
        assert figures.alias_bytes == (NUM_PAGES * page_bytes if back else 0), target
        assert figures.temp_bytes <= 2 * BATCHES[0] * page_bytes + 2**20, f"{target}: {figures.temp_bytes} bytes, back: {back}"
