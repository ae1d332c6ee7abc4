"""Parsers of calls: what each form reads as, and what holds for any text however it is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.tools.formats import TOOL_FORMATS
from jaxserve.engine.tools.parts import CallArguments
from tests.engine.tools.reading import NAMES, calls_of, read, text_of, tool_reading

FORMATS = sorted(TOOL_FORMATS)
GEMMA_QUOTES = {"gemma": '<|"|>', "functiongemma": "<escape>"}
CONTROL_TOKENS = {
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "mistral-args": ("[TOOL_CALLS]",),
    "gemma": ("<|tool_call>",),
    "functiongemma": ("<start_function_call>",),
}

# --- what models write ------------------------------------------------------------------------------------------------

WEATHER = [("get_weather", '{"city": "Paris"}')]
TWO = [*WEATHER, ("f", "{}")]

WRITTEN: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "hermes": [
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", WEATHER),
        (
            'Let me see.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
            "Let me see.",
            TWO,
        ),
        ('<tool_call>{"arguments":{"city": "Paris"},"name":"get_weather"}</tool_call> done', "done", WEATHER),
        # A function without arguments; one too few and one too many braces; arguments as a string of JSON.
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', "", WEATHER),
        # The closing tag within a string is part of the string.
        (
            '<tool_call>{"name": "f", "arguments": {"a": "\\"}</tool_call>"}}</tool_call>',
            "",
            [("f", '{"a": "\\"}</tool_call>"}')],
        ),
        # No calls.
        ("The tag <tool_call> begins a call.", "The tag <tool_call> begins a call.", []),
        ('  <tool_call> ["f"] </tool_call>', '  <tool_call> ["f"] </tool_call>', []),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', '<tool_call>{"name": 3, "arguments": {}}</tool_call>', []),
        ("a < b\n", "a < b\n", []),
        # Cut off: within the arguments, the closing tag, the name, and what is no JSON.
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa', "", [("get_weather", '{"city": "Pa')]),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_', "", [("f", "{}")]),
        ('<tool_call>\n{"name": "get_w', '<tool_call>\n{"name": "get_w', []),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> so', "so", [("f", '{"a": 1')]),
    ],
    "llama3": [
        ('{"name": "get_weather", "parameters": {"city": "Paris"}}', "", WEATHER),
        ('\n{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "f", "parameters": {}}', "", TWO),
        ('{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}', "", WEATHER),
        ('<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', "", WEATHER),
        ('Sure. <|python_tag|>{"name": "other", "parameters": {}}', "Sure.", [("other", "{}")]),
        # An answer in JSON is no call, nor is a program.
        ('{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}', []),
        ('{"answer": {"name": "f"}}', '{"answer": {"name": "f"}}', []),
        ('So: {"name": "f", "parameters": {}}', 'So: {"name": "f", "parameters": {}}', []),
        ("<|python_tag|>print(1)", "print(1)", []),
        ('{"name": "f", "parameters": {}}; and now', "; and now", [("f", "{}")]),
        ('{"name": "get_weather", "parameters": {"city": "P', "", [("get_weather", '{"city": "P')]),
    ],
    "mistral": [
        ('[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}]', "", WEATHER),
        ('[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "f", "arguments": {}}]', "", TWO),
        ('Well.[TOOL_CALLS]{"name": "f", "arguments": {}}', "Well.", [("f", "{}")]),
        ("[TOOL_CALLS] none", " none", []),
        ("[TOOL_CALLS][1, 2]", "[1, 2]", []),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}, {"nom": 1}]', '{"nom": 1}]', [("f", "{}")]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": [', "", [("f", '{"a": [')]),
    ],
    "mistral-args": [
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', "", WEATHER),
        ('[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]f{}', "", TWO),
        ('[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}', "", WEATHER),
        ("[TOOL_CALLS]two words{}", "two words{}", []),
        ("[TOOL_CALLS]get_wea", "get_wea", []),
    ],
    "gemma": [
        ('<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>', "", WEATHER),
        ('<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|><|tool_call>call:f{}<tool_call|>', "", TWO),
        (
            'Hm. <|tool_call>call:f{a:[1,{b:<|"|>x "y"\n,}<|"|>,c:true}],d:-1.5,e:{},g:bare word,h:[]}<tool_call|>',
            "Hm.",
            [("f", '{"a": [1, {"b": "x \\"y\\"\\n,}", "c": true}], "d": -1.5, "e": {}, "g": "bare word", "h": []}')],
        ),
        ('<|tool_call>call:f{"a": "b", <|"|>c<|"|>: 1,}<tool_call|>', "", [("f", '{"a": "b", "c": 1}')]),
        ("<|tool_call>nothing", "nothing", []),
        ('<|tool_call>call:f{a:<|"|>Par', "", [("f", '{"a": "Par')]),
    ],
    "functiongemma": [
        ("<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>", "", WEATHER),
    ],
}


@pytest.mark.parametrize(
    ("name", "written", "text", "calls"),
    [pytest.param(name, *case, id=f"{name}-{i}") for name, cases in WRITTEN.items() for i, case in enumerate(cases)],
)
def test_what_a_model_writes_is_read(name: str, written: str, text: str, calls: list[tuple[str, str]]) -> None:
    for cuts in ((), range(len(written))):
        parts = read(tool_reading(name), written, cuts)
        assert (text_of(parts), calls_of(parts)) == (text, calls)


# --- what holds for any text ------------------------------------------------------------------------------------------

SNIPPETS = sorted({marker for format in TOOL_FORMATS.values() for marker in format.markers})
SNIPPETS += ["call:", "f", "get_weather", '"name"', '"arguments"', '"parameters"', ": ", ", ", "; ", *'{}[]"\\:,; \nab1é']
SNIPPETS += [
    '{"name": "f", "arguments": {',
    '{"name": "f", "parameters": ',
    "call:f{a:",
    "f[ARGS]{",
    "\\u12",
    "\\ud83d\\ude00",
]
TEXTS = st.lists(st.sampled_from(SNIPPETS), max_size=20).map("".join)
CUTS = st.lists(st.integers(0, 60), max_size=6)


@pytest.mark.parametrize("name", FORMATS)
@given(text=TEXTS, cuts=CUTS)
def test_any_text_is_read_alike_however_it_is_cut(name: str, text: str, cuts: list[int]) -> None:
    whole = read(tool_reading(name), text)
    assert read(tool_reading(name), text, cuts) == whole
    assert read(tool_reading(name), text, range(len(text))) == whole
    assert not any(token in text_of(whole) for token in CONTROL_TOKENS.get(name, ()))


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.text(alphabet="ab <[\n", max_size=40), cuts=CUTS)
def test_text_without_calls_comes_back_as_it_is(name: str, text: str, cuts: list[int]) -> None:
    assert text_of(read(tool_reading(name), text, cuts)) == text


ARGUMENTS = st.dictionaries(
    st.text(alphabet="abé_", min_size=1, max_size=4),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\{}[],:é\n😀<', max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet="ab", min_size=1), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), min_size=1, max_size=3)


def write_calls(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The calls in the format's own syntax."""
    syntax = TOOL_FORMATS[name].syntax
    quote = GEMMA_QUOTES.get(name)
    arguments = [write_gemma(value, quote) if quote else json.dumps(value, ensure_ascii=False) for _, value in calls]
    written = [syntax.call(call) + text + syntax.after_call for (call, _), text in zip(calls, arguments, strict=True)]
    return syntax.before + syntax.between.join(written) + syntax.after


def write_gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{write_gemma(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(write_gemma(item, quote) for item in value) + "]"
    return json.dumps(value)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@given(calls=CALLS, text=st.sampled_from(["", "Let me see."]), cuts=CUTS)
def test_calls_come_back_whole(name: str, calls: list[tuple[str, dict[str, Any]]], text: str, cuts: list[int]) -> None:
    if name == "llama3":
        text = ""  # text may not come before a bare object
    parts = read(tool_reading(name), text + ("\n" if text else "") + write_calls(name, calls), cuts)
    assert [(call, json.loads(arguments)) for call, arguments in calls_of(parts)] == calls
    assert text_of(parts) == text


def begun(text: str, marker: str) -> list[int]:
    """Lengths at which `text` ends with the beginning of `marker`."""
    return [length for length in range(1, len(marker)) if text.endswith(marker[:length])]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@given(calls=CALLS, length=st.integers(0, 200), cuts=CUTS)
def test_of_calls_cut_short_the_beginning_comes(
    name: str, calls: list[tuple[str, dict[str, Any]]], length: int, cuts: list[int]
) -> None:
    written = write_calls(name, calls)
    whole = calls_of(read(tool_reading(name), written))
    while name in GEMMA_QUOTES and begun(written[:length], GEMMA_QUOTES[name]):
        length -= 1  # a control token comes whole
    cut = calls_of(read(tool_reading(name), written[:length], cuts))
    assert [call for call, _ in cut] == [call for call, _ in whole[: len(cut)]]
    assert [arguments for _, arguments in cut[:-1]] == [arguments for _, arguments in whole[: max(0, len(cut) - 1)]]
    if cut:
        assert whole[len(cut) - 1][1].startswith(cut[-1][1])


def test_arguments_come_as_they_are_written() -> None:
    """Not at the end of the call: a client shows them growing."""
    parser = tool_reading("hermes").parser("answer")
    parser.push('<tool_call>{"name": "f", "arguments": ')
    assert parser.push('{"a": "long') == (CallArguments(0, '{"a": "long'),)
    assert parser.push(" text") == (CallArguments(0, " text"),)


@pytest.mark.slow
def test_reading_is_linear_in_the_text() -> None:
    """Held white space, brackets and braces by the thousand neither recurse nor take quadratic time."""
    for name in FORMATS:
        opening = TOOL_FORMATS[name].syntax.before + TOOL_FORMATS[name].syntax.call("f")
        for text in (opening + "{" * 5000, opening + '{"a": ' + "[" * 5000, " " * 5000 + "x", "{" * 5000):
            read(tool_reading(name), text, range(0, len(text), 2))
