"""Low-rank adapters (LoRA: Hu et al., 2021) of a decoder's products: their stacked arrays, and what they add to each product.

Owns shapes, where a PEFT module's pair lies in them, and the mathematics. Does not know files, slots' owners or requests.

Where a model has adapters, `N` of them at most and each of rank `R` at most, each product `W @ x` of a token with adapter `n`
becomes `W @ x + B[n] @ (A[n] @ x)`, B times the adapter's scale. All A are one matrix of `N * R` rows and all B one of
`N * R` columns, so that it is two products of a fixed shape whatever adapters a step mixes: between them, what belongs to
other adapters than the token's is replaced by zeros. A smaller rank, or a module that an adapter leaves alone, is zeros too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxserve.errors import ModelLoadError
from jaxserve.model_config import ModelConfig
from jaxserve.models.decoder_params import HEAD_AXES, Layer, Mlp, TensorNames
from jaxserve.models.layers import linear
from jaxserve.models.params import ParamSpec, map_specs
from pallas_kernels import pytree

OVERFLOW = 1e30
"""Above it a key or value has come of an adapter that overflows, and may be infinite in the type of the pages."""
MAX_PROBLEMS = 10
"""Problems that an error lists; of more it gives the number."""

Pair = tuple[np.ndarray, np.ndarray]
"""A of `[r, in]` and B, times its scale, of `[out, r]`."""


@pytree.dataclass
class LayerAdapters:
    """All adapters of one block. Of a single one, to be put into its slot, the shapes are the same without `N`.

    Attributes:
        gate_up_a, gate_up_b, down_a, down_b: None where the block has no MLP that adapters may change.
    """

    qkv_a: Float[Array, "3 N R E"]
    query_b: Float[Array, "K G D N R"]
    key_b: Float[Array, "K D N R"]
    value_b: Float[Array, "K D N R"]
    output_a: Float[Array, "N R K G D"]
    output_b: Float[Array, "E N R"]
    gate_up_a: Float[Array, "2 N R E"] | None
    gate_up_b: Float[Array, "2 F N R"] | None
    down_a: Float[Array, "N R F"] | None
    down_b: Float[Array, "E N R"] | None


Adapters = tuple[LayerAdapters, ...]


@pytree.dataclass
class TokenAdapters:
    """One block's adapters, and which of them each token of the step has; -1 for none."""

    layer: LayerAdapters
    of_token: Int[Array, " T"]


# --- what is computed -------------------------------------------------------------------------------------------------


def chosen_adapters(adapter_of_token: Int[Array, " T"], num_adapters: int) -> Bool[Array, "N 1 T"]:
    """Whether a token has an adapter, for each of them; -1 is none."""
    return (adapter_of_token == jnp.arange(num_adapters)[:, None])[:, None]


def add_qkv(qkv: Float[Array, "K parts D T"], x: Float[Array, "E T"], mine: TokenAdapters) -> Float[Array, "K parts D T"]:
    """Queries, keys and values with what adapters add to them."""
    low = _low(mine.layer.qkv_a, x, mine.of_token)
    parts = [
        _high(mine.layer.query_b, low[0]),
        _high(mine.layer.key_b, low[1])[:, None],
        _high(mine.layer.value_b, low[2])[:, None],
    ]
    return qkv + jnp.concatenate(parts, axis=1)


def add_output(out: Float[Array, "E T"], x: Float[Array, "heads T"], mine: TokenAdapters) -> Float[Array, "E T"]:
    """This device's part of attention's output, with its part of what adapters add: B is whole, A @ x is of its heads."""
    num, rank = mine.layer.output_a.shape[:2]
    return out + _high(mine.layer.output_b, _low(mine.layer.output_a.reshape(1, num, rank, -1), x, mine.of_token)[0])


def add_gate_up(gate_up: Float[Array, "2 F T"], x: Float[Array, "E T"], mine: TokenAdapters) -> Float[Array, "2 F T"]:
    """Gate and up with what adapters add to them."""
    assert mine.layer.gate_up_a is not None
    assert mine.layer.gate_up_b is not None
    low = _low(mine.layer.gate_up_a, x, mine.of_token)
    return gate_up + jnp.stack([_high(mine.layer.gate_up_b[part], low[part]) for part in range(2)])


def add_down(out: Float[Array, "E T"], x: Float[Array, "F T"], mine: TokenAdapters) -> Float[Array, "E T"]:
    """This device's part of the MLP's output, likewise."""
    assert mine.layer.down_a is not None
    assert mine.layer.down_b is not None
    return out + _high(mine.layer.down_b, _low(mine.layer.down_a[None], x, mine.of_token)[0])


def without_overflow(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Keys or values as pages may have them: zeros for what is infinite or no number.

    Pages come to other sequences as they were left, and attention to the places that these have not written yet is 0, which
    times such a value is no number.
    """
    return jnp.where(jnp.abs(x) < OVERFLOW, x, 0)


def _low(
    a: Float[Array, "parts N R in"], x: Float[Array, "in T"], adapter_of_token: Int[Array, " T"]
) -> Float[Array, "parts NR T"]:
    """A @ x of each token's own adapter, zeros in the rows of others."""
    parts, num, rank, size = a.shape
    every = linear(a.reshape(-1, size), x).reshape(parts, num, rank, -1)
    # Not by a product with 0 and 1: an adapter that overflows must not reach tokens of others.
    return jnp.where(chosen_adapters(adapter_of_token, num), every, 0).reshape(parts, num * rank, -1)


def _high(b: Float[Array, "*out N R"], low: Float[Array, "NR T"]) -> Float[Array, "*out T"]:
    *out, num, rank = b.shape
    return linear(b.reshape(-1, num * rank), low).reshape(*out, -1)


# --- what it is made of -----------------------------------------------------------------------------------------------


def specs(layers: tuple[Layer, ...], rank: int) -> Adapters:
    """Declarations of one adapter for blocks declared as `layers`. None comes from a model's checkpoint."""
    return tuple(_layer_specs(layer, rank) for layer in layers)


def stacked(one: Adapters, num_adapters: int) -> Adapters:
    """Declarations of so many adapters: their axis comes before that of the rank."""

    def stack(spec: ParamSpec) -> ParamSpec:
        at = spec.axes.index("rank")
        shape = (*spec.shape[:at], num_adapters, *spec.shape[at:])
        return replace(spec, shape=shape, axes=(*spec.axes[:at], "adapters", *spec.axes[at:]))

    return map_specs(stack, one)


def adapters_axis(spec: ParamSpec) -> int:
    """Which axis of a stacked array tells adapters apart."""
    return spec.axes.index("adapters")


def _layer_specs(layer: Layer, rank: int) -> LayerAdapters:
    heads, parts, dim, hidden = layer.qkv.shape
    group = parts - 2
    shapes: dict[str, tuple[tuple[int, ...], tuple[str, ...]] | None] = {
        "qkv_a": ((3, rank, hidden), ("query_key_value", "rank", "embed")),
        "query_b": ((heads, group, dim, rank), (*HEAD_AXES, "rank")),
        "key_b": ((heads, dim, rank), ("kv_heads", "head_dim", "rank")),
        "value_b": ((heads, dim, rank), ("kv_heads", "head_dim", "rank")),
        "output_a": ((rank, heads, group, dim), ("rank", *HEAD_AXES)),
        "output_b": ((hidden, rank), ("embed", "rank")),
        **dict.fromkeys(("gate_up_a", "gate_up_b", "down_a", "down_b")),
    }
    if isinstance(layer.mlp, Mlp):
        mlp = layer.mlp.down.shape[1]
        shapes |= {
            "gate_up_a": ((2, rank, hidden), ("gate_and_up", "rank", "embed")),
            "gate_up_b": ((2, mlp, rank), ("gate_and_up", "mlp", "rank")),
            "down_a": ((rank, mlp), ("rank", "mlp")),
            "down_b": ((hidden, rank), ("embed", "rank")),
        }
    fields: dict[str, Any] = {
        name: None if shape is None else ParamSpec(*shape, tensors=(), scale=0) for name, shape in shapes.items()
    }
    return LayerAdapters(**fields)


def arrange(
    pairs: Mapping[str, Pair], config: ModelConfig, layers: tuple[Layer, ...], names: TensorNames, max_rank: int, where: str
) -> Adapters:
    """One adapter's arrays in float32, of the shapes that `specs` declares.

    Args:
        pairs: by the module that each changes, such as `model.layers.0.self_attn.q_proj`.
        layers: declarations of the model's blocks.
        where: named in errors.

    Raises:
        ModelLoadError: one for all pairs that fit no product of this model.
    """
    placing = _Placing(dict(pairs), config, names, max_rank)
    arranged = tuple(placing.layer(index, layer) for index, layer in enumerate(layers))
    problems = placing.problems + [
        f"{name} is none of the products that adapters may change: {', '.join(_module_names(names))} in layers 0 to "
        f"{config.num_layers - 1}"
        for name in placing.pairs
    ]
    if problems:
        more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        raise ModelLoadError(f"{where} does not fit this model: " + "; ".join(problems[:MAX_PROBLEMS] + more))
    return arranged


def _module_names(names: TensorNames) -> list[str]:
    return [*names.qkv, names.output, *names.gate_up, names.down]


@dataclass(slots=True)
class _Placing:
    """Pairs on their way into arrays; `pairs` are those left.

    Attributes:
        problems: what does not fit, so far.
    """

    pairs: dict[str, Pair]
    config: ModelConfig
    names: TensorNames
    max_rank: int
    problems: list[str] = field(default_factory=list)

    def layer(self, index: int, layer: Layer) -> LayerAdapters:
        config, names, rank, prefix = self.config, self.names, self.max_rank, f"model.layers.{index}."
        heads, group, dim, hidden = (
            config.num_kv_heads,
            config.num_heads // config.num_kv_heads,
            config.head_dim,
            config.hidden_size,
        )
        queries, keys = heads * group * dim, heads * dim
        qkv = self._side_by_side(prefix, names.qkv, (queries, keys, keys), hidden)
        output_a, output_b = self._side_by_side(prefix, (names.output,), (hidden,), queries)[0]
        fields: dict[str, Any] = {
            "qkv_a": np.stack([a for a, _ in qkv]),
            "query_b": qkv[0][1].reshape(heads, group, dim, rank),
            "key_b": qkv[1][1].reshape(heads, dim, rank),
            "value_b": qkv[2][1].reshape(heads, dim, rank),
            "output_a": output_a.reshape(rank, heads, group, dim),
            "output_b": output_b,
            **dict.fromkeys(("gate_up_a", "gate_up_b", "down_a", "down_b")),
        }
        if isinstance(layer.mlp, Mlp):
            mlp = layer.mlp.down.shape[1]
            gate_up = self._side_by_side(prefix, names.gate_up, (mlp, mlp), hidden)
            fields["gate_up_a"] = np.stack([a for a, _ in gate_up])
            fields["gate_up_b"] = np.stack([b for _, b in gate_up])
            fields["down_a"], fields["down_b"] = self._side_by_side(prefix, (names.down,), (hidden,), mlp)[0]
        return LayerAdapters(**fields)

    def _side_by_side(self, prefix: str, modules: tuple[str, ...], widths: tuple[int, ...], inputs: int) -> list[Pair]:
        """A pair for each of `widths`: a module's own, or, where one module makes them all, its A with each part of its B."""
        if len(modules) == len(widths):
            return [self._take(prefix + name, width, inputs) for name, width in zip(modules, widths, strict=True)]
        a, b = self._take(prefix + modules[0], sum(widths), inputs)
        return [(a, part) for part in np.split(b, np.cumsum(widths)[:-1])]

    def _take(self, name: str, width: int, inputs: int) -> Pair:
        """The pair of a module, filled up to the full rank with zeros; zeros where it does not fit."""
        a, b = np.zeros((self.max_rank, inputs), np.float32), np.zeros((width, self.max_rank), np.float32)
        pair = self.pairs.pop(name, None)
        if pair is None:
            return a, b
        given_a, given_b = pair
        rank = given_a.shape[0]
        if (given_a.shape, given_b.shape) != ((rank, inputs), (width, rank)):
            self.problems.append(
                f"{name} has A of {given_a.shape} and B of {given_b.shape}, expected (r, {inputs}) and ({width}, r)"
            )
        elif rank > self.max_rank:
            self.problems.append(f"{name} has rank {rank}, more than max_adapter_rank, which is {self.max_rank}")
        else:
            a[:rank], b[:, :rank] = given_a, given_b
        return a, b
