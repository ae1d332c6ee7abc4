"""Compile for accelerators that this machine does not have, in a process of its own, and read the compiler's figures.

The compilers come as wheels: `libtpu` for TPUs, the CUDA plugin for GPUs, which the extra `aot` names; without them `missing`
says so. They may lie in the environment, or in `COMPILERS` beside it: JAX asks what it finds in the environment for devices
at each start, and complains where there are none. They read their settings when they are loaded and may abort the process on
a bad program, so jobs run in a subprocess. Owns the targets and the jobs' protocol; what is compiled is the caller's.

A job names a function `build(devices, **kwargs)` that returns what to compile: a jitted function and abstract arguments with
shardings on those devices. What asks JAX for the kind of device while it is traced needs a mesh of them, as in `shard_map`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pallas_kernels import gpu_figures

MAX_CHARS_OF_ERROR = 2000
COMPILERS = Path(sys.prefix) / "compilers"
NUM_WORKERS = 2
"""Processes that compile side by side: each takes one core and up to 2 GiB."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A kind of device to compile for.

    Attributes:
        platform: "tpu" or "cuda".
        device_kind: what JAX calls it.
        num_cores: TensorCores that one JAX device has, or multiprocessors.
        hbm_bytes: memory of one device.
        topologies: name of the smallest topology with so many devices.
    """

    name: str
    platform: str
    device_kind: str
    num_cores: int
    hbm_bytes: int
    topologies: dict[int, str]

    def topology(self, num_devices: int) -> str:
        return next(name for count, name in sorted(self.topologies.items()) if count >= num_devices)


_GIB = 2**30
TARGETS = {
    target.name: target
    for target in (
        Target("v5e", "tpu", "TPU v5 lite", 1, 16 * _GIB, {4: "v5e:2x2", 8: "v5e:2x4"}),
        Target("v6e", "tpu", "TPU v6 lite", 1, 32 * _GIB, {4: "v6e:2x2", 8: "v6e:2x4"}),
        Target("v5p", "tpu", "TPU v5p", 2, 95 * _GIB, {4: "v5p:2x2x1", 8: "v5p:2x2x2"}),
        Target("tpu7x", "tpu", "TPU7x", 1, 96 * _GIB, {8: "tpu7x:2x2x1"}),
        Target("h200", "cuda", "NVIDIA H200", 132, 141 * 10**9, {1: "1x1x1", 4: "1x1x4", 8: "1x1x8"}),
    )
}

_H200 = {
    "gpu_device_info": {
        "cuda_compute_capability": {"major": 9, "minor": 0},
        "core_count": 132,
        "fpus_per_core": 128,
        "clock_rate_ghz": 1.98,
        "memory_bandwidth": 4_800_000_000_000,
        "device_memory_size": 151_397_597_184,
        "l2_cache_size": 50 * 2**20,
        "threads_per_warp": 32,
        "threads_per_block_limit": 1024,
        "threads_per_core_limit": 2048,
        "registers_per_core_limit": 65_536,
        "registers_per_block_limit": 65_536,
        "shared_memory_per_block": 48 * 2**10,
        "shared_memory_per_block_optin": 227 * 2**10,
        "shared_memory_per_core": 228 * 2**10,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
    },
    "platform_name": "CUDA",
    "dnn_version_info": {"major": 9, "minor": 12, "patch": 0},
    "runtime_version": {"major": 13, "minor": 0, "patch": 0},
    "device_description_str": "NVIDIA H200",
}
"""What XLA asks a GPU about itself, as its `GpuTargetConfigProto` names it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One program for one target.

    Attributes:
        build: "module:function" of the job's builder; see the module's docstring.
        kwargs: for the builder; whatever JSON can hold.
    """

    target: str
    build: str
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_devices: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """What the compiler says of a program, on one device; bytes of HBM but for `code_bytes`.

    Attributes:
        bundles: static instruction bundles of each Pallas TPU kernel, by its name.
        spills: for want of registers; for a TPU how many bundles store one, for a GPU bytes of a thread.
        registers: a thread's, of each Pallas GPU kernel.
        shared_bytes: shared memory of a block of each Pallas GPU kernel.
        collectives: how many of each kind.
        error: why there is no program; everything else is then empty.
    """

    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    code_bytes: int = 0
    bundles: dict[str, int] = dataclasses.field(default_factory=dict)
    spills: dict[str, int] = dataclasses.field(default_factory=dict)
    registers: dict[str, int] = dataclasses.field(default_factory=dict)
    shared_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    collectives: dict[str, int] = dataclasses.field(default_factory=dict)
    error: str = ""


def missing(target: Target) -> str:
    """What has to be installed before `target` can be compiled for; empty where nothing is."""
    is_tpu = target.platform == "tpu"
    module, package = ("libtpu", "libtpu") if is_tpu else ("jax_plugins/xla_cuda13", "jax-cuda13-plugin")
    found = any(Path(folder, module).is_dir() for folder in search_path())
    return "" if found else f"{package} is not installed; the extra `aot` brings it, `make test` installs it in {COMPILERS}"


def search_path() -> list[str]:
    """`PYTHONPATH` of a process that may load the compilers."""
    return [*filter(None, sys.path), str(COMPILERS)]


def compile_jobs(jobs: Sequence[Job], *, builders: Sequence[Path] = (), dump: bool = True) -> list[Figures]:
    """Compile each job in one of a few subprocesses that run at low priority, and return the figures in the same order.

    Args:
        builders: where the builders' modules are found, besides this process's own `sys.path`.
        dump: whether to count bundles, which takes the compiler twice as long.
    """
    results: dict[int, Figures] = {}

    def work_off(share: Sequence[int], platform: str) -> None:
        while share:
            done = _run_worker(platform, [jobs[index] for index in share], builders, dump)
            results.update({index: Figures(**figures) for index, figures in zip(share, done, strict=False)})
            share = share[len(done) :]

    with ThreadPoolExecutor() as pool:
        for platform in ("tpu", "cuda"):
            todo = [index for index, job in enumerate(jobs) if TARGETS[job.target].platform == platform]
            list(pool.map(work_off, (todo[start::NUM_WORKERS] for start in range(NUM_WORKERS)), [platform] * NUM_WORKERS))
    return [results[index] for index in range(len(jobs))]


def _run_worker(platform: str, jobs: Sequence[Job], builders: Sequence[Path], dump: bool) -> list[dict[str, Any]]:
    """Results of the jobs up to the first that killed the process, its error included."""
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ, **_environment(platform, Path(folder) if dump and platform == "tpu" else None))
        environment["PYTHONPATH"] = os.pathsep.join([*map(str, builders), *search_path()])
        process = subprocess.run(
            [sys.executable, "-m", "pallas_kernels.aot", folder],
            input="\n".join(json.dumps(dataclasses.asdict(job)) for job in jobs),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    done = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    if len(done) < len(jobs):
        ending = process.stderr[-MAX_CHARS_OF_ERROR:]
        done.append({"error": f"the compiler's process ended with {process.returncode}: {ending}"})
    return done


def _environment(platform: str, dump: Path | None) -> dict[str, str]:
    """What the compilers must find when they are loaded."""
    common = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if platform == "cuda":
        return common | gpu_figures.ENVIRONMENT
    return common | {
        "TPU_SKIP_MDS_QUERY": "1",  # no metadata server will answer here
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # the lock is for those who run programs
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_LOG_DIR": "disabled",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
        "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true" if dump else "",
    }


# --- in the subprocess ------------------------------------------------------------------------------------------------


def main() -> None:
    """Read jobs from standard input, a line each, and write their figures to standard output."""
    os.nice(19)
    dump = Path(sys.argv[1])
    for line in sys.stdin:
        try:
            figures = compile_here(Job(**json.loads(line)), dump)
        except Exception as error:
            figures = Figures(error=f"{type(error).__name__}: {error}"[:MAX_CHARS_OF_ERROR])
        for path in dump.iterdir():
            path.unlink()
        print(json.dumps(dataclasses.asdict(figures)), flush=True)


def compile_here(job: Job, dump: Path) -> Figures:
    """Compile `job` in this process, whose environment is as `compile_jobs` makes it."""
    target = TARGETS[job.target]
    module, name = job.build.split(":")
    build: Callable[..., Any] = getattr(importlib.import_module(module), name)
    function, arguments = build(target_devices(target, job.num_devices), **job.kwargs)
    with gpu_figures.printed() as printed:
        compiled = function.lower(*arguments).compile()
    memory, program = compiled.memory_analysis(), compiled.as_text()
    bundles, spills = _read_bundles(dump, program)
    kernels = gpu_figures.kernels_in(printed.text)
    return Figures(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        bundles=bundles,
        spills=spills | gpu_figures.largest(kernels, "spilled_bytes"),
        registers=gpu_figures.largest(kernels, "registers"),
        shared_bytes=gpu_figures.largest(kernels, "shared_bytes"),
        collectives=count_collectives(program),
    )


def target_devices(target: Target, num_devices: int) -> list[Any]:
    """Devices of the target that can be compiled for and not run on."""
    from jax.experimental import topologies

    topology = target.topology(num_devices)
    if target.platform == "tpu":
        description = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    else:
        description = topologies.get_topology_desc(
            target.name, platform="cuda", target_config=_as_text_proto(_H200), topology=topology
        )
    return list(description.devices[:num_devices])


def count_collectives(program: str) -> dict[str, int]:
    """How many collectives of each kind an optimised program has."""
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    counts = {kind: len(re.findall(rf"\s{kind}(?:-start)?\(", program)) for kind in kinds}
    return {kind: count for kind, count in counts.items() if count}


def _read_bundles(dump: Path, program: str) -> tuple[dict[str, int], dict[str, int]]:
    """Bundles and spills of each Pallas kernel, from the compiler's table of what each bundle uses; the largest of a name."""
    kernels = set(re.findall(r'%([\w.-]+) = [^\n]*custom_call_target="tpu_custom_call"', program))
    bundles: dict[str, int] = {}
    spills: dict[str, int] = {}
    for path in dump.glob("*-final_hlo-static-per-bundle-utilization.txt"):
        operation = re.sub(r"^\d+-(.*)-\d+-final_hlo-.*", r"\1", path.name)
        if operation not in kernels:
            continue
        kernel = re.sub(r"\.\d+$", "", operation)
        # A line of names, one of capacities, a heading, then a line of counts for each bundle.
        lines = path.read_text().splitlines()
        names = [name.strip() for name in lines[1].split(",")]
        rows = [line.split() for line in lines[4:] if line.strip()]
        bundles[kernel] = max(bundles.get(kernel, 0), len(rows))
        spill = names.index("VSTORE:SPILL")
        spills[kernel] = max(spills.get(kernel, 0), sum(int(row[spill]) for row in rows))
    return bundles, spills


def _as_text_proto(message: dict[str, Any]) -> str:
    def field(name: str, value: Any) -> str:
        if isinstance(value, dict):
            return f"{name} {{ {_as_text_proto(value)} }}"
        return f"{name}: {json.dumps(value)}"

    return " ".join(field(name, value) for name, value in message.items())


if __name__ == "__main__":
    main()
