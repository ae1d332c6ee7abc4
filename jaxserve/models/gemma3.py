"""Gemma 3's text model: Gemma 2 without caps, with normed queries and keys, and five layers with a window to one without, each
kind with a rotary base of its own."""

from __future__ import annotations

from typing import Any

from jaxserve.models import gemma2
from jaxserve.models.family import IGNORED_TENSORS, Family
from jaxserve.models.hf_config import HfConfig


def read(config: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    period = config.count("sliding_window_pattern", 6)
    pattern = tuple((layer + 1) % period != 0 for layer in range(config.count("num_hidden_layers")))
    # transformers 5 writes both kinds' rotary settings under their names.
    of_kinds = config.rope.get("full_attention"), config.rope.get("sliding_attention")
    of_all, of_windowed = (kind if isinstance(kind, dict) else {} for kind in of_kinds)
    return gemma2.shared(config) | {
        "qk_norm": "head",
        "windowed": config.windowed(pattern),
        "rope_theta": float(of_all.get("rope_theta") or config.rope_theta(1_000_000.0)),
        "rope_scaling": config.rope_scaling(of_all or config.rope),
        "local_rope_theta": float(of_windowed.get("rope_theta") or config.number("rope_local_base_freq", 10_000.0)),
    }


FAMILY = Family(
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "gemma3_text", "gemma3"),
    read=read,
    names=gemma2.NAMES,
    ignored_tensors=(*IGNORED_TENSORS, "*vision_tower.*", "*multi_modal_projector.*"),
)
