"""The first rung: TPU kernels interpreted on CPU with simulated memories, copies and semaphores.

Finds missing waits, races between copies and computation, reads of memory that nobody wrote (which holds NaN here) and
accesses past a buffer's end, page ids included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

DMA_MODES = ("eager", "on_wait")
"""When a copy happens: as early as the hardware could do it, and as late."""

VECTOR_CLOCK_SIZE = 64
"""The default, twice the cores, misses races."""


class RaceError(Exception):
    """The interpreter saw two accesses that nothing orders."""


@contextmanager
def interpreted(dma_mode: str) -> Iterator[None]:
    """TPU kernels that are traced inside run in the interpreter, which raises where it detects a race."""
    params = pltpu.InterpretParams(detect_races=True, vector_clock_size=VECTOR_CLOCK_SIZE, dma_execution_mode=dma_mode)
    try:
        with pltpu.force_tpu_interpret_mode(params):
            yield
    except BaseException:
        # Whatever was half done must not meet the next kernel.
        pltpu.reset_tpu_interpret_mode_state()
        raise


def run_interpreted(function: Callable[..., Any], *args: Any, dma_mode: str) -> Any:
    """`function(*args)`, ready, with its TPU kernels interpreted.

    Args:
        function: jitted, and not traced before with these shapes outside the interpreter.

    Raises:
        RaceError: a race was only printed, as jax 0.11 does; later versions raise an error of their own.
    """
    with interpreted(dma_mode):
        result = jax.block_until_ready(function(*args))
        if _races_found():
            raise RaceError("the interpreter printed what raced")
    return result


def _races_found() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # no public name tells

    races = getattr(interpret_pallas_call, "races", None)
    return races is not None and races.races_found
