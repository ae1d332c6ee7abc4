"""What the ladder compiles ahead of time beyond single kernels: builders for `pallas_kernels.aot`, run in its subprocess."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.device.abstract import abstract_step
from jaxserve.device.buckets import Bucket
from jaxserve.device.build import choose_experts_impl, choose_weight_form
from jaxserve.device.sampler import choose_draw
from jaxserve.model_config import ExpertsConfig, ModelConfig, RopeScaling
from jaxserve.models.sharding import mesh_of
from jaxserve.plan import RunnerLimits
from pallas_kernels.programs import Program

MIXTURE = ModelConfig(
    family="qwen3_moe", vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_layers=48, num_heads=32,
    num_kv_heads=4, head_dim=128, max_position=40_960, rope_theta=1_000_000.0, qk_norm="head",
    experts=ExpertsConfig(num=128, per_token=8, width=768),
)  # fmt: skip
"""Shape of Qwen3 30B-A3B, a mixture of experts."""

LLAMA_8B = ModelConfig(
    family="llama", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32, num_heads=32,
    num_kv_heads=8, head_dim=128, max_position=131_072, rope_theta=500_000.0,
    rope_scaling=RopeScaling(kind="llama3", factor=8.0),
)  # fmt: skip
"""Shape of Llama 3.1 8B."""

MODELS = {
    "demo": ModelConfig(
        family="llama", vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64, max_position=8192, rope_theta=100_000.0, tie_embeddings=True,
    ),
    "8b": LLAMA_8B,
    "8b, 4 layers": dataclasses.replace(LLAMA_8B, num_layers=4),
    "gemma3": ModelConfig(
        family="gemma3", vocab_size=262_144, hidden_size=640, intermediate_size=2048, num_layers=6, num_heads=4,
        num_kv_heads=1, head_dim=256, max_position=32_768, rms_norm_eps=1e-6, activation="gelu_tanh", norms="both",
        norm_offset=1.0, qk_norm="head", rope_theta=1e6, local_rope_theta=1e4, window=512,
        windowed=(True,) * 5 + (False,), embedding_scale=640**0.5, tie_embeddings=True,
    ),
    "30b-a3b": MIXTURE,
    "30b-a3b, 6 layers": dataclasses.replace(MIXTURE, num_layers=6),
}  # fmt: skip
"""Shapes of SmolLM2 135M, the demo model, of Llama 3.1 8B, of the first six of the eighteen layers of Gemma 3 270M, and
of a mixture of experts; of some of their layers where these show the same programs in a part of the compiling."""


def engine_step(
    devices: Sequence[Any],
    *,
    model: str,
    impl: str,
    num_pages: int,
    page_size: int = 64,
    max_seqs: int = 64,
    chunk_tokens: int = 512,
    max_context: int = 8192,
    kv_dtype: str = "bfloat16",
    expert_parallel: int = 1,
    weight_dtype: str = "auto",
) -> Program:
    """The whole step of a model with `max_seqs` decodes, or with `chunk_tokens` places for them and for chunks; sampling as
    the devices get it."""
    config = MODELS[model]
    limits = RunnerLimits(
        num_pages=num_pages,
        page_size=page_size,
        max_seqs=max_seqs,
        max_step_tokens=max(chunk_tokens, max_seqs),
        max_context=max_context,
        vocab_size=config.vocab_size,
    )
    bucket = Bucket(chunk_tokens or max_seqs, chunk_tokens // 16, max_seqs)
    mesh, dtype = mesh_of(devices, expert_parallel), np.dtype(jnp.bfloat16)
    engine = EngineConfig(weight_dtype=weight_dtype, quant_matmul="auto" if weight_dtype == "auto" else impl)
    return abstract_step(
        config,
        limits,
        bucket,
        mesh,
        dtype,
        impl,
        kv_dtype=np.dtype(jnp.dtype(kv_dtype)),
        draw_impl=choose_draw(devices[0].platform, config.vocab_size)[0],
        experts_impl=choose_experts_impl(config, mesh, dtype),
        weight_form=choose_weight_form(engine, config, devices[0].platform, devices[0].device_kind, dtype),
    )
