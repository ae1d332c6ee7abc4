"""Fields that say what an output has to be.

`structured_outputs` is vLLM's, `response_format` OpenAI's.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from jaxserve.server.schema.body import Body, Refused, only

MAX_SCHEMA_NAME = 64


class TextFormat(Body, tag_field="type", tag="text", frozen=True, kw_only=True):
    """Any text."""


class JsonObjectFormat(Body, tag_field="type", tag="json_object", frozen=True, kw_only=True):
    """A JSON object."""


class JsonSchema(Body, frozen=True, kw_only=True):
    """A schema with a name."""

    name: Annotated[str, Meta(max_length=MAX_SCHEMA_NAME, pattern="^[a-zA-Z0-9_-]+$")]
    schema: Annotated[dict[str, Any], Meta(description="JSON Schema, draft 2020-12; what cannot be enforced is refused.")]
    description: str | None = None
    strict: Annotated[bool, Meta(description="The output follows the schema either way.")] | None = None


class JsonSchemaFormat(Body, tag_field="type", tag="json_schema", frozen=True, kw_only=True):
    """JSON that a schema describes."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Body, frozen=True, kw_only=True):
    """What the output has to be, in one of several languages."""

    json: Annotated[dict[str, Any] | str, Meta(description="A JSON schema, or one as text.")] | None = None
    json_object: Annotated[bool, Meta(description="Any JSON object.")] | None = None
    regex: Annotated[str, Meta(description="A regular expression, which the whole output matches.")] | None = None
    choice: Annotated[list[str], Meta(min_length=1, description="The output is one of these.")] | None = None
    grammar: Annotated[str, Meta(description="A grammar in Lark's notation, as llguidance has it.")] | None = None
    disable_any_whitespace: Annotated[Any, only(False)] = None
    disable_additional_properties: Annotated[Any, only(False)] = None
    disable_fallback: Annotated[Any, only(False, True)] = None
    whitespace_pattern: Refused = None
    structural_tag: Refused = None
