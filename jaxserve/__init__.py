"""A JAX serving engine for large language models.

`jaxserve.LLM` and `jaxserve.SamplingParams` are loaded when they are first asked for, so importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_LAZY = {"LLM": "jaxserve.offline.llm", "SamplingParams": "jaxserve.request"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
