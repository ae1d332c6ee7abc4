"""The clock: a call's median time with cold caches, and what the device could do at most. Knows no kernel."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench.limits import best_seconds, memory_read_bandwidth

FLUSH_BYTES = {"cpu": 128 << 20, "gpu": 256 << 20, "tpu": 256 << 20}
"""Where the last level's size is unknown; more than any of that platform had when this was written."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the device was measured to do.

    Attributes:
        bandwidth: bytes per second; reads on CPU, reads and writes of a copy elsewhere.
        matrix_rate: operations per second of one large product, float32 on CPU and bfloat16 elsewhere.
    """

    device_kind: str
    bandwidth: float
    matrix_rate: float

    def floor_seconds(self, num_bytes: float, operations: float) -> float:
        """No call of so many bytes and operations is faster."""
        return max(num_bytes / self.bandwidth, operations / self.matrix_rate)


def limits(platform: str) -> Limits:
    """Measure this machine's device; some seconds."""
    on_cpu = platform == "cpu"
    size, dtype = (2048, jnp.float32) if on_cpu else (8192, jnp.bfloat16)
    square = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    seconds = best_seconds(lambda: jax.block_until_ready(product(square, square)), 5)
    if on_cpu:
        bandwidth = memory_read_bandwidth(5)
    else:
        source = jnp.ones((256 << 20,), jnp.float32)
        copy = jax.jit(lambda x: x + 1)
        bandwidth = 2 * source.nbytes / best_seconds(lambda: jax.block_until_ready(copy(source)), 5)
    return Limits(jax.devices()[0].device_kind, bandwidth, 2 * size**3 / seconds)


class Flush:
    """Reads and writes more than the last cache holds, so that what a call finds there is not its own inputs."""

    def __init__(self, platform: str) -> None:
        num_bytes = max(FLUSH_BYTES[platform], 4 * _last_level_cache()) if platform == "cpu" else FLUSH_BYTES[platform]
        self._buffer = jnp.zeros((num_bytes // 4,), jnp.float32)
        self._pass_over = jax.jit(lambda x: x + 1, donate_argnums=0)

    def __call__(self) -> None:
        self._buffer = jax.block_until_ready(self._pass_over(self._buffer))


def median_seconds(call: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], flush: Flush, repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls in order of time, arguments in turn, caches flushed before each."""
    for some in arguments:
        jax.block_until_ready(call(*some))
    seconds = []
    for index in range(repeats):
        some = arguments[index % len(arguments)]
        flush()
        started = time.perf_counter()
        jax.block_until_ready(call(*some))
        seconds.append(time.perf_counter() - started)
    return sorted(seconds)


def summary(seconds: Sequence[float]) -> tuple[float, float]:
    """The median, and how far the middle half of the runs is apart, as a share of it."""
    median = statistics.median(seconds)
    quarter = len(seconds) // 4
    return median, (seconds[-1 - quarter] - seconds[quarter]) / median


def _last_level_cache() -> int:
    """Bytes of the largest cache that Linux tells of, or 0."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20}[text[-1]])
    return max(sizes)
