"""What families make of a `config.json`: defaults of the classes in transformers, and what is refused rather than ignored."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.device.build import build_runner
from jaxserve.errors import ConfigError
from jaxserve.model_config import ModelConfig, RopeScaling
from jaxserve.models.families import FAMILIES, model_config_from_hf
from jaxserve.models.hf_unheeded import NEUTRAL
from jaxserve.models.rope import rotary_table
from jaxserve.models.sharding import make_mesh

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LONG_ROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def read(model_type: str, **values: Any) -> ModelConfig:
    return model_config_from_hf({"model_type": model_type, **SIZES, **values})


def asked_for(key: str) -> Any:
    """A value of `key` that is not neutral."""
    return {"is_causal": False, "layer_types": ["full_attention", "chunked_attention"]}.get(key, 3)


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", sorted(NEUTRAL))
def test_a_key_that_changes_the_model_and_is_not_heeded_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"config.json: {key} = .*: not supported with the family llama"):
        read("llama", **{key: asked_for(key)})
    for neutral in NEUTRAL[key]:
        assert read("llama", **{key: neutral}) == read("llama")


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3", "gemma3_text", "olmo2", "phi3"])
def test_attention_to_what_comes_after_is_refused(model_type: str) -> None:
    with pytest.raises(ConfigError, match="use_bidirectional_attention = True"):
        read(model_type, use_bidirectional_attention=True)


def test_heeded_keys_are_not_refused() -> None:
    granite = read("granite", embedding_multiplier=12, residual_multiplier=0.22, attention_multiplier=0.5, logits_scaling=8)
    assert (granite.embedding_scale, granite.residual_scale) == (12.0, 0.22)
    assert (granite.attention_scale, granite.logits_scale) == (0.5, 0.125)
    assert read("qwen2", use_sliding_window=False, sliding_window=8, layer_types=["sliding_attention"] * 2).windowed == ()


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "dynamic", "factor": 2.0}, "rope scaling 'dynamic' is not supported"),
        ({"rope_type": "mrope", "mrope_section": [1, 2, 1]}, "rope scaling 'mrope' is not supported"),
        ({"rope_type": "yarn", "factor": 2.0, "attn_factor": 1.5}, "attn_factor in rope scaling yarn is not supported"),
        ({"rope_type": "linear"}, "'factor'"),
        (
            {"rope_type": "default", "llama_4_scaling_beta": 0.1},
            "llama_4_scaling_beta needs rope scaling yarn, found 'default'",
        ),
        (LONG_ROPE | {"long_factor": [2.0] * 3}, r"a short and a long factor for each of 4 pairs, found \(4, 3\)"),
    ],
)
def test_scaling_that_we_have_not_is_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read("llama", rope_scaling=rope)


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2", "mistral"])
def test_rotary_settings_of_kinds_of_layers_are_refused_where_all_are_alike(model_type: str) -> None:
    rope = {kind: {"rope_type": "default", "rope_theta": 5e5} for kind in ("full_attention", "sliding_attention")}
    with pytest.raises(ConfigError, match=r"rope_parameters\.full_attention = .*, rope_parameters\.sliding_attention = "):
        read(model_type, rope_parameters=rope)


def test_a_window_with_scaled_positions_is_refused() -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(ConfigError, match="rope_parameters must be without scaling in sliding_attention"):
        read("gemma3_text", rope_parameters={"full_attention": linear, "sliding_attention": linear})


@pytest.mark.parametrize(("part", "dim"), [(0.7, 5), (0.375, 3)])
def test_a_rotated_part_that_has_no_pairs_is_refused(part: float, dim: int) -> None:
    with pytest.raises(ConfigError, match=rf"rotary_dim must be even and at most head_dim \(8\), found {dim}"):
        read("llama", partial_rotary_factor=part)


# --- defaults ---------------------------------------------------------------------------------------------------------


def test_gemma_3_that_also_sees_says_only_what_differs() -> None:
    """As the `config.json` of 4B has it."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = model_config_from_hf({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert (config.max_position, config.window, config.windowed[:6]) == (131_072, 1024, (True,) * 5 + (False,))
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)
    assert config.rope_scaling == RopeScaling(kind="linear", factor=8.0)
    assert config.tie_embeddings
    assert config.attention_soft_cap is None
    assert config.activation == "gelu_tanh"


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("mistral", {"window": 4096, "windowed": (True, True)}),
        ("qwen3", {"head_dim": 128, "window": None, "rms_norm_eps": 1e-6}),
        ("qwen2", {"head_dim": 8, "qkv_bias": True, "output_bias": False, "windowed": ()}),
        (
            "gemma2",
            {"attention_soft_cap": 50.0, "logits_soft_cap": 30.0, "window": 4096, "head_dim": 256, "tie_embeddings": True},
        ),
        ("phi3", {"rms_norm_eps": 1e-5, "window": None, "tie_embeddings": False}),
        ("olmo2", {"rms_norm_eps": 1e-5, "rope_theta": 1e4}),
        ("olmo3", {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "local_rope_theta": 5e5, "window": 4096}),
        ("smollm3", {"rope_theta": 2e6, "tie_embeddings": True, "window": None, "rotary": (True, True)}),
        ("granite", {"attention_scale": 1.0, "logits_scale": 1.0, "rms_norm_eps": 1e-6}),
    ],
)
def test_absent_keys_are_what_transformers_takes(model_type: str, fields: dict[str, Any]) -> None:
    config = read(model_type)
    assert {name: getattr(config, name) for name in fields} == fields


def test_null_differs_from_absent() -> None:
    assert read("mistral", sliding_window=None).window is None
    nulls = read("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (nulls.attention_soft_cap, nulls.logits_soft_cap) == (None, None)
    nested = {"model_type": "mistral", **SIZES, "sliding_window": None}
    assert model_config_from_hf({"architectures": ["SomeVisionModel"], "text_config": nested}).windowed == ()


def test_gemma_does_not_heed_the_activation_that_its_class_does_not() -> None:
    assert read("gemma2", hidden_act="gelu").activation == "gelu_tanh"
    assert read("gemma2", hidden_activation="gelu").activation == "gelu"
    with pytest.raises(ConfigError, match=r"hidden_act must be one of silu, .*, found 'relu2'"):
        read("llama", hidden_act="relu2")


@pytest.mark.parametrize(
    ("model_type", "max_context", "windows"),
    [
        ("mistral", 4097, [4096, 4096]),
        ("mistral", 4096, [None, None]),
        ("gemma2", 4096, [None, None]),
        ("gemma3_text", 64, [4096, 4096]),
    ],
)
def test_a_window_as_wide_as_the_context_is_none(model_type: str, max_context: int, windows: list[int | None]) -> None:
    """Unless layers that have it rotate by another base."""
    config = read(model_type).for_context(max_context)
    assert [config.layer_window(layer) for layer in range(2)] == windows


# --- long rope --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_context", "is_long"), [(64, False), (65, True), (512, True), (0, True)])
def test_an_engine_takes_the_long_factors_if_its_contexts_are_longer(max_context: int, is_long: bool) -> None:
    config = read("phi3", original_max_position_embeddings=64, rope_scaling=LONG_ROPE)
    engine = EngineConfig(max_context=max_context, num_pages=8)
    runner = build_runner(engine, config, make_mesh(1), np.dtype(np.float32))
    assert runner._config.rope_scaling is not None
    assert runner._config.rope_scaling.long is is_long


@pytest.mark.parametrize(
    ("scaling", "short", "long"),
    [
        ({}, 1.2247, 1.2247),  # sqrt(1 + log(512 / 64) / log(64))
        ({"short_mscale": 1.1, "long_mscale": 1.3}, 1.1, 1.3),
        ({"attention_factor": 1.5}, 1.5, 1.5),
        ({"type": "yarn"}, 1.2247, 1.2247),
        ({"type": "su"}, 1.2247, 1.2247),
    ],
)
def test_long_rope_multiplies_what_it_rotates(scaling: dict[str, Any], short: float, long: float) -> None:
    config = read("phi3", original_max_position_embeddings=64, rope_scaling=LONG_ROPE | scaling)
    for max_context, factor, divisor in ((64, short, 1.0), (512, long, 2.0)):
        table = rotary_table(jnp.arange(2), 8, 1e4, config.for_context(max_context).rope_scaling)
        np.testing.assert_allclose(table.cos[:, 0], factor, rtol=1e-4)
        np.testing.assert_allclose(table.cos[0, 1], factor * np.cos(1 / divisor), rtol=1e-4)


def test_every_family_is_asked_for_by_its_type_too() -> None:
    for name, family in FAMILIES.items():
        assert any(architecture[0].islower() for architecture in family.architectures), name
