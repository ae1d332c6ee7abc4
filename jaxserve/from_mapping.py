"""Dataclasses from mappings such as parsed TOML: the one place where keys and types of settings are checked.

Standard library only. Knows no setting.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from jaxserve.errors import ConfigError


def from_mapping(kind: type, values: Mapping[str, Any], *, where: str) -> Any:
    """Build the dataclass `kind` from a (nested) mapping such as parsed TOML.

    Args:
        where: named in errors, such as the file's path.

    Raises:
        ConfigError: on an unknown key, naming the nearest known one, or on a value of the wrong type.
    """
    known = {f.name: f for f in fields(kind)}
    hints = get_type_hints(kind)
    built: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(sorted(known))}"
            raise ConfigError(f"{where}: unknown key {key!r}{hint}")
        expected = hints[key]
        if is_dataclass(expected) and isinstance(expected, type):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}: {key} must be a table, found {value!r}")
            built[key] = from_mapping(expected, value, where=f"{where}: {key}")
        else:
            built[key] = _coerce(expected, value, f"{where}: {key}")
    try:
        return kind(**built)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from None


def _coerce(expected: Any, value: Any, where: str) -> Any:
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if expected == tuple[str, ...] and isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if expected == tuple[str, ...]:
        raise ConfigError(f"{where} must be a list of strings, found {value!r}")
    wrong = expected in (int, float, str, bool) and type(value) is not expected
    if wrong or (expected is float and not math.isfinite(value)):
        raise ConfigError(f"{where} must be {expected.__name__}, found {value!r}")
    return value
