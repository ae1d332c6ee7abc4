"""Grammars over the small tokenizers, for tests of what carries them."""

from __future__ import annotations

import json
from typing import Any

from jaxserve.constraint import Grammar, GrammarKind
from jaxserve.engine.grammar import CompiledGrammar, GrammarCompiler
from tests.engine import tiny_tokenizers

TOKENIZER = tiny_tokenizers.byte_level()
END_ID = tiny_tokenizers.IM_END_ID
VOCAB_SIZE = 288
"""More than the tokenizer has, as a model's logits may be wider."""

COMPILER = GrammarCompiler(TOKENIZER, VOCAB_SIZE, (END_ID,))


def json_schema(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def compiled(grammar: Grammar) -> CompiledGrammar:
    constraint = COMPILER.compile(grammar)
    assert isinstance(constraint, CompiledGrammar)
    return constraint


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the whole text is one that `grammar` lets through, byte by byte."""
    return compiled(grammar).start().accepts([ID_OF_BYTE[byte] for byte in text.encode()])


ID_OF_BYTE = {
    TOKENIZER.token_bytes(token_id)[0]: token_id
    for token_id in range(TOKENIZER.vocab_size)
    if len(TOKENIZER.token_bytes(token_id)) == 1
}


def allowed(mask: bytes) -> set[int]:
    """Ids of a mask's bits."""
    return {index * 8 + bit for index, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1}
