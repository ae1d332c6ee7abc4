"""Quantised products on a GPU: each form against the definition, then against a copy's bandwidth and a product's rate.

The other kernels that are no attention, draws and experts' products, are checked here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.device.measure import ON_GPU, Ceilings, Row, off_gpu, print_table, seconds_of
from pallas_kernels.grouped_matmul import check as grouped_check
from pallas_kernels.quant_matmul import gpu, reference
from pallas_kernels.quant_matmul.cases import CASES, Case, make_inputs
from pallas_kernels.quant_matmul.weights import QuantWeights
from pallas_kernels.sample import check as sample_check

MAX_ERROR = 5e-3
"""Of ||found - expected|| / ||expected||; outputs in bfloat16 are off by some 2e-3."""
LAYERS = 6 if ON_GPU else 1
"""Of one program, each with weights of its own, so that the cache holds none of them."""
FORMS: tuple[dict[str, Any], ...] = (
    {"bits": 8},
    {"bits": 8, "activations": "int8"},
    *({"bits": bits, "group": group} for bits in (8, 4) for group in (32, 64, 128)),
    {"bits": 4, "group": 64, "offsets": True, "activations": "int8"},
)


def hardware_cases() -> list[Case]:
    """The shared cases that the kernel takes, every width of its tile for every form, and tiles of twice the rows."""
    cases = [case for case in CASES if case.activations != "float32"]
    for form in FORMS:
        cases += [Case(num_out=1000, num_in=2048, num_tokens=tokens, **form) for tokens in (*gpu.TOKENS, 300)]
    cases += [Case(num_out=4096, num_in=1024, num_tokens=1152, **form) for form in FORMS[:2]]
    return cases


def _agreement(case: Case) -> Row:
    row: Row = {"case": case.name}
    try:
        x, weights = make_inputs(case)
        ours = jax.jit(lambda x, laid: gpu.quant_matmul(x, laid, **off_gpu()))
        laid = gpu.lay_out(weights)
        found, again = (np.asarray(ours(x, laid), np.float32) for _ in range(2))
        expected = np.asarray(jax.jit(reference.quant_matmul)(x, weights), np.float32)
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        row |= {
            "error": float(f"{error:.2e}"),
            "same_again": bool((found == again).all()),
            "ok": bool(error < MAX_ERROR and np.isfinite(found).all() and (found == again).all()),
        }
    except Exception as error:
        row |= {"ok": False, "failure": f"{type(error).__name__}: {str(error)[:150]}"}
    return row


def _others(quick: bool) -> Iterator[Row]:
    """Draws by XLA, and experts' products by the kernel that jax ships."""
    checks: dict[str, Callable[[], dict[str, tuple[float, bool]]]] = {
        "sample": lambda: sample_check.check("xla", sample_check.VOCABULARIES[:2] if quick else sample_check.VOCABULARIES)
    }
    if ON_GPU:
        checks["grouped_matmul"] = lambda: grouped_check.check("gpu")
    for name, check in checks.items():
        try:
            for case, (error, ok) in check().items():
                yield {"case": f"{name} {case}", "error": float(f"{error:.2e}"), "ok": ok}
        except Exception as error:
            yield {"case": name, "ok": False, "failure": f"{type(error).__name__}: {str(error)[:150]}"}


def _weights(num_out: int, num_in: int, bits: int, group: int | None) -> list[Any]:
    """Laid out, a layer's after the other's."""

    def one(key: jax.Array) -> Any:
        most = 2 ** (bits - 1)
        values = jax.random.randint(key, (num_out, num_in), -most, most).astype(jnp.int8)
        scales = jnp.full((num_out, num_in // group if group else 1), 1 / most / num_in**0.5, jnp.float32)
        return gpu.lay_out(QuantWeights(values=values, scales=scales, bits=bits))

    make = jax.jit(one)
    return [make(key) for key in jax.random.split(jax.random.key(0), LAYERS)]


def _time(num_out: int, num_in: int, num_tokens: int, bits: int, group: int | None, ceilings: Ceilings) -> Row:
    """One product, as one of several in a program."""
    layers = _weights(num_out, num_in, bits, group)
    x = jax.random.normal(jax.random.key(1), (num_in, num_tokens), jnp.bfloat16)
    run = jax.jit(lambda x, layers: [gpu.quant_matmul(x, laid, **off_gpu()) for laid in layers])
    seconds = seconds_of(lambda: run(x, layers), repeats=10 if ON_GPU else 1) / LAYERS
    scales = 4 * num_out * (num_in // group if group else 1)
    num_bytes = num_out * num_in * bits // 8 + scales + 2 * num_tokens * (num_in + num_out)
    operations = 2 * num_out * num_in * num_tokens
    return {
        "case": f"time w{bits}{f'_g{group}' if group else ''}_{num_out}x{num_in}x{num_tokens}",
        "us": round(seconds * 1e6, 1),
        "of_bandwidth": round(num_bytes / seconds / ceilings.bandwidth, 3),
        "of_rate": round(operations / seconds / ceilings.rate, 3),
        "ok": True,
    }


def products(quick: bool, out: Path) -> list[Row]:
    """Errors first, then times as shares of the ceilings: of the bandwidth for few tokens, of the rate for many."""
    cases = hardware_cases()
    if quick:
        cases = [case for case in cases if case.num_tokens == gpu.TOKENS[1]][:3]
    # Compilers run beside each other; what they make still runs in turn.
    with ThreadPoolExecutor(1 if quick else 12) as pool:
        rows = [*pool.map(_agreement, cases), *_others(quick)]
    bad = [row for row in rows if not row["ok"]]
    print(f"{len(rows) - len(bad)} of {len(rows)} products and draws agree")
    print_table(bad)
    ceilings = Ceilings(out)
    shapes = ((256, 256),) if quick else ((28_672, 4096), (4096, 4096))
    tokens = (1,) if quick else (1, 16, 128, 4096)
    forms: tuple[tuple[int, int | None], ...] = ((4, 128),) if quick else ((8, None), (4, 128), (4, 32))
    timed = [_time(*shape, count, *form, ceilings) for form in forms for shape in shapes for count in tokens]
    return bad + timed + [row for row in rows if row["ok"]]
