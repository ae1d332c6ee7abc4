"""Quantised products, sampling and experts' products through the real compilers of devices that are not here, by way of the
lab: that they compile, fit, copy no weights, and do not grow."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from pallas_kernels.aot import Figures, Job
from tests.kernels.ladder.compiled import compile_all, require

pytestmark = pytest.mark.slow

TOLERANCE = 0.05
"""How far bundles may be from their record: patch releases of the compiler move them by a per cent or two."""

QUANTISED: dict[str, dict[str, Any]] = {
    "int8, one token": {"num_out": 4096, "num_in": 4096},
    "int8, a batch": {"num_out": 4096, "num_in": 14_336, "num_tokens": 128},
    "int8, both": {"num_out": 4096, "num_in": 4096, "num_tokens": 16, "activations": "int8"},
    "int8 in groups": {"num_out": 4096, "num_in": 4096, "num_tokens": 16, "group": 32},
    "int4 in groups of 32": {"num_out": 4096, "num_in": 4096, "num_tokens": 512, "bits": 4, "group": 32, "offsets": True},
    "int4 in groups of 64": {"num_out": 576, "num_in": 1536, "bits": 4, "group": 64},
    "int4 in groups of 128": {"num_out": 4096, "num_in": 14_336, "num_tokens": 8, "bits": 4, "group": 128},
    "int4, both": {"num_out": 4096, "num_in": 4096, "num_tokens": 8, "bits": 4, "group": 128, "activations": "int8"},
    "float32": {"num_out": 576, "num_in": 576, "num_tokens": 3, "activations": "float32"},
}
FEW = ("int8, one token", "int8 in groups", "int4 in groups of 128")
"""For targets of which the whole list would tell little more."""

QUANTISED_ON = {"v5e": tuple(QUANTISED), "v6e": tuple(QUANTISED), "v5p": FEW, "tpu7x": FEW}
SAMPLED: tuple[dict[str, int], ...] = ({}, {"rows": 1, "vocab": 128_256}, {"rows": 13, "vocab": 49_152})

BUNDLES_ON_V5E = {"int8, one token": 1803, "int4 in groups of 128": 2146}
"""Of a tile of 256 rows by 4096 inputs."""


def lab_job(target: str, subject: str, variant: str, shape: str, **settings: Any) -> Job:
    kwargs = {"subject": subject, "variant": variant, "shape": shape, "settings": settings, "files": []}
    return Job(target, "bench.kernels.ahead:build", kwargs)


def assert_compiled(name: str, figures: Figures, most_temp_bytes: int) -> None:
    assert not figures.error, f"{name}: {figures.error}"
    assert figures.temp_bytes <= most_temp_bytes, f"{name} takes {figures.temp_bytes:,} bytes beside its arguments"


def quantised(target: str, name: str) -> Job:
    return lab_job(target, "quant_matmul", "tpu", "8b", **QUANTISED[name])


def sampling(target: str, shape: dict[str, int]) -> Job:
    return lab_job(target, "sample", "tpu_kernel", "wide", **shape)


@cache
def compiled() -> dict[str, Figures]:
    """All products and samplings, in one go: the compilers take seconds to begin."""
    jobs = [quantised(target, name) for target, names in QUANTISED_ON.items() for name in names]
    jobs += [sampling(target, shape) for target in QUANTISED_ON for shape in SAMPLED]
    return dict(zip(map(str, jobs), compile_all(jobs), strict=True))


@pytest.mark.parametrize("target", QUANTISED_ON)
def test_quantised_products_compile_and_copy_no_weights(target: str) -> None:
    require(target)
    for name in QUANTISED_ON[target]:
        figures = compiled()[str(quantised(target, name))]
        # Activations and outputs in another order; v5p counts the kernel's own memory too.
        assert_compiled(f"{name} on {target}", figures, 24 << 20 if target == "v5p" else 9 << 20)


def test_bundles_are_near_their_recorded_figures() -> None:
    require("v5e")
    for name, figures in zip(
        BUNDLES_ON_V5E, compile_all([quantised("v5e", name) for name in BUNDLES_ON_V5E], dump=True), strict=True
    ):
        assert not figures.error, figures.error
        (bundles,), (spills,) = figures.bundles.values(), figures.spills.values()
        assert abs(bundles - BUNDLES_ON_V5E[name]) <= TOLERANCE * BUNDLES_ON_V5E[name], f"{name}: {bundles} bundles"
        assert spills <= 0.02 * bundles, f"{name}: {spills} of {bundles} bundles spill"


@pytest.mark.parametrize("target", QUANTISED_ON)
def test_sampling_a_large_vocabulary_fits_the_fast_memory(target: str) -> None:
    require(target)
    for shape in SAMPLED:
        assert_compiled(f"{shape} on {target}", compiled()[str(sampling(target, shape))], 1 << 20)


def test_experts_products_copy_no_experts() -> None:
    """The reason for each choice: what is chosen takes next to nothing beside its arguments, and what is not takes much."""
    require("v5e")
    require("h200")
    chosen = [("v5e", "ragged_dot"), ("h200", "ragged_dot_mgpu"), ("h200", "ragged_dot")]
    tpu, gpu, dense = compile_all([lab_job(target, "grouped_matmul", name, "many") for target, name in chosen])
    assert_compiled("ragged_dot on v5e", tpu, 1 << 20)
    assert_compiled("jax's Pallas kernel on h200", gpu, 1 << 20)
    assert not dense.error
    # Every expert's copy of the rows: once this fails, XLA's ragged_dot for GPUs has become one to look at.
    assert dense.temp_bytes > 64 * 512 * 2048 * 2
