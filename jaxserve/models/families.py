"""The model families that this engine runs, and what each must provide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxserve.config import ModelConfig
from jaxserve.models import llama


@dataclass(frozen=True, slots=True)
class Family:
    """One family: the declarations of its parameters, its layers over a step, what makes logits of what leaves them, tensors
    of its checkpoints that are no parameters, and those of these that may hold scales of float8 KV."""

    specs: Callable[[ModelConfig], Any]
    forward: Callable[..., Any]
    head: Callable[..., Any]
    ignored_tensors: tuple[str, ...]
    kv_scale_tensors: Callable[[ModelConfig], tuple[tuple[str, str], ...]]


FAMILIES = {"llama": Family(llama.specs, llama.forward, llama.head, llama.IGNORED_TENSORS, llama.kv_scale_tensors)}
