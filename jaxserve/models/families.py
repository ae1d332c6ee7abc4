"""The model families that this engine runs, by name, and which of them a `config.json` asks for."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from jaxserve.config import ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.models import gemma2, gemma3, granite, llama, mistral, olmo2, phi3, qwen2, qwen3, smollm3
from jaxserve.models.hf_config import HfConfig

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
    "granite": granite.FAMILY,
}


def model_config_from_hf(config: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
    """Read a Hugging Face `config.json`, or the text model's part of one.

    Raises:
        ConfigError: on an unknown architecture, or a key that is missing or wrong, naming `where`.
    """
    known = {name: family for family, row in FAMILIES.items() for name in row.architectures}
    architectures = config.get("architectures") or [config.get("model_type", "unknown")]
    name = str(architectures[0])
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{where}: unknown architecture {name!r}; known: {', '.join(sorted(known))}{hint}")
    nested = config.get("text_config")
    values = {**config, **nested} if isinstance(nested, Mapping) else config
    return ModelConfig(family=known[name], **FAMILIES[known[name]].read(HfConfig(values, where)))
