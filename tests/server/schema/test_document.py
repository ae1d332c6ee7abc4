"""The OpenAPI document: valid, complete, and as strict as the server is."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import msgspec
import openapi_spec_validator
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect as types

from jaxserve.config import HttpConfig
from jaxserve.errors import InvalidRequest
from jaxserve.server.handlers import ROUTES
from jaxserve.server.schema.anthropic import MessagesRequest
from jaxserve.server.schema.chat import ChatRequest
from jaxserve.server.schema.completions import CompletionRequest
from jaxserve.server.schema.decoding import decode
from jaxserve.server.schema.document import document
from jaxserve.server.schema.embeddings import EmbeddingRequest
from jaxserve.server.schema.operations import OPERATIONS
from jaxserve.server.schema.responses import ResponsesRequest
from jaxserve.server.schema.tokenization import DetokenizeRequest, TokenizeRequest
from tests.server.serving import MODEL, serving

DOCUMENT = document(version="1", has_keys=True)
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.slow
@pytest.mark.parametrize("has_keys", [True, False])
def test_it_is_valid(has_keys: bool) -> None:
    openapi_spec_validator.validate(document(version="1", has_keys=has_keys))


def test_it_has_every_route() -> None:
    routes = {(route.method, re.sub(r"{(\w+):[^}]*}", r"{\1}", route.path)) for route in ROUTES}
    assert routes == set(OPERATIONS), "jaxserve/server/schema/operations.py describes every route"


def test_it_says_what_needs_a_key() -> None:
    assert DOCUMENT["security"] == [{"ApiKey": []}, {"ApiKeyHeader": []}]
    assert DOCUMENT["paths"]["/health"]["get"]["security"] == []
    assert "401" in DOCUMENT["paths"]["/v1/completions"]["post"]["responses"]
    assert "401" not in DOCUMENT["paths"]["/health"]["get"]["responses"]
    without = document(version="1", has_keys=False)
    assert without["security"] == []
    assert "401" not in without["paths"]["/v1/completions"]["post"]["responses"]
    assert without["paths"]["/v1/cache"]["delete"]["security"] == [{"ApiKey": []}, {"ApiKeyHeader": []}]


# --- as strict as the server ------------------------------------------------------------------------------------------

# Small enough that all have their fractions: a float beyond 2**52 is an integer to JSON Schema.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e6, 1e6) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
BODIES: dict[type, dict[str, Any]] = {
    CompletionRequest: {"model": "m", "prompt": "x"},
    ChatRequest: {"model": "m", "messages": MESSAGES},
    ResponsesRequest: {"model": "m", "input": "x"},
    MessagesRequest: {"model": "m", "messages": MESSAGES, "max_tokens": 1},
    EmbeddingRequest: {"model": "m", "input": "x"},
    TokenizeRequest: {"prompt": "x"},
    DetokenizeRequest: {"tokens": [5]},
}
VALIDATORS = {
    cls: jsonschema.Draft202012Validator(
        {"$ref": f"#/components/schemas/{cls.__name__}", "components": DOCUMENT["components"]}
    )
    for cls in BODIES
}


def likely(schema: Any) -> st.SearchStrategy[Any]:
    """Values at and beyond the limits of a field's schema, that its own name would not be refused for."""
    values: list[Any] = [None]
    for part in schema.get("anyOf", [schema]):
        values += part.get("enum", [])
        for limit in ("minimum", "maximum", "exclusiveMinimum"):
            values += [part[limit] + step for step in (-1, 0, 1) if limit in part]
        for limit in ("minLength", "maxLength"):
            values += ["x" * max(0, part[limit] + step) for step in (-1, 0, 1) if limit in part]
        if part.get("type") == "array":
            values += [["x"], [1], [], ["x"] * 17, [1] * 17]
    return st.sampled_from(values)


@given(data=st.data())
def test_it_is_as_strict_as_the_server(data: st.DataObject) -> None:
    """It accepts what the server's types accept and nothing else.

    But to JSON Schema 1.0 is an integer; and the highest seed is not one of a type's limits, which have 63 bits.
    """
    for cls, base in BODIES.items():
        properties = DOCUMENT["components"]["schemas"][cls.__name__]["properties"]
        names = data.draw(st.lists(st.sampled_from([*properties, "unknown"]), max_size=3))
        fields = {name: data.draw(likely(properties.get(name, {})) | JSON) for name in names}
        body = json.loads(re.sub(r"(\d)\.0\b(?!e)", r"\1.5", json.dumps({**base, **fields})))
        try:
            decode(body, cls)
            accepted = not (type(body.get("seed")) is int and body["seed"] >= 2**64)
        except InvalidRequest:
            accepted = False
        assert accepted == VALIDATORS[cls].is_valid(body), body


# --- what it says of answers ------------------------------------------------------------------------------------------

VARIANTS: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": True}},
    {"stream": True, "stream_options": {"continuous_usage_stats": True}},
]
ASKED: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("POST", "/v1/completions"): [{"model": MODEL, "prompt": "x", **more} for more in [*VARIANTS, {"logprobs": 2}]],
    ("POST", "/v1/chat/completions"): [
        {"model": MODEL, "messages": MESSAGES, "max_tokens": 9, **more}
        for more in [*VARIANTS, {"logprobs": True, "top_logprobs": 2}, {"logprobs": True, "stream": True}]
    ],
    ("POST", "/v1/responses"): [
        {"model": MODEL, "input": "x", "max_output_tokens": 9, **more}
        for more in [
            {},
            {"stream": True},
            {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
            {"temperature": 0},
        ]
    ],
    ("POST", "/v1/messages"): [
        {"model": MODEL, "messages": MESSAGES, "max_tokens": 9, **more} for more in ({}, {"stream": True})
    ],
    ("POST", "/v1/messages/count_tokens"): [{"model": MODEL, "messages": MESSAGES}],
    ("POST", "/tokenize"): [{"prompt": "x", "return_token_strs": True}, {"messages": MESSAGES}],
    ("POST", "/detokenize"): [{"tokens": [5]}],
}


STORED = ("/v1/files", "/v1/batches")
"""They need something to be there first: test_batches.py holds them to what the document says."""


async def test_answers_are_as_it_says() -> None:
    async with serving(config=HttpConfig(port=0, admin_key="secret")) as server:
        for (method, path), operation in OPERATIONS.items():
            if path.startswith(STORED):
                continue
            for body in ASKED.get((method, path), [{}] if operation.body is None else []):
                options = {"json": body} if body else {}
                headers = {"Authorization": "Bearer secret"}
                url = server.url + path.replace("{model}", MODEL)
                async with server.http.request(method, url, headers=headers, **options) as response:
                    data = await response.read()
                    assert response.status == 200, (path, data)
                    if response.content_type == "text/event-stream":
                        *events, last, rest = data.decode().split("\n\n")
                        assert rest == ""
                        assert (last == "data: [DONE]") != operation.event_names
                        for event in [*events, last] if operation.event_names else events:
                            name, _, body = event.rpartition("data: ")
                            assert bool(name) == operation.event_names
                            msgspec.json.decode(body, type=operation.event)
                    elif isinstance(operation.answer, str):
                        assert response.content_type == operation.answer
                    else:
                        msgspec.json.decode(data, type=operation.answer)


async def test_errors_are_as_it_says() -> None:
    async with serving() as server:
        for (method, path), operation in OPERATIONS.items():
            if operation.body is None:
                continue
            for body, status in (({"model": MODEL, "nonsense": 1}, 400), ([], 400)):
                async with server.http.request(method, server.url + path, json=body) as response:
                    assert response.status == status
                    assert status in operation.errors
                    msgspec.json.decode(await response.read(), type=operation.error)


async def test_it_is_served() -> None:
    async with serving() as server:
        status, served = await server.get("/openapi.json")
        assert status == 200
        assert served["paths"] == json.loads(json.dumps(document(version="1", has_keys=False)["paths"]))


def lonely_tags(node: types.Type, path: str) -> list[str]:
    """Structs with a tag that stand without another struct to be told from."""
    if isinstance(node, types.Metadata):
        return lonely_tags(node.type, path)
    if isinstance(node, types.ListType):
        return lonely_tags(node.item_type, f"{path}[]")
    if isinstance(node, types.DictType):
        return lonely_tags(node.value_type, f"{path}.*")
    if isinstance(node, types.UnionType):
        structs = [part for part in node.types if isinstance(part, types.StructType)]
        if len(structs) > 1:
            return [lonely for struct in structs for lonely in lonely_fields(struct, path)]
        return [lonely for part in node.types for lonely in lonely_tags(part, path)]
    if isinstance(node, types.StructType):
        return ([path] if node.tag_field else []) + lonely_fields(node, path)
    return []


def lonely_fields(struct: types.StructType, path: str) -> list[str]:
    return [lonely for field in struct.fields for lonely in lonely_tags(field.type, f"{path}.{field.name}")]


@pytest.mark.parametrize("cls", BODIES, ids=lambda cls: cls.__name__)
def test_tags_tell_structs_of_a_union_apart(cls: type) -> None:
    """The decoder does not ask for a tag where it tells nothing apart, and the document says that it must be there."""
    assert lonely_tags(types.type_info(cls), cls.__name__) == []
