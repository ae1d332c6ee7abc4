"""Every keyword of JSON Schema with values of every kind, most of them wrong: a grammar, or a refusal that says why."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from jaxserve.errors import InvalidRequest
from tests.engine.grammars import COMPILER, json_schema

KEYWORDS = [
    *("type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
    *("items", "prefixItems", "additionalItems", "contains", "minContains", "maxContains", "minItems", "maxItems"),
    *("uniqueItems", "unevaluatedItems", "pattern", "format", "minLength", "maxLength", "minimum", "maximum"),
    *("exclusiveMinimum", "exclusiveMaximum", "multipleOf", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
    *(
        "$ref",
        "$defs",
        "definitions",
        "$id",
        "$schema",
        "$anchor",
        "$dynamicRef",
        "$dynamicAnchor",
        "$recursiveRef",
        "$comment",
    ),
    *("title", "description", "default", "examples", "deprecated", "readOnly", "nullable", "discriminator", "x-guidance", ""),
]
VALUES: list[Any] = [
    *(None, True, False, 0, 5, -1, 2.0, 1.5, 1e300, 10**30, "", "x", "[", "#", "#/$defs/a", "\ud7ff\x00", "string"),
    *(
        [],
        [None],
        [5],
        ["a"],
        ["a", "a"],
        [{}],
        [[]],
        [True],
        {},
        {"a": 5},
        {"a": None},
        {"a": {}},
        {"a": True},
        {"": []},
        {"[": {}},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("keyword", KEYWORDS)
def test_any_value_compiles_or_is_refused(keyword: str) -> None:
    """vllm I57725, I35438: a 500, or a failure in the middle of the answer."""
    for value in VALUES:
        for type_ in ({}, {"type": "object"}, {"type": "array"}):
            schema = {**type_, keyword: value}
            for place in (schema, {"type": "object", "properties": {"p": schema}, "required": ["p"]}):
                with suppress(InvalidRequest):
                    COMPILER.compile(json_schema(place)).start()
