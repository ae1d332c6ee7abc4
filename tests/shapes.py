"""The type checker that `conftest.py` puts on every function of the array rooms: shapes in signatures hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

# An int is fine where a float is asked for, as PEP 484 has it.
_typechecked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check arguments and result, but of `__init__`: JAX rebuilds pytrees through it with leaves that are no arrays."""
    return function if function.__qualname__.endswith(".__init__") else _typechecked(function)
