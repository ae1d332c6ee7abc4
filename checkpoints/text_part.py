"""The text model within a checkpoint, under the names that a text model alone has.

Owns the prefixes that are about: of checkpoints of several models in one (text beside vision or audio), and of those that were
saved without the head. Knows no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from checkpoints.checkpoint import Checkpoint, CheckpointBase, TensorInfo

TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Where a config of several models keeps the text model's."""
PREFIX = "model."
PREFIXES = (
    *(PREFIX, "model.language_model.", "language_model.model.", "language_model."),
    *("model.text_model.", "text_model.model.", "text_model.", ""),
)
"""Before `embed_tokens.weight`, the usual one first; none where the base model was saved alone."""
HEADS = ("lm_head.weight", "language_model.lm_head.weight", "text_model.lm_head.weight", "model.lm_head.weight")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The text model's part of a config of several models; None in one of a text model."""
    return next((config[key] for key in TEXT_CONFIGS if isinstance(config.get(key), Mapping)), None)


def text_part(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` as one of a text model alone: itself if it is, else a view of it.

    Tensors of other models are left out where the config says that there are any.
    """
    names = checkpoint.tensors
    prefix = next((known for known in PREFIXES if f"{known}embed_tokens.weight" in names), PREFIX)
    several = text_config(checkpoint.config) is not None
    if prefix == PREFIX and not several:
        return checkpoint
    head = next((name for name in HEADS if name in names), None)
    own = {}
    for name in names:
        if name == head:
            own["lm_head.weight"] = name
        elif name.startswith(prefix):
            own[PREFIX + name.removeprefix(prefix)] = name
        elif not several:
            own[name] = name
    return TextPart(checkpoint, own)


class TextPart(CheckpointBase):
    """A view of some of a checkpoint's tensors under other names, each of `own` naming the checkpoint's."""

    def __init__(self, whole: Checkpoint, own: Mapping[str, str]) -> None:
        tensors: dict[str, TensorInfo] = {name: whole.tensors[of_whole] for name, of_whole in own.items()}
        super().__init__(whole.path, whole.config, whole.tokenizer, tensors)
        self._whole = whole
        self._own = own

    def read(self, name: str) -> np.ndarray:
        self.info(name)
        return self._whole.read(self._own[name])

    def read_into(self, name: str, target: np.ndarray) -> None:
        self.info(name)
        self._whole.read_into(self._own[name], target)

    def stored_bytes(self) -> Mapping[str, int]:
        return self._whole.stored_bytes()

    def close(self) -> None:
        self._whole.close()
