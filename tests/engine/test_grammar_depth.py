"""Grammars that go deeper than a compiler's stack are refused, and the bound of their depth is one."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.grammar_depth import MAX_CHAIN, check_rules, check_schema, longest_chain
from jaxserve.errors import InvalidRequest
from tests.engine.grammars import compiled, json_schema
from tests.engine.test_grammar import lark


def rules(num: int, body: str = 'a{} | "x"') -> str:
    chain = "\n".join(f"a{i}: {body.format(i + 1)}" for i in range(num))
    return f'start: a0\n{chain}\na{num}: "y"\n'


def references(num: int) -> dict[str, Any]:
    def part(i: int) -> Any:
        return {"anyOf": [{"const": i}, {"$ref": f"#/$defs/{i + 1}"}]}

    return {"$defs": {f"{i}": part(i) for i in range(num)} | {f"{num}": {"type": "null"}}, "$ref": "#/$defs/0"}


def nested(num: int) -> dict[str, Any]:
    """Each definition's arrays hold the next's."""

    def part(i: int) -> Any:
        inner: Any = {"$ref": f"#/$defs/{i + 1}"}
        for _ in range(50):
            inner = {"type": "array", "items": inner}
        return inner

    return {"$defs": {f"{i}": part(i) for i in range(num)} | {f"{num}": {"type": "null"}}, "$ref": "#/$defs/0"}


@given(st.dictionaries(st.integers(0, 6), st.sets(st.integers(0, 6), max_size=3)))
def test_the_bound_is_one(edges: dict[int, set[int]]) -> None:
    edges = {node: edges.get(node, set()) for node in range(7)}

    def longest_from(node: int, path: frozenset[int]) -> int:
        return 1 + max((longest_from(target, path | {target}) for target in edges[node] - path), default=0)

    def reaches(node: int) -> set[int]:
        found: set[int] = set()
        pending = [*edges[node]]
        while pending:
            if (target := pending.pop()) not in found:
                found.add(target)
                pending += edges[target]
        return found

    exact = max(longest_from(node, frozenset({node})) for node in edges)
    bound = longest_chain(edges)
    assert bound >= exact
    if not any(node in reaches(node) for node in edges):
        assert bound == exact
    assert bound <= len(edges)


@pytest.mark.parametrize(
    "text",
    [
        rules(MAX_CHAIN + 1),
        rules(MAX_CHAIN + 1, "a{}"),
        rules(MAX_CHAIN + 1, '"a" a{} "b"').replace("\na", "\n\na"),
        rules(MAX_CHAIN + 1).replace("a", "A").replace("stArt", "start"),
        rules(MAX_CHAIN + 1, 'a{}\n  | "x"').replace(":", '[capture, stop="]:"]:'),
        rules(MAX_CHAIN + 1).replace("a", "a-").replace("sta-rt", "start").replace("a-1:", "?a-1:"),
        rules(MAX_CHAIN + 1) + rules(MAX_CHAIN + 1).replace("a", "b").replace("stbrt", "other") + "b: a0 /#/ \"'",
        "start: %json " + json.dumps(references(MAX_CHAIN + 1)),
    ],
)
def test_rules_in_long_chains_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"chain of up to {MAX_CHAIN}|more than {MAX_CHAIN}"):
        check_rules(text)


@pytest.mark.parametrize(
    "text", ["a" * 200_000, "a[" * 100_000, "a " * 100_000, "a:\n" * 60_000, '"' * 200_000, "[" * 200_000]
)
def test_hostile_texts_take_no_time(text: str) -> None:
    began = time.process_time()
    with contextlib.suppress(ValueError):
        check_rules(text)
    assert time.process_time() - began < 2, "quadratic ones take minutes"


def test_schemas_in_long_chains_are_refused() -> None:
    """Each but the last crashed the process, or would, twice as long."""
    for schema in (references(MAX_CHAIN + 1), nested(12), {"anyOf": [references(MAX_CHAIN + 1), nested(12)]}):
        with pytest.raises(ValueError, match="its parts refer to one another"):
            check_schema(schema)
        with pytest.raises(InvalidRequest, match="its parts refer to one another"):
            compiled(json_schema(schema))
    with pytest.raises(InvalidRequest, match="its rules refer to one another"):
        compiled(lark(rules(MAX_CHAIN + 1)))


def test_many_that_are_not_in_a_chain_are_not() -> None:
    check_rules("start: " + " | ".join(f"r{i}" for i in range(2000)) + "\n" + "\n".join(f'r{i}: "x"' for i in range(2000)))
    check_schema(
        {"anyOf": [{"$ref": f"#/$defs/{i}"} for i in range(2000)], "$defs": {f"{i}": {"const": i} for i in range(2000)}}
    )
    check_schema({"$defs": {f"{i}": {"items": {"$ref": f"#/$defs/{i}"}} for i in range(2000)}})


def test_what_is_let_in_compiles() -> None:
    for grammar in (
        lark(rules(MAX_CHAIN - 10, '"(" a{} | "x"')),
        json_schema(references(MAX_CHAIN // 3)),
        json_schema(nested(9)),
    ):
        assert any(compiled(grammar).start().mask())
