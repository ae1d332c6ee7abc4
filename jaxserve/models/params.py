"""One declaration per parameter, and everything that follows from it.

`ParamSpec` states shape, logical axes and initialiser once. The abstract tree, the shardings and the random initialisation
come from it; so does what a checkpoint must hold. Knows no family and no file format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxserve.models.sharding import AnyMesh, padded_shape, partition_spec


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter as the model thinks of it, before the mesh pads or splits it.

    Attributes:
        shape: logical shape.
        axes: a logical axis name for each dimension; `sharding.MESH_AXES` maps them to the mesh.
        tensors: the checkpoint's tensors that it is made of, Hugging Face's name and shape of each.
        build: makes the logical array of those tensors, in that order.
        parts: where that is the tensors side by side, of an array of the logical shape the views that they fill, each with as
            many values in the same order: a tensor is then read to where it stays. Without either the only one is taken as it
            is.
        scale: standard deviation of the random initialisation; 0 gives ones, as norms start.
        dtype: on the device; None for the model's.
        inputs: last axes that a product sums over, of a matrix that `layers.linear` takes, which may be kept in eight or four
            bits; 0 for anything else.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    build: Callable[[list[np.ndarray]], np.ndarray] | None = None
    parts: Callable[[np.ndarray], list[np.ndarray]] | None = None
    scale: float = 0.02
    dtype: str | None = None
    inputs: int = 0

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)


def _is_spec(node: object) -> bool:
    return isinstance(node, ParamSpec)


def map_specs(function: Callable[[ParamSpec], Any], specs: Any) -> Any:
    """Apply `function` to each `ParamSpec` of a tree."""
    return jax.tree.map(function, specs, is_leaf=_is_spec)


def abstract_params(specs: Any, mesh: AnyMesh, dtype: np.dtype) -> Any:
    """The tree of `jax.ShapeDtypeStruct` with shardings: padded shapes, as the devices hold them."""

    def one(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, partition_spec(spec.axes))
        shape = padded_shape(spec.shape, spec.axes, mesh)
        return jax.ShapeDtypeStruct(shape, np.dtype(spec.dtype or dtype), sharding=sharding)

    return map_specs(one, specs)


def random_params(specs: Any, mesh: Mesh, dtype: np.dtype, seed: int) -> Any:
    """Random parameters for tests and benchmarks: the same logical values whatever the mesh, zeros in the padding."""
    rng = np.random.default_rng(seed)

    def one(spec: ParamSpec) -> jax.Array:
        values = np.ones(spec.shape) if spec.scale == 0 else spec.scale * rng.standard_normal(spec.shape)
        padded = pad_to(values, padded_shape(spec.shape, spec.axes, mesh))
        return jax.device_put(jnp.asarray(padded, spec.dtype or dtype), NamedSharding(mesh, partition_spec(spec.axes)))

    return map_specs(one, specs)


def pad_to(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`values` with zeros after the end of each axis that `shape` makes longer."""
    if values.shape == shape:
        return values
    return np.pad(values, [(0, want - have) for have, want in zip(values.shape, shape, strict=True)])
