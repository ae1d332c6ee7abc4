"""Whether a JSON schema has an instance that ends: it can require itself in itself, and then no finite text satisfies it.

A grammar of such a schema goes on for ever without a wrong token, so the compiler does not see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

MAX_ROUNDS = 100
"""Of looking at all subschemas. References that need more of them are taken to end."""

Finite = Callable[[Any], bool]


def is_finite(schema: dict[str, Any]) -> bool:
    """Whether some instance of the schema is finite, as far as references within it tell.

    The least fixed point: no subschema has one to begin with, and each round adds those whose parts do.
    """
    found: dict[int, bool] = {}

    def finite(part: Any) -> bool:
        return part if isinstance(part, bool) else found.get(id(part), False)

    schemas = _reachable(schema)
    for _ in range(MAX_ROUNDS):
        num_found = len(found)
        for part in schemas:
            if id(part) not in found and _has_finite(part, schema, finite):
                found[id(part)] = True
        if id(schema) in found:
            return True
        if len(found) == num_found:
            return False
    return True


def _reachable(root: dict[str, Any]) -> list[dict[str, Any]]:
    """All that `_has_finite` may ask about, the innermost first."""
    seen: dict[int, dict[str, Any]] = {}
    pending: list[Any] = [root]
    while pending:
        part = pending.pop()
        if isinstance(part, dict) and id(part) not in seen:
            seen[id(part)] = part
            pending.extend(_parts(part))
            pending.append(_target(part, root))
    return list(seen.values())[::-1]


def _parts(schema: dict[str, Any]) -> list[Any]:
    lists = [part for name in ("allOf", "anyOf", "oneOf", "prefixItems") for part in _list(schema, name)]
    return [*_properties(schema).values(), *lists, schema.get("items"), schema.get("additionalProperties")]


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    value = schema.get("properties")
    return value if isinstance(value, dict) else {}


def _has_finite(schema: dict[str, Any], root: dict[str, Any], finite: Finite) -> bool:
    target = _target(schema, root)
    if target is not None and not finite(target):
        return False
    if not all(map(finite, _list(schema, "allOf"))):
        return False
    if any(options and not any(map(finite, options)) for options in (_list(schema, "anyOf"), _list(schema, "oneOf"))):
        return False
    if "const" in schema or "enum" in schema:
        return True
    kinds = [schema["type"]] if isinstance(schema.get("type"), str) else _list(schema, "type")
    if not kinds or any(kind not in ("object", "array") for kind in kinds):
        return True
    return any(_HAS_FINITE[kind](schema, finite) for kind in kinds)


def _has_finite_object(schema: dict[str, Any], finite: Finite) -> bool:
    others = schema.get("additionalProperties", True)
    return all(finite(_properties(schema).get(name, others)) for name in _list(schema, "required"))


def _has_finite_array(schema: dict[str, Any], finite: Finite) -> bool:
    least, items = schema.get("minItems", 0), _list(schema, "prefixItems")
    if not isinstance(least, int):
        return True
    return all(map(finite, items[: max(0, least)])) and (least <= len(items) or finite(schema.get("items", True)))


_HAS_FINITE = {"object": _has_finite_object, "array": _has_finite_array}


def _target(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """What the schema refers to, if it is named by its place in the root."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    target: Any = root
    for step in unquote(reference[2:]).split("/") if reference != "#" else ():
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict):
            target = target.get(name)
        elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        else:
            return None
    return target if isinstance(target, (dict, bool)) else None
