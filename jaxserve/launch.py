"""Builds an engine from a `ServeConfig`: where both towers meet.

Resolves the model, has its weights loaded while the lattice compiles, and hands over an `Engine`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import jax

from checkpoints.checkpoint import Checkpoint, CheckpointError
from checkpoints.sources import cache_dir
from jaxserve.adapters import PeftSource
from jaxserve.config import EngineConfig, ServeConfig
from jaxserve.device.buckets import choose_bucket
from jaxserve.device.build import build_runner, dtype_of
from jaxserve.device.runner import DeviceRunner, Weights
from jaxserve.engine.adapters import NO_ADAPTERS, AdapterSource, AdapterTable, load_first, named_adapters
from jaxserve.engine.calibration import build_pacer, find_cost
from jaxserve.engine.constraints import Constraints
from jaxserve.engine.core import EngineCore
from jaxserve.engine.pinning import pin_prefix
from jaxserve.engine.text import ChatRules, Tokenizer
from jaxserve.engine.tiering import build_tier
from jaxserve.errors import ModelLoadError
from jaxserve.host.jump import JumpForward
from jaxserve.host.prefix import PrefixTree, make_tree
from jaxserve.host.scheduler import Scheduler
from jaxserve.host.sizes import NO_SIZES, StepSizes
from jaxserve.model_config import ModelConfig
from jaxserve.models.families import model_config_from_hf
from jaxserve.models.sharding import make_mesh
from jaxserve.plan import RunnerLimits
from jaxserve.sampling_defaults import find_defaults
from jaxserve.vocabulary import build_tokenizer
from jaxserve.weights import check_params, find_kv_scales, load_params, open_model

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with a stage ("load" in bytes, "compile" in programs), how much is done, and of how much."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A warm engine, ready for `core.add` and `core.step`."""

    core: EngineCore
    tokenizer: Tokenizer
    runner: DeviceRunner
    model_name: str
    model_config: ModelConfig
    constraints: Constraints
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    adapters: AdapterTable = NO_ADAPTERS
    adapter_source: AdapterSource | None = None

    @property
    def limits(self) -> RunnerLimits:
        """What requests can have: all but the pinned pages."""
        limits = self.runner.limits
        return replace(limits, num_pages=limits.num_pages - self.core.stats().pinned_pages)

    def close(self) -> None:
        """Nothing is held beyond memory, which goes with the last reference."""


def build_engine(
    config: ServeConfig,
    *,
    progress: Progress | None = None,
    meanwhile: Callable[[Constraints], None] = lambda constraints: None,
) -> Engine:
    """Load, compile and return a warm engine.

    Args:
        meanwhile: called once the weights are there, while other threads still compile.

    Raises:
        ConfigError: settings that do not fit the model or the machine.
        ModelLoadError: weights or tokenizer that cannot be had or read.
    """
    adapters = named_adapters(config.engine)
    _limit_malloc_arenas()
    _enable_compile_cache(config.engine)
    try:
        with open_model(config.model) as checkpoint, _no_garbage_collection():
            loaded = _load(checkpoint, config.engine, progress or (lambda stage, done, total: None), meanwhile)
    except CheckpointError as error:
        raise ModelLoadError(str(error)) from error
    core = _build_core(config.engine, loaded.runner, loaded.model_config)
    if config.engine.pin_prefix:
        # Conversations begin with the prefix as this server will encode it.
        rules = ChatRules(special_tokens_in_messages=config.http.special_tokens_in_messages)
        pin_prefix(core, loaded.tokenizer.with_rules(rules), Path(config.engine.pin_prefix))
    name = config.http.served_model_name or Path(config.model.removeprefix("hf:")).name
    engine = Engine(
        core=core,
        tokenizer=loaded.tokenizer,
        runner=loaded.runner,
        model_name=name,
        model_config=loaded.model_config,
        constraints=loaded.constraints,
        sampling_defaults=loaded.sampling_defaults,
    )
    if not config.engine.max_adapters:
        return engine
    source, table = PeftSource(loaded.model_config, loaded.runner), AdapterTable(config.engine.max_adapters, (name,))
    load_first(table, source, adapters, int(time.time()))
    return replace(engine, adapters=table, adapter_source=source)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What there is once the weights are there and every program is compiled."""

    tokenizer: Tokenizer
    runner: DeviceRunner
    model_config: ModelConfig
    constraints: Constraints
    sampling_defaults: Mapping[str, float]


def _load(checkpoint: Checkpoint, engine: EngineConfig, report: Progress, meanwhile: Callable[[Constraints], None]) -> _Loaded:
    where = str(checkpoint.path)
    model_config = model_config_from_hf(checkpoint.config, where=where)
    sampling_defaults = find_defaults(checkpoint.config, engine.generation_config, where=where)
    tokenizer = _tokenizer(checkpoint)
    model_config = _with_end_of_tokenizer(model_config, tokenizer)
    mesh = make_mesh(engine.tensor_parallel, engine.expert_parallel)
    dtype = dtype_of(engine)
    runner = build_runner(engine, model_config, mesh, dtype)
    model_config = model_config.for_context(runner.limits.max_context)
    check_params(checkpoint, model_config, mesh, dtype)
    constraints = Constraints(tokenizer, runner.limits.vocab_size, model_config.eos_token_ids)

    def load_weights() -> Weights:
        how = partial(report, "load"), runner.weight_form, runner.layer_memory
        params = load_params(checkpoint, model_config, mesh, dtype, *how)
        scales = find_kv_scales(engine, checkpoint, model_config, params, mesh, dtype)
        meanwhile(constraints)
        return Weights(params, scales)

    runner.warm_up(load_weights, partial(report, "compile"))
    return _Loaded(tokenizer, runner, model_config, constraints, sampling_defaults)


def _build_core(engine: EngineConfig, runner: DeviceRunner, model_config: ModelConfig) -> EngineCore:
    """The loop over a warm runner, with what is measured on it."""
    bucket_for = partial(choose_bucket, runner.buckets)
    tier = cost = None
    if engine.host_kv_memory:
        cost = find_cost(engine, runner, runner.buckets, bucket_for)
        tier = build_tier(engine, runner.limits, runner.time_loads(), cost, bucket_for)
    pacer = build_pacer(engine, runner, runner.buckets, bucket_for, cost=cost)
    scheduler = Scheduler(
        runner.limits,
        prefill_chunk=engine.prefill_chunk,
        eos_token_ids=model_config.eos_token_ids,
        seed=None,
        pacer=pacer,
        prefixes=prefix_tree(engine, model_config),
        tier=tier,
        jump=JumpForward(bucket.num_single for bucket in runner.buckets if not bucket.has_chunks),
        sizes=NO_SIZES if runner.fixed_places is None else StepSizes(runner.buckets, runner.fixed_places),
    )
    return EngineCore(scheduler, runner, overlap=engine.overlap, on_step=pacer.observe if pacer else None)


def prefix_tree(engine: EngineConfig, model: ModelConfig) -> PrefixTree | None:
    """An empty tree for the scheduler, as `engine` wants it."""
    # A token costs two operations a weight, and with each token before it two for the score and two for the sum.
    width = model.num_heads * model.head_dim
    return make_tree(engine, lambda: model.active_weights / (2 * width))


def _with_end_of_tokenizer(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The tokenizer's EOS ends texts too: who tunes a model for chat often names the new end there alone."""
    end = tokenizer.eos_token_id
    if end is None or end in config.eos_token_ids:
        return config
    return replace(config, eos_token_ids=(*config.eos_token_ids, end))


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    files = checkpoint.tokenizer
    if files is None:
        raise ModelLoadError(
            f"{checkpoint.path}: no tokenizer found; put the model's tokenizer.json or tokenizer.model beside its weights"
        )
    return build_tokenizer(files)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Tracing makes millions of objects and no garbage to speak of: looking for it takes a fifth of tracing's time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _limit_malloc_arenas() -> None:
    """Have glibc keep two heaps instead of eight a core: the compiler's threads leave 200 MB of holes in the others."""
    with contextlib.suppress(OSError, AttributeError):
        m_arena_max = -8
        ctypes.CDLL("libc.so.6").mallopt(m_arena_max, 2)


def _enable_compile_cache(engine: EngineConfig) -> None:
    path = Path(engine.compile_cache) if engine.compile_cache else cache_dir() / "compiled"
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
