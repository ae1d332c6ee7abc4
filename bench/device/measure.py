"""Clocks, ceilings and tables of the device benchmarks. Knows no kernel."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

ON_GPU = jax.default_backend() == "gpu"
L2_BYTES = 60 << 20
Row = dict[str, Any]


def off_gpu() -> dict[str, Any]:
    """Nothing on a GPU; elsewhere the options that run kernels in the interpreter, on a few multiprocessors."""
    if ON_GPU:
        return {}
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams

    return {"interpret": InterpretGPUParams(), "num_workers": 2}


def seconds_of(call: Callable[[], Any], *, repeats: int = 10) -> float:
    """Median wall time of a call that is waited for, after two to warm up."""
    for _ in range(2):
        jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def kernel_times(call: Callable[[], Any]) -> dict[str, list[float]]:
    """Microseconds of each kernel that a call launches, by name; empty where the profiler cannot be had."""
    try:
        from jax.experimental.mosaic.gpu import profiler

        _, timings = profiler.measure(call, aggregate=False)()
    except Exception as error:
        print(f"no kernel times: {type(error).__name__}: {error}", file=sys.stderr)
        return {}
    by_name: dict[str, list[float]] = {}
    for name, milliseconds in timings or ():
        by_name.setdefault(name, []).append(milliseconds * 1e3)
    return by_name


def print_table(rows: list[Row]) -> None:
    if not rows:
        return
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[str(row.get(key, "")) for key in keys] for row in rows]
    widths = [max(len(key), *(len(line[i]) for line in cells)) for i, key in enumerate(keys)]
    for line in [keys, *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)


def ceilings(quick: bool, out: Path) -> list[Row]:
    """Copy bandwidth (bytes read and written) and the rate of a bfloat16 matrix product on random data."""
    del out
    size = 1 << (20 if quick else 32)
    source = jax.random.bits(jax.random.key(0), (size // 4,), jnp.uint32)
    copy = jax.jit(lambda x: x ^ jnp.uint32(1))
    bandwidth = 2 * size / seconds_of(lambda: copy(source))
    dim = 256 if quick else 8192
    a, b = (jax.random.normal(jax.random.key(seed), (dim, dim), jnp.bfloat16) for seed in (1, 2))
    product = jax.jit(lambda a, b: a @ b)
    rate = 2 * dim**3 / seconds_of(lambda: product(a, b))
    return [{"copy_TBps": round(bandwidth / 1e12, 3), "matmul_TFLOPps": round(rate / 1e12, 1)}]


class Ceilings:
    """What the section "ceilings" measured on this machine, else what one H200 gave on random data."""

    def __init__(self, out: Path) -> None:
        try:
            measured = json.loads((out / "ceilings.json").read_text())["rows"][0]
        except (OSError, LookupError):
            measured = {"copy_TBps": 4.3, "matmul_TFLOPps": 790.0}
        self.bandwidth = measured["copy_TBps"] * 1e12
        self.rate = measured["matmul_TFLOPps"] * 1e12
