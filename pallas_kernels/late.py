"""Functions of modules that are imported when first called: what a kernel needs to be imported is not everybody's."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def late(module: str, function: str) -> Callable[..., Any]:
    """`function` of `module`, which is imported by the first call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(module), function)(*args, **kwargs)

    return call
