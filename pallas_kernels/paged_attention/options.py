"""Tuned options of `paged_attention`: read for a kind of device, tried, and taken or left, once at start-up.

A file that is broken, or names what this version does not have or cannot compile, costs its options and is said; it never
keeps an engine from starting. Knows no model beyond `Shape`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.kv_update import LARGEST
from pallas_kernels.paged_attention import IMPLEMENTATIONS, paged_attention, schedule
from pallas_kernels.paged_attention.choose import Shape, pool_dtype, pool_width

TRIAL_SINGLES = 8
TRIAL_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Choice:
    """Options for `schedule`, where they come from, and what was wrong if they are not what a file says.

    Attributes:
        source: in words, for the log.
        problem: empty where there is none.
    """

    source: str
    options: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""


def choose_options(folder: Path, device_kind: str, impl: str, shape: Shape) -> Choice:
    """The options of `impl` that are tuned for a kind of device, if they compile here for `shape`; else none."""
    path = tuned.file_of(folder, device_kind)
    name = f"paged_attention.{impl}"
    try:
        options = tuned.load(folder, device_kind).get(name)
    except ValueError as error:
        return Choice("the defaults", problem=f"tuned options cannot be read: {error}")
    if not options:
        return Choice(f"the defaults, since nothing is tuned for {name} on {device_kind}")
    unknown = sorted(options.keys() - set(IMPLEMENTATIONS[impl].options))
    if unknown:
        known = ", ".join(IMPLEMENTATIONS[impl].options) or "none"
        return Choice(
            "the defaults", problem=f"{path}: [{name}] names {', '.join(unknown)}; this version has {known}; tune it anew"
        )
    try:
        _try(impl, shape, options)
    except Exception as error:  # a compiler may raise anything, and the defaults do not need these options
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return Choice("the defaults", problem=f"{path}: {name} does not compile with {options}: {reason}; tune it anew")
    return Choice(f"{options} of {path}", options)


def _try(impl: str, shape: Shape, options: Mapping[str, int]) -> None:
    """Compile a step's attention, decodes and chunks; whatever is wrong with the options raises."""
    num_tokens, num_rows, width = TRIAL_SINGLES + TRIAL_CHUNK, TRIAL_SINGLES + 2, 1024 // shape.page_size

    def attend(queries: Any, pages: Any, table: Any, offsets: Any, lengths: Any, kv_scales: Any) -> Any:
        work = schedule(
            table,
            offsets,
            lengths,
            num_tokens=num_tokens,
            num_single=TRIAL_SINGLES,
            page_size=shape.page_size,
            impl=impl,
            options=options,
        )
        return paged_attention(queries, pages, work, scale=1.0, kv_scales=kv_scales, impl=impl)

    abstract = jax.ShapeDtypeStruct
    kv_dtype = pool_dtype(impl, shape.kv_dtype)
    jax.jit(attend).lower(
        abstract((num_tokens, shape.num_heads, shape.head_dim), shape.dtype),
        abstract((num_rows * width, shape.num_kv_heads, shape.page_size, pool_width(impl, shape.head_dim)), kv_dtype),
        abstract((num_rows, width), jnp.int32),
        abstract((num_rows + 1,), jnp.int32),
        abstract((num_rows,), jnp.int32),
        abstract((shape.num_kv_heads, 2), jnp.float32) if kv_dtype in LARGEST else None,
    ).compile()
