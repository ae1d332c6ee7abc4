"""Copies of shared pages, compiled ahead of time for devices that are not here: in place, whatever the layout and the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.device.abstract import pool_shape
from jaxserve.device.prepare import copy_pages
from jaxserve.device.step import POOL_AXES
from jaxserve.models.sharding import TENSOR, partition_spec
from pallas_kernels.aot import TARGETS
from tests.kernels.ladder.compiled import compile_all, job, require
from tests.kernels.ladder.programs import MODELS

pytestmark = pytest.mark.slow

NUM_PAGES, PAGE_SIZE, MAX_SEQS = 1024, 64, 64
CASES = (("v5e", 1, "tpu"), ("v6e", 4, "tpu"), ("h200", 1, "gpu"))


def page_copies(devices: Sequence[Any], *, impl: str) -> tuple[Any, tuple[Any, ...]]:
    """The program and its abstract arguments, for the pools of the 8B model."""
    model, mesh = MODELS["8b"], Mesh(np.array(devices), (TENSOR,))
    shape = pool_shape(model, NUM_PAGES, PAGE_SIZE, mesh, impl)
    split, everywhere = NamedSharding(mesh, partition_spec(POOL_AXES)), NamedSharding(mesh, PartitionSpec())
    pools = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=split),) * model.num_layers
    pairs = jax.ShapeDtypeStruct((MAX_SEQS, 2), jnp.int32, sharding=everywhere)
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    program = jax.jit(copy_pages, donate_argnums=(0,), out_shardings=(split,) * model.num_layers)
    return program, (pools, pairs, count)


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
