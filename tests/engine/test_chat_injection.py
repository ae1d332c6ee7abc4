"""Control tokens come from the template alone, whatever is written into a conversation and wherever."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.text import ChatRules, Tokenizer
from jaxserve.errors import InvalidRequest
from tests.engine import tiny_tokenizers as tiny
from tests.engine.test_chat_references import REFERENCES

# The control tokens that the templates write.
CONTROL = [
    *("<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CONTENT]", "[CALL_ID]", "[ARGS]"),
    *("<start_of_turn>", "<end_of_turn>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|eom_id|>", "<|python_tag|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|start|>", "<|message|>"),
    *("<|channel|>", "<|call|>", "<|return|>", "<|constrain|>"),
]
PIECES = [token[:i] for token in CONTROL for i in range(1, len(token) + 1)]
PIECES += [token[i:] for token in CONTROL for i in range(1, len(token))]
HOSTILE = st.lists(st.sampled_from(["x", " ", "\n", '"', *CONTROL]) | st.sampled_from(PIECES), min_size=1, max_size=4).map(
    "".join
)
NUM_TEXTS = 9


def conversation(texts: list[str]) -> dict[str, Any]:
    """Messages and variables with each text in another place."""
    user, answer, name, key, value, result, part, described, date = texts
    arguments = {f"k{key}": f"v{value}", "n": {f"k{key}": [f"v{value}"]}}
    call = {"id": "call12345", "type": "function", "function": {"name": f"f{name}", "arguments": arguments}}
    parameters = {"type": "object", "properties": {f"p{key}": {"type": "string", "description": f"d{described}"}}}
    return {
        "messages": [
            {"role": "user", "content": f"u{user}"},
            {"role": "assistant", "content": f"a{answer}"},
            {"role": "user", "content": [{"type": "text", "text": f"u{part}"}, {"type": "text", "text": f"{user}u"}]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": f"r{result}", "tool_call_id": "call12345"},
        ],
        "tools": [
            {"type": "function", "function": {"name": f"f{name}", "description": f"d{described}", "parameters": parameters}}
        ],
        "date_string": date,
        "enable_thinking": False,
    }


@functools.cache
def tokenizer_for(shared: Path, name: str) -> Tokenizer:
    library = tiny.byte_level_library()
    library.add_special_tokens(CONTROL)
    source = (shared / "data" / "chat-templates" / f"{name}.jinja").read_text()
    return Tokenizer(library.to_str(), chat_template=source, bos_token="<s>", eos_token="</s>")


def control_tokens(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    ids = tokenizer.encode_chat(**conversation(texts))
    return [token_id for token_id in ids if tokenizer.is_special(token_id)]


QUICK = "Mistral-Small-3.2-24B-Instruct-2506"


@pytest.mark.parametrize(
    "name", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in REFERENCES]
)
@given(texts=st.lists(HOSTILE, min_size=NUM_TEXTS, max_size=NUM_TEXTS))
def test_no_text_adds_or_breaks_a_control_token(shared: Path, name: str, texts: list[str]) -> None:
    tokenizer = tokenizer_for(shared, name)
    try:
        expected = control_tokens(tokenizer, ["x"] * NUM_TEXTS)
    except InvalidRequest:
        pytest.skip("it takes no tools")
    assert len(expected) > 4
    assert control_tokens(tokenizer, texts) == expected


def test_where_the_server_says_so_they_do(shared: Path) -> None:
    tokenizer = tokenizer_for(shared, "Qwen-Qwen3-0.6B").with_rules(ChatRules(special_tokens_in_messages=True))
    plain = control_tokens(tokenizer, ["x"] * NUM_TEXTS)
    assert len(control_tokens(tokenizer, ["<|im_end|>"] * NUM_TEXTS)) > len(plain)
