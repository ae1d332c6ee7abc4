"""OpenAI's own description of what may be asked, walked to its last nested field: each is understood, or refused by its name.

The tables of README, and the tests that walk those, are about whole fields; here it is what is in them. Each thing that the
description lets a body have, at any depth, is sent once, with what must stand beside it; what is taken must be in `TAKEN`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.server.embeddings import parse_embeddings
from jaxserve.server.openai import parse_chat, parse_completion
from jaxserve.server.responses import parse_responses
from jaxserve.server.schema.decoding import decode
from jaxserve.server.schema.stored import BatchRequest
from tests.engine import tiny_tokenizers as tiny
from tests.server.test_fields import reference
from tests.server.test_tools import TOOL_TEMPLATE

MAX_DEPTH = 7
TOKENIZER = tiny.byte_level(TOOL_TEMPLATE + "{{ reasoning_effort }}")
Json = dict[str, Any]
Example = tuple[str, Any]
"""A path within a field, and a value of the field that has something there."""


class Walk:
    """Makes examples of schemas."""

    def __init__(self, schemas: Mapping[str, Json]) -> None:
        self._schemas = schemas

    def fields(self, name: str) -> Json:
        """The fields of an object, by name."""
        return {field: schema for shape in self._shapes(self._schemas[name]) for field, schema in _properties(shape).items()}

    def _shapes(self, schema: Json) -> list[Json]:
        """What a schema allows, each without any choice in it."""
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        common = {key: schema[key] for key in ("properties", "required", "type") if key in schema}
        if choices := schema.get("anyOf") or schema.get("oneOf"):
            return [_joined(common, shape) for choice in choices for shape in self._shapes(choice)]
        if "allOf" in schema:
            shapes = [common]
            for part in schema["allOf"]:
                shapes = [_joined(before, shape) for before in shapes for shape in self._shapes(part)]
            return shapes
        return [schema]

    def _least(self, schema: Json, depth: int) -> Any:
        """The smallest value of the first shape that has one."""
        values = (_simple(shape, lambda inner: self._least(inner, depth + 1)) for shape in self._shapes(schema))
        return next((value for value in values if value is not None), None)

    def examples(self, schema: Json, depth: int = 0) -> Iterator[Example]:
        """Values with each thing that may be in them, and where that is."""
        for shape in self._shapes(schema):
            if "enum" in shape:
                yield from (("", value) for value in shape["enum"])
                continue
            least = _simple(shape, lambda inner: self._least(inner, depth + 1))
            if least is not None:
                yield "", least
            if depth == MAX_DEPTH:
                continue
            for name, inner in _properties(shape).items():
                yield from ((f".{name}{path}", {**least, name: value}) for path, value in self.examples(inner, depth + 1))
            if shape.get("type") == "array":
                yield from ((f"[0]{path}", [value]) for path, value in self.examples(shape["items"], depth + 1))


def _properties(shape: Json) -> Json:
    properties: Json = shape.get("properties", {})
    return properties


def _joined(left: Json, right: Json) -> Json:
    required = {*left.get("required", ()), *right.get("required", ())}
    return {**left, **right, "properties": {**_properties(left), **_properties(right)}, "required": sorted(required)}


def _simple(shape: Json, least: Callable[[Json], Any]) -> Any:
    """The smallest value of a shape, with the smallest of what must be in it; None for null."""
    kind = shape.get("type", "object")
    if "enum" in shape:
        return shape["enum"][0]
    if kind == "object":
        return {name: least(inner) for name, inner in _properties(shape).items() if name in shape.get("required", ())}
    if kind == "array":
        return [least(shape["items"])] if shape.get("minItems") else []
    return {"string": "x", "integer": 1, "number": 1, "boolean": True}.get(kind)


PLACE = {"model": "m", "max_context": 512, "call_id": "c"}


def _parser(parse: Callable[..., Any]) -> Callable[[Json], Any]:
    return lambda body: parse(json.dumps(body).encode(), TOKENIZER, **PLACE)


BODIES: dict[str, tuple[Json, Callable[[Json], Any]]] = {
    "CreateCompletionRequest": ({"model": "m", "prompt": "hello"}, _parser(parse_completion)),
    "CreateChatCompletionRequest": ({"model": "m", "messages": [{"role": "user", "content": "hello"}]}, _parser(parse_chat)),
    "CreateResponse": ({"model": "m", "input": "hello"}, _parser(parse_responses)),
    "CreateEmbeddingRequest": ({"model": "m", "input": "hello"}, _parser(parse_embeddings)),
    "CreateBatchRequest": (
        {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
        lambda body: decode(json.dumps(body).encode(), BatchRequest),
    ),
}
FUNCTION = {"name": "x"}
BESIDE: dict[tuple[str, str], Json] = {
    ("CreateChatCompletionRequest", "tool_choice"): {"tools": [{"type": "function", "function": FUNCTION}]},
    ("CreateChatCompletionRequest", "top_logprobs"): {"logprobs": True},
    ("CreateResponse", "tool_choice"): {"tools": [{"type": "function", **FUNCTION}]},
    ("CreateResponse", "top_logprobs"): {"include": ["message.output_text.logprobs"]},
    **{(name, "stream_options"): {"stream": True} for name in BODIES},
}


def outcomes(schemas: Json, name: str) -> Iterator[tuple[str, str | None]]:
    """For each thing that a body may have, where it is, and the field that the refusal names, or None if it is taken."""
    base, parse = BODIES[name]
    walk = Walk(schemas)
    for field, schema in walk.fields(name).items():
        for path, value in () if field == "model" else walk.examples(schema):
            try:
                parse({**base, **BESIDE.get((name, field), {}), field: value})
            except InvalidRequest as error:
                yield field + path, error.param or ""
            else:
                yield field + path, None


def names(param: str, path: str) -> bool:
    """Whether a refusal names what is at `path`, something in it, something that it is in, or what is missing beside it."""
    wholes = [whole for whole in (param, param.rpartition(".")[0]) if whole]
    return param.startswith(path.removesuffix(".type")) or any(path.startswith((f"{whole}.", f"{whole}[")) for whole in wholes)


def spread(text: str) -> set[str]:
    """Paths, of which those in braces share what is before them."""
    paths: set[str] = set()
    for word in text.split():
        before, _, inner = word.partition("{")
        paths |= {before + part for part in inner.removesuffix("}").split(",")} if inner else {before}
    return paths


SAID_OF_ITSELF = spread(
    """annotations annotations[0]{,.container_id,.end_index,.file_id,.filename,.index,.start_index,.title,.type,.url}
    logprobs logprobs[0]{,.bytes,.bytes[0],.logprob,.token,.top_logprobs,.top_logprobs[0]}"""
)
"""Of a text that the model said, what an answer had beside it; it means nothing in an input."""

STREAM_OPTIONS = "stream_options.{include_usage,include_obfuscation}"
TAKEN = {
    "CreateCompletionRequest": spread(f"prompt[0] prompt[0][0] stop[0] {STREAM_OPTIONS}"),
    "CreateChatCompletionRequest": spread(
        f"""modalities[0] stop[0] {STREAM_OPTIONS} messages[0]{{,.role,.name,.tool_call_id,.content}}
        messages[0].content[0]{{,.type,.text}} messages[0].tool_calls[0]{{,.id,.type,.function}}
        messages[0].tool_calls[0].function.{{name,arguments}} response_format.{{type,json_schema.schema}}
        tool_choice.{{type,function,function.name}}
        tools[0]{{,.type,.function}} tools[0].function.{{name,description,parameters,strict}}"""
    ),
    "CreateResponse": spread(
        """include[0] reasoning.{context,effort} text.{verbosity,format} text.format.{type,name,description,schema,strict}
        tool_choice.{type,name} tools[0]{,.type,.name,.description,.parameters,.strict}
        input[0]{,.type,.role,.content,.id,.status,.phase,.call_id,.name,.arguments} input[0].content[0]{,.type,.text}"""
    )
    | {f"input[0].content[0].{path}" for path in SAID_OF_ITSELF},
    "CreateEmbeddingRequest": {"input[0]", "input[0][0]"},
    "CreateBatchRequest": set(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
def test_whatever_the_reference_lets_a_body_have_is_taken_or_refused_by_name(name: str, shared: Path) -> None:
    taken = set()
    for path, param in outcomes(reference(shared), name):
        assert param is None or names(param, path), f"{path} was refused as {param!r}"
        if param is None and ("." in path or "[" in path):
            taken.add(path)
    assert taken == TAKEN[name]
