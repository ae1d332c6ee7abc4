"""GPU kernels beside attention through the real compiler for an H200: they compile for its own instructions, spill nothing,
fit, and do not grow.

After a change that is meant to move the figures, rewrite the record:

    JAXSERVE_WRITE_FIGURES=1 .venv/bin/pytest tests/kernels/test_gpu_figures.py -k recorded
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from pallas_kernels.aot import Figures, search_path
from pallas_kernels.gpu_figures import Assembled, kernels_in, largest
from pallas_kernels.quant_matmul.gpu import SHARED_MEMORY, TOKENS
from tests.conftest import ROOT
from tests.kernels.ladder.compiled import GPU_FIGURES, compile_all, job, record_figures, recorded_figures, require

MAX_REGISTERS = 168
"""A third of a multiprocessor's for each of three warpgroups; they divide them among themselves once they run."""
MAX_REGISTERS_OF_TWO = 80
"""Where two workers, of three warpgroups each, are to fit on a multiprocessor."""
TOLERANCE = 8
"""How far registers may be from their record: they are given out by eights."""

FORMS: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8, "group": None},
    "int8, both": {"bits": 8, "group": None, "activations": "int8"},
    "int8 in groups of 32": {"bits": 8, "group": 32},
    "int8 in groups of 64": {"bits": 8, "group": 64},
    "int8 in groups of 128": {"bits": 8, "group": 128},
    "int4 in groups of 32": {"bits": 4, "group": 32},
    "int4 in groups of 64": {"bits": 4, "group": 64},
    "int4 in groups of 128": {"bits": 4, "group": 128},
}
QUANTISED = {
    f"{name}, {tokens} tokens": form | {"num_tokens": tokens} for name, form in FORMS.items() for tokens in TOKENS
} | {f"{name}, 8192 tokens": FORMS[name] | {"num_tokens": 8192} for name in ("int8", "int8, both", "int4 in groups of 128")}
QUANTISED |= {
    f"int4 in groups of 32, {dtype} scales, {tokens} tokens": FORMS["int4 in groups of 32"]
    | {"num_tokens": tokens, "scales": dtype}
    for dtype, tokens in (("float16", 16), ("bfloat16", 96), ("float16", 128))
}
RECORDED = [name for name in QUANTISED if name.endswith((", 8 tokens", ", 128 tokens", ", 8192 tokens"))]


@cache
def compiled() -> dict[str, Figures]:
    """All, side by side."""
    require("h200")
    jobs = [job("h200", "pallas_kernels.programs:quant_matmul", impl="gpu", **form) for form in QUANTISED.values()]
    return dict(zip(QUANTISED, compile_all(jobs), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_products_compile_without_spills(name: str) -> None:
    figures, form = compiled()[name], QUANTISED[name]
    assert not figures.error, figures.error
    ((kernel, registers),) = figures.registers.items()
    assert kernel == f"quant_matmul_w{form['bits']}"
    assert figures.spills == {kernel: 0}
    few = form["num_tokens"] <= (32 if form["group"] is None else 16)
    assert registers <= (MAX_REGISTERS_OF_TWO if few else MAX_REGISTERS)
    # Of a multiprocessor's 228 KiB each worker takes 1 KiB besides.
    assert 0 < figures.shared_bytes[kernel] <= SHARED_MEMORY[1 if few else 0]
    assert (SHARED_MEMORY[1] + 1024) * 2 == (SHARED_MEMORY[0] + 1024) == 228 * 1024


@pytest.mark.slow
def test_products_copy_no_weights_and_four_bits_take_half_a_byte() -> None:
    for name, form in QUANTISED.items():
        figures, num_tokens = compiled()[name], form["num_tokens"]
        weights = 4096 * 4096 * form["bits"] // 8
        scales = 4096 * (4096 // form["group"] if form["group"] else 1) * (2 if "scales" in form else 4)
        activations = 4096 * num_tokens * 2
        assert weights + scales < figures.argument_bytes <= weights + scales + activations + 4 * num_tokens, name
        # Splits of the sums, and activations in another order.
        assert figures.temp_bytes <= 4 * 4096 * 4 * num_tokens + activations, name


@pytest.mark.slow
def test_figures_are_near_the_recorded_ones() -> None:
    found = {
        name: {
            "registers": max(compiled()[name].registers.values()),
            "shared_bytes": max(compiled()[name].shared_bytes.values()),
        }
        for name in RECORDED
    }
    if os.environ.get("JAXSERVE_WRITE_FIGURES"):
        record_figures(found, GPU_FIGURES)
    recorded = recorded_figures(GPU_FIGURES)
    assert recorded.keys() == found.keys()
    for name, figures in found.items():
        assert figures["shared_bytes"] == recorded[name]["shared_bytes"], name
        assert abs(figures["registers"] - recorded[name]["registers"]) <= TOLERANCE, f"{name}: {figures} for {recorded[name]}"


@pytest.mark.slow
def test_why_sampling_has_no_kernel_for_gpus() -> None:
    """What XLA compiles goes over a row fewer times than the bisections of a kernel that cannot hold one would.

    Once this fails, `pallas_kernels.sample.REFUSED` is to be thought over.
    """
    require("h200")
    rows, vocab = 16, 262_144
    command = [sys.executable, "-m", "tests.kernels.ladder.passes", str(rows), str(vocab)]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(search_path()))
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    found = {line.pop("name"): line for line in map(json.loads, result.stdout.splitlines())}
    called = {callee for computation in found.values() for callee in computation["branches"] + computation["loops"]}
    (entry,) = (name for name, computation in found.items() if computation["branches"] and name not in called)

    def mostly(name: str) -> tuple[int, int, int]:
        """Reads, writes and launches where every choice falls on the branch that does most, but for those that bisect."""
        here = found[name]
        assert not here["loops"]
        branches = [mostly(branch) for branch in here["branches"] if not found[branch]["loops"]]
        most = max(branches, default=(0, 0, 0))
        return here["reads"] + most[0], here["writes"] + most[1], here["launches"] + most[2]

    assert len([name for name in found if found[name]["loops"]]) == 1, "one branch bisects"
    reads, writes, launches = mostly(entry)
    assert (reads, writes) == (9, 2)
    assert launches <= 30


PRINTED = """
define void @first_mosaic_gpu(ptr %0, ptr %1) {
  call void @mosaic_gpu_init_tma_desc(ptr %4, ptr %7, i64 0)
  call void @mosaic_gpu_build_kernel_spec(ptr %0NINE, i32 5120, i32 0, i32 1, ptr %9, ptr %8)
}
define i32 @_mlir_ciface_first_mosaic_gpu(ptr %0, ptr %1) {
ptxas info    : Compiling entry function 'first_mosaic_gpu_kernel' for 'sm_90a'
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 40 registers, used 16 barriers, 1 bytes smem
ptxas info    : Compiling entry function 'second_mosaic_gpu_kernel' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
ptxas info    : Compiling entry function 'second_mosaic_gpu_kernel' for 'sm_90a'
    0 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 90 registers, used 16 barriers
""".replace("NINE", ", i32 1" * 9)


def test_what_the_assembler_says_is_read() -> None:
    kernels = kernels_in(PRINTED)
    assert kernels[0] == Assembled(name="first", target="sm_90a", registers=40, spilled_bytes=16, shared_bytes=5120)
    assert largest(kernels, "registers") == {"first": 40, "second": 168}
    assert largest(kernels, "spilled_bytes") == {"first": 16, "second": 4}
    assert kernels_in("nothing of the kind") == []
