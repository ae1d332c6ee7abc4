"""What of JSON Schema is refused before it is compiled, because the compiler would ignore it or let wrong instances pass.

Draft 2020-12 is what llguidance compiles; it refuses by itself most of what it cannot enforce. Owns the rest: keywords of
other drafts and of OpenAPI that restrict and that it takes for annotations, combinations that a grammar cannot hold, and what
its regular expressions mean otherwise than JSON Schema's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jaxserve.engine.grammar_depth import check_schema
from jaxserve.engine.json_finite import is_finite

MAX_DEPTH = 64

_CONTROL = re.compile("[\x00-\x07\x0b\x0e-\x1f]")
"""Characters that JSON can spell with \\u alone, which the compiled grammars do without."""

FOREIGN = {
    "divisibleBy": "use multipleOf",
    "disallow": "it is not a keyword of draft 2020-12",
    "extends": "use allOf",
    "nullable": 'use "type": [..., "null"] or anyOf',
    "x-guidance": "the compiler's options are not open",
}
"""Keywords that are not of draft 2020-12, yet mean a restriction to whoever writes them; and what to do instead."""

_ONE_SCHEMA = (
    *("additionalProperties", "additionalItems", "items", "contains", "not", "if", "then", "else"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def prepare_schema(schema: Any) -> dict[str, Any]:
    """The schema as an object, in which every keyword that restricts is one that the compiler enforces or refuses.

    Args:
        schema: parsed JSON, which is changed.

    Raises:
        ValueError: what cannot be used, and where.
    """
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError(f"a schema must be an object, found {schema!r:.60}")
    pending: list[tuple[str, dict[str, Any], int]] = [("", schema, 0)]
    while pending:
        where, current, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        place = f"at {where[:200]}: " if where else ""
        _check(place, current)
        _spell_out_patterns(place, current)
        _spell_out_counts(current)
        pending.extend((path, child, depth + 1) for path, child in _children(where, current) if not isinstance(child, bool))
    check_schema(schema)
    if not is_finite(schema):
        raise ValueError("no text satisfies it: it requires itself in itself")
    return schema


def _children(where: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _ONE_SCHEMA:
        if name in schema and not isinstance(schema[name], list):
            yield f"{where}/{name}", schema[name]
    for name in _SCHEMA_LISTS:
        if isinstance(schema.get(name), list):
            yield from ((f"{where}/{name}/{i}", child) for i, child in enumerate(schema[name]))
    for name in _SCHEMA_MAPS:
        if isinstance(schema.get(name), dict):
            yield from ((f"{where}/{name}/{key}", child) for key, child in schema[name].items())


def _check(place: str, schema: Any) -> None:
    if not isinstance(schema, dict):
        raise ValueError(f"{place}a schema must be an object or a boolean, found {schema!r:.60}")
    for name, advice in FOREIGN.items():
        if schema.get(name) not in (None, False):
            raise ValueError(f"{place}the keyword {name!r} is not supported; {advice}")
    for name in _SCHEMA_MAPS:
        if not isinstance(schema.get(name, {}), dict):
            raise ValueError(f"{place}{name!r} must be an object, found {schema[name]!r:.60}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValueError(f"{place}'required' must be an array of strings, found {required!r:.60}")
    literals = (schema.get("const"), schema.get("enum"), required, list(schema.get("properties", ())))
    if any(_CONTROL.search(text) for literal in literals for text in _strings(literal)):
        raise ValueError(f"{place}a control character in a constant or in a property's name is not supported")
    _check_min_properties(place, schema, len(set(required)))


def _strings(value: Any) -> Iterator[str]:
    """All strings of a JSON value, keys included."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            pending.extend((*item, *item.values()))
        elif isinstance(item, list):
            pending.extend(item)


def _check_min_properties(place: str, schema: dict[str, Any], num_required: int) -> None:
    """A grammar counts a key that is repeated twice, whoever parses the object once: so no more may be asked for than are
    required by name, where names are not."""
    least = schema.get("minProperties", 0)
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if isinstance(least, (int, float)) and least > max(1, num_required) and not is_closed:
        raise ValueError(
            f"{place}'minProperties' {least} is supported only with additionalProperties false and no patternProperties, "
            f"or up to the number of required properties, {num_required}"
        )


def _spell_out_patterns(place: str, schema: dict[str, Any]) -> None:
    try:
        if isinstance(schema.get("pattern"), str):
            schema["pattern"] = ecma_regex(schema["pattern"])
        if isinstance(schema.get("patternProperties"), dict):
            schema["patternProperties"] = {ecma_regex(key): child for key, child in schema["patternProperties"].items()}
    except ValueError as error:
        raise ValueError(f"{place}{error}") from None


def _spell_out_counts(schema: dict[str, Any]) -> None:
    """2.0 is the integer 2 to JSON Schema, not to the compiler."""
    for name in _COUNTS:
        if isinstance(schema.get(name), float) and schema[name].is_integer():
            schema[name] = int(schema[name])


_TOKEN = re.compile(r"\\.|[\[\].]|&&|--|~~|\\$", re.DOTALL)

_EMPTY_CLASS = re.compile(r"\[\^?\]")


def ecma_regex(pattern: str) -> str:
    r"""The regular expression as the compiler writes what ECMA-262 means by it.

    To ECMA-262 U+FEFF is a space, `.` is no line separator of four, and classes of characters hold no others and no operators.

    Raises:
        ValueError: it has a class of no characters, or ends within an escape, which the compiler would read otherwise.
    """
    in_class = False

    def replace(match: re.Match[str]) -> str:
        nonlocal in_class
        token = match[0]
        if token == "\\":
            raise ValueError(f"the pattern {pattern!r:.60} ends with a backslash that escapes nothing")
        if token == "[" and not in_class and _EMPTY_CLASS.match(pattern, match.start()):
            raise ValueError(f"the pattern {pattern!r:.60} has a class of characters without any, which is not supported")
        if in_class:
            in_class = token != "]"
            return _IN_CLASS.get(token, token)
        in_class = token == "["
        return _OUTSIDE.get(token, token)

    return _TOKEN.sub(replace, pattern)


_IN_CLASS = {r"\s": r"\s\x{FEFF}", "[": r"\[", "&&": r"&\&", "--": r"-\-", "~~": r"~\~"}
_OUTSIDE = {r"\s": r"[\s\x{FEFF}]", r"\S": r"[^\s\x{FEFF}]", ".": r"[^\n\r\x{2028}\x{2029}]"}
