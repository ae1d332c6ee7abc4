"""What NVIDIA's assembler says of Pallas GPU kernels (Mosaic GPU) while a program is compiled.

The compiler prints it where a process has `ENVIRONMENT`, past Python and straight to standard output. A kernel that the same
process has compiled before is not compiled again, and so not printed. Owns that text's form. Knows neither kernels nor jobs.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

ENVIRONMENT = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_HOST_LLVM": "1"}
"""To be set before JAX loads the compiler: it then prints what the assembler says, and the code that launches a kernel."""

_ASSEMBLED = re.compile(
    r"Compiling entry function '(?P<name>\w+?)(?:_mosaic_gpu_kernel)?' for '(?P<target>\w+)'"
    r".*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    flags=re.DOTALL,
)
_LAUNCHED = re.compile(
    r"^define (?:void|i32) @(?P<name>\w+?)_mosaic_gpu\("
    r".*?@mosaic_gpu_(?:build_kernel_spec|launch_kernel)\(ptr %\d+(?:, i32 \d+){9}, i32 (?P<shared>\d+),",
    flags=re.DOTALL | re.MULTILINE,
)
"""After the grid, the cluster and the block, of three numbers each, come the bytes of shared memory."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """One kernel.

    Attributes:
        target: an architecture, as "sm_90a".
        registers: that a thread starts with.
        spilled_bytes: that a thread stores, or loads if more, for want of registers.
        shared_bytes: shared memory of a block; 0 where the launch was not printed.
    """

    name: str
    target: str
    registers: int
    spilled_bytes: int
    shared_bytes: int = 0


@dataclass(slots=True)
class Printed:
    """What was printed, once `printed` is over."""

    text: str = field(default="")


@contextmanager
def printed() -> Iterator[Printed]:
    """Keep what is written to the process's standard output, by compilers too, out of it."""
    sys.stdout.flush()
    kept, out = Printed(), os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield kept
        finally:
            sys.stdout.flush()
            os.dup2(out, 1)
            os.close(out)
            file.seek(0)
            kept.text = file.read().decode(errors="replace")


def kernels_in(text: str) -> list[Assembled]:
    """Every kernel that `text` tells of, in order; names without the compiler's ending."""
    shared = {match["name"]: int(match["shared"]) for match in _LAUNCHED.finditer(text)}
    return [
        Assembled(
            name=match["name"],
            target=match["target"],
            registers=int(match["registers"]),
            spilled_bytes=max(int(match["stores"]), int(match["loads"])),
            shared_bytes=shared.get(match["name"], 0),
        )
        for match in _ASSEMBLED.finditer(text)
    ]


def largest(kernels: Sequence[Assembled], attribute: str) -> dict[str, int]:
    """An attribute of the kernels by their names; the largest of those that share one."""
    found: dict[str, int] = {}
    for kernel in kernels:
        found[kernel.name] = max(found.get(kernel.name, 0), getattr(kernel, attribute))
    return found
