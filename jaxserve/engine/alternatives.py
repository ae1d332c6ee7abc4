"""An expression that finds the longest of many texts, fast however many they are.

Python's `re` tries alternatives one after the other, which for the 6,000 control tokens of a large vocabulary takes 80 us at
every `<` of a text that others wrote. Written as a trie, it is a few comparisons.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby, takewhile

MAX_DEPTH = 40
"""Branches within each other; what is left then are plain alternatives. `re` bounds how deeply groups nest."""


def any_of(texts: Iterable[str]) -> str:
    """The source of an expression that matches the longest of `texts`, none of them empty; one that never does for none."""
    unique = sorted(set(texts))
    return _trie(unique, MAX_DEPTH) if unique else r"(?!)"


def _trie(texts: Sequence[str], depth: int) -> str:
    """For texts in order, the first of which may be empty if the others are not all."""
    if not depth:
        return f"(?:{'|'.join(map(re.escape, reversed(texts)))})"
    prefix = _common_prefix(texts[0], texts[-1])
    rests = [text[len(prefix) :] for text in texts]
    may_end = not rests[0]
    branches = [_trie(list(group), depth - 1) for _, group in groupby(rests[may_end:], key=lambda rest: rest[0])]
    if not branches:
        return re.escape(prefix)
    inner = "|".join(branches)
    return f"{re.escape(prefix)}(?:{inner}){'?' if may_end else ''}"


def _common_prefix(first: str, second: str) -> str:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return first[: sum(1 for _ in same)]
