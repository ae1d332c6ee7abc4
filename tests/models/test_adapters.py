"""The mathematics of stacked adapters against NumPy, and which pairs fit which products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.model_config import ModelConfig
from jaxserve.models import adapters
from jaxserve.models.adapters import LayerAdapters, TokenAdapters
from jaxserve.models.decoder_params import TensorNames
from jaxserve.models.families import FAMILIES
from jaxserve.models.params import map_specs

CONFIG = ModelConfig(
    family="llama",
    vocab_size=16,
    hidden_size=12,
    intermediate_size=10,
    num_layers=1,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    max_position=64,
)
NAMES = TensorNames()
LAYERS = FAMILIES["llama"].specs(CONFIG).layers
SHAPES = {
    "self_attn.q_proj": (24, 12),
    "self_attn.k_proj": (8, 12),
    "self_attn.v_proj": (8, 12),
    "self_attn.o_proj": (12, 24),
    "mlp.gate_proj": (10, 12),
    "mlp.up_proj": (10, 12),
    "mlp.down_proj": (12, 10),
}
MAX_RANK = 3
OF_TOKEN = np.array([1, -1, 0, 1, 0], np.int32)

Pairs = dict[str, tuple[np.ndarray, np.ndarray]]


def random_pairs(seed: int, rank: int, modules: dict[str, tuple[int, int]] = SHAPES) -> Pairs:
    rng = np.random.default_rng(seed)
    return {
        f"model.layers.0.{name}": (
            rng.standard_normal((rank, inputs)).astype(np.float32),
            rng.standard_normal((width, rank)).astype(np.float32),
        )
        for name, (width, inputs) in modules.items()
    }


def arrange(pairs: Pairs, names: TensorNames = NAMES) -> adapters.Adapters:
    return adapters.arrange(pairs, CONFIG, LAYERS, names, MAX_RANK, "adapter")


def stack(*every: Pairs, names: TensorNames = NAMES) -> TokenAdapters:
    """The arrays of the only layer with all of `every` in them, and the tokens of `OF_TOKEN`."""
    specs = adapters.stacked(adapters.specs(LAYERS, MAX_RANK), len(every))[0]
    ones = [arrange(pairs, names)[0] for pairs in every]
    fields: dict[str, Any] = {}
    for name in LayerAdapters.__dataclass_fields__:
        spec = getattr(specs, name)
        fields[name] = jnp.stack([getattr(one, name) for one in ones], adapters.adapters_axis(spec))
        assert fields[name].shape == spec.shape
    return TokenAdapters(LayerAdapters(**fields), jnp.asarray(OF_TOKEN))


def added(every: list[Pairs], module: str, x: np.ndarray) -> np.ndarray:
    """What PEFT adds to the product of `module`, token by token."""
    columns = []
    for column, adapter in zip(x.T, OF_TOKEN, strict=True):
        a, b = every[adapter].get(f"model.layers.0.{module}", (np.zeros((1, len(column))), np.zeros((SHAPES[module][0], 1))))
        columns.append(b @ (a @ column) if adapter >= 0 else np.zeros(SHAPES[module][0]))
    return np.stack(columns, axis=1)


EVERY = [
    random_pairs(0, 3),
    random_pairs(1, 1, {name: SHAPES[name] for name in ("self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")}),
]


def test_every_product_of_every_token() -> None:
    """An adapter of all modules, and one of a lower rank that leaves most of them alone."""
    mine = stack(*EVERY)
    rng = np.random.default_rng(2)
    inputs = [rng.standard_normal((size, 5)).astype(np.float32) for size in (12, 24, 10)]

    @jax.jit
    def all_products(mine: TokenAdapters, wide: jax.Array, attended: jax.Array, hidden: jax.Array) -> tuple[jax.Array, ...]:
        return (
            adapters.add_qkv(jnp.ones((2, 5, 4, 5)), wide, mine),
            adapters.add_output(jnp.ones((12, 5)), attended, mine),
            adapters.add_gate_up(jnp.ones((2, 10, 5)), wide, mine),
            adapters.add_down(jnp.ones((12, 5)), hidden, mine),
        )

    qkv, output, gate_up, down = (np.asarray(product) - 1 for product in all_products(mine, *inputs))
    wide, attended, hidden = inputs
    for name, part in zip("qkv", (qkv[:, :3].reshape(24, 5), qkv[:, 3].reshape(8, 5), qkv[:, 4].reshape(8, 5)), strict=True):
        np.testing.assert_allclose(part, added(EVERY, f"self_attn.{name}_proj", wide), atol=1e-5)
    np.testing.assert_allclose(output, added(EVERY, "self_attn.o_proj", attended), atol=1e-5)
    for found, name in zip(gate_up, ("gate", "up"), strict=True):
        np.testing.assert_allclose(found, added(EVERY, f"mlp.{name}_proj", wide), atol=1e-5)
    np.testing.assert_allclose(down, added(EVERY, "mlp.down_proj", hidden), atol=1e-5)


def test_tokens_without_an_adapter_keep_every_bit() -> None:
    mine = stack(*EVERY)
    out = jnp.asarray(np.random.default_rng(3).standard_normal((12, 5)), jnp.float32)
    found = adapters.add_down(out, jnp.ones((10, 5)), mine)
    assert np.array_equal(np.asarray(found)[:, OF_TOKEN < 0], np.asarray(out)[:, OF_TOKEN < 0])
    assert not np.array_equal(found, out)


def test_an_adapter_that_overflows_reaches_no_others_tokens() -> None:
    large = {name: (np.full_like(a, 1e38), b) for name, (a, b) in EVERY[0].items()}
    mine = stack(large, EVERY[1])
    found = np.asarray(adapters.add_down(jnp.ones((12, 5)), jnp.full((10, 5), 10.0), mine))
    assert np.isfinite(found[:, OF_TOKEN != 0]).all()
    assert not np.isfinite(found[:, OF_TOKEN == 0]).all()


def test_modules_that_make_several_products_at_once() -> None:
    """Phi's: one A for queries, keys and values, and for gate and up."""
    fused = {"self_attn.qkv_proj": (40, 12), "mlp.gate_up_proj": (20, 12)}
    pairs = random_pairs(4, 2, fused)
    names = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    a, b = pairs["model.layers.0.self_attn.qkv_proj"]
    gate_up_a, gate_up_b = pairs["model.layers.0.mlp.gate_up_proj"]
    separate = {
        **{
            f"model.layers.0.self_attn.{name}_proj": (a, part) for name, part in zip("qkv", np.split(b, [24, 32]), strict=True)
        },
        **{
            f"model.layers.0.mlp.{name}_proj": (gate_up_a, part)
            for name, part in zip(("gate", "up"), np.split(gate_up_b, 2), strict=True)
        },
    }
    (one,), (other,) = arrange(pairs, names), arrange(separate)
    for name in LayerAdapters.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_one_error_for_all_that_does_not_fit() -> None:
    pairs = random_pairs(0, 2)
    pairs |= random_pairs(0, 4, {"self_attn.q_proj": (24, 12)})
    pairs |= random_pairs(0, 2, {"mlp.down_proj": (12, 11)})
    pairs["model.layers.1.mlp.up_proj"] = pairs["model.layers.0.mlp.up_proj"]
    pairs["lm_head"] = pairs["model.layers.0.mlp.up_proj"]
    with pytest.raises(ModelLoadError) as caught:
        arrange(pairs)
    message = str(caught.value)
    assert "self_attn.q_proj has rank 4, more than max_adapter_rank, which is 3" in message
    assert "mlp.down_proj has A of (2, 11) and B of (12, 2), expected (r, 10) and (12, r)" in message
    assert "model.layers.1.mlp.up_proj is none of the products" in message
    assert "lm_head is none of the products" in message


def test_a_mixtures_experts_are_none_of_the_products() -> None:
    layer = replace(LAYERS[0], mlp=object())
    pairs = {"model.layers.0.mlp.down_proj": EVERY[0]["model.layers.0.mlp.down_proj"]}
    with pytest.raises(ModelLoadError, match="none of the products"):
        adapters.arrange(pairs, CONFIG, (layer,), NAMES, MAX_RANK, "adapter")
    assert map_specs(lambda spec: spec, adapters.specs((layer,), 2))[0].down_a is None
