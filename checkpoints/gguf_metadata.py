"""GGUF metadata, read by key with the type that is expected.

Owns the errors for keys that are missing or of the wrong type. Knows no particular key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.checkpoint import CheckpointError

MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    """Metadata of the file `path`. Every getter returns None if the key is not there and a type was not demanded.

    Attributes:
        values: numbers, strings and booleans; lists of strings; numeric arrays as NumPy arrays.
    """

    path: Path
    values: Mapping[str, Any]

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def error(self, key: str, expected: str) -> CheckpointError:
        """An error that says what `key` should be and what it is."""
        if key not in self.values:
            return CheckpointError(f"{self.path}: {key} is missing; expected {expected}")
        shown = repr(self.values[key])
        return CheckpointError(f"{self.path}: {key} must be {expected}, found {shown[:80]}{'...' * (len(shown) > 80)}")

    def text(self, key: str) -> str | None:
        """A string."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def flag(self, key: str) -> bool | None:
        """A boolean."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "a boolean")
        return value

    def count(self, key: str, default: int | None = None, *, most: int = MAX_COUNT) -> int:
        """A positive integer, or an array that has the same one for each layer; demanded if there is no default."""
        value = self.values.get(key, default)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()
        if type(value) is not int or value < 1:
            raise self.error(key, "a positive integer")
        if value > most:
            raise self.error(key, f"at most {most:,}")
        return value

    def is_off(self, key: str) -> bool:
        """Whether it is absent or 0."""
        value = self.values.get(key)
        return value is None or (type(value) in (int, float) and value == 0)

    def optional_count(self, key: str) -> int | None:
        """As `count`; None where the key is absent or 0."""
        return None if self.is_off(key) else self.count(key)

    def index(self, key: str, length: int) -> int | None:
        """An index into something of `length` entries."""
        value = self.values.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < length):
            raise self.error(key, f"an integer from 0 to {length - 1}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; demanded if there is no default."""
        value = self.values.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(key, "a number")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A positive number; demanded if there is no default."""
        value = self.values.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.error(key, "a positive number")
        # Stored as float32; seven digits bring back the decimal that was meant (1e-05, not 9.999999747378752e-06).
        return float(f"{value:.7g}")

    def strings(self, key: str) -> list[str]:
        """A list of strings; demanded."""
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self.error(key, "a list of strings")
        return value

    def numbers(self, key: str, length: int) -> np.ndarray | None:
        """An array of `length` numbers."""
        value = self.values.get(key)
        if value is not None and not (isinstance(value, np.ndarray) and len(value) == length):
            raise self.error(key, f"an array of {length} numbers")
        return value


@dataclass(frozen=True, slots=True)
class ArchitectureKeys:
    """Metadata under the architecture's `prefix`, which ends in a dot."""

    metadata: GgufMetadata
    prefix: str

    def get(self, key: str) -> Any:
        """The value as it is; None where there is none."""
        return self.metadata.values.get(self.prefix + key)

    def error(self, key: str, expected: str) -> CheckpointError:
        """An error that says what `key` should be and what it is."""
        return self.metadata.error(self.prefix + key, expected)

    def count(self, key: str, default: int | None = None, *, most: int = MAX_COUNT) -> int:
        """A positive integer; demanded if there is no default."""
        return self.metadata.count(self.prefix + key, default, most=most)

    def is_off(self, key: str) -> bool:
        """Whether it is absent or 0."""
        return self.metadata.is_off(self.prefix + key)

    def optional_count(self, key: str) -> int | None:
        """A positive integer; None where the key is absent or 0."""
        return self.metadata.optional_count(self.prefix + key)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; demanded if there is no default."""
        return self.metadata.number(self.prefix + key, default)

    def positive(self, key: str, default: float | None = None) -> float:
        """A positive number; demanded if there is no default."""
        return self.metadata.positive(self.prefix + key, default)

    def text(self, key: str) -> str | None:
        """A string; None where there is none."""
        return self.metadata.text(self.prefix + key)

    def original_context(self, config: Mapping[str, Any]) -> int:
        """Tokens of the context before it was stretched."""
        return self.count("rope.scaling.original_context_length", config["max_position_embeddings"])
