"""What this machine can do at most: memory reads with every core this process may use. numpy only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

BYTES_PER_THREAD = 256 << 20
"""Far more than any cache, so that every read comes from memory."""


def memory_read_bandwidth(repeats: int = 10) -> float:
    """Bytes per second of the best of `repeats` sweeps, one thread a core, each over an array of its own.

    `np.max` is the yardstick: it reads every byte once, writes nothing, and keeps up with the memory.
    """
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    arrays = [np.ones(BYTES_PER_THREAD // 4, np.float32) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        seconds = best_seconds(lambda: list(pool.map(np.max, arrays)), repeats)
    return sum(array.nbytes for array in arrays) / seconds


def best_seconds(work: Callable[[], object], repeats: int) -> float:
    """The shortest of `repeats` runs of `work`, after one that warms it up."""
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
