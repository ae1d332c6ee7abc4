"""Weights in eight or four bits: which parameters are kept so, and how they come to be.

A model's matrices are rounded when they are loaded, one after the other, from what the checkpoint has of them in floats;
whatever the mesh, to the same values. Norms and biases stay as they are. What the numbers mean, and how they are multiplied,
is `pallas_kernels.quant_matmul`'s.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxserve.errors import ConfigError
from jaxserve.models.params import ParamSpec, abstract_params, map_specs
from jaxserve.models.sharding import DEVICES, AnyMesh, local_shape, partition_spec
from pallas_kernels import pytree
from pallas_kernels.quant_matmul import lay_out, quant_matmul, quantize_activations, quantize_weights, take_rows

FORMS: dict[str, tuple[int, int | None]] = {"int8": (8, None), "int4": (4, 32)}
"""Bits and inputs that share a scale, None for all of a row, by what `EngineConfig.weight_dtype` calls them. Groups have an
offset too, so that what a GGUF file has in Q4_1 keeps its values."""


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How matrices are kept.

    Attributes:
        bits: 8, or 4 for all but embeddings and the head: logits and looked-up rows cost little more in 8.
        group: inputs that share a scale and an offset; None for a scale a row.
        dtype: of activations.
        rounds_activations: whether products take these in eight bits too, with a scale a token; but for the head's.
        impl: of `quant_matmul`.
        options: of its `lay_out`.
    """

    bits: int
    group: int | None
    dtype: str
    rounds_activations: bool
    impl: str
    options: tuple[tuple[str, int], ...] = ()


@pytree.dataclass
class QuantMatrix:
    """A matrix as each device's `quant_matmul` wants its part; every array has the devices' parts along a first axis.

    Attributes:
        num_rows: of one part.
        form: how it is kept.
    """

    laid: Any
    num_rows: int = pytree.static()
    form: WeightForm = pytree.static()

    def times(self, x: Float[Array, "in T"]) -> Float[Array, "out T"]:
        """This device's part times `x`; inside `shard_map`."""
        inputs = quantize_activations(x) if self.form.rounds_activations else x
        return quant_matmul(inputs, self._local(), impl=self.form.impl)

    def rows(self, indices: Int[Array, " R"]) -> Float[Array, "R in"]:
        """Rows of this device's part; inside `shard_map`."""
        return take_rows(self._local(), indices, impl=self.form.impl).astype(self.form.dtype)

    def _local(self) -> Any:
        return jax.tree.map(lambda part: part.reshape(part.shape[1:]), self.laid)


def held_params(specs: Any, mesh: AnyMesh, dtype: np.dtype, form: WeightForm | None) -> Any:
    """The tree of `jax.ShapeDtypeStruct` with shardings that the step takes: `abstract_params` if there is no `form`.

    Raises:
        ConfigError: a matrix that cannot be kept in that form.
    """
    if form is None:
        return abstract_params(specs, mesh, dtype)

    def one(spec: ParamSpec) -> Any:
        if not spec.inputs:
            return abstract_params(spec, mesh, dtype)
        of_spec = _form_of(spec.axes, form)
        shape = local_shape(spec.shape, spec.axes, mesh)
        _check_groups(spec, shape, of_spec)
        laid = _one_part(shape, spec.inputs, of_spec)
        sharding = NamedSharding(mesh, PartitionSpec(DEVICES))
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((mesh.size, *leaf.shape[1:]), leaf.dtype, sharding=sharding), laid
        )

    return map_specs(one, specs)


def loaded_params(specs: Any, mesh: AnyMesh, dtype: np.dtype, form: WeightForm | None) -> Any:
    """What is to be loaded, in floats, before `quantize` makes of it what `held_params` describes."""

    def one(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        return abstract_params(spec, mesh, dtype if form is None or not spec.inputs else np.dtype(np.float32))

    return map_specs(one, specs)


def quantize(spec: ParamSpec, weights: Float[Array, "..."], mesh: Mesh, form: WeightForm | None) -> Any:
    """A parameter as the step takes it; given up are those in floats that do not stay so."""
    if form is None or not spec.inputs:
        return weights
    made = _program(mesh, _form_of(spec.axes, form), spec.axes, spec.inputs)(weights)
    jax.block_until_ready(made)
    weights.delete()
    return made


def quantize_tree(specs: Any, params: Any, mesh: Mesh, form: WeightForm | None) -> Any:
    """`quantize` for each parameter of a tree."""
    return jax.tree.map(
        lambda spec, weights: quantize(spec, weights, mesh, form),
        specs,
        params,
        is_leaf=lambda node: isinstance(node, ParamSpec),
    )


@functools.lru_cache(maxsize=32)
def _program(mesh: Mesh, form: WeightForm, axes: tuple[str, ...], inputs: int) -> Any:
    is_split = any(partition_spec(axes[-inputs:])) and mesh.size > 1
    local = functools.partial(_quantize, inputs=inputs, form=form, across=DEVICES if is_split else ())
    parts = PartitionSpec(DEVICES)
    sharded = jax.shard_map(local, mesh=mesh, in_specs=partition_spec(axes), out_specs=parts, check_vma=False)
    return jax.jit(sharded, out_shardings=NamedSharding(mesh, parts))


@functools.lru_cache(maxsize=32)
def _one_part(shape: tuple[int, ...], inputs: int, form: WeightForm) -> QuantMatrix:
    """Shapes and dtypes of one device's part. Layers are alike, and tracing takes milliseconds for each."""
    weights = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.eval_shape(functools.partial(_quantize, inputs=inputs, form=form, across=()), weights)


def _quantize(weights: Float[Array, "..."], *, inputs: int, form: WeightForm, across: tuple[str, ...]) -> QuantMatrix:
    """One device's part. `across`: mesh axes that split the inputs, so that all parts of a row share its scale."""
    matrix = weights.reshape(-1, math.prod(weights.shape[-inputs:])).astype(jnp.float32)
    if form.group is None:
        largest = jnp.max(jnp.abs(matrix), axis=1, keepdims=True)
        largest = lax.pmax(largest, across) if across else largest
        quantised = quantize_weights(matrix, bits=form.bits, largest=largest)
    else:
        quantised = quantize_weights(matrix, bits=form.bits, group=form.group, symmetric=False)
    laid = lay_out(quantised, impl=form.impl, **dict(form.options))
    parts = jax.tree.map(lambda part: part[None], laid)
    return QuantMatrix(laid=parts, num_rows=len(matrix), form=form)


def _form_of(axes: tuple[str, ...], form: WeightForm) -> WeightForm:
    """`form` as a parameter with these axes has it."""
    return replace(form, bits=8, group=None, rounds_activations=False) if axes[0] == "vocab" else form


def _check_groups(spec: ParamSpec, shape: tuple[int, ...], form: WeightForm) -> None:
    """Raise `ConfigError` unless one device's part, of this shape, has whole groups."""
    num_in = math.prod(shape[-spec.inputs :])
    if form.group is not None and num_in % form.group:
        names = ", ".join(name for name, _ in spec.tensors)
        raise ConfigError(
            f"weights in {form.bits} bits come in groups of {form.group} inputs, and of {names} a device has {num_in}; "
            "take weight_dtype int8, or other numbers of devices"
        )
