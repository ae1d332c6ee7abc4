"""What a type asks for and what a value is, in the words of error messages."""

from __future__ import annotations

import json
import re
from typing import Any

from msgspec import inspect as types

MAX_SHOWN = 60


def found_of(value: Any) -> str:
    """A JSON value for an error message: its type and the beginning of it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        if len(value) <= MAX_SHOWN:
            return f"string {value!r}"
        return f"string {value[:MAX_SHOWN]!r}... of {len(value)} characters"
    if isinstance(value, (list, dict)):
        return f"{'array' if isinstance(value, list) else 'object'} of {len(value)}"
    return f"{'integer' if isinstance(value, int) else 'number'} {repr(value)[:MAX_SHOWN]}"


def expected_of(node: types.Type) -> str:
    """What a type asks for, such as `an array of at most 16 strings`."""
    return _words(node)[0]


def plural_of(node: types.Type) -> str:
    """As `expected_of`, for several."""
    return _words(node)[1]


def _words(node: types.Type) -> tuple[str, str]:
    """For one such value, and for several."""
    match node:
        case types.Metadata(extra={"noun": words}):
            return words
        case types.Metadata():
            return _words(node.type)
        case types.UnionType():
            parts = dict.fromkeys(_words(part) for part in node.types if not isinstance(part, types.NoneType))
            return " or ".join(part[0] for part in parts), " or ".join(part[1] for part in parts)
        case types.IntType():
            return f"an integer{_range(node)}", f"integers{_range(node)}"
        case types.FloatType():
            return (f"a number{_range(node)}" if _range(node) else "a finite number"), f"numbers{_range(node)}"
        case types.BoolType():
            return "true or false", "booleans"
        case types.StrType():
            text = _count(node, "characters", before=" of ") + (f" matching {node.pattern}" if node.pattern else "")
            return f"a string{text}", f"strings{text}"
        case types.LiteralType():
            text = ", ".join(map(json.dumps, node.values))
            return text if len(node.values) == 1 else f"one of {text}", f"any of {text}"
        case types.ListType():
            text = _count(node, _words(node.item_type)[1])
            return f"an array of {text}", f"arrays of {text}"
        case types.DictType():
            text = _count(node, _words(node.value_type)[1])
            return f"an object of {text}", f"objects of {text}"
        case types.StructType():
            return "an object", "objects"
        case types.NoneType():
            return "null", "nulls"
    return "a JSON value", "JSON values"


def _range(node: types.IntType | types.FloatType) -> str:
    """Such as ` from 1 to 128` or ` above 0 and at most 1`."""
    if node.ge is not None and node.le is not None:
        return f" from {node.ge:g} to {node.le:g}" if abs(node.le) < 1e6 else f" from {node.ge} to {node.le}"
    limits = {"at least": node.ge, "above": node.gt, "at most": node.le, "below": node.lt}
    text = " and ".join(f"{word} {limit}" for word, limit in limits.items() if limit is not None)
    return f" {text}" if text else ""


def _count(node: types.StrType | types.ListType | types.DictType, things: str, *, before: str = "") -> str:
    """Such as `at most 16 strings`. Of a string with no limits nothing; of a collection with none the bare `things`."""
    least, most = node.min_length or 0, node.max_length
    if not least and most is None:
        return "" if before else things
    if most is None:
        return f"{before}at least {least} {things}"
    return f"{before}{least} to {most} {things}" if least else f"{before}at most {most} {things}"


def fits(value: Any, node: types.Type) -> bool:
    """Whether a value of a dictionary, or its key, is as a simple type has it."""
    match node:
        case types.Metadata():
            return fits(value, node.type)
        case types.UnionType():
            return any(fits(value, part) for part in node.types)
        case types.IntType():
            return type(value) is int and _in_range(value, node)
        case types.FloatType():
            return type(value) in (int, float) and _in_range(value, node)
        case types.StrType():
            return (
                isinstance(value, str)
                and len(value) >= (node.min_length or 0)
                and (node.max_length is None or len(value) <= node.max_length)
                and (node.pattern is None or re.search(node.pattern, value) is not None)
            )
        case types.BoolType():
            return isinstance(value, bool)
        case types.NoneType():
            return value is None
    return True


def _in_range(value: float, node: types.IntType | types.FloatType) -> bool:
    return (
        (node.ge is None or value >= node.ge)
        and (node.gt is None or value > node.gt)
        and (node.le is None or value <= node.le)
        and (node.lt is None or value < node.lt)
    )
