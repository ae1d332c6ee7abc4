"""TPU attention through export and the real TPU compilers: that it compiles, fits, copies no pool, and does not grow.

Bundles are the instruction words of a kernel's final program: a figure of the compiler's schedule that needs no TPU. After a
change that is meant to move them, rewrite the record:

    JAXSERVE_WRITE_FIGURES=1 .venv/bin/pytest tests/kernels/test_aot_tpu_kernels.py -k figures
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest

from pallas_kernels.aot import Figures, Job
from pallas_kernels.paged_attention import IMPLEMENTATIONS
from tests.kernels.ladder.compiled import as_tpu, compile_all, job, record_figures, recorded_figures, require

pytestmark = pytest.mark.slow

TOLERANCE = 0.05
"""How far a figure may be from its record: patch releases of the compiler move it by a per cent or two."""

ATTENTION = "pallas_kernels.programs:attention"

BASE: dict[str, Any] = {
    "impl": "tpu", "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "num_tokens": 256, "num_rows": 64,
}  # fmt: skip

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "decodes of one sequence": {"num_tokens": 1, "num_rows": 1},
    "decodes": {"num_tokens": 64},
    "chunks": {"num_tokens": 2048},
    "many sequences": {"num_tokens": 256, "num_rows": 256},
    "head_dim 64": {"head_dim": 64},
    "head_dim 80": {"head_dim": 80, "num_heads": 32, "num_kv_heads": 32},
    "head_dim 96": {"head_dim": 96, "num_heads": 32, "num_kv_heads": 32},
    "head_dim 256": {"head_dim": 256, "num_heads": 16, "num_kv_heads": 8, "soft_cap": 50.0, "window": 4096},
    "9 heads over 3": {"head_dim": 64, "num_heads": 9, "num_kv_heads": 3},
    "7 heads over 1": {"num_heads": 28, "num_kv_heads": 4},
    "16 heads over 1": {"num_heads": 16, "num_kv_heads": 1},
    "a shard of eight": {"num_heads": 4, "num_kv_heads": 1, "page_size": 64},
    "window and sinks": {"head_dim": 64, "num_heads": 64, "window": 128, "sinks": True},
    "float32": {"dtype": "float32", "num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    **{f"pages of {size}": {"page_size": size} for size in (8, 32, 64, 128)},
    **{f"int8 pages of {size}": {"page_size": size, "kv_dtype": "int8"} for size in (8, 16, 32, 128)},
    **{f"float8 pages of {size}": {"page_size": size, "kv_dtype": "float8_e4m3fn"} for size in (8, 64)},
}
"""What the engine's settings and its models' shapes lead to, each against `BASE`."""

FEW = ("decodes", "head_dim 80", "head_dim 256", "int8 pages of 32", "float8 pages of 64")
"""For targets of which the whole list would tell little more."""

UPDATES: dict[str, dict[str, Any]] = {
    "decodes": {"num_tokens": 64},
    "chunks": {"num_tokens": 2048, "page_size": 64},
    "rows wider than K and V": {"head_dim": 80},
    "float32": {"dtype": "float32", "head_dim": 256, "num_tokens": 1},
    "pages of 8": {"page_size": 8},
    **{f"int8 pages of {size}": {"page_size": size, "kv_dtype": "int8"} for size in (8, 16, 128)},
    "float8 pages of 64": {"page_size": 64, "kv_dtype": "float8_e4m3fn"},
}
"""Settings of `kv_update`."""

FEW_UPDATES = ("decodes", "int8 pages of 16")

FIGURED = ("decodes", "chunks")


ATTENTION_ON = {"v5e": tuple(CONFIGURATIONS), "v6e": tuple(CONFIGURATIONS), "v5p": FEW, "tpu7x": FEW}
UPDATES_ON = {"v5e": tuple(UPDATES), "v6e": tuple(UPDATES), "v5p": FEW_UPDATES, "tpu7x": FEW_UPDATES}


def update(target: str, name: str) -> Job:
    return job(target, "pallas_kernels.programs:kv_update", impl="tpu", **UPDATES[name])


def attention(target: str, name: str) -> Job:
    return job(target, ATTENTION, **{**BASE, **CONFIGURATIONS[name]})


@cache
def compiled() -> dict[str, Figures]:
    """All of both, in one go: the compilers take seconds to begin."""
    jobs = [attention(target, name) for target, names in ATTENTION_ON.items() for name in names]
    jobs += [update(target, name) for target, names in UPDATES_ON.items() for name in names]
    return dict(zip(map(str, jobs), compile_all(jobs), strict=True))


@pytest.mark.parametrize("target", ATTENTION_ON)
def test_every_configuration_compiles_and_copies_no_pool(target: str) -> None:
    require(target)
    for name in ATTENTION_ON[target]:
        figures = compiled()[str(attention(target, name))]
        assert not figures.error, f"{name} on {target}: {figures.error}"
        # Queries and outputs in the kernel's order, each at most 64 MiB here; a copy of the pool would be no less than 64.
        assert figures.temp_bytes < 96 * 2**20, f"{name} on {target} takes {figures.temp_bytes >> 20} MiB beside its arguments"


@pytest.mark.parametrize("target", UPDATES_ON)
def test_every_update_compiles_in_place(target: str) -> None:
    require(target)
    for name in UPDATES_ON[target]:
        figures = compiled()[str(update(target, name))]
        assert not figures.error, f"{name} on {target}: {figures.error}"
        assert figures.alias_bytes >= 16 * 2**20, "the pool is not updated in place"
        assert figures.temp_bytes < 16 * 2**20, f"{name} on {target} takes {figures.temp_bytes >> 20} MiB: a copy of the pool?"


def test_what_does_not_fit_is_an_error_and_not_a_crash() -> None:
    """This rung can fail: an oversized pool, a page size that the kernel refuses, and a job after them that still runs."""
    require("v5e")
    jobs = [
        job("v5e", ATTENTION, **{**BASE, "num_pages": 2**20}),
        job("v5e", ATTENTION, **{**BASE, "page_size": 24}),
        attention("v5e", "decodes of one sequence"),
    ]
    oversized, refused, fine = compile_all(jobs)
    assert "hbm" in oversized.error.lower()
    assert "page_size: expected 8, 16, 32, 64 or 128; found 24" in refused.error
    assert not fine.error
    assert fine.argument_bytes > 2**20


def test_bundles_are_near_their_recorded_figures() -> None:
    for target in ("v5e", "v6e"):
        require(target)
    jobs = {
        f"{kernel}, {name}, {target}": (kernel, build(target, name))
        for kernel, build in (("paged_attention", attention), ("kv_update", update))
        for name in FIGURED
        for target in ("v5e", "v6e")
    }
    found = {}
    compiled = compile_all([job for _, job in jobs.values()], dump=True)
    for (label, (kernel, _)), figures in zip(jobs.items(), compiled, strict=True):
        assert not figures.error, figures.error
        # The largest of a kernel's programs, whose names may end in what it was fused with.
        found[label] = {
            "bundles": max(count for name, count in figures.bundles.items() if name.startswith(kernel)),
            "spills": max(count for name, count in figures.spills.items() if name.startswith(kernel)),
        }
    if os.environ.get("JAXSERVE_WRITE_FIGURES"):
        record_figures(found)
    recorded = recorded_figures()
    assert recorded.keys() == found.keys()
    for name, figures in found.items():
        for figure, value in figures.items():
            expected = recorded[name][figure]
            assert abs(value - expected) <= TOLERANCE * max(expected, 100), f"{name}: {value} {figure}, recorded {expected}"


@pytest.mark.parametrize("changes", [{}, {"kv_dtype": "int8"}, {"dtype": "float32"}], ids=str)
def test_exports_for_tpu_without_a_compiler(changes: dict[str, Any]) -> None:
    """Lowering alone, which needs no libtpu, refuses blocks and operations that no TPU takes."""
    shape = {**BASE, "dtype": "bfloat16", "kv_dtype": "", **changes}

    def step(queries: jax.Array, pages: jax.Array, table: jax.Array, offsets: jax.Array, lengths: jax.Array) -> jax.Array:
        impl = IMPLEMENTATIONS["tpu"]
        work = impl.schedule(table, offsets, lengths, num_tokens=256, num_single=0, page_size=shape["page_size"])
        return impl.paged_attention(queries, pages, work, scale=0.1)

    arguments = (
        jax.ShapeDtypeStruct((256, 32, 128), shape["dtype"]),
        jax.ShapeDtypeStruct((64, 8, 16, 256), shape["kv_dtype"] or shape["dtype"]),
        jax.ShapeDtypeStruct((64, 32), jnp.int32),
        jax.ShapeDtypeStruct((65,), jnp.int32),
        jax.ShapeDtypeStruct((64,), jnp.int32),
    )
    with as_tpu("TPU v5 lite"):
        exported = jax.export.export(jax.jit(step), platforms=["tpu"])(*arguments)
    assert "tpu_custom_call" in exported.mlir_module()
