"""The OpenAPI document: the operations and their structs, in the form that other people's tools read.

Source: OpenAPI Specification 3.1.1, whose schemas are JSON Schema 2020-12, which is what msgspec makes of the structs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec

from jaxserve.server.schema.operations import OPERATIONS, Operation

Json = dict[str, Any]

_REF = "#/components/schemas/{name}"
_PATH_PARAMETER = re.compile(r"{(\w+)}")
_RETRIED = (429, 503)

SECURITY_SCHEMES = {
    "ApiKey": {"type": "http", "scheme": "bearer"},
    "ApiKeyHeader": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
EITHER_KEY: list[Json] = [{name: []} for name in SECURITY_SCHEMES]

DESCRIPTION = """The API of a jaxserve server. Fields that are not implemented are refused by name unless they have a value at
which they change nothing; so are unknown ones. Null is always the default."""


def document(*, version: str, has_keys: bool, operations: Mapping[tuple[str, str], Operation] = OPERATIONS) -> Json:
    """The document of a server.

    Args:
        version: of the server.
        has_keys: whether requests need an API key.
    """
    types = list(dict.fromkeys(part for operation in operations.values() for part in _structs(operation)))
    refs, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    ref_of = dict(zip(types, refs, strict=True))
    paths: dict[str, Json] = {}
    for (method, path), operation in operations.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation, ref_of, has_keys)
    return {
        "openapi": "3.1.1",
        "info": {
            "title": "jaxserve",
            "version": version,
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": EITHER_KEY if has_keys else [],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": SECURITY_SCHEMES},
    }


def _structs(operation: Operation) -> Iterable[Any]:
    parts = (operation.body, operation.form, operation.answer, operation.event, operation.unavailable, operation.error)
    return (part for part in parts if part is not None and not isinstance(part, str))


def _operation(method: str, path: str, operation: Operation, ref_of: Mapping[type, Json], has_keys: bool) -> Json:
    needs_key = operation.is_admin or (has_keys and not operation.is_open)
    described: Json = {
        "operationId": "_".join(re.findall(r"\w+", f"{method.lower()} {path}")),
        "summary": operation.summary,
        "responses": _responses(operation, ref_of, needs_key),
    }
    parameters = [*_path_parameters(path), *_query_parameters(operation)]
    if parameters:
        described["parameters"] = parameters
    for content_type, body in (("application/json", operation.body), ("multipart/form-data", operation.form)):
        if body is not None:
            described["requestBody"] = {"required": True, "content": {content_type: {"schema": ref_of[body]}}}
    if needs_key != has_keys:
        described["security"] = EITHER_KEY if needs_key else []
    return described


def _path_parameters(path: str) -> list[Json]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in _PATH_PARAMETER.findall(path)
    ]


def _query_parameters(operation: Operation) -> list[Json]:
    if operation.query is None:
        return []
    (_, schemas) = msgspec.json.schema_components([operation.query], ref_template=_REF)
    schema = schemas[operation.query.__name__]
    return [
        {"name": name, "in": "query", "required": name in schema["required"], "schema": part}
        for name, part in schema["properties"].items()
    ]


def _responses(operation: Operation, ref_of: Mapping[type, Json], needs_key: bool) -> Json:
    content: Json = {}
    if isinstance(operation.answer, type):
        content["application/json"] = {"schema": ref_of[operation.answer]}
    elif operation.answer == "application/json":
        content["application/json"] = {"schema": {"type": "object"}}
    else:
        content[operation.answer] = {"schema": {"type": "string"}}
    described = "The answer."
    if operation.event is not None:
        ending = "each with its name" if operation.event_names else "of which the last is `[DONE]`"
        described = f"The answer; with `stream`, server-sent events, {ending}."
        content["text/event-stream"] = {
            "schema": _event([ref_of[operation.event], ref_of[operation.error]], is_named=operation.event_names)
        }
    responses: Json = {"200": {"description": described, "content": content}}
    statuses = {*operation.errors, 500, *([401] if needs_key else [])}
    for status in sorted(statuses):
        responses[str(status)] = _error(status, ref_of[operation.error])
    if operation.unavailable is not None:
        schema = ref_of[operation.unavailable]
        responses["503"] = {"description": "Not now.", "content": {"application/json": {"schema": schema}}}
    return responses


def _event(schemas: list[Json], *, is_named: bool) -> Json:
    """One event, which is what readers of 3.1 take the schema of a stream for, and what 3.2 calls `itemSchema`."""
    data: Json = {"contentMediaType": "application/json", "contentSchema": {"anyOf": schemas}}
    if not is_named:
        data = {"anyOf": [data, {"const": "[DONE]"}]}
    properties = {"event": {"type": "string"}, "data": {"type": "string", **data}}
    return {"type": "object", "properties": properties, "required": ["data"]}


def _error(status: int, ref: Json) -> Json:
    described: Json = {"description": HTTPStatus(status).phrase, "content": {"application/json": {"schema": ref}}}
    if status in _RETRIED:
        described["headers"] = {
            "Retry-After": {"description": "Seconds after which it is worth another try.", "schema": {"type": "integer"}}
        }
    return described
