"""What fields of a body restrict an output to: as parameters of sampling, and compiled.

Pure. Owns the meaning of `response_format` and `structured_outputs`. Does not know how a grammar is compiled (`engine`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from jaxserve.constraint import JSON_OBJECT, Grammar, GrammarKind
from jaxserve.engine.constraints import Constraints
from jaxserve.errors import InvalidRequest
from jaxserve.request import Request
from jaxserve.server.schema.common import AnyGenerationRequest
from jaxserve.server.schema.constraints import JsonObjectFormat, JsonSchemaFormat, ResponseFormat, StructuredOutputs
from jaxserve.server.schema.decoding import check_depth

_LANGUAGES = ("json", "json_object", "regex", "choice", "grammar")


def grammar_of(body: AnyGenerationRequest, response_format: ResponseFormat | None) -> Grammar | None:
    """What the output of `body` has to be, or None where it may be anything.

    Raises:
        InvalidRequest: two fields say what it has to be, or one says it in two ways or none.
    """
    wanted = _of_response_format(response_format)
    if body.structured_outputs is None:
        return wanted
    if wanted is not None:
        raise InvalidRequest(
            "structured_outputs must be left out where response_format restricts the output", param="structured_outputs"
        )
    return _of_structured_outputs(body.structured_outputs)


def constrain(requests: tuple[Request, ...], constraints: Constraints) -> tuple[Request, ...]:
    """The requests with what their parameters restrict tokens to. May take a second.

    Raises:
        InvalidRequest: naming the field that cannot be used.
    """
    return tuple(replace(request, constraint=constraints.of(request.params)) for request in requests)


def _of_response_format(wanted: ResponseFormat | None) -> Grammar | None:
    match wanted:
        case JsonObjectFormat():
            return Grammar(GrammarKind.JSON_SCHEMA, JSON_OBJECT, "response_format")
        case JsonSchemaFormat():
            return _schema_grammar(wanted.json_schema.schema, "response_format.json_schema.schema")
    return None


def _of_structured_outputs(wanted: StructuredOutputs) -> Grammar:
    given = [name for name in _LANGUAGES if getattr(wanted, name) not in (None, False)]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise InvalidRequest(
            f"structured_outputs must have one of json, json_object, regex, choice and grammar, found {found}",
            param="structured_outputs",
        )
    name = given[0]
    value, param = getattr(wanted, name), f"structured_outputs.{name}"
    if name == "json":
        return Grammar(GrammarKind.JSON_SCHEMA, value, param) if isinstance(value, str) else _schema_grammar(value, param)
    if name == "json_object":
        return Grammar(GrammarKind.JSON_SCHEMA, JSON_OBJECT, param)
    if name == "choice":
        return Grammar(GrammarKind.CHOICE, json.dumps(value), param)
    return Grammar(GrammarKind.REGEX if name == "regex" else GrammarKind.LARK, value, param)


def _schema_grammar(schema: dict[str, Any], param: str) -> Grammar:
    check_depth(param, schema)
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), param)
