"""A runner from an `EngineConfig`: data types, which attention, and how many pages the memory allows.

Owns what is decided between what was asked for and what the machine has. Knows no checkpoint.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.device.abstract import page_bytes
from jaxserve.device.adapters import adapters_bytes
from jaxserve.device.runner import DeviceRunner
from jaxserve.errors import ConfigError
from jaxserve.model_config import ModelConfig
from jaxserve.models.families import FAMILIES
from jaxserve.models.quant import FORMS, WeightForm, held_params
from jaxserve.models.sharding import EXPERT, TENSOR, AnyMesh, check_splits, padded_shape
from jaxserve.plan import MIN_WINDOW, RunnerLimits, enough_local_pages
from pallas_kernels.grouped_matmul.choose import choose as choose_grouped
from pallas_kernels.paged_attention.choose import Shape, choose
from pallas_kernels.paged_attention.options import choose_options
from pallas_kernels.quant_matmul.choose import choose as choose_quant_matmul
from pallas_kernels.quant_matmul.choose import options_for
from pallas_kernels.tuned import default_folder

logger = logging.getLogger(__name__)

DEFAULT_MAX_CONTEXT = 8192
DEFAULT_CPU_KV_BYTES = 2 * 2**30
"""On CPU memory is shared with everything else, and the pool is zeroed at start: take no more than this unasked."""


def build_runner(engine: EngineConfig, model_config: ModelConfig, mesh: Mesh, dtype: np.dtype) -> DeviceRunner:
    """A runner, not yet warm, with its pool sized from `engine`."""
    max_context = engine.max_context or min(model_config.max_position, DEFAULT_MAX_CONTEXT)
    if max_context > model_config.max_position:
        raise ConfigError(f"max_context is {max_context} but the model's positions end at {model_config.max_position}")
    model_config = model_config.for_context(max_context)
    kv_dtype = kv_dtype_of(engine, dtype)
    attention_impl, options = _choose_attention(engine, model_config, mesh, dtype, kv_dtype)
    bytes_per_page = page_bytes(model_config, engine.page_size, mesh, kv_dtype, attention_impl)
    if 0 < engine.host_kv_memory < bytes_per_page:
        raise ConfigError(f"host_kv_memory is {engine.host_kv_memory} bytes, too few for one page of {bytes_per_page}")
    window = widest_window(model_config)
    limits = RunnerLimits(
        num_pages=0,
        page_size=engine.page_size,
        max_seqs=engine.max_seqs,
        max_step_tokens=engine.max_step_tokens,
        max_context=max_context,
        vocab_size=model_config.vocab_size,
        host_pages=engine.host_kv_memory // bytes_per_page,
        hidden_size=model_config.hidden_size,
        window=window,
        max_adapters=engine.max_adapters,
        max_adapter_rank=engine.max_adapter_rank,
    )
    device = mesh.devices.flat[0]
    form = choose_weight_form(engine, model_config, device.platform, device.device_kind, dtype)
    weights = weight_bytes(model_config, mesh, dtype, form) + adapters_bytes(model_config, limits, mesh, dtype)
    limits = _size_pools(engine, model_config, limits, mesh, weights, bytes_per_page)
    logger.info("mesh: %s; %s", dict(mesh.shape), limits)
    experts_impl = choose_experts_impl(model_config, mesh, dtype)
    return DeviceRunner(model_config, mesh, limits, dtype, kv_dtype, attention_impl, options, experts_impl, form)


def choose_experts_impl(model_config: ModelConfig, mesh: Mesh, dtype: np.dtype) -> str:
    """The implementation of `grouped_matmul` for one device's share of the experts.

    Raises:
        ConfigError: the mesh splits experts, and the model has none.
    """
    experts = model_config.experts
    check_splits(model_config, mesh.shape[EXPERT])
    if experts is None:
        return "xla"
    device, hidden = mesh.devices.flat[0], model_config.hidden_size
    num, width = padded_shape((experts.num, experts.width), ("experts", "expert_mlp"), mesh)
    num, width = num // mesh.shape[EXPERT], width // mesh.shape[TENSOR]
    shapes = ((num, width, hidden), (num, hidden, width))
    impl, reason = choose_grouped(device.platform, device.device_kind, shapes, dtype)
    logger.info("experts: %s, since %s", impl, reason)
    return impl


def choose_weight_form(
    engine: EngineConfig, model_config: ModelConfig, platform: str, device_kind: str, dtype: np.dtype
) -> WeightForm | None:
    """How matrices are kept; None for `dtype`.

    Raises:
        ConfigError: a form that this model or device cannot have.
    """
    if engine.weight_dtype == "auto":
        for name in ("activation_dtype", "quant_matmul"):
            if getattr(engine, name) != "auto":
                raise ConfigError(f"{name} {getattr(engine, name)} needs a weight_dtype of int8 or int4, which is auto")
        return None
    if model_config.experts is not None:
        raise ConfigError(f"weight_dtype {engine.weight_dtype} is for models without experts; take auto")
    try:
        impl, reason = choose_quant_matmul(platform, device_kind, dtype, engine.quant_matmul)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    logger.info("weights in %s, multiplied by: %s, since %s", engine.weight_dtype, impl, reason)
    bits, group = FORMS[engine.weight_dtype]
    rounds = engine.activation_dtype == "int8"
    return WeightForm(bits, group, dtype.name, rounds, impl, tuple(options_for(impl, platform).items()))


def widest_window(model_config: ModelConfig) -> int | None:
    """Newest positions that a token sees in any layer, as `RunnerLimits.window` has it."""
    windows = [model_config.layer_window(layer) for layer in range(model_config.num_layers)]
    return None if None in windows else max(MIN_WINDOW, *(window for window in windows if window is not None))


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


def dtype_of(engine: EngineConfig) -> np.dtype:
    """Of weights and activations."""
    name = engine.dtype
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return np.dtype(jax.numpy.dtype(name))


def kv_dtype_of(engine: EngineConfig, dtype: np.dtype) -> np.dtype:
    """Of the KV pools, beside weights in `dtype`."""
    names = {"auto": dtype.name, "fp8": "float8_e4m3fn"}
    return np.dtype(jax.numpy.dtype(names.get(engine.kv_dtype, engine.kv_dtype)))


def _size_pools(
    engine: EngineConfig,
    model_config: ModelConfig,
    limits: RunnerLimits,
    mesh: Mesh,
    weight_bytes: int,
    bytes_per_page: int,
) -> RunnerLimits:
    """`limits` with pages as configured, else with what the memory allows and the sequences can use."""
    usable = engine.max_seqs * limits.pages_for(limits.max_context)
    memory = 0
    pages = engine.num_pages
    if not pages:
        memory = engine.kv_memory or _free_kv_bytes(mesh, weight_bytes)
        pages = min(usable, memory // bytes_per_page)
    if pages * engine.page_size < 2 * engine.page_size:
        raise ConfigError(f"{memory} bytes hold {pages} KV pages, which is too few; raise kv_memory or lower page_size")
    limits = replace(limits, num_pages=pages)
    if engine.host_kv_memory or engine.pin_prefix:  # neither is there for local pages
        return limits
    return _with_local_pages(engine, model_config, limits, usable, memory, bytes_per_page)


def _with_local_pages(
    engine: EngineConfig, model_config: ModelConfig, limits: RunnerLimits, usable: int, memory: int, bytes_per_page: int
) -> RunnerLimits:
    """`limits` with a pool for the layers with a window, where others see all, and pages for the others from what memory that
    leaves. What these cannot use is for more of the first, which keep prefixes. As they are, for all layers, where memory
    suffices for as many of the first as of the others, or for less than sequences that run may hold."""
    num_local = sum(model_config.layer_window(layer) is not None for layer in range(model_config.num_layers))
    if limits.window is not None or not num_local or model_config.window is None:
        return limits
    window = max(MIN_WINDOW, model_config.window)
    local_pages = enough_local_pages(replace(limits, num_pages=usable), window)
    pages = engine.num_pages
    if not pages:
        local_bytes = bytes_per_page // model_config.num_layers * num_local
        other_bytes = bytes_per_page - local_bytes
        pages = min(usable, (memory - local_pages * local_bytes) // other_bytes)
        local_pages = max(local_pages, (memory - pages * other_bytes) // local_bytes)
    if pages <= local_pages:
        return limits
    return replace(limits, num_pages=pages, local_pages=local_pages, local_window=window)


def weight_bytes(model_config: ModelConfig, mesh: AnyMesh, dtype: np.dtype, form: WeightForm | None) -> int:
    """Bytes that the parameters take of each device."""
    abstract = held_params(FAMILIES[model_config.family].specs(model_config), mesh, dtype, form)
    leaves = jax.tree.leaves(abstract)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _free_kv_bytes(mesh: Mesh, weight_bytes: int) -> int:
    """Bytes for KV that may be taken unasked: half of what the devices have free once each has its `weight_bytes`."""
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - weight_bytes * mesh.size
        return max(0, min(free // 2, DEFAULT_CPU_KV_BYTES))
    stats = device.memory_stats()
    return max(0, (stats["bytes_limit"] - stats["bytes_in_use"] - weight_bytes) // 2 * mesh.size)
