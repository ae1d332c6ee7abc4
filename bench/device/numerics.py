"""Each configuration of the GPU kernels against the definition, on the hardware."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.device.measure import Row, off_gpu
from pallas_kernels.paged_attention import gpu
from pallas_kernels.paged_attention import reference as definition
from pallas_kernels.paged_attention.cases import CASES, Case, Inputs, attend, make_inputs, plan, real_tokens


def _attention(implementation: Any, inputs: Inputs, **options: Any) -> jax.Array:
    return attend(implementation, inputs, plan(implementation, inputs), **options)


def hardware_cases() -> list[Case]:
    """The shared cases in bfloat16, and larger ones that fill a GPU: every head dim, page size, group and kind of page."""
    cases = [dataclasses.replace(case, dtype="bfloat16") for case in CASES]
    lengths = (1, 63, 64, 65, 700, 0, 1025, 2000, 333, 128)
    chunks = ((100, 900), (0, 0), (5, 1200), (1, 64), (300, 300))
    rest: dict[str, Any] = {"singles": lengths, "chunks": chunks, "padding_tokens": 3, "dtype": "bfloat16"}
    for head_dim in gpu.HEAD_DIMS:
        cases.append(Case(name=f"dim{head_dim}", num_heads=8, num_kv_heads=2, head_dim=head_dim, page_size=16, **rest))
    for page_size in gpu.PAGE_SIZES:
        name = f"page{page_size}"
        cases.append(Case(name=name, num_heads=8, num_kv_heads=2, head_dim=128, page_size=page_size, **rest))
    for heads, kv_heads in ((4, 4), (7, 1), (16, 2), (9, 3), (32, 1), (100, 1)):
        name = f"group{heads}over{kv_heads}"
        cases.append(Case(name=name, num_heads=heads, num_kv_heads=kv_heads, head_dim=128, page_size=16, **rest))
    for kv_dtype in ("int8", "float8_e4m3fn"):
        for head_dim in (64, 80, 96, 128):
            name = f"{kv_dtype}_dim{head_dim}"
            cases.append(
                Case(name=name, num_heads=8, num_kv_heads=2, head_dim=head_dim, page_size=16, kv_dtype=kv_dtype, **rest)
            )
    for name, extra in (("window", {"window": 200}), ("capped", {"soft_cap": 2.0}), ("sinks", {"sinks": True})):
        cases.append(Case(name=name, num_heads=8, num_kv_heads=2, head_dim=128, page_size=16, **rest, **extra))
    long: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "dtype": "bfloat16"}
    cases.append(Case(name="one_long_decode", singles=(9000,), **long))
    cases.append(Case(name="direct_chunks", chunks=((1500, 1500), (700, 900)), **long))
    whole = ((1500, 1500), (700, 900))
    cases.append(Case(name="direct_everything", chunks=whole, window=333, soft_cap=3.0, sinks=True, **long))
    return cases


def _agreement(case: Case) -> Row:
    row: Row = {"case": case.name}
    try:
        inputs = make_inputs(case)
        ours = jax.jit(lambda x: _attention(gpu, x, **off_gpu()))
        found, again = (np.asarray(ours(inputs), np.float32) for _ in range(2))
        expected = np.asarray(jax.jit(lambda x: _attention(definition, x))(inputs), np.float32)
        real = real_tokens(inputs)
        error = np.linalg.norm((found - expected)[real]) / max(np.linalg.norm(expected[real]), 1e-30)
        row |= {
            "error": float(f"{error:.2e}"),
            "largest": float(f"{np.abs(found - expected)[real].max(initial=0):.2e}"),
            "same_again": bool((found == again).all()),
            "ok": bool(error < 1e-2 and np.isfinite(found).all() and (found == again).all()),
        }
    except Exception as error:
        row |= {"ok": False, "failure": f"{type(error).__name__}: {str(error)[:150]}"}
    return row


def numerics(quick: bool, out: Path) -> list[Row]:
    """Errors as ||found - expected|| / ||expected||, both on this device; a second run must give the same bits."""
    del out
    names = ("two_decodes", "with_sinks")
    cases = [case for case in hardware_cases() if not quick or case.name in names]
    # Compilers run beside each other; what they make still runs in turn.
    with ThreadPoolExecutor(1 if quick else 12) as pool:
        rows = list(pool.map(_agreement, cases))
    bad = [row for row in rows if not row["ok"]]
    print(f"{len(rows) - len(bad)} of {len(rows)} configurations agree")
    return bad + [row for row in rows if row["ok"]]
