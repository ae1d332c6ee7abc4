"""JSON Schema's own test suite, draft 2020-12: a schema either lets exactly its instances through, or is refused.

An instance that the suite calls invalid is never accepted. One that it calls valid is accepted in its compact form, or stands
below with a reason. What stands below and is no longer needed fails a test, so the lists only shrink.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import InvalidRequest
from tests.engine.grammars import COMPILER, ID_OF_BYTE, json_schema

SUITE = "data/schemas/json-schema-test-suite-draft2020-12"

UNSUPPORTED_KEYWORDS = frozenset(
    {
        *("$dynamicAnchor", "$dynamicRef", "contains", "minContains", "maxContains", "dependencies", "dependentRequired"),
        *("dependentSchemas", "if", "then", "else", "not", "propertyNames", "unevaluatedItems", "unevaluatedProperties"),
        "uniqueItems",
    }
)
"""What a schema that has it is refused for."""

UNSUPPORTED_FORMATS = frozenset(
    {
        *("idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer"),
        *("uri-reference", "uri-template"),
    }
)

UNSUPPORTED_KINDS = (
    r"is not present in a registry",  # schemas elsewhere are not fetched
    r"oneOf constraints are not supported",  # where no two branches are known to exclude each other
    r"patternProperty regexes .* are not disjoint",
    r"look-around|backreferences|regex parse error",  # what regular languages cannot say, and Unicode classes by other names
    r"too many digits|Failed to generate regex for float range",  # numbers beyond 64 bits
    r"a control character in a constant",
    r"'minProperties' \d+ is supported only",
)
"""Other reasons why a schema is refused."""

NARROWER = {
    "integers are written without a fraction": {
        ("const.json", "float zero is valid"),
        ("const.json", "float one is valid"),
        ("const.json", "float -2.0 is valid"),
        ("const.json", "float is valid"),
        ("enum.json", "float zero is valid"),
        ("enum.json", "[0.0] is valid"),
        ("enum.json", "float one is valid"),
        ("enum.json", "[1.0] is valid"),
        ("type.json", "a float with zero fractional part is an integer"),
        ("float-overflow.json", "valid if optional overflow handling is implemented"),
    },
    "properties come in the schema's order": {
        ("allOf.json", "allOf"),
        ("allOf.json", "valid"),
        ("const.json", "same object with different property order is valid"),
    },
    "formats are enforced": {
        ("format.json", f"invalid {name} string is only an annotation by default")
        for name in ("email", "ipv4", "ipv6", "hostname", "date", "date-time", "time", "uri", "uuid", "duration")
    },
    "control characters are not written": {
        ("ecmascript-regex.json", "Line tabulation matches"),
        ("ecmascript-regex.json", "Non-whitespace control matches"),
    },
}
"""Valid instances that do not get through, by the reason: other texts of the same value do, or the schema asks for less."""


@dataclass(frozen=True)
class Group:
    """A schema and its instances."""

    file: str
    name: str
    schema: Any
    tests: list[dict[str, Any]]


@pytest.fixture(scope="module")
def groups(shared: Path) -> list[Group]:
    return list(_read(shared / SUITE))


def _read(root: Path) -> Iterator[Group]:
    for path in sorted(root.rglob("*.json")):
        for group in json.loads(path.read_text()):
            yield Group(path.name, group["description"], group["schema"], group["tests"])


def refusal(schema: Any) -> str | None:
    """Why the schema is refused; None if it is not."""
    try:
        COMPILER.compile(json_schema(schema))
    except InvalidRequest as error:
        return str(error)
    return None


def accepts(schema: Any, instance: Any) -> bool:
    """Whether the instance gets through in its compact form."""
    text = json.dumps(instance, separators=(",", ":"), ensure_ascii=False)
    matcher = COMPILER.compile(json_schema(schema)).start()
    return matcher.accepts([ID_OF_BYTE[byte] for byte in text.encode()])  # type: ignore[attr-defined, no-any-return]


@pytest.mark.slow
def test_every_schema_is_followed_exactly_or_refused(groups: list[Group]) -> None:
    narrower = {case for cases in NARROWER.values() for case in cases}
    num_followed, seen = 0, set()
    for group in groups:
        if refusal(group.schema) is not None:
            continue
        for case in group.tests:
            got, valid = accepts(group.schema, case["data"]), case["valid"]
            where = f"{group.file}: {group.name}: {case['description']}: {group.schema}"
            assert valid or not got, f"wrongly accepted: {where}"
            if valid and not got:
                assert (group.file, case["description"]) in narrower, f"wrongly refused: {where}"
                seen.add((group.file, case["description"]))
            num_followed += 1
    assert seen == narrower, f"no longer needed: {narrower - seen}"
    assert num_followed > 700


@pytest.mark.slow
def test_every_refusal_has_a_known_reason(groups: list[Group]) -> None:
    reasons = [(group, reason) for group in groups if (reason := refusal(group.schema)) is not None]
    keywords, formats, kinds = set(), set(), set()
    for group, reason in reasons:
        if listed := re.search(r"Unimplemented keys: (\[.*\])", reason):
            keywords |= set(json.loads(listed[1]))
        elif unknown := re.search(r"Unknown format: (\S+)", reason):
            formats.add(unknown[1])
        elif known := [kind for kind in UNSUPPORTED_KINDS if re.search(kind, reason)]:
            kinds |= set(known)
        else:
            # What nothing satisfies may be refused as such.
            assert not any(case["valid"] for case in group.tests), f"{group.file}: {group.name}: {reason}: {group.schema}"
    assert keywords == UNSUPPORTED_KEYWORDS
    assert formats == UNSUPPORTED_FORMATS
    assert kinds == set(UNSUPPORTED_KINDS)
