"""Which of XLA's CPU libraries computes a step's products, chosen once at start-up.

XLA's CPU compiler gives a product to YNNPACK, oneDNN or its own code. Steps of few tokens have sums instead, see
`models.layers.linear`. For decodes of many sequences oneDNN is faster than the default where jaxlib has it (0.65 to 0.92 of a
step's time at 32, on two kinds of 2 AVX512 cores); for chunks it is slower, since the default computes reductions in YNNPACK
too. A program with oneDNN in it cannot be kept in the persistent cache (jaxlib 0.12), which costs seconds at every start, so
it is taken where it pays most. Products of bfloat16 it computes three times slower than the default does. Other platforms
compile as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.device.buckets import Bucket

logger = logging.getLogger(__name__)

ONEDNN_DECODES = 32
"""Decodes alone of so many sequences."""

Options = dict[str, str | bool | int]

_CPU: Options = {
    "xla_backend_optimization_level": 1,
    "xla_cpu_enable_fast_math": True,
    "xla_cpu_prefer_vector_width": 512,
}
"""LLVM's level 1 compiles a fifth faster than the default, and the steps ran no slower. Fast math, of which XLA keeps NaN,
infinities, division and functions exact unless told otherwise, lets LLVM reorder sums and so vectorise decode attention. With
vectors of 512 bits, where the processor has them, half the instructions of XLA's 256 read as much, so that more reads are
under way at once: 2 to 6% of a step."""

_ONEDNN: Options = {
    **_CPU,
    "xla_cpu_use_onednn": True,
    "xla_cpu_experimental_onednn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE",
}
"""oneDNN computes products and nothing after them: a product with two sums after it, such as a bias and the residual, comes
out wrong when it is one call (jaxlib 0.12), and with one sum it is no faster."""


def step_options(bucket: Bucket, dtype: np.dtype) -> Options:
    """XLA options for the step of `bucket` of a model whose weights are of `dtype`."""
    if jax.default_backend() != "cpu":
        return {}
    return _ONEDNN if uses_onednn(bucket, dtype) else _CPU


def sampling_options() -> Options:
    """XLA options for programs that only sample."""
    return _CPU if jax.default_backend() == "cpu" else {}


def uses_onednn(bucket: Bucket, dtype: np.dtype) -> bool:
    """Whether oneDNN computes the products of this bucket's step, so that it is compiled anew at every start."""
    wanted = not bucket.has_chunks and bucket.num_single == ONEDNN_DECODES and dtype == np.float32
    if not (wanted and jax.default_backend() == "cpu" and _has_onednn()):
        return False
    # Here, before anything compiles: a filter that one thread adds is lost when another leaves `catch_warnings`.
    _expect_uncached()
    return True


def _expect_uncached() -> None:
    """JAX warns each time that it cannot keep such a program, which is known and nothing that a user could mend."""
    warnings.filterwarnings("ignore", message="Error writing persistent compilation cache entry .*onednn-fusion")


@functools.cache
def _has_onednn() -> bool:
    """Whether this jaxlib gives a product to oneDNN when asked. Asks the compiler, since no version number tells."""
    _expect_uncached()
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    try:
        program = jax.jit(jnp.matmul).lower(shape, shape).compile(compiler_options=_ONEDNN).as_text()
    except jax.errors.JaxRuntimeError as error:
        logger.info("products of many decodes: XLA's default library; oneDNN cannot be asked for: %s", error)
        return False
    found = "onednn" in (program or "")
    logger.info("products of many decodes: %s", "oneDNN" if found else "XLA's default library; jaxlib has no oneDNN")
    return found


def release_freed_memory() -> None:
    """Have glibc give back what a compile has freed, of which it keeps 100 MB and more in holes; nothing elsewhere."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
