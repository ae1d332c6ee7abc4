"""The model families that this engine runs, by name, and which of them a `config.json` asks for."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.model_config import ModelConfig
from jaxserve.models import (
    gemma2,
    gemma3,
    granite,
    granite_moe,
    llama,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
)
from jaxserve.models.hf_config import HfConfig
from jaxserve.models.hf_unheeded import refuse_unheeded

FAMILIES = {
    "llama": llama.FAMILY,
    "smollm3": smollm3.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "gemma2": gemma2.FAMILY,
    "gemma3": gemma3.FAMILY,
    "phi3": phi3.FAMILY,
    "olmo2": olmo2.FAMILY,
    "olmo3": olmo3.FAMILY,
    "granite": granite.FAMILY,
    "mixtral": mixtral.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "olmoe": olmoe.FAMILY,
    "granite_moe": granite_moe.FAMILY,
}


TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Where the `config.json` of several models in one, such as text and vision, keeps the text model's."""


def model_config_from_hf(config: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
    """Read a Hugging Face `config.json`, or the text model's part of one.

    Raises:
        ConfigError: on an unknown architecture, or a key that is missing or wrong, naming `where`.
    """
    nested: Mapping[str, Any] = next((config[key] for key in TEXT_CONFIGS if isinstance(config.get(key), Mapping)), {})
    name = _known_name(config) or _known_name(nested)
    if name is None:
        raise _unknown_architecture(config, where)
    values = {**config, **{key: value for key, value in nested.items() if value is not None or key not in config}}
    family = _ARCHITECTURES[name]
    hf_config = HfConfig(values, where)
    fields = FAMILIES[family].read(hf_config)
    refuse_unheeded(hf_config, family)
    return ModelConfig(family=family, **fields)


_ARCHITECTURES = {name: family for family, row in FAMILIES.items() for name in row.architectures}


def _names(config: Mapping[str, Any]) -> list[str]:
    """What a config calls its architecture, the most particular name first."""
    declared = config.get("architectures") or []
    names = declared if isinstance(declared, list) else [declared]
    return [str(name) for name in (*names, config.get("model_type")) if name]


def _known_name(config: Mapping[str, Any]) -> str | None:
    """The name by which a family knows the config, if one does.

    A base model (`LlamaModel`) is the generating one without its head. `model_type` counts where no class is named, since
    classes of one type, such as those that classify, compute different things.
    """
    names = _names(config)[:1]
    names += [f"{name.removesuffix('Model')}ForCausalLM" for name in names if name.endswith("Model")]
    return next((name for name in names if name in _ARCHITECTURES), None)


def _unknown_architecture(config: Mapping[str, Any], where: str) -> ConfigError:
    name = (_names(config) or ["unknown"])[0]

    def distance(known: str) -> float:
        return -difflib.SequenceMatcher(None, name.lower(), known.lower()).ratio()

    nearest = ", ".join(sorted(sorted(_ARCHITECTURES), key=distance))
    return ConfigError(f"{where}: unknown architecture {name!r}; known, the nearest first: {nearest}")
