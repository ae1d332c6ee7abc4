"""The whole step of an 8B-shaped Llama with random weights, against the time to read its bytes once."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bench.device.measure import ON_GPU, Ceilings, Row, print_table
from jaxserve.device.abstract import pool_shape
from jaxserve.device.buckets import Bucket
from jaxserve.device.pack import pack
from jaxserve.device.sampler import empty_state
from jaxserve.device.step import DeviceState, jit_step, make_step, state_shardings
from jaxserve.model_config import ModelConfig
from jaxserve.models.families import FAMILIES
from jaxserve.models.params import ParamSpec, map_specs
from jaxserve.models.sharding import make_mesh
from jaxserve.plan import PlanRow, RunnerLimits, StepPlan
from jaxserve.request import SamplingParams

LLAMA_8B = ModelConfig(
    family="llama", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32, num_heads=32,
    num_kv_heads=8, head_dim=128, max_position=8192, rope_theta=500_000.0,
)  # fmt: skip
TINY = ModelConfig(
    family="llama", vocab_size=512, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=64, max_position=512,
)  # fmt: skip
PAGE_SIZE = 16


@partial(jax.jit, static_argnames=("shape", "scale"))
def _normal(key: Any, shape: tuple[int, ...], scale: float) -> Any:
    return scale * jax.random.normal(key, shape, jnp.bfloat16)


def _random_params(config: ModelConfig, mesh: Mesh) -> Any:
    """As `random_params`, but made on the device: on the host, eight billion numbers take minutes."""
    keys = iter(jax.random.split(jax.random.key(0), 16 * config.num_layers + 16))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def one(spec: ParamSpec) -> jax.Array:
        ones = spec.scale == 0
        values = jnp.ones(spec.shape, jnp.bfloat16) if ones else _normal(next(keys), spec.shape, spec.scale)
        return jax.device_put(values, everywhere)

    return map_specs(one, FAMILIES[config.family].specs(config))


def _decode_plan(batch: int, context: int) -> StepPlan:
    pages_per_row = -(-context // PAGE_SIZE)
    order = np.random.default_rng(0).permutation(batch * pages_per_row).reshape(batch, pages_per_row)
    rows = tuple(
        PlanRow(
            seq_id=seq,
            slot=seq,
            start=context - 1,
            count=1,
            tokens=(seq + 1,),
            pages=pages.tolist(),
            sample=True,
            num_prompt=context - 1,
            params=SamplingParams(temperature=0.0),
            seed=seq,
            stop_ids=(),
            fresh=True,
        )
        for seq, pages in enumerate(order)
    )
    return StepPlan(0, rows)


def _filled_state(config: ModelConfig, limits: RunnerLimits, mesh: Any, impl: str) -> DeviceState:
    shape = pool_shape(config, limits.num_pages, limits.page_size, mesh, impl)

    def make() -> DeviceState:
        keys = jax.random.split(jax.random.key(1), config.num_layers)
        pools = tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
        return DeviceState(pools=pools, slots=empty_state(limits.max_seqs, limits.max_context, config.vocab_size))

    return jax.jit(make, out_shardings=state_shardings(mesh, config.num_layers))()


def _time_step(config: ModelConfig, params: Any, mesh: Any, batch: int, context: int, impl: str, num_steps: int) -> float:
    limits = RunnerLimits(
        num_pages=batch * -(-context // PAGE_SIZE),
        page_size=PAGE_SIZE,
        max_seqs=batch,
        max_step_tokens=max(batch, 16),
        max_context=context + 16,
        vocab_size=config.vocab_size,
    )
    bucket = Bucket(batch, 0, batch)
    state = _filled_state(config, limits, mesh, impl)
    specs, state_specs = jax.tree.map(lambda leaf: leaf.sharding.spec, (params, state))
    step = jit_step(make_step(config, limits, bucket, impl), mesh, specs, state_specs)
    uploaded = jax.device_put(pack(_decode_plan(batch, context), bucket, limits)[0])
    best = float("inf")
    for _ in range(4):  # the first compiles
        started = time.perf_counter()
        for _ in range(num_steps):
            state, result = step(params, state, uploaded)
        result.sampled.block_until_ready()
        best = min(best, (time.perf_counter() - started) / num_steps)
    return best


def step(quick: bool, out: Path) -> list[Row]:
    """Decodes of batch 1, 16 and 128 at context 1k."""
    config, context = (TINY, 100) if quick else (LLAMA_8B, 1024)
    mesh = make_mesh(1)
    params = _random_params(config, mesh)
    # The embedding is looked up, not read.
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - params.embedding.nbytes
    ceilings, rows = Ceilings(out), []
    for batch in (1, 4) if quick else (1, 16, 128):
        kv_bytes = 4 * batch * context * config.num_layers * config.num_kv_heads * config.head_dim
        floor = (weight_bytes + kv_bytes) / ceilings.bandwidth
        for impl in ("gpu", "xla") if ON_GPU else ("xla",):
            row: Row = {"batch": batch, "context": context, "impl": impl, "floor_ms": round(floor * 1e3, 3)}
            try:
                seconds = _time_step(config, params, mesh, batch, context, impl, 2 if quick else 20)
                row |= {
                    "step_ms": round(seconds * 1e3, 3),
                    "over_floor": round(seconds / floor, 2),
                    "tokens_per_s": round(batch / seconds, 1),
                }
            except Exception as error:
                row["failure"] = f"{type(error).__name__}: {str(error)[:150]}"
            rows.append(row)
            print_table(rows[-1:])
    return rows
