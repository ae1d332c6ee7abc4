"""How fast attention alone is on a GPU: decodes against the bandwidth of a copy, prompts against the rate of a product."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.device.measure import L2_BYTES, ON_GPU, Ceilings, Row, kernel_times, off_gpu, print_table, seconds_of
from pallas_kernels.paged_attention import gpu, xla

LAYERS = 4
"""Of a prompt, in one program."""


def _pool(num_pages: int, num_kv_heads: int, page_size: int, dim: int, dtype: Any, seed: int) -> jax.Array:
    """Random pages: a few thousand different ones, repeated."""
    distinct = min(num_pages, 2048)

    @jax.jit
    def make() -> jax.Array:
        some = jax.random.normal(jax.random.key(seed), (distinct, num_kv_heads, page_size, 2 * dim), jnp.bfloat16)
        return jnp.tile(some.astype(dtype), (-(-num_pages // distinct), 1, 1, 1))[:num_pages]

    return make()


def _decode_inputs(batch: int, context: int, page_size: int, dtype: Any, quick: bool) -> tuple[Any, list[jax.Array], Any]:
    heads, kv_heads, dim = (8, 2, 64) if quick else (32, 8, 128)
    width = -(-context // page_size)
    num_bytes = batch * width * kv_heads * page_size * 2 * dim * jnp.dtype(dtype).itemsize
    copies = 1 if quick else max(1, min(16, -(-4 * L2_BYTES // num_bytes)))
    table = np.random.default_rng(0).permutation(batch * width).astype(np.int32).reshape(batch, width)
    pools = [_pool(batch * width, kv_heads, page_size, dim, dtype, seed) for seed in range(copies)]
    queries = jax.random.normal(jax.random.key(99), (batch, heads, dim), jnp.bfloat16)
    rows = (jnp.asarray(table), jnp.arange(batch + 1, dtype=jnp.int32), jnp.full(batch, context, jnp.int32))
    return queries, pools, rows


def time_decode(
    batch: int,
    context: int,
    page_size: int,
    dtype: Any,
    quick: bool,
    ceilings: Ceilings,
    implementation: Any = gpu,
    **options: Any,
) -> Row:
    """One layer of decodes: as one of a row of layers with a pool each, so that the cache holds none of them."""
    queries, pools, rows = _decode_inputs(batch, context, page_size, dtype, quick)
    dim = queries.shape[2]
    scales = None if dtype == jnp.bfloat16 else jnp.ones((pools[0].shape[1], 2), jnp.float32)

    @jax.jit
    def layers(queries: jax.Array, pools: list[jax.Array], rows: Any) -> jax.Array:
        work = implementation.schedule(*rows, num_tokens=batch, num_single=batch, page_size=page_size)
        for pool in pools:
            queries = implementation.paged_attention(queries, pool, work, scale=dim**-0.5, kv_scales=scales, **options)
        return queries

    rounds = 1 if quick else max(1, min(50, int(2e11 / (pools[0].nbytes * len(pools)))))
    microseconds = seconds_of(lambda: layers(queries, pools, rows), repeats=min(rounds, 10)) / len(pools) * 1e6
    kernels = kernel_times(lambda: layers(queries, pools, rows)) if ON_GPU else {}
    attention = [t for name, times in kernels.items() if "paged_attention" in name for t in times]
    others = sum(t for name, times in kernels.items() if "paged_attention" not in name for t in times) / len(pools)
    num_bytes = pools[0].nbytes
    kernel = statistics.median(attention) if attention else 0.0
    floor = num_bytes / ceilings.bandwidth * 1e6
    return {
        "batch": batch,
        "context": context,
        "page": page_size,
        "pages_in": jnp.dtype(dtype).name,
        "layer_us": round(microseconds, 1),
        "kernel_us": round(kernel, 1),
        "other_us": round(others, 1),
        "floor_us": round(floor, 1),
        "kernel_share": round(floor / kernel, 3) if kernel else None,
        "layer_share": round(floor / microseconds, 3),
    }


def decode(quick: bool, out: Path) -> list[Row]:
    """Batch 1, 16, 128 by context 1k, 8k, 64k; 8 KV heads, 32 query heads, D 128."""
    batches, contexts = ((1, 3), (100,)) if quick else ((1, 16, 128), (1024, 8192, 65536))
    ceilings, rows = Ceilings(out), []
    for dtype in (jnp.bfloat16, jnp.float8_e4m3fn):
        for batch in batches:
            for context in contexts:
                rows.append(time_decode(batch, context, 16, dtype, quick, ceilings, **off_gpu()))
                print_table(rows[-1:])
    return rows


def decode_variants(quick: bool, out: Path) -> list[Row]:
    """Tile, ring and page size at batch 16, context 8k, and "xla" beside them."""
    batch, context = (2, 100) if quick else (16, 8192)
    ceilings, rows = Ceilings(out), []
    tilings = [gpu.Tuning(), gpu.Tuning(64, 2), gpu.Tuning(128, 2), gpu.Tuning(64, 4, 1)]
    for page_size in (16, 64):
        for tuning in tilings:
            row: Row = {"tuning": str(tuning)}
            try:
                row |= time_decode(batch, context, page_size, jnp.bfloat16, quick, ceilings, decode_tuning=tuning, **off_gpu())
            except Exception as error:
                row["failure"] = f"{type(error).__name__}: {str(error)[:120]}"
            rows.append(row)
    if not quick:
        rows.append({"tuning": "xla"} | time_decode(batch, context, 16, jnp.bfloat16, quick, ceilings, implementation=xla))
    return rows


def prefill(quick: bool, out: Path) -> list[Row]:
    """One causal prompt of 8k and of 2k, and a chunk of 2k after 6k: ours, jax's cuDNN attention, torch's."""
    shapes = ((200, 200), (60, 200)) if quick else ((8192, 8192), (2048, 2048), (2048, 8192))
    tunings = {"gpu": gpu.Tuning()}
    if not quick:
        tunings |= {"gpu, no ping-pong": gpu.Tuning(ping_pong=False), "gpu, tile 64": gpu.Tuning(64)}
    ceilings, rows = Ceilings(out), []
    for count, length in shapes:
        prompt = _Prompt(count, length, *((8, 2, 64) if quick else (32, 8, 128)))
        calls: dict[str, Callable[[], Row]] = {
            name: partial(prompt.ours, tuning, ceilings) for name, tuning in tunings.items()
        }
        if ON_GPU and count == length:  # their causal masks are for whole prompts
            calls |= {"cudnn": partial(prompt.cudnn, ceilings), "torch": partial(prompt.torch, ceilings)}
        for name, call in calls.items():
            row: Row = {"of": name, "tokens": count, "context": length}
            try:
                row |= call()
            except Exception as error:
                row["failure"] = f"{type(error).__name__}: {str(error)[:120]}"
            rows.append(row)
    return rows


@dataclass(frozen=True, slots=True)
class _Prompt:
    """`count` tokens of which the last is at position `length - 1`."""

    count: int
    length: int
    heads: int
    kv_heads: int
    dim: int

    @property
    def flops(self) -> float:
        """Of the two products, for pairs that see each other."""
        pairs = self.count * (self.length - self.count) + self.count * (self.count + 1) / 2
        return 4 * pairs * self.heads * self.dim

    def row(self, call: Callable[[], Any], layers: int, ceilings: Ceilings) -> Row:
        seconds = seconds_of(call) / layers
        rate = self.flops / seconds
        return {
            "us": round(seconds * 1e6, 1),
            "TFLOPps": round(rate / 1e12, 1),
            "share": round(rate / ceilings.rate, 3),
        }

    def ours(self, tuning: gpu.Tuning, ceilings: Ceilings) -> Row:
        page_size = 16
        width = -(-self.length // page_size)
        table = np.random.default_rng(0).permutation(width).astype(np.int32)[None]
        pool = _pool(width, self.kv_heads, page_size, self.dim, jnp.bfloat16, 0)
        queries = jax.random.normal(jax.random.key(1), (self.count, self.heads, self.dim), jnp.bfloat16)
        rows = (jnp.asarray(table), jnp.asarray([0, self.count], jnp.int32), jnp.asarray([self.length], jnp.int32))
        layers = LAYERS if ON_GPU else 1

        @jax.jit
        def attend(queries: jax.Array, pool: jax.Array, rows: Any) -> jax.Array:
            work = gpu.schedule(*rows, num_tokens=self.count, num_single=0, page_size=page_size)
            options: dict[str, Any] = {"chunk_tuning": tuning, **off_gpu()}
            for _ in range(layers):
                queries = gpu.paged_attention(queries, pool, work, scale=self.dim**-0.5, **options)
            return queries

        row = self.row(lambda: attend(queries, pool, rows), layers, ceilings)
        kernels = kernel_times(lambda: attend(queries, pool, rows)) if ON_GPU else {}
        times = [time for name, of_kernel in kernels.items() if "paged_attention" in name for time in of_kernel]
        if times:
            row["kernel_us"] = round(statistics.median(times), 1)
            row["kernel_share"] = round(self.flops / statistics.median(times) * 1e6 / ceilings.rate, 3)
        return row

    def cudnn(self, ceilings: Ceilings) -> Row:
        shapes = ((1, self.count, self.heads, self.dim), *((1, self.length, self.kv_heads, self.dim),) * 2)
        q, k, v = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes))

        @jax.jit
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            for _ in range(LAYERS):
                q = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
            return q

        return self.row(lambda: attend(q, k, v), LAYERS, ceilings)

    def torch(self, ceilings: Ceilings) -> Row:
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        def make(num_heads: int, num: int) -> Any:
            return torch.randn(1, num_heads, num, self.dim, device="cuda", dtype=torch.bfloat16)

        q, k, v = make(self.heads, self.count), make(self.kv_heads, self.length), make(self.kv_heads, self.length)

        def call() -> tuple[()]:
            for _ in range(LAYERS):
                scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            torch.cuda.synchronize()
            return ()

        return self.row(call, LAYERS, ceilings)
