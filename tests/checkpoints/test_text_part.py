"""The text model within checkpoints of several models, and in those without the head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints.checkpoint import CheckpointBase, TensorInfo
from checkpoints.text_part import text_part

NAMES = ("embed_tokens.weight", "layers.0.self_attn.q_proj.weight", "norm.weight")


class Stored(CheckpointBase):
    """A checkpoint whose tensors hold their own names."""

    def __init__(self, config: dict[str, Any], *names: str) -> None:
        super().__init__(Path("m"), config, None, {name: TensorInfo((), np.dtype("U60")) for name in names})

    def read(self, name: str) -> np.ndarray:
        return np.array(name)


@pytest.mark.parametrize(
    ("prefix", "head", "others"),
    [
        ("model.language_model.", "lm_head.weight", ("model.vision_tower.x", "model.multi_modal_projector.y")),
        ("language_model.model.", "language_model.lm_head.weight", ("vision_tower.x", "multi_modal_projector.y")),
        ("model.text_model.", "lm_head.weight", ("model.vision_model.x", "model.connector.y")),
        ("language_model.", None, ("audio_tower.embed_positions.weight",)),
    ],
)
@pytest.mark.parametrize("key", ["text_config", "llm_config"])
def test_several_models_in_one_show_the_text_model(prefix: str, head: str | None, others: tuple[str, ...], key: str) -> None:
    stored = [*(prefix + name for name in NAMES), *others, *([head] if head else [])]
    view = text_part(Stored({key: {}}, *stored))
    wanted = {f"model.{name}": f"{prefix}{name}" for name in NAMES} | ({"lm_head.weight": head} if head else {})
    assert {name: str(view.read(name)) for name in view.tensors} == wanted


def test_a_base_model_gets_its_prefix_and_what_is_not_its_own_stays() -> None:
    view = text_part(Stored({}, *NAMES, "lm_head.weight"))
    assert set(view.tensors) == {*(f"model.{name}" for name in NAMES), "lm_head.weight"}


def test_a_text_model_alone_is_left_as_it_is() -> None:
    stored = Stored({}, *(f"model.{name}" for name in NAMES), "vision_tower.x")
    assert text_part(stored) is stored


def test_a_surplus_beside_a_text_model_without_prefix_is_kept_for_the_check() -> None:
    names = (*(f"language_model.model.{name}" for name in NAMES), "stray.weight")
    assert "stray.weight" in text_part(Stored({}, *names)).tensors
