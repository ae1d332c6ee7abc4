"""The trie finds what plain alternatives do, the longest first."""

from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st

from jaxserve.engine.alternatives import any_of

words = st.text("ab<|.*\n\u2581", min_size=1, max_size=5)


@given(st.sets(words), st.text("ab<|.*\n\u2581", max_size=30))
@example(set(), "a")
@example({"a" * n for n in range(1, 200)}, "a" * 150 + "b" + "a" * 300)
def test_it_finds_what_plain_alternatives_do(texts: set[str], text: str) -> None:
    plain = "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)"
    assert re.findall(any_of(texts), text) == re.findall(plain, text)
