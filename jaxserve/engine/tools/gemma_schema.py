"""Rules of a grammar that hold arguments in Gemma's notation, which is not JSON, to a JSON schema.

Owns the part of JSON Schema that can be said so: types, constants, properties, items and how many, alternatives, references,
limits of numbers and lengths of strings. All else is refused. Objects have the properties that the schema names, in its order,
and no others unless it names none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

_ANNOTATIONS = (
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
    "$schema",
    "$id",
)
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_KNOWN = frozenset(
    (
        *_OF_NUMBERS,
        *("type", "enum", "const", "properties", "required", "additionalProperties", "items", "minItems", "maxItems"),
        *("anyOf", "$ref", "$defs", "definitions", "minLength", "maxLength", "format"),
        *_ANNOTATIONS,
    )
)
_SCALARS = {
    "integer": "/-?(0|[1-9][0-9]{0,18})/",
    "number": r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,3})?/",
    "boolean": '("true" | "false")',
    "null": '"null"',
}
_FORMATS = {
    "date": "/[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])/",
    "uuid": "/[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}/",
}
_KINDS: tuple[tuple[tuple[str, ...], type, str], ...] = (
    (("enum", "anyOf", "required"), list, "an array"),
    (("properties", "$defs", "definitions"), dict, "an object"),
    (("minItems", "maxItems", "minLength", "maxLength"), int, "a number of things"),
    (("$ref", "format"), str, "a string"),
)
_BARE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"


def gemma_rules(name: str, schema: Mapping[str, Any], quote: str, string: str) -> list[str]:
    """The rule `name`, and those that it needs.

    Args:
        quote: terms of the quote token.
        string: terms of any string, quotes included.

    Raises:
        ValueError: what the schema has that cannot be said, and where.
    """
    rules = _Rules(name, schema, quote, string)
    rules.define(name, rules.value(schema, "", 0))
    return rules.lines


class _Rules:
    def __init__(self, prefix: str, root: Mapping[str, Any], quote: str, string: str) -> None:
        self._prefix = prefix
        self._root = root
        self._quote = quote
        self._string = string
        self._references: dict[str, str] = {}
        self._has_any = False
        self.lines: list[str] = []

    def define(self, name: str, body: str) -> str:
        self.lines.append(f"{name}: {body}")
        return name

    def _new(self, body: str) -> str:
        return self.define(f"{self._prefix}_{len(self.lines)}", body)

    def value(self, schema: Any, where: str, depth: int) -> str:
        """The body of a rule for what `schema` allows."""
        if schema is True:
            return self._any()
        if not isinstance(schema, Mapping) or depth > 64:
            raise ValueError(f"at {where or '/'}: no schema that this model's form of calls can be held to")
        if unknown := sorted(set(schema) - _KNOWN):
            raise ValueError(f"at {where or '/'}: {unknown[0]!r} is not supported in this model's form of calls")
        _check_kinds(schema, where)
        if "$ref" in schema:
            return self._reference(schema["$ref"], depth)
        if "const" in schema:
            return self._literal(schema["const"])
        if "enum" in schema:
            return _any_of(map(self._literal, schema["enum"]))
        if "anyOf" in schema:
            return _any_of(self.value(part, f"{where}/anyOf/{i}", depth + 1) for i, part in enumerate(schema["anyOf"]))
        kinds = schema.get("type", "object" if "properties" in schema else None)
        if kinds is None:
            return self._any()
        return _any_of(self._typed(kind, schema, where, depth) for kind in ([kinds] if isinstance(kinds, str) else kinds))

    def _typed(self, kind: str, schema: Mapping[str, Any], where: str, depth: int) -> str:
        if kind in ("integer", "number") and any(keyword in schema for keyword in _OF_NUMBERS):
            limits = {keyword: schema[keyword] for keyword in _OF_NUMBERS if keyword in schema}
            return self._new(f"%json {json.dumps({'type': kind, **limits})}")  # numbers are written as in JSON
        if kind in _SCALARS:
            return _SCALARS[kind]
        if kind == "string":
            return self._text(schema, where)
        if kind == "array":
            return self._array(schema, where, depth)
        if kind == "object":
            return self._object(schema, where, depth)
        raise ValueError(f"at {where or '/'}: there is no type {kind!r:.60}")

    def _text(self, schema: Mapping[str, Any], where: str) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if (form := schema.get("format")) is not None:
            if form not in _FORMATS or least or most is not None:
                raise ValueError(f"at {where}: the format {form!r:.60} is not supported in this model's form of calls")
            return f"{self._quote} {_FORMATS[form]} {self._quote}"
        if not least and most is None:
            return self._string
        if not self._quote.startswith("<["):
            raise ValueError(f"at {where}: lengths of strings are not supported in this model's form of calls")
        return f"{self._quote} /(.|\\n){{{least},{'' if most is None else most}}}/ {self._quote}"

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {json.dumps(value)} {self._quote}" if value else f"{self._quote} {self._quote}"
        if isinstance(value, list):
            return _joined('"["', (self._literal(item) for item in value), '"]"')
        if isinstance(value, Mapping):
            return _joined('"{"', (f"{self._key(key)} {self._literal(item)}" for key, item in value.items()), '"}"')
        return json.dumps(json.dumps(value))

    def _key(self, key: str) -> str:
        if _BARE_KEY.fullmatch(key):
            return json.dumps(f"{key}:")
        return f'{self._literal(key)} ":"'

    def _array(self, schema: Mapping[str, Any], where: str, depth: int) -> str:
        item = self._new(self.value(schema.get("items", True), f"{where}/items", depth + 1))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        further = f'("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {further} "]"' if least else f'"[" ({item} {further})? "]"'

    def _object(self, schema: Mapping[str, Any], where: str, depth: int) -> str:
        required = schema.get("required", ())
        properties = {
            **schema.get("properties", {}),
            **{key: True for key in required if key not in schema.get("properties", {})},
        }
        if not properties:
            more = schema.get("additionalProperties", True)
            return (
                '"{" "}"' if more is False else self._open_object(self.value(more, f"{where}/additionalProperties", depth + 1))
            )
        first, further = '""', '""'
        for key, child in reversed(properties.items()):
            member = self._new(f"{self._key(key)} {self._group(self.value(child, f'{where}/properties/{key}', depth + 1))}")
            if key in required:
                first, further = self._new(f"{member} {further}"), self._new(f'"," {member} {further}')
            else:
                first = self._new(f"{member} {further} | {first}")
                further = self._new(f'"," {member} {further} | {further}')
        return f'"{{" {first} "}}"'

    def _open_object(self, value: str) -> str:
        member = self._new(f'{_KEY} ":" {self._group(value)}')
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def _group(self, body: str) -> str:
        return f"({body})"

    def _reference(self, reference: Any, depth: int) -> str:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise ValueError(f"the reference {reference!r:.100} is not into the schema itself")
        if reference not in self._references:
            name = self._references[reference] = f"{self._prefix}_ref{len(self._references)}"
            self.define(name, self.value(self._resolve(reference), reference, depth + 1))
        return self._references[reference]

    def _resolve(self, reference: str) -> Any:
        found: Any = self._root
        for step in reference.removeprefix("#").split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or key not in found:
                raise ValueError(f"the reference {reference!r:.100} leads nowhere")
            found = found[key]
        return found

    def _any(self) -> str:
        name = f"{self._prefix}_any"
        if not self._has_any:
            self._has_any = True
            scalars = " | ".join([self._string, *_SCALARS.values()])
            array = f'"[" ({name} ("," {name})*)? "]"'
            self.define(name, f"{scalars} | {array} | {self._open_object(name)}")
        return name


def _check_kinds(schema: Mapping[str, Any], where: str) -> None:
    """Check that keywords have values of their kind.

    Raises:
        ValueError: naming the first that has not.
    """
    for keywords, kind, words in _KINDS:
        for keyword in keywords:
            value = schema.get(keyword)
            wrong = not isinstance(value, kind) or (isinstance(value, int) and (isinstance(value, bool) or value < 0))
            if keyword in schema and wrong:
                raise ValueError(f"at {where or '/'}: {keyword!r} must be {words}, found {value!r:.60}")
    kinds = schema.get("type", "object")
    if not isinstance(kinds, str) and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise ValueError(f"at {where or '/'}: 'type' must be a string or an array of strings, found {kinds!r:.60}")


def _any_of(bodies: Iterable[str]) -> str:
    bodies = list(bodies)
    if not bodies:
        raise ValueError("nothing is allowed")
    return bodies[0] if len(bodies) == 1 else " | ".join(f"({body})" for body in bodies)


def _joined(before: str, bodies: Iterable[str], after: str) -> str:
    inner = ' "," '.join(bodies)
    return f"{before} {inner} {after}"
