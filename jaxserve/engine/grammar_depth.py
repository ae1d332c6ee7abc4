"""How deep a compiler of grammars would have to go, which is bounded before it is let in.

llguidance follows rules and references by recursion, and a few thousand of them, one behind the other, overflow its stack: the
process would be gone. Owns an upper bound of that depth. Does not know what rules and schemas mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any

MAX_CHAIN = 500
"""Rules of a grammar, or parts of a schema, one within or behind the other; 1,000 are still safe in a stack of 8 MiB."""

_RULE = re.compile(r"[ \t]*+[?!]*+([A-Za-z_][\w-]*+)")
"""The beginning of a line that begins a rule. Lines that go on with one begin otherwise, with `|`."""

_WORD = re.compile(r"[A-Za-z_][\w-]*+")
_JSON = re.compile(r"%json\s*")


def check_rules(text: str) -> None:
    """Refuse a grammar in Lark's notation whose rules, or schemas, go too deep.

    Whatever word is a rule's name counts as a reference to it, also within quotes, so that no quoting can hide one.

    Raises:
        ValueError: they do.
    """
    lines = [(_RULE.match(line), line) for line in text.split("\n")]
    edges: dict[str, set[str]] = {rule[1]: set() for rule, _ in lines if rule}
    current: set[str] = set()
    for rule, line in lines:
        current = edges[rule[1]] if rule else current
        current |= edges.keys() & _WORD.findall(line, rule.end() if rule else 0)
    _check(edges, "its rules refer to one another")
    for place in _JSON.finditer(text):
        try:
            check_schema(json.JSONDecoder().raw_decode(text, place.end())[0])
        except RecursionError:
            raise ValueError("a schema in it is nested too deeply") from None
        except json.JSONDecodeError:
            continue  # which the compiler says better


def check_schema(schema: Any) -> None:
    """Refuse a JSON schema whose parts and references go too deep.

    Raises:
        ValueError: they do.
    """
    parts = list(_objects(schema))
    if len(parts) <= MAX_CHAIN:
        return
    edges: dict[int, set[int]] = {}
    for part in parts:
        inner = edges[id(part)] = {id(child) for child in _inside(part)}
        if isinstance(reference := part.get("$ref"), str):
            inner.add(id(_target(schema, reference)))
    _check(edges, "its parts refer to one another")


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            yield item
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)


def _inside(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects in `part` that are in no other in it."""
    pending = list(part.values())
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            yield item
        elif isinstance(item, list):
            pending.extend(item)


def _target(schema: Any, reference: str) -> Any:
    """What a reference refers to; the whole schema where that cannot be told, which is the most that it can be."""
    found = schema
    for step in reference.removeprefix("#").split("/")[1:] if reference.startswith("#/") else ():
        step = step.replace("~1", "/").replace("~0", "~")
        found = found.get(step) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else schema


def _check(edges: Mapping[Any, Collection[Any]], what: str) -> None:
    if len(edges) > MAX_CHAIN and (length := longest_chain(edges)) > MAX_CHAIN:
        raise ValueError(f"{what} in a chain of up to {length}, which is more than {MAX_CHAIN}")


def longest_chain[K: Hashable](edges: Mapping[K, Collection[K]]) -> int:
    """Nodes on the longest path through a graph, or more: of those in a circle, all count.

    Source: Sharir, "A strong-connectivity algorithm and its applications in data flow analysis", 1981, for the circles.
    """
    backwards: dict[K, list[K]] = {node: [] for node in edges}
    for node, targets in edges.items():
        for target in targets:
            backwards[target].append(node)
    circle_of: dict[K, int] = {}
    lengths: list[int] = []
    # Of the graph turned round, so that what a circle leads to has been there before.
    for node in reversed(_by_end(backwards)):
        if node in circle_of:
            continue
        circle, number = [node], len(lengths)
        circle_of[node] = number
        for member in circle:
            new = [target for target in edges[member] if target not in circle_of]
            circle_of.update(dict.fromkeys(new, number))
            circle += dict.fromkeys(new)
        after = {circle_of[target] for member in circle for target in edges[member]} - {number}
        lengths.append(len(circle) + max((lengths[other] for other in after), default=0))
    return max(lengths, default=0)


def _by_end[K: Hashable](edges: Mapping[K, Collection[K]]) -> list[K]:
    """All nodes in the order in which a search in depth is done with them."""
    ended: list[K] = []
    seen: set[K] = set()
    for start in edges:
        if start in seen:
            continue
        seen.add(start)
        stack = [(start, iter(edges[start]))]
        while stack:
            node, targets = stack[-1]
            following = next((target for target in targets if target not in seen), None)
            if following is None:
                ended.append(node)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(edges[following])))
    return ended
