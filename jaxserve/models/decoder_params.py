"""Parameters of a decoder: the pytrees, their declarations, and which of a checkpoint's tensors they are made of.

Owns shapes and names. What is computed with them is `decoder.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Num

from jaxserve.model_config import ExpertsConfig, ModelConfig
from jaxserve.models.params import ParamSpec
from pallas_kernels import pytree

NORMS_OF = {"pre": 2, "post": 2, "both": 4}
"""Norms of a block, by where `ModelConfig.norms` says they are."""

HEAD_AXES = ("kv_heads", "heads_of_group", "head_dim")


@pytree.dataclass
class Mlp:
    """A gated MLP: `down(activation(gate) * up)`, gate and up side by side."""

    gate_up: Float[Array, "2 F E"]
    gate_up_bias: Float[Array, "2 F"] | None
    down: Float[Array, "E F"]
    down_bias: Float[Array, " E"] | None


@pytree.dataclass
class Experts:
    """A mixture of experts in place of an MLP. Matrices lie as `moe.lay_out` leaves them: declared they are `[X, out, in]`.

    Attributes:
        router: the score of each expert.
        gate, up, down: of each expert, what they are of an MLP.
        shared: an MLP that all tokens meet.
        shared_gate: what that MLP makes is weighted by the sigmoid of this.
    """

    router: Float[Array, "X E"]
    gate: Float[Array, "X_local _ _"]
    up: Float[Array, "X_local _ _"]
    down: Float[Array, "X_local _ _"]
    shared: Mlp | None
    shared_gate: Float[Array, "1 E"] | None


@pytree.dataclass
class Layer:
    """One block. `G` is the number of query heads of a KV head, which come before their K and V in `qkv`.

    Attributes:
        norms: in the order in which they apply.
        query_key_norms: of a head's queries and of its keys, where heads are normed one by one.
        projection_norms: of a KV head's queries and, last, its keys, where they are normed over all heads.
    """

    norms: Float[Array, "N E"]
    qkv: Float[Array, "K G+2 D E"]
    qkv_bias: Float[Array, "K G+2 D"] | None
    query_key_norms: Float[Array, "2 D"] | None
    projection_norms: Float[Array, "K G+1 D"] | None
    output: Float[Array, "E K G D"]
    output_bias: Float[Array, " E"] | None
    mlp: Mlp | Experts


@pytree.dataclass
class StackedLayers:
    """Blocks that are alike, for one loop to run: all layers' arrays one below the other.

    Flat, so that an array may take any shape once a layer's part is cut out of it. Cut out of another shape than a product
    takes, each number's index would be taken apart anew, which is three times slower.

    Attributes:
        arrays: of each leaf of a block.
        shapes, structure: how one layer's parts become a block.
    """

    arrays: tuple[Num[Array, "L _"], ...]
    shapes: tuple[tuple[int, ...], ...] = pytree.static()
    structure: Any = pytree.static()

    def block(self, parts: Sequence[Num[Array, " _"]]) -> Layer:
        """A layer's block of its part of each of `arrays`."""
        leaves = [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        layer: Layer = jax.tree.unflatten(self.structure, leaves)
        return layer


@pytree.dataclass
class DecoderParams:
    """The whole model. `lm_head` is None where it is tied to `embedding`."""

    embedding: Float[Array, "V E"]
    layers: tuple[Layer, ...] | StackedLayers
    final_norm: Float[Array, " E"]
    lm_head: Float[Array, "V E"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """What a family calls a block's tensors, below `model.layers.N.` and without `.weight` or `.bias`.

    Attributes:
        norms: in the order in which they apply.
        qkv: queries, keys and values, or one tensor of all three.
        gate_up: gate and up, or one tensor of both.
        router, shared_gate_up, shared_down, shared_gate: of a mixture of experts and the MLP that all tokens meet.
        expert_gate_up, expert_down: of expert `{}`; without that place, one tensor of all experts.
    """

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_key_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    shared_gate_up: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"


def specs(config: ModelConfig, names: TensorNames) -> DecoderParams:
    """The parameters' declarations, in the shape of `DecoderParams`."""
    hidden = config.hidden_size
    table = (config.vocab_size, hidden)
    layers = tuple(_LayerSpecs(config, names, f"model.layers.{index}.").layer(index) for index in range(config.num_layers))
    fields: dict[str, Any] = {
        "embedding": ParamSpec(table, ("vocab", "embed"), (("model.embed_tokens.weight", table),), inputs=1),
        "layers": layers,
        "final_norm": _norm((hidden,), ("embed",), (("model.norm.weight", (hidden,)),), config.norm_offset),
        "lm_head": None
        if config.tie_embeddings
        else ParamSpec(table, ("vocab", "embed"), (("lm_head.weight", table),), inputs=1),
    }
    return DecoderParams(**fields)


Tensors = tuple[tuple[str, tuple[int, ...]], ...]


def _norm(shape: tuple[int, ...], axes: tuple[str, ...], tensors: Tensors, offset: float) -> ParamSpec:
    """Weights of norms, one below the other where there are several tensors. `offset` is added once, here.

    With an offset they are kept in float32: in bfloat16 the sum would lose what the weight alone has.
    """

    def build(parts: list[np.ndarray]) -> np.ndarray:
        return np.stack([part.astype(np.float32) + offset for part in parts]).reshape(shape)

    return ParamSpec(shape, axes, tensors, build, scale=0, dtype="float32" if offset else None)


@dataclass(frozen=True, slots=True)
class _LayerSpecs:
    """Declarations of the block whose tensors' names begin with `prefix`."""

    config: ModelConfig
    names: TensorNames
    prefix: str

    def layer(self, index: int) -> Layer:
        config, names = self.config, self.names
        hidden = config.hidden_size
        heads, group, dim = config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim
        wide = heads * group * dim
        widths = [wide, heads * dim, heads * dim] if len(names.qkv) > 1 else [wide + 2 * heads * dim]
        assert len(names.norms) == NORMS_OF[config.norms], f"{config.family}: {names.norms} for {config.norms}"

        def by_head(whole: np.ndarray) -> list[np.ndarray]:
            return [whole[:, :group], *(whole[:, place] for place in range(group, whole.shape[1]))]

        def of_one(parts: list[np.ndarray]) -> np.ndarray:
            whole = np.empty((heads, group + 2, dim, *parts[0].shape[1:]), parts[0].dtype)
            for view, values in zip(by_head(whole), np.split(parts[0], [wide, wide + heads * dim]), strict=True):
                view[...] = values.reshape(view.shape)
            return whole

        joined: dict[str, Any] = {"parts": by_head} if len(names.qkv) > 1 else {"build": of_one}
        norms = tuple((f"{self.prefix}{name}.weight", (hidden,)) for name in names.norms)
        fields: dict[str, Any] = {
            "norms": _norm((len(norms), hidden), ("norms_of_layer", "embed"), norms, config.norm_offset),
            "qkv": ParamSpec(
                (heads, group + 2, dim, hidden),
                (*HEAD_AXES, "embed"),
                self._weights(names.qkv, widths, hidden),
                **joined,
                inputs=1,
            ),
            "qkv_bias": None,
            "query_key_norms": None,
            "projection_norms": None,
            "output": ParamSpec(
                (hidden, heads, group, dim),
                ("embed", *HEAD_AXES),
                self._weights((names.output,), [hidden], wide),
                parts=lambda whole: [whole],
                inputs=3,
            ),
            "output_bias": self._bias(names.output, config.output_bias),
            "mlp": self.experts(config.experts) if config.experts and config.has_experts(index) else self.mlp(),
        }
        if config.qkv_bias:
            fields["qkv_bias"] = ParamSpec((heads, group + 2, dim), HEAD_AXES, self._biases(names.qkv, widths), **joined)
        if config.qk_norm == "head":
            tensors = tuple((f"{self.prefix}{name}.weight", (dim,)) for name in names.query_key_norms)
            fields["query_key_norms"] = _norm((2, dim), ("query_and_key", "head_dim"), tensors, config.norm_offset)
        elif config.qk_norm == "projection":
            assert not config.norm_offset, "no family has both"
            wides = zip(names.query_key_norms, (wide, heads * dim), strict=True)
            tensors = tuple((f"{self.prefix}{name}.weight", (width,)) for name, width in wides)
            fields["projection_norms"] = ParamSpec((heads, group + 1, dim), HEAD_AXES, tensors, parts=by_head, scale=0)
        return Layer(**fields)

    def mlp(self) -> Mlp:
        config, names = self.config, self.names
        return self._mlp(names.gate_up, names.down, config.intermediate_size, has_bias=config.mlp_bias)

    def _mlp(self, gate_up: tuple[str, ...], down: str, mlp: int, *, has_bias: bool) -> Mlp:
        hidden = self.config.hidden_size
        widths = [mlp, mlp] if len(gate_up) > 1 else [2 * mlp]

        def side_by_side(whole: np.ndarray) -> list[np.ndarray]:
            return [*whole] if len(gate_up) > 1 else [whole]

        fields: dict[str, Any] = {
            "gate_up": ParamSpec(
                (2, mlp, hidden),
                ("gate_and_up", "mlp", "embed"),
                self._weights(gate_up, widths, hidden),
                parts=side_by_side,
                inputs=1,
            ),
            "gate_up_bias": None,
            "down": ParamSpec((hidden, mlp), ("embed", "mlp"), self._weights((down,), [hidden], mlp), inputs=1),
            "down_bias": self._bias(down, has_bias),
        }
        if has_bias:
            biases = self._biases(gate_up, widths)
            fields["gate_up_bias"] = ParamSpec((2, mlp), ("gate_and_up", "mlp"), biases, parts=side_by_side)
        return Mlp(**fields)

    def experts(self, experts: ExpertsConfig) -> Experts:
        names, hidden, width = self.names, self.config.hidden_size, experts.width
        gate, up = names.expert_gate_up[0], names.expert_gate_up[-1]
        shared = experts.shared_width
        fields: dict[str, Any] = {
            "router": ParamSpec(
                (experts.num, hidden), ("experts_of_layer", "embed"), self._weights((names.router,), [experts.num], hidden)
            ),
            "gate": self._matrices(gate, (width, hidden), ("expert_mlp", "embed"), half=0 if gate == up else None),
            "up": self._matrices(up, (width, hidden), ("expert_mlp", "embed"), half=1 if gate == up else None),
            "down": self._matrices(names.expert_down, (hidden, width), ("embed", "expert_mlp")),
            "shared": self._mlp(names.shared_gate_up, names.shared_down, shared, has_bias=False) if shared else None,
            "shared_gate": None,
        }
        if experts.shared_gate:
            tensors = self._weights((names.shared_gate,), [1], hidden)
            fields["shared_gate"] = ParamSpec((1, hidden), ("shared_gate", "embed"), tensors)
        return Experts(**fields)

    def _matrices(self, name: str, shape: tuple[int, int], axes: tuple[str, str], *, half: int | None = None) -> ParamSpec:
        """One matrix of each expert, of a tensor each or of one tensor of all; `half` of it where that is of gate and up."""
        assert self.config.experts is not None
        num, name = self.config.experts.num, f"{self.prefix}{name}.weight"
        whole, all_axes = (num, *shape), ("experts", *axes)
        if "{}" in name:
            return ParamSpec(whole, all_axes, tuple((name.format(index), shape) for index in range(num)), np.stack)
        if half is None:
            return ParamSpec(whole, all_axes, ((name, whole),))
        both = (num, 2 * shape[0], shape[1])
        return ParamSpec(whole, all_axes, ((name, both),), lambda parts: np.split(parts[0], 2, axis=1)[half])

    def _weights(self, names: tuple[str, ...], widths: list[int], inputs: int) -> Tensors:
        pairs = zip(names, widths, strict=True)
        return tuple((f"{self.prefix}{name}.weight", (width, inputs)) for name, width in pairs)

    def _biases(self, names: tuple[str, ...], widths: list[int]) -> Tensors:
        return tuple((f"{self.prefix}{name}.bias", (width,)) for name, width in zip(names, widths, strict=True))

    def _bias(self, name: str, there: bool) -> ParamSpec | None:
        hidden = self.config.hidden_size
        return ParamSpec((hidden,), ("embed",), self._biases((name,), [hidden])) if there else None


def kv_scale_tensors(config: ModelConfig) -> tuple[tuple[str, str], ...]:
    """A checkpoint's tensors, where it has them, that hold each layer's scales of K and V in float8 pages."""
    prefixes = (f"model.layers.{index}.self_attn." for index in range(config.num_layers))
    return tuple((f"{prefix}k_scale", f"{prefix}v_scale") for prefix in prefixes)
