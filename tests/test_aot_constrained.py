"""Sampling among masks, compiled ahead of time for devices that are not here: the slots stay in place, and room is small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.device.constrained import jit_constrain, upload_width
from jaxserve.device.sampler import choose_draw, empty_state
from jaxserve.models.sharding import mesh_of
from pallas_kernels.aot import TARGETS
from tests.kernels.ladder.compiled import compile_all, job, require

pytestmark = pytest.mark.slow

VOCAB, MAX_SEQS, MAX_CONTEXT = 128_256, 64, 8192
CASES = (("v5e", 1), ("h200", 1))


def constrained(devices: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """The program for 64 rows of the 8B model's vocabulary, and its abstract arguments."""
    mesh = mesh_of(devices)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def abstract(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    slots = jax.eval_shape(lambda: empty_state(MAX_SEQS, MAX_CONTEXT, VOCAB))
    slots = jax.tree.map(lambda leaf: abstract(leaf.shape, leaf.dtype), slots)
    logits, result = abstract((VOCAB, MAX_SEQS), jnp.float32), abstract((MAX_SEQS, 42), jnp.int32)
    upload = abstract((MAX_SEQS, upload_width(VOCAB)), jnp.int32)
    draw_impl, _ = choose_draw(devices[0].platform, VOCAB)
    return jit_constrain(draw_impl, VOCAB, mesh), (slots, logits, result, upload)


def test_constrained_rows_are_sampled_in_place() -> None:
    for target, _ in CASES:
        require(target)
    jobs = [job(target, "tests.test_aot_constrained:constrained", num_devices=num_devices) for target, num_devices in CASES]
    for (target, _), figures in zip(CASES, compile_all(jobs), strict=True):
        assert not figures.error, f"{target}: {figures.error}"
        assert figures.alias_bytes >= 4 * (MAX_SEQS + 1) * (MAX_CONTEXT + 1), target
        # A few times the logits, which are 33 MB.
        assert figures.temp_bytes < 12 * 4 * VOCAB * MAX_SEQS, f"{target}: {figures.temp_bytes} bytes"
        assert figures.temp_bytes < 0.05 * TARGETS[target].hbm_bytes
        assert figures.collectives == {}
