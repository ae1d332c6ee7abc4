"""OLMo 3: OLMo 2 with a window in three layers of four, which do without the others' rope scaling."""

from __future__ import annotations

from typing import Any

from jaxserve.models import olmo2
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig


def read(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    pattern = tuple((layer + 1) % 4 != 0 for layer in range(config.count("num_hidden_layers")))
    theta = config.rope_theta(500_000.0)
    window = {"window": config.count("sliding_window", 4096), "windowed": config.windowed(pattern)}
    return olmo2.read(config) | config.rope_of_kinds(theta, theta) | window


FAMILY = Family(architectures=("Olmo3ForCausalLM", "olmo3"), read=read, names=olmo2.NAMES)
