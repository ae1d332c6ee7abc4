"""`config.json` in the variants that are about: what each says of the same model, and which architecture is meant."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoints.hf_files import read_config
from jaxserve.errors import ConfigError
from jaxserve.model_config import ModelConfig, RopeScaling
from jaxserve.models.families import FAMILIES, model_config_from_hf

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LLAMA_3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in LLAMA.items() if key not in keys}


PLAIN = model_config_from_hf(LLAMA)
SCALED = replace(PLAIN, rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_max_position=1024))
HALVED = replace(PLAIN, rope_scaling=RopeScaling(kind="linear", factor=2.0))

SAME: dict[str, tuple[dict[str, Any], ModelConfig]] = {
    "rope_scaling": (LLAMA | {"rope_scaling": {"rope_type": "llama3"} | LLAMA_3_SCALING}, SCALED),
    "the old key `type`": (LLAMA | {"rope_scaling": {"type": "llama3"} | LLAMA_3_SCALING}, SCALED),
    "rope_parameters": (
        without("rope_theta") | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA_3_SCALING},
        SCALED,
    ),
    "rope_parameters of no scaling": (
        without("rope_theta") | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        PLAIN,
    ),
    "rope_theta in rope_scaling": (
        without("rope_theta") | {"rope_scaling": {"type": "linear", "factor": 2, "rope_theta": 5e5}},
        HALVED,
    ),
    "rope_scaling null": (LLAMA | {"rope_scaling": None}, PLAIN),
    "rope_scaling empty": (LLAMA | {"rope_scaling": {}}, PLAIN),
    "head_dim null": (LLAMA | {"head_dim": None}, PLAIN),
    "head_dim": (LLAMA | {"head_dim": 32}, replace(PLAIN, head_dim=32)),
    "KV heads missing": (without("num_key_value_heads"), replace(PLAIN, num_kv_heads=4)),
    "KV heads null": (LLAMA | {"num_key_value_heads": None}, replace(PLAIN, num_kv_heads=4)),
    "many EOS": (LLAMA | {"eos_token_id": [2, 7]}, replace(PLAIN, eos_token_ids=(2, 7))),
    "EOS that is none": (LLAMA | {"eos_token_id": -1}, replace(PLAIN, eos_token_ids=())),
    "many BOS": (LLAMA | {"bos_token_id": [1, 5]}, PLAIN),
    "no EOS": (LLAMA | {"eos_token_id": None}, replace(PLAIN, eos_token_ids=())),
    "biases null": (LLAMA | {"attention_bias": None, "mlp_bias": None}, PLAIN),
    "architectures missing": (without("architectures"), PLAIN),
    "architectures null": (LLAMA | {"architectures": None}, PLAIN),
    "architectures empty": (LLAMA | {"architectures": []}, PLAIN),
    "architectures a string": (LLAMA | {"architectures": "LlamaForCausalLM"}, PLAIN),
    "the base model": (LLAMA | {"architectures": ["LlamaModel"]}, PLAIN),
    "numbers that are none, where nobody looks": (LLAMA | {"initializer_range": math.nan, "summary": math.inf}, PLAIN),
    "dtypes": (LLAMA | {"torch_dtype": "bfloat16", "dtype": None}, PLAIN),
    "text_config": (
        {"architectures": ["SomeVisionForConditionalGeneration"], "model_type": "some_vision", "text_config": LLAMA},
        PLAIN,
    ),
    "text_config of a known type": (
        {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": without("architectures")},
        PLAIN,
    ),
    "llm_config": ({"architectures": ["InternVLChatModel"], "llm_config": LLAMA, "vision_config": {"x": 1}}, PLAIN),
    "nulls in text_config": (
        LLAMA | {"architectures": ["VisionX"], "text_config": {"model_type": "llama", "hidden_size": None}},
        PLAIN,
    ),
}


@pytest.mark.parametrize("variant", SAME)
def test_variants_say_the_same(variant: str) -> None:
    config, expected = SAME[variant]
    assert model_config_from_hf(config) == expected


WRONG = {
    "a string for a number": (LLAMA | {"hidden_size": "64"}, "hidden_size must be a positive integer, found '64'"),
    "missing": (without("vocab_size"), "vocab_size must be a positive integer, found no such key"),
    "infinite": (LLAMA | {"rms_norm_eps": math.inf}, "rms_norm_eps must be a number, found inf"),
    "rope a list": (LLAMA | {"rope_scaling": [1]}, r"rope_scaling must be an object, found \[1\]"),
    "unknown scaling": (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope scaling 'dynamic' is not supported"),
    "scaling without factor": (LLAMA | {"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
    "eos": (LLAMA | {"eos_token_id": [2, None]}, "eos_token_id must be a token id or a list"),
    "bos": (LLAMA | {"bos_token_id": "<s>"}, "bos_token_id must be a token id or a list"),
    "as many layers as would take all memory": (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers must be at most"),
    "as many experts": (
        LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 10**9},
        "num_local_experts must be at most",
    ),
    "wider than any": (LLAMA | {"intermediate_size": 10**12}, "intermediate_size must be at most"),
    "a number beyond all floats": (LLAMA | {"rms_norm_eps": 10**400}, "rms_norm_eps must be a number"),
    "a negative epsilon": (LLAMA | {"rms_norm_eps": -1e-5}, "rms_norm_eps must be a number above 0"),
    "a base in words": (LLAMA | {"rope_theta": "10k"}, "rope_theta must be a number above 1, found '10k'"),
    "a base of 1": (LLAMA | {"rope_theta": 1}, "rope_theta must be a number above 1, found 1"),
    "a base in rope_parameters": (
        without("rope_theta") | {"rope_parameters": {"rope_theta": [5e5]}},
        r"rope_theta must be a number above 1, found \[500000.0\]",
    ),
    "a part in words": (LLAMA | {"partial_rotary_factor": "half"}, "partial_rotary_factor must be .*, found 'half'"),
    "a part of nothing": (LLAMA | {"partial_rotary_factor": 0.01}, r"leave a part of head_dim \(16\), found 0.01"),
    "a list for a name": (LLAMA | {"hidden_act": ["silu"]}, r"hidden_act must be one of silu, .* found \['silu'\]"),
    "a list for a scaling": (LLAMA | {"rope_scaling": {"type": ["linear"]}}, r"rope scaling \['linear'\] is not supported"),
    "a negative factor": (LLAMA | {"rope_scaling": {"type": "linear", "factor": -2}}, "is wrong: -2 is not above 0"),
    "a factor in words": (LLAMA | {"rope_scaling": {"type": "linear", "factor": "2"}}, "is wrong: '2' is not a number"),
    "a factor beyond all floats": (LLAMA | {"rope_scaling": {"type": "yarn", "factor": 10**400}}, "is not a number"),
    "an ill blend": (
        LLAMA | {"rope_scaling": {"type": "llama3"} | LLAMA_3_SCALING | {"low_freq_factor": 4}},
        r"low_freq_factor \(4.0\) must be below high_freq_factor \(4.0\)",
    ),
    "a long rope over one position": (
        LLAMA
        | {"original_max_position_embeddings": 1}
        | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}},
        "is wrong: .*division by zero",
    ),
    "factors of nothing": (
        LLAMA | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [0] * 8}},
        "is wrong: 0 is not above 0",
    ),
    "kinds of layers that are none": (
        LLAMA | {"architectures": ["Gemma2ForCausalLM"], "layer_types": [[], {}]},
        "layer_types must be a list of sliding_attention and full_attention",
    ),
    "scores scaled by the root of nothing": (
        LLAMA | {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": -4},
        "query_pre_attn_scalar must be a number above 0",
    ),
    "a cap of 0": (
        LLAMA | {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 0.0},
        "attn_logit_softcapping must be a number above 0",
    ),
    "logits divided by 0": (
        LLAMA | {"architectures": ["GraniteForCausalLM"], "logits_scaling": 0},
        "logits_scaling must be a number above 0",
    ),
    "layers without rotation in words": (
        LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": "11"},
        "no_rope_layers must be a list of 0 and 1",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str) -> None:
    config, message = WRONG[case]
    with pytest.raises(ConfigError, match=rf"x/config\.json: .*{message}"):
        model_config_from_hf(config, where="x/config.json")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("LlamaForCausalLm", "LlamaForCausalLM"), ("qwen_3", "qwen3"), ("Gemma4ForCausalLM", "Gemma[23]ForCausalLM")],
)
def test_an_unknown_architecture_lists_the_known_ones_the_nearest_first(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown architecture '{name}'; known, the nearest first: {nearest}, ") as caught:
        model_config_from_hf(LLAMA | {"architectures": [name]})
    for family in FAMILIES.values():
        assert all(known in str(caught.value) for known in family.architectures)


def test_a_class_that_computes_something_else_is_unknown_though_its_type_is_known() -> None:
    with pytest.raises(ConfigError, match="unknown architecture 'LlamaForSequenceClassification'"):
        model_config_from_hf(LLAMA | {"architectures": ["LlamaForSequenceClassification"]})


def test_a_config_is_read_with_a_byte_order_mark_and_numbers_that_are_none(tmp_path: Path) -> None:
    text = json.dumps(LLAMA | {"initializer_range": math.nan, "bound": -math.inf})
    (tmp_path / "config.json").write_text("\ufeff" + text, encoding="utf-8")
    assert model_config_from_hf(read_config(tmp_path)) == PLAIN
