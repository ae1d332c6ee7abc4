"""Reasoning before an answer, the tokens that it took, and the choice of formats from a chat template."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.tools.dialect import Reading, ReasoningCounter, choose_dialect
from jaxserve.engine.tools.formats import TOOL_FORMATS
from jaxserve.engine.tools.parts import Reasoning, Text
from jaxserve.engine.tools.reasoning import REASONING_FORMATS
from jaxserve.errors import ConfigError
from tests.engine.tools.reading import NAMES, calls_of, read

THINK = REASONING_FORMATS["think"]


def thinking(*, opened: bool = False, tools: str | None = None) -> Reading:
    return Reading(TOOL_FORMATS[tools] if tools else None, NAMES, THINK, opened)


@pytest.mark.parametrize(
    ("written", "opened", "parts"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, (Reasoning("Hm."), Text("Yes."))),
        ("\n<think>Hm.</think>Yes.\n", False, (Reasoning("Hm."), Text("Yes.\n"))),
        ("Hm.\n</think>\n\nYes.", True, (Reasoning("Hm."), Text("Yes."))),
        ("<think>Hm.</think>Yes.", True, (Reasoning("Hm."), Text("Yes."))),
        ("<think>\n\n</think>\n\nYes.", False, (Text("Yes."),)),
        ("Yes.", False, (Text("Yes."),)),
        ("  Yes, <think> is a tag.", False, (Text("  Yes, <think> is a tag."),)),
        ("<think>a</think>b<think>c</think>", False, (Reasoning("a"), Text("b<think>c</think>"))),
        # Cut off.
        ("<think>\nHm. What", False, (Reasoning("Hm. What"),)),
        ("Hm. What\n</thi", True, (Reasoning("Hm. What\n</thi"),)),
        ("<thi", False, (Text("<thi"),)),
        ("", True, ()),
    ],
)
def test_reasoning_is_set_apart(written: str, opened: bool, parts: tuple[object, ...]) -> None:
    for cuts in ((), range(len(written))):
        assert read(thinking(opened=opened), written, cuts) == parts


def test_calls_come_after_reasoning_and_what_looks_like_one_within_it_is_none() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    parts = read(thinking(tools="hermes"), f"<think>Maybe {call}</think>\n\n{call}")
    assert parts[0] == Reasoning(f"Maybe {call}")
    assert calls_of(parts) == [("f", "{}")]
    assert len(parts) == 3


def test_without_formats_all_is_text() -> None:
    written = "<think>a</think><tool_call>"
    assert read(Reading(), written) == (Text(written),)


def test_only_a_prompt_that_ends_in_the_tag_opens_reasoning() -> None:
    assert THINK.opened_by("<|assistant|>\n<think>\n")
    assert not THINK.opened_by("<think>\n\n</think>\n\n")


WORDS = st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "\n", "b<", "", "think>"]), max_size=12)


@given(tokens=WORDS, opened=st.booleans(), sizes=st.lists(st.integers(1, 3), min_size=1))
def test_tokens_that_begin_before_the_end_of_reasoning_are_counted(tokens: list[str], opened: bool, sizes: list[int]) -> None:
    """However they are grouped; one that adds no text counts with what comes after it."""
    whole = thinking(opened=opened).parser("answer")
    whole.push("".join(tokens))
    whole.finish()
    offsets = [len("".join(tokens[:i])) for i in range(len(tokens))]
    expected = sum(offset < (whole.reasoning_end or 0) for offset in offsets)

    parser = thinking(opened=opened).parser("answer")
    counter = ReasoningCounter(parser)
    waiting: list[int] = []
    num_out = position = 0
    while position < len(tokens):
        size = sizes[position % len(sizes)]
        text = "".join(tokens[position : position + size])
        waiting += offsets[position : position + size]
        num_out += len(text)
        parser.push(text)
        # As the text stream has it: a token comes once a character after its beginning is out.
        counter.push([offset for offset in waiting if offset < num_out])
        waiting = [offset for offset in waiting if offset >= num_out]
        position += size
    parser.finish()
    counter.push(waiting)
    assert counter.num_tokens == expected


CHATML_TOOLS = '{{ tools }}<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>'


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (None, None, None),
        ("{{ messages }}", None, None),
        (CHATML_TOOLS, "hermes", None),
        (CHATML_TOOLS + "<think>", "hermes", "think"),
        ("<tool_call><function=...><parameter=...>", None, None),
        ('<|start_header_id|>{"name": ..., "parameters": ...}<|eot_id|>', "llama3", None),
        ("[TOOL_CALLS][{{ name }}]", "mistral", None),
        ("[TOOL_CALLS]{{ name }}[ARGS] [THINK]", "mistral-args", "mistral"),
        ("<|tool_call>call: <|channel>thought", "gemma", "gemma"),
        ("<start_function_call>call:", "functiongemma", None),
    ],
)
def test_the_template_says_which_formats(template: str | None, tools: str | None, reasoning: str | None) -> None:
    dialect = choose_dialect(template)
    assert (dialect.tools and dialect.tools.name, dialect.reasoning and dialect.reasoning.name) == (tools, reasoning)


@pytest.mark.parametrize(
    ("file", "tools", "reasoning"),
    [
        ("HuggingFaceTB-SmolLM3-3B", None, "think"),
        ("Mistral-Small-3.2-24B-Instruct-2506", "mistral-args", None),
        ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "hermes", None),
        ("Qwen-Qwen2.5-7B-Instruct", "hermes", None),
        ("Qwen-Qwen3-0.6B", "hermes", "think"),
        ("google-gemma-2-2b-it", None, None),
        ("meta-llama-Llama-3.1-8B-Instruct", "llama3", None),
        ("meta-llama-Llama-3.2-3B-Instruct", "llama3", None),
        ("microsoft-Phi-3.5-mini-instruct", None, None),
        ("mistralai-Mistral-Nemo-Instruct-2407", "mistral", None),
        ("openai-gpt-oss-120b", None, None),
    ],
)
def test_templates_in_the_wild(shared: Path, file: str, tools: str | None, reasoning: str | None) -> None:
    source = (shared / "data" / "chat-templates" / f"{file}.jinja").read_text()
    test_the_template_says_which_formats(source, tools, reasoning)


def test_a_name_overrides_the_template() -> None:
    dialect = choose_dialect(CHATML_TOOLS, tool_format="llama3", reasoning_format="think")
    assert dialect.tools is TOOL_FORMATS["llama3"]
    assert dialect.reasoning is THINK
    assert str(dialect) == "tool calls: llama3; reasoning: think"
    assert str(choose_dialect(CHATML_TOOLS, tool_format="none")) == "tool calls: none; reasoning: none"
    with pytest.raises(ConfigError, match=r"tool_format must be auto, none or one of hermes, .* found 'json'"):
        choose_dialect(None, tool_format="json")
