"""Drives a model's `forward` without an engine: one sequence over shuffled pages, in chunks of any width.

Owns the batches that a runner would make. Knows nothing of plans, slots or sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from checkpoints.checkpoint import open_checkpoint
from jaxserve.device.abstract import pool_shape
from jaxserve.device.layer_memory import LayerMemory
from jaxserve.device.step import POOL_AXES, SCALE_AXES, SHARED_POOL_AXES
from jaxserve.model_config import ModelConfig
from jaxserve.models.batch import NO_PAGE, StepBatch
from jaxserve.models.families import FAMILIES, model_config_from_hf
from jaxserve.models.moe import lay_out
from jaxserve.models.sharding import make_mesh, partition_spec
from jaxserve.weights import load_params
from pallas_kernels.paged_attention.choose import pool_dtype
from tests.references.load import DemoReference, FamilyReference, GemmaReference, TinyReference, write_hf_directory

PAGE_SIZE = 16

OPTIMISED: Mapping[str, Any] = {}
UNOPTIMISED: Mapping[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiles in half the time, for tests of what is computed by many models."""


class PagedModel:
    """A model on a mesh, and the KV of one sequence.

    Args:
        capacity: tokens that the sequence may have.
        kv_dtype: of the pools; `dtype` where empty. Eight bits need `kv_scales`.
        compiler_options: of XLA, such as `UNOPTIMISED`.
        as_on_cpu: whether layers share a pool, and decodes run them in one loop, as the engine has it on CPU.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Any,
        tensor_parallel: int,
        *,
        dtype: str,
        capacity: int,
        attention_impl: str = "xla",
        kv_dtype: str = "",
        kv_scales: jax.Array | None = None,
        expert_parallel: int = 1,
        experts_impl: str = "xla",
        compiler_options: Mapping[str, Any] = OPTIMISED,
        as_on_cpu: bool = False,
    ) -> None:
        self.config = config
        self._compiler_options = dict(compiler_options)
        self._attention_impl = attention_impl
        self._experts_impl = experts_impl
        self.params = self._decode_params = lay_out(params, experts_impl)
        self._as_on_cpu = as_on_cpu
        if as_on_cpu:
            layers = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), self.params.layers
            )
            self.params, self._decode_params = LayerMemory(layers).adopt(self.params)
        self._mesh = make_mesh(tensor_parallel, expert_parallel)
        self._num_pages = -(-capacity // PAGE_SIZE) + 2
        self._table = np.random.default_rng(0).permutation(self._num_pages)[:-2].astype(np.int32)
        self._pool_specs = (partition_spec(POOL_AXES),) * config.num_layers
        if as_on_cpu:
            self._pool_specs = (partition_spec(SHARED_POOL_AXES),)
        self._kv_dtype = pool_dtype(attention_impl, kv_dtype or dtype)
        self._kv_scales = kv_scales
        self._programs: dict[int, Any] = {}
        self.restart()

    @classmethod
    def load(
        cls,
        path: Path,
        tensor_parallel: int = 1,
        *,
        dtype: str = "float32",
        capacity: int,
        expert_parallel: int = 1,
        **options: Any,
    ) -> PagedModel:
        """Load the checkpoint at `path` as the engine does."""
        checkpoint = open_checkpoint(path)
        config = model_config_from_hf(checkpoint.config).for_context(capacity)
        params = load_params(checkpoint, config, make_mesh(tensor_parallel, expert_parallel), np.dtype(jnp.dtype(dtype)))
        checkpoint.close()
        options |= {"dtype": dtype, "capacity": capacity, "expert_parallel": expert_parallel}
        return cls(config, params, tensor_parallel, **options)

    def restart(self) -> None:
        """Forget the sequence: the next token is its first."""
        self.length = 0
        shape = pool_shape(self.config, self._num_pages, PAGE_SIZE, self._mesh, self._attention_impl)
        if self._as_on_cpu:
            shape = (shape[0], self.config.num_layers, *shape[1:])
        shardings = [NamedSharding(self._mesh, spec) for spec in self._pool_specs]
        self._pools = tuple(jax.device_put(jnp.zeros(shape, self._kv_dtype), sharding) for sharding in shardings)

    def feed(self, tokens: Sequence[int] | np.ndarray, *, width: int) -> np.ndarray:
        """Append `tokens`, at most `width` of them, in one step of `width` tokens; their logits, [tokens, V].

        A step of width 1 is a decode, any other a chunk.
        """
        count, start = len(tokens), self.length
        assert 1 <= count <= width
        self.length += count
        positions = np.where(np.arange(width) < count, start + np.arange(width), 0).astype(np.int32)
        page_ids = np.where(np.arange(width) < count, self._table[positions // PAGE_SIZE], NO_PAGE)
        batch = StepBatch(
            token_ids=np.pad(np.asarray(tokens, np.int32), (0, width - count)),
            positions=positions,
            page_ids=page_ids.astype(np.int32),
            page_offsets=positions % PAGE_SIZE,
            block_table=self._table[None],
            row_offsets=np.array([0, count], np.int32),
            lengths=np.array([self.length], np.int32),
        )  # type: ignore[call-arg]
        if width not in self._programs:
            self._programs[width] = self._compile(width)
        batch = jax.tree.map(jnp.asarray, batch)
        params = self._decode_params if width == 1 else self.params
        logits, self._pools = self._programs[width](params, self._pools, batch, self._kv_scales)
        return np.asarray(logits).T[:count]

    def feed_all(self, tokens: Sequence[int] | np.ndarray, *, width: int) -> np.ndarray:
        """Append `tokens` in chunks of `width`, the last of which may be padded; their logits, [tokens, V]."""
        starts = range(0, len(tokens), width)
        return np.concatenate([self.feed(tokens[start : start + width], width=width) for start in starts])

    def _compile(self, width: int) -> Any:
        family = FAMILIES[self.config.family]
        num_single = 1 if width == 1 else 0
        options = {"config": self.config, "num_single": num_single, "attention_impl": self._attention_impl}
        options["experts_impl"] = self._experts_impl

        def step(params: Any, pools: Any, batch: StepBatch, kv_scales: Any) -> Any:
            states, pools = family.forward(params, pools, batch, kv_scales=kv_scales, **options)
            return family.head(params, states, self.config)[0], pools

        everywhere = PartitionSpec()
        params = self._decode_params if width == 1 else self.params
        param_specs = jax.tree.map(lambda leaf: leaf.sharding.spec, params)
        pool_specs = self._pool_specs
        sharded = jax.shard_map(
            step,
            mesh=self._mesh,
            in_specs=(param_specs, pool_specs, everywhere, partition_spec(SCALE_AXES)),
            out_specs=(everywhere, pool_specs),
            check_vma=False,
        )
        return jax.jit(sharded, compiler_options=self._compiler_options)


def load_tiny_model(
    reference: TinyReference | FamilyReference,
    folder: Path,
    tensor_parallel: int = 1,
    *,
    dtype: str = "float32",
    capacity: int = 80,
    **options: Any,
) -> PagedModel:
    """A tiny reference model, through its Hugging Face directory under `folder`."""
    path = write_hf_directory(reference, folder / reference.name)
    return PagedModel.load(path, tensor_parallel, dtype=dtype, capacity=capacity, **options)


def assert_greedy_tokens(
    model: PagedModel, last: np.ndarray, reference: DemoReference | GemmaReference, tolerance: float
) -> None:
    """The model goes on from the logits `last` [V] as the reference did, but for one near-tie.

    It is fed the reference's own tokens, so that a near-tie changes nothing after it.
    """
    near_ties = 0
    for token, gap in zip(reference.greedy_tokens, reference.greedy_gaps, strict=True):
        near_ties += gap < 2 * tolerance
        if gap >= 2 * tolerance:
            assert last.argmax() == token
        runner_up, best = np.sort(last)[-2:]
        assert best - last[token] < 2 * tolerance
        assert best - runner_up == pytest.approx(gap, abs=2 * tolerance)
        (last,) = model.feed([token], width=1)
    assert near_ties <= 1, "nearly all choices must be ones that rounding cannot change"
