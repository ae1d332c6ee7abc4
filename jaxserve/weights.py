"""A model's checkpoint, and its weights as a runner wants them: which tensors feed which parameter, and scales of KV in eight
bits.

Under the roof with `launch`, since it sees checkpoints and models. Owns no file format and no model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.sources import default_models_dir, resolve
from checkpoints.text_part import text_part
from checkpoints.tree import TensorSource, check_tree, load_tree
from jaxserve.config import EngineConfig
from jaxserve.device.build import kv_dtype_of
from jaxserve.device.kv_scales import measure_scales, scales_of_checkpoint
from jaxserve.device.layer_memory import LayerMemory
from jaxserve.device.step import has_scales
from jaxserve.model_config import ModelConfig
from jaxserve.models.families import FAMILIES
from jaxserve.models.params import ParamSpec, map_specs, pad_to
from jaxserve.models.quant import WeightForm, loaded_params, quantize
from jaxserve.models.sharding import AnyMesh, padded_shape

logger = logging.getLogger(__name__)


def open_model(model: str) -> Checkpoint:
    """Open the text model that `ServeConfig.model` names, fetched first if need be; only headers are read.

    Raises:
        CheckpointError: nothing of that name, or it cannot be fetched or read.
    """
    return text_part(open_checkpoint(resolve(model, default_models_dir())))


def check_params(checkpoint: Checkpoint, model_config: ModelConfig, mesh: AnyMesh, dtype: np.dtype) -> None:
    """Raise one `CheckpointError` that lists every tensor that does not fit; reads no data, so it is quick."""
    abstract, mapping, ignored = _params_wanted(model_config, mesh, dtype)
    check_tree(checkpoint, abstract, mapping, ignore=ignored)


def load_params(
    checkpoint: Checkpoint,
    model_config: ModelConfig,
    mesh: Mesh,
    dtype: np.dtype,
    progress: Callable[[int, int], None] | None = None,
    form: WeightForm | None = None,
    memory: LayerMemory | None = None,
) -> Any:
    """Stream a checkpoint onto the mesh as the family's parameters; with `form`, each is quantised once it is there.

    Args:
        memory: where layers are made, if not in memory of their own.
    """
    finish = None if form is None else lambda spec, array: quantize(spec, array, mesh, form)
    abstract, mapping, ignored = _params_wanted(model_config, mesh, dtype, form, finish)
    if memory is not None:
        layers = jax.tree.map(lambda source, place: replace(source, memory=place), mapping.layers, memory.places)
        mapping = replace(mapping, layers=layers)
    return load_tree(checkpoint, abstract, mapping, ignore=ignored, progress=progress)


def _params_wanted(
    model_config: ModelConfig,
    mesh: AnyMesh,
    dtype: np.dtype,
    form: WeightForm | None = None,
    finish: Callable[[ParamSpec, jax.Array], Any] | None = None,
) -> tuple[Any, Any, tuple[str, ...]]:
    """The abstract parameters, where each comes from, and patterns of tensors that nobody needs."""
    family = FAMILIES[model_config.family]
    specs = family.specs(model_config)

    def source(spec: ParamSpec) -> TensorSource:
        padded = padded_shape(spec.shape, spec.axes, mesh)
        names = tuple(name for name, _ in spec.tensors)
        shapes = tuple(shape for _, shape in spec.tensors)
        last = None if finish is None else partial(finish, spec)
        if spec.build is not None:
            build = spec.build
            return TensorSource(names, lambda tensors: pad_to(build(tensors), padded), shapes=shapes, finish=last)
        parts = None if spec.parts is None and padded == spec.shape else partial(_unpadded_parts, spec)
        return TensorSource(names, parts=parts, shapes=shapes, finish=last)

    ignored = family.ignored_tensors + (("lm_head.weight",) if model_config.tie_embeddings else ())
    return loaded_params(specs, mesh, dtype, form), map_specs(source, specs), ignored


def _unpadded_parts(spec: ParamSpec, padded: np.ndarray) -> list[np.ndarray]:
    """`spec.parts` of a padded parameter, whose padding becomes zeros."""
    if padded.shape != spec.shape:
        padded[...] = 0
    whole = padded[tuple(slice(size) for size in spec.shape)]
    return [whole] if spec.parts is None else spec.parts(whole)


def read_kv_scales(checkpoint: Checkpoint, model_config: ModelConfig, mesh: Mesh) -> jax.Array | None:
    """The checkpoint's own scales for KV in float8; None unless it has them for all layers."""
    names = FAMILIES[model_config.family].kv_scale_tensors(model_config)
    if not all(name in checkpoint.tensors for pair in names for name in pair):
        return None
    return scales_of_checkpoint(model_config, mesh, [(checkpoint.read(key), checkpoint.read(value)) for key, value in names])


def find_kv_scales(
    engine: EngineConfig, checkpoint: Checkpoint, model_config: ModelConfig, params: Any, mesh: Mesh, dtype: np.dtype
) -> jax.Array | None:
    """The checkpoint's own scales for KV in float8 if it has them, else measured ones; None unless KV is in eight bits."""
    kv_dtype = kv_dtype_of(engine, dtype)
    if not has_scales(kv_dtype):
        return None
    own = read_kv_scales(checkpoint, model_config, mesh) if engine.kv_dtype == "fp8" else None
    logger.info("KV in %s, its scales %s", kv_dtype.name, "measured on random tokens" if own is None else "the checkpoint's")
    return measure_scales(model_config, params, mesh, dtype, kv_dtype) if own is None else own
