"""The second and third rung: export for a platform, and ahead-of-time compilation for a target.

A compiler that is not installed skips its tests with a reason; in CI, or with JAXSERVE_REQUIRE_AOT set, it fails them.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from pallas_kernels.aot import TARGETS, Figures, Job, compile_jobs, missing

ROOT = Path(__file__).resolve().parents[3]
FIGURES = Path(__file__).with_name("figures.json")
GPU_FIGURES = Path(__file__).with_name("figures_gpu.json")
REQUIRED = bool(os.environ.get("CI") or os.environ.get("JAXSERVE_REQUIRE_AOT"))


def require(target: str) -> None:
    """Skip, or fail where compilers are required, unless `target` can be compiled for."""
    reason = missing(TARGETS[target])
    if not reason:
        return
    if REQUIRED:
        pytest.fail(f"CI or JAXSERVE_REQUIRE_AOT is set, but {reason}")
    pytest.skip(reason)


def job(target: str, program: str, *, num_devices: int = 1, **kwargs: object) -> Job:
    """A job of the builder `program`, "module:function"."""
    return Job(target, program, dict(kwargs), num_devices)


def compile_all(jobs: Sequence[Job], *, dump: bool = False) -> list[Figures]:
    """Figures of the jobs, which the ladder's subprocess compiles."""
    return compile_jobs(jobs, builders=[ROOT], dump=dump)


def recorded_figures(path: Path = FIGURES) -> dict[str, dict[str, int]]:
    """The committed regression figures of this jax, which brings its own compiler; skips where none are recorded."""
    recorded = json.loads(path.read_text())
    if _jax_minor() not in recorded:
        pytest.skip(f"no figures are recorded for jax {_jax_minor()}, only for {', '.join(recorded)}")
    figures: dict[str, dict[str, int]] = recorded[_jax_minor()]
    return figures


def record_figures(figures: dict[str, dict[str, int]], path: Path = FIGURES) -> None:
    """Rewrite the record of this jax."""
    recorded = json.loads(path.read_text()) | {_jax_minor(): figures}
    path.write_text(json.dumps(recorded, indent=2, sort_keys=True) + "\n")


def _jax_minor() -> str:
    return ".".join(jax.__version__.split(".")[:2])


@contextmanager
def as_tpu(device_kind: str) -> Iterator[None]:
    """Code that is traced inside and asks JAX what device it is for is told a TPU of this kind."""
    kind: dict[str, Any] = {"device_kind": device_kind, "num_cores": 1}
    if "platform" in {field.name for field in dataclasses.fields(AbstractDevice)}:  # since jax 0.12
        kind["platform"] = "tpu"
    with use_abstract_mesh(AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=AbstractDevice(**kind))):
        yield
