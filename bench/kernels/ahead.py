"""Trials compiled for devices that are not here, by `pallas_kernels.aot`; what the compilers say of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.kernels.registry import LabError, Trial, find, load, plan
from pallas_kernels.aot import TARGETS, Figures, Job, Target, compile_jobs, missing

ROOT = Path(__file__).resolve().parents[2]


def target(name: str) -> Target:
    """The device of `aot:name`, or a `LabError` that says what there is or what to install."""
    if name not in TARGETS:
        raise LabError(f"--target aot:{name}: no such device; there are {', '.join(f'aot:{known}' for known in TARGETS)}")
    lacking = missing(TARGETS[name])
    if lacking:
        raise LabError(f"--target aot:{name}: {lacking}")
    return TARGETS[name]


def platform_of(found: Target) -> str:
    return "tpu" if found.platform == "tpu" else "gpu"


def compile_trial(trial: Trial, found: Target, files: Sequence[Path]) -> Figures:
    """Compile one trial in a process of its own.

    Args:
        files: what was loaded to register variants.
    """
    job = Job(
        target=found.name,
        build="bench.kernels.ahead:build",
        kwargs={
            "subject": trial.subject.name,
            "variant": trial.variant.name,
            "shape": trial.shape_name.split()[0],
            "settings": trial.settings,
            "files": [str(path.resolve()) for path in files],
        },
    )
    return compile_jobs([job], builders=[ROOT])[0]


def build(
    devices: Sequence[Any], *, subject: str, variant: str, shape: str, settings: dict[str, Any], files: list[str]
) -> tuple[Any, tuple[Any, ...]]:
    """For `pallas_kernels.aot`: the jitted variant and abstract arguments on the device."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import bench.kernels.attention
    import bench.kernels.subjects  # noqa: F401

    for path in files:
        load(Path(path))
    found = find(subject)
    platform = "tpu" if "tpu" in devices[0].device_kind.lower() else "gpu"
    (trial,) = plan(found, platform=platform, shapes=[shape], variants=[variant], sweeps=[settings])
    arguments = jax.eval_shape(lambda: trial.prepare(found.make(trial.shape, 0)))
    mesh = Mesh(np.array(devices[:1]), ("device",))
    everywhere = PartitionSpec()
    run = jax.shard_map(trial.function(), mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    here = NamedSharding(mesh, everywhere)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), arguments)
    return jax.jit(run), abstract
