"""OpenAI's own description of its API, and whether an answer is what it says.

Knows nothing of jaxserve: which schema an answer must have is read from the description's paths. Where that description
contradicts what OpenAI's servers have always sent, and their clients expect, the difference is written down in `_amend`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

_URI = "urn:openai"
_JSON = "application/json"
_EVENTS = "text/event-stream"


@dataclass(frozen=True)
class Exchange:
    """One answer, or one event of a stream.

    Attributes:
        path: without the `/v1` before it.
        event: whether `body` is the data of a server-sent event.
    """

    method: str
    path: str
    status: int
    body: bytes
    event: bool = False


class Specification:
    """The description in `path`, as validators."""

    def __init__(self, path: Path) -> None:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        self._operations = _operations(document)
        _amend(document["components"]["schemas"])
        resource = Resource.from_contents({"components": _with_nulls(document["components"])}, DRAFT202012)
        self._registry: Registry = Registry().with_resource(_URI, resource)
        self._validators: dict[str, Draft202012Validator] = {}

    def problems(self, exchange: Exchange) -> list[str]:
        """What in `exchange` is not as described; nothing of paths that are not OpenAI's."""
        name = self._schema_of(exchange)
        if name is None:
            return []
        try:
            value = json.loads(exchange.body, parse_constant=_no_constant)
        except ValueError as error:
            return [f"{_title(exchange)}: not JSON: {error}"]
        if exchange.event and "error" in value:
            name = "ErrorResponse"
        return self.problems_of(value, name, title=_title(exchange))

    def problems_of(self, value: Any, name: str, *, title: str = "") -> list[str]:
        """What in `value` is not as the schema `name` says."""
        validator = self._validators.setdefault(
            name, Draft202012Validator({"$ref": f"{_URI}#/components/schemas/{name}"}, registry=self._registry)
        )
        return [f"{title}: {name}: {error.json_path}: {error.message:.300}" for error in validator.iter_errors(value)]

    def _schema_of(self, exchange: Exchange) -> str | None:
        operation = self._find(exchange.method, exchange.path)
        if operation is None:
            return None
        if exchange.status >= 400:
            return "ErrorResponse"
        return operation.get(_EVENTS if exchange.event else _JSON)

    def _find(self, method: str, path: str) -> dict[str, str] | None:
        parts = path.strip("/").split("/")
        for (known, template), operation in self._operations.items():
            if known == method and len(template) == len(parts) and all(map(_fits, template, parts)):
                return operation
        return None


def _fits(wanted: str, found: str) -> bool:
    return wanted == found or wanted.startswith("{")


def _operations(document: dict[str, Any]) -> dict[tuple[str, tuple[str, ...]], dict[str, str]]:
    """By method and path, the name of the schema that each media type of a success has."""
    found = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method not in ("get", "post", "delete"):
                continue
            content = operation["responses"].get("200", {}).get("content", {})
            names = {
                kind: media["schema"]["$ref"].rpartition("/")[2]
                for kind, media in content.items()
                if "$ref" in media["schema"]
            }
            if path == "/completions":  # streams of it are described in words only
                names[_EVENTS] = "CreateCompletionStreamResponse"
            found[method.upper(), tuple(path.strip("/").split("/"))] = names
    return found


def _amend(schemas: dict[str, Any]) -> None:
    """What OpenAI's servers send and their description does not allow.

    - a chunk of a completion has no finish reason before its last, and its usage is null before the last;
    - the first token of an echoed prompt has no log probability;
    - an embedding is a string where base64 was asked for, as OpenAI's clients do.
    """
    logprobs = schemas["CreateCompletionResponse"]["properties"]["choices"]["items"]["properties"]["logprobs"]
    lists = logprobs["anyOf"][0]["properties"]
    lists["token_logprobs"]["items"]["nullable"] = True
    lists["top_logprobs"]["items"]["nullable"] = True
    embedding = schemas["Embedding"]["properties"]
    embedding["embedding"] = {"anyOf": [embedding["embedding"], {"type": "string"}]}
    chunk = json.loads(json.dumps(schemas["CreateCompletionResponse"]))
    chunk["properties"]["choices"]["items"]["properties"]["finish_reason"]["nullable"] = True
    chunk["properties"]["usage"]["nullable"] = True
    schemas["CreateCompletionStreamResponse"] = chunk


def _with_nulls(value: Any) -> Any:
    """`value` with OpenAPI 3.0's `nullable`, which parts of the description still use, as JSON Schema says it."""
    if isinstance(value, list):
        return [_with_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    plain = {key: _with_nulls(item) for key, item in value.items() if key != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if value.get("nullable") is True else plain


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _title(exchange: Exchange) -> str:
    return f"{exchange.method} {exchange.path} {exchange.status}{' event' if exchange.event else ''}"


def events(data: bytes) -> Iterator[bytes]:
    """The data of each event in a whole stream, but for its `[DONE]`."""
    for block in data.split(b"\n\n"):
        for line in block.split(b"\n"):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield line.removeprefix(b"data: ")
