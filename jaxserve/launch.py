"""Builds everything from a `ServeConfig`: the only module that sees both towers.

Resolves the model, loads it onto the mesh, sizes the KV pool, compiles the lattice and hands over an `Engine`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from checkpoints.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from checkpoints.sources import cache_dir, resolve
from checkpoints.tree import TensorSource, check_tree, load_tree
from jaxserve.config import EngineConfig, ModelConfig, ServeConfig, model_config_from_hf
from jaxserve.device.buckets import choose_bucket
from jaxserve.device.compile_counter import num_compiles
from jaxserve.device.kv_scales import measure_scales, scales_of_checkpoint
from jaxserve.device.runner import DeviceRunner, Weights, page_bytes
from jaxserve.device.step import has_scales
from jaxserve.engine.calibration import build_pacer
from jaxserve.engine.core import EngineCore
from jaxserve.engine.pinning import pin_prefix
from jaxserve.engine.text import Tokenizer
from jaxserve.errors import ConfigError, ModelLoadError
from jaxserve.host.prefix import PrefixTree
from jaxserve.host.scheduler import Scheduler
from jaxserve.models.families import FAMILIES
from jaxserve.models.params import ParamSpec, abstract_params, map_specs, pad_to
from jaxserve.models.sharding import make_mesh, padded_shape
from jaxserve.plan import RunnerLimits
from jaxserve.server import app
from jaxserve.server.service import ServerParts
from pallas_kernels.paged_attention.choose import Shape, choose
from pallas_kernels.paged_attention.options import choose_options
from pallas_kernels.tuned import default_folder

logger = logging.getLogger(__name__)

DEFAULT_MAX_CONTEXT = 8192
DEFAULT_CPU_KV_BYTES = 2 * 2**30
"""On CPU memory is shared with everything else, and the pool is zeroed at start: take no more than this unasked."""

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

    @property
    def limits(self) -> RunnerLimits:
        """What requests can have: all but the pinned pages."""
        limits = self.runner.limits
        return replace(limits, num_pages=limits.num_pages - self.core.stats().pinned_pages)

    def close(self) -> None:
        """Nothing is held beyond memory, which goes with the last reference."""


def models_dir() -> Path:
    """The folder of named models: in an installed package within it, in a checkout beside it."""
    here = Path(__file__).parent
    inside = here / "configs" / "models"
    return inside if inside.is_dir() else here.parent / "configs" / "models"


def build_engine(config: ServeConfig, *, progress: Progress | None = None) -> Engine:
    """Load, compile and return a warm engine.

    Raises:
        ConfigError: settings that do not fit the model or the machine.
        ModelLoadError: weights or tokenizer that cannot be had or read.
    """
    report = progress or (lambda stage, done, total: None)
    _limit_malloc_arenas()
    _enable_compile_cache(config.engine)
    try:
        with open_checkpoint(resolve(config.model, models_dir())) as checkpoint, _no_garbage_collection():
            model_config = model_config_from_hf(checkpoint.config, where=str(checkpoint.path))
            tokenizer = _tokenizer(checkpoint)
            mesh = make_mesh(config.engine.tensor_parallel)
            dtype = _dtype(config.engine)
            runner = build_runner(config.engine, model_config, mesh, dtype)
            check_params(checkpoint, model_config, mesh, dtype)

            def load() -> Weights:
                params = load_params(checkpoint, model_config, mesh, dtype, partial(report, "load"))
                return Weights(params, _kv_scales(config.engine, checkpoint, model_config, params, mesh, dtype))

            runner.warm_up(load, partial(report, "compile"))
    except CheckpointError as error:
        raise ModelLoadError(str(error)) from error
    pacer = build_pacer(config.engine, runner, runner.buckets, partial(choose_bucket, runner.buckets))
    scheduler = Scheduler(
        runner.limits,
        prefill_chunk=config.engine.prefill_chunk,
        eos_token_ids=model_config.eos_token_ids,
        seed=None,
        pacer=pacer,
        prefixes=PrefixTree(runner.limits.page_size) if config.engine.prefix_cache else None,
    )
    core = EngineCore(scheduler, runner, overlap=config.engine.overlap, on_step=pacer.observe if pacer else None)
    if config.engine.pin_prefix:
        pin_prefix(core, tokenizer, Path(config.engine.pin_prefix))
    name = config.http.served_model_name or Path(config.model.removeprefix("hf:")).name
    return Engine(core=core, tokenizer=tokenizer, runner=runner, model_name=name, model_config=model_config)


def serve(config: ServeConfig) -> int:
    """Serve over HTTP until SIGTERM or SIGINT, then drain; the process's exit code.

    The port is open while the model loads, so `/health` answers and `/ready` says 503 until the engine is warm.
    """

    def build() -> ServerParts:
        engine = build_engine(config, progress=_log_progress())
        logger.info("ready: %s on http://%s:%d", engine.model_name, config.http.host, config.http.port)
        return ServerParts(
            core=engine.core,
            limits=engine.limits,
            tokenizer=engine.tokenizer,
            model_name=engine.model_name,
            num_compiles=num_compiles,
        )

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # JAX says at this level which accelerators it did not find.
    logging.getLogger("jax").setLevel(logging.WARNING)
    return app.serve(build, config.http)


def _log_progress() -> Progress:
    """Log each tenth of a stage."""
    said: dict[str, int] = {}

    def progress(stage: str, done: int, total: int) -> None:
        tenth = done * 10 // total
        if tenth > said.get(stage, 0):
            said[stage] = tenth
            logger.info("%s: %d%%", stage, 10 * tenth)

    return progress


def build_runner(engine: EngineConfig, model_config: ModelConfig, mesh: Mesh, dtype: np.dtype) -> DeviceRunner:
    """A runner, not yet warm, with its pool sized from `engine`."""
    max_context = engine.max_context or min(model_config.max_position, DEFAULT_MAX_CONTEXT)
    if max_context > model_config.max_position:
        raise ConfigError(f"max_context is {max_context} but the model's positions end at {model_config.max_position}")
    kv_dtype = _kv_dtype(engine, dtype)
    attention_impl, options = _choose_attention(engine, model_config, mesh, dtype, kv_dtype)
    limits = RunnerLimits(
        num_pages=_num_pages(engine, model_config, max_context, mesh, dtype, kv_dtype, attention_impl),
        page_size=engine.page_size,
        max_seqs=engine.max_seqs,
        max_step_tokens=engine.max_step_tokens,
        max_context=max_context,
        vocab_size=model_config.vocab_size,
    )
    logger.info("mesh: %s; %s", dict(mesh.shape), limits)
    return DeviceRunner(model_config, mesh, limits, dtype, kv_dtype, attention_impl, options)


def _kv_scales(
    engine: EngineConfig, checkpoint: Checkpoint, model_config: ModelConfig, params: Any, mesh: Mesh, dtype: np.dtype
) -> jax.Array | None:
    """The checkpoint's own scales for KV in float8 if it has them, else measured ones; None unless KV is in eight bits."""
    kv_dtype = _kv_dtype(engine, dtype)
    if not has_scales(kv_dtype):
        return None
    own = read_kv_scales(checkpoint, model_config, mesh) if engine.kv_dtype == "fp8" else None
    logger.info("KV in %s, its scales %s", kv_dtype.name, "measured on random tokens" if own is None else "the checkpoint's")
    return measure_scales(model_config, params, mesh, dtype, kv_dtype) if own is None else own


def _choose_attention(
    engine: EngineConfig, model_config: ModelConfig, mesh: Mesh, dtype: np.dtype, kv_dtype: np.dtype
) -> tuple[str, Mapping[str, int]]:
    """The implementation for one device's share of the heads, and its options that are tuned for the device."""
    device = mesh.devices.flat[0]
    num_kv_heads = -(-model_config.num_kv_heads // mesh.devices.size)
    shape = Shape(
        num_heads=num_kv_heads * (model_config.num_heads // model_config.num_kv_heads),
        num_kv_heads=num_kv_heads,
        head_dim=model_config.head_dim,
        page_size=engine.page_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    try:
        impl, reason = choose(device.platform, device.device_kind, shape, engine.attention)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    tuned = choose_options(default_folder(), device.device_kind, impl, shape)
    if tuned.problem:
        logger.warning("attention: %s", tuned.problem)
    logger.info("attention: %s, since %s; sizes: %s", impl, reason, tuned.source)
    return impl, tuned.options


def check_params(checkpoint: Checkpoint, model_config: ModelConfig, mesh: Mesh, dtype: np.dtype) -> None:
    """Raise one `CheckpointError` that lists every tensor that does not fit; reads no data, so it is quick."""
    abstract, mapping, ignored = _params_wanted(model_config, mesh, dtype)
    check_tree(checkpoint, abstract, mapping, ignore=ignored)


def load_params(
    checkpoint: Checkpoint,
    model_config: ModelConfig,
    mesh: Mesh,
    dtype: np.dtype,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """Stream a checkpoint onto the mesh as the family's parameters."""
    abstract, mapping, ignored = _params_wanted(model_config, mesh, dtype)
    return load_tree(checkpoint, abstract, mapping, ignore=ignored, progress=progress)


def _params_wanted(model_config: ModelConfig, mesh: Mesh, dtype: np.dtype) -> tuple[Any, Any, tuple[str, ...]]:
    """The abstract parameters, where each comes from, and patterns of tensors that nobody needs."""
    family = FAMILIES[model_config.family]
    specs = family.specs(model_config)

    def source(spec: ParamSpec) -> TensorSource:
        padded = padded_shape(spec.shape, spec.axes, mesh)
        names = tuple(name for name, _ in spec.tensors)
        shapes = tuple(shape for _, shape in spec.tensors)
        if spec.build is None and padded == spec.shape:
            return TensorSource(names, None, shapes)
        build = spec.build or (lambda tensors: tensors[0])
        return TensorSource(names, lambda tensors: pad_to(build(tensors), padded), shapes)

    ignored = family.ignored_tensors + (("lm_head.weight",) if model_config.tie_embeddings else ())
    return abstract_params(specs, mesh, dtype), map_specs(source, specs), ignored


def read_kv_scales(checkpoint: Checkpoint, model_config: ModelConfig, mesh: Mesh) -> jax.Array | None:
    """The checkpoint's own scales for KV in float8; None unless it has them for all layers."""
    names = FAMILIES[model_config.family].kv_scale_tensors(model_config)
    if not all(name in checkpoint.tensors for pair in names for name in pair):
        return None
    return scales_of_checkpoint(model_config, mesh, [(checkpoint.read(key), checkpoint.read(value)) for key, value in names])


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    files = checkpoint.tokenizer
    if files is None or files.tokenizer_json is None:
        raise ModelLoadError(f"{checkpoint.path}: no tokenizer found; put the model's tokenizer.json beside its weights")
    return Tokenizer(
        files.tokenizer_json,
        chat_template=files.chat_template,
        bos_token=files.bos_token,
        eos_token=files.eos_token,
        add_bos=files.add_bos,
    )


def _dtype(engine: EngineConfig) -> np.dtype:
    name = engine.dtype
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return np.dtype(jax.numpy.dtype(name))


def _kv_dtype(engine: EngineConfig, dtype: np.dtype) -> np.dtype:
    names = {"auto": dtype.name, "fp8": "float8_e4m3fn"}
    return np.dtype(jax.numpy.dtype(names.get(engine.kv_dtype, engine.kv_dtype)))


def _num_pages(
    engine: EngineConfig,
    model_config: ModelConfig,
    max_context: int,
    mesh: Mesh,
    dtype: np.dtype,
    kv_dtype: np.dtype,
    attention_impl: str,
) -> int:
    """Pages of the pool: as configured, else what the memory allows and the sequences can use."""
    if engine.num_pages:
        return engine.num_pages
    usable = engine.max_seqs * -(-max_context // engine.page_size)
    memory = engine.kv_memory or _free_kv_bytes(mesh, _weight_bytes(model_config, mesh, dtype))
    pages = min(usable, memory // page_bytes(model_config, engine.page_size, mesh, kv_dtype, attention_impl))
    if pages * engine.page_size < 2 * engine.page_size:
        raise ConfigError(f"{memory} bytes hold {pages} KV pages, which is too few; raise kv_memory or lower page_size")
    return pages


def _weight_bytes(model_config: ModelConfig, mesh: Mesh, dtype: np.dtype) -> int:
    """Bytes that the parameters take of each device."""
    abstract = abstract_params(FAMILIES[model_config.family].specs(model_config), mesh, dtype)
    shards = [math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(abstract)]
    return sum(shards) * dtype.itemsize


def _free_kv_bytes(mesh: Mesh, weight_bytes: int) -> int:
    """Bytes for KV that may be taken unasked: half of what the devices have free once each has its `weight_bytes`."""
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - weight_bytes * mesh.size
        return max(0, min(free // 2, DEFAULT_CPU_KV_BYTES))
    stats = device.memory_stats()
    return max(0, (stats["bytes_limit"] - stats["bytes_in_use"] - weight_bytes) // 2 * mesh.size)


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
