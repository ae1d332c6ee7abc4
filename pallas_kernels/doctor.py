"""What the kernels would do here, and what the compilers say of them: `python -m pallas_kernels.doctor`.

For each kernel, the implementation that this machine gets and the reason; then its program compiled ahead of time for
devices that need not be here, wherever their compiler is installed. Works without any extra.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import grouped_matmul, kv_update, paged_attention, quant_matmul, sample
from pallas_kernels.aot import TARGETS, Figures, Job, Target, compile_jobs, missing
from pallas_kernels.paged_attention.choose import Shape, choose, is_hopper
from pallas_kernels.paged_attention.options import choose_options
from pallas_kernels.quant_matmul.choose import choose as choose_quant_matmul
from pallas_kernels.tuned import default_folder

EXAMPLE = Shape(
    num_heads=32, num_kv_heads=8, head_dim=128, page_size=16, dtype=jnp.dtype("bfloat16"), kv_dtype=jnp.dtype("bfloat16")
)
"""The attention that is looked at: an 8B Llama's, on one device."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel as the doctor knows it.

    Attributes:
        choose: of platform and device kind, the implementation and the reason, as the engine chooses at start-up.
        implementations: all that there are.
        build: its program, for `aot.Job`.
    """

    name: str
    choose: Callable[[str, str], tuple[str, str]]
    implementations: Collection[str]
    build: str

    def tried(self, target: Target) -> list[str]:
        """What is compiled for a target: the implementation that it would get, and its own if that is another."""
        platform = jax_platform(target)
        chosen, _ = self.choose(platform, target.device_kind)
        return [chosen, *({platform} & set(self.implementations) - {chosen})]

    def job(self, target: Target, impl: str) -> Job:
        """The program that `target` would run with `impl`."""
        return Job(target.name, self.build, {"impl": impl})


def jax_platform(target: Target) -> str:
    """The platform as a device of the target would name it."""
    return "gpu" if target.platform == "cuda" else target.platform


def _attention(platform: str, device_kind: str) -> tuple[str, str]:
    return choose(platform, device_kind, EXAMPLE)


def _quant_matmul(platform: str, device_kind: str) -> tuple[str, str]:
    return choose_quant_matmul(platform, device_kind, EXAMPLE.dtype)


def _by_platform(implementations: Collection[str]) -> Callable[[str, str], tuple[str, str]]:
    """The platform's own implementation where a kernel has one."""

    def of(platform: str, device_kind: str) -> tuple[str, str]:
        if platform not in implementations:
            return "xla", f"there is no other for platform {platform}"
        if platform == "gpu" and not is_hopper(device_kind):
            return "xla", f"the GPU kernel is for Hopper, and this is {device_kind}"
        return platform, f"it is written for this platform; {device_kind}"

    return of


def _kernel(package: ModuleType, choose: Callable[[str, str], tuple[str, str]] | None = None, program: str = "") -> Kernel:
    name, implementations = package.__name__.rpartition(".")[2], package.IMPLEMENTATIONS
    build = f"pallas_kernels.programs:{program or name}"
    return Kernel(name, choose or _by_platform(implementations), implementations, build)


KERNELS = (
    _kernel(paged_attention, _attention, program="attention"),
    _kernel(kv_update),
    _kernel(quant_matmul, _quant_matmul),
    _kernel(grouped_matmul),
    _kernel(sample),
)


def describe(figures: Figures) -> str:
    """Figures in one line."""
    if figures.error:
        return f"FAILED: {figures.error.strip().splitlines()[0]}"
    parts = [f"temp {figures.temp_bytes / 2**20:.1f} MiB"]
    if figures.code_bytes:
        parts.append(f"code {figures.code_bytes / 2**10:.0f} KiB")
    if figures.alias_bytes:
        parts.append(f"{figures.alias_bytes / 2**20:.0f} MiB updated in place")
    parts += [f"{name}: {count} bundles, {figures.spills[name]} spills" for name, count in sorted(figures.bundles.items())]
    parts += [
        f"{name}: {count} registers, {figures.spills[name]} bytes spilled, {figures.shared_bytes[name] / 2**10:.0f} KiB shared"
        for name, count in sorted(figures.registers.items())
    ]
    return "compiled; " + ", ".join(parts)


def report(targets: Sequence[Target], write: Callable[[str], Any]) -> bool:
    """Write the whole report; whether all that could be compiled was."""
    device = jax.devices()[0]
    write(f"jax {jax.__version__} on {len(jax.devices())} x {device.device_kind} ({device.platform})")
    ready = [target for target in targets if not missing(target)]
    jobs = {
        (kernel.name, target.name, impl): kernel.job(target, impl)
        for kernel in KERNELS
        for target in ready
        for impl in kernel.tried(target)
    }
    figures = dict(zip(jobs, compile_jobs(list(jobs.values())), strict=True))
    for kernel in KERNELS:
        impl, reason = kernel.choose(device.platform, device.device_kind)
        write(f"\n{kernel.name}\n  here   {impl}: {reason}")
        if kernel.name == "paged_attention":
            tuned = choose_options(default_folder(), device.device_kind, impl, EXAMPLE)
            write(f"         sizes: {'; '.join(filter(None, (tuned.problem, tuned.source)))}")
        for target in targets:
            for number, impl in enumerate(kernel.tried(target)):
                found = figures.get((kernel.name, target.name, impl))
                name = f"{target.name:6} {impl}" if number == 0 else f"{'':6} {impl}, not chosen"
                write(f"  {name}: {describe(found) if found else 'not compiled: ' + missing(target)}")
    return not any(found.error for found in figures.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code is 1 where a program did not compile."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.doctor",
        description="Show which implementation of each kernel this machine gets and why, and compile the kernels for "
        "accelerators that need not be here. Compiling for TPUs needs libtpu and for GPUs the CUDA plugin: both come with "
        "the extra 'aot'. What is not installed is named and left out.",
    )
    parser.add_argument(
        "--target", action="append", choices=sorted(TARGETS), metavar="NAME",
        help=f"compile for this device only; may be repeated; one of {', '.join(sorted(TARGETS))} (default: all)",
    )  # fmt: skip
    parser.add_argument("--no-compile", action="store_true", help="only show what is chosen here")
    options = parser.parse_args(arguments)
    names = [] if options.no_compile else options.target or list(TARGETS)
    healthy = report([TARGETS[name] for name in names], lambda line: print(line, flush=True))
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main())
