"""Grammars of calls: what they let pass is calls as their schemas have them, and the parsers read them back."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.constraint import Grammar, GrammarKind
from jaxserve.engine.grammar import GrammarCompiler
from jaxserve.engine.text import Tokenizer
from jaxserve.engine.tools import gemma_schema
from jaxserve.engine.tools.formats import TOOL_FORMATS
from jaxserve.engine.tools.grammar import (
    Function,
    Writing,
    calls_or_answer,
    reasoned_answer,
    required_calls,
    triggered_calls,
)
from jaxserve.engine.tools.reasoning import REASONING_FORMATS
from jaxserve.errors import InvalidRequest
from tests.engine import tiny_tokenizers as tiny
from tests.engine.tools.reading import calls_of, read, tool_reading
from tests.engine.tools.test_parsers import FORMATS, GEMMA_QUOTES, write_calls

CONTROL = sorted({marker for name in FORMATS if name != "hermes" for marker in TOOL_FORMATS[name].markers})


def tokenizer_with(special: list[str]) -> Tokenizer:
    library = tiny.byte_level_library()
    library.add_special_tokens(special)
    return Tokenizer(library.to_str(), eos_token="<|im_end|>")


TOKENIZERS = {"control": tokenizer_with(CONTROL), "text": tiny.byte_level()}
COMPILERS = {
    kind: GrammarCompiler(tokenizer, tokenizer.vocab_size, (tiny.IM_END_ID,)) for kind, tokenizer in TOKENIZERS.items()
}
WEATHER = Function(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["c", "f"]}},
        "required": ["city"],
    },
)
NOTHING = Function("now", {"type": "object", "properties": {}, "additionalProperties": False})
THINK = REASONING_FORMATS["think"]


def writing(name: str, kind: str = "control", **options: Any) -> Writing:
    tokenizer = TOKENIZERS[kind]
    format = TOOL_FORMATS[name]
    return Writing(tokenizer.special_ids_by_name(format.markers), format.syntax, **options)


def accepts(lark: str, text: str, kind: str = "control") -> bool:
    """Whether the grammar lets all of `text` pass, token by token, and an end after it."""
    tokenizer, compiler = TOKENIZERS[kind], COMPILERS[kind]
    matcher = compiler.compile(Grammar(GrammarKind.LARK, lark)).start()
    for token_id in [*tokenizer.encode(text), tiny.IM_END_ID]:
        if not matcher.mask()[token_id >> 3] >> (token_id & 7) & 1:
            return False
        matcher.advance(token_id)
    return True


ONE = [("get_weather", {"city": "Par}is", "days": 3})]
KINDS = ["control", "text"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_required_calls_are_calls_as_their_schemas_have_them(name: str, kind: str) -> None:
    one = required_calls(writing(name, kind), [WEATHER, NOTHING], single=True)
    many = required_calls(writing(name, kind), [WEATHER, NOTHING], single=False)
    both = [*ONE, ("now", {})]
    assert accepts(one, write_calls(name, ONE), kind)
    assert accepts(many, write_calls(name, ONE), kind)
    assert accepts(many, write_calls(name, both), kind)
    refused = [both, [("f", {})], [("get_weather", {})], [("get_weather", {"city": 3})], [("now", {"a": 1})]]
    refused += [[("get_weather", {"city": "x", "unit": "k"})], [("get_weather", {"city": "x", "days": 1.5})]]
    for calls in refused:
        assert not accepts(one, write_calls(name, calls), kind)
    for text in ("", "Hello.", write_calls(name, ONE)[:-1], "Hello. " + write_calls(name, ONE), write_calls(name, ONE) + "x"):
        assert not accepts(many, text, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_triggered_calls_leave_text_alone(name: str, kind: str) -> None:
    lark = triggered_calls(writing(name, kind), [WEATHER, NOTHING], single=False)
    once = triggered_calls(writing(name, kind), [WEATHER, NOTHING], single=True)
    for text in ("", "Hello <b> there.", "a\n\nb"):
        assert accepts(lark, text, kind)
        assert accepts(once, text, kind)
    said = "" if name == "llama3" else "Hello.\n"
    assert accepts(lark, said + write_calls(name, ONE), kind)
    assert accepts(once, said + write_calls(name, ONE), kind)
    assert accepts(lark, said + write_calls(name, [*ONE, ("now", {})]), kind)
    assert not accepts(once, said + write_calls(name, [*ONE, ("now", {})]), kind)
    assert not accepts(lark, said + write_calls(name, [("f", {})]), kind)
    assert not accepts(lark, said + write_calls(name, [("now", {"a": 1})]), kind)


def test_reasoning_may_come_first_and_looks_like_anything() -> None:
    call = write_calls("hermes", ONE)
    thought = '\nMaybe <tool_call>{"name": "f"}</tool_call>?\n'
    begins = writing("hermes", reasoning=THINK)
    for lark in (required_calls(begins, [WEATHER], single=True), triggered_calls(begins, [WEATHER], single=True)):
        assert accepts(lark, call)
        assert accepts(lark, f"<think>{thought}</think>\n\n{call}")
        assert not accepts(lark, f"<think>{thought}</think>\n\n" + write_calls("hermes", [("f", {})]))
    opened = writing("hermes", reasoning=THINK, opened=True)
    lark = required_calls(opened, [WEATHER], single=True)
    assert accepts(lark, f"{thought}</think>\n\n{call}")
    assert not accepts(lark, call)
    assert accepts(triggered_calls(opened, [WEATHER], single=True), f"{thought}</think>\n\nHello.")


ANSWERS = [
    (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object", "required": ["a"]}'), '{"a": 1}', '{"b": 1}'),
    (Grammar(GrammarKind.CHOICE, '["yes", "\\"no\\"/"]'), '"no"/', "no"),
    (Grammar(GrammarKind.REGEX, r"a/b\/[/\d]+|\n"), "a/b/12/", "a/b"),
    (Grammar(GrammarKind.REGEX, "a\\\nb\n\\\\"), "a\nb\n\\", "a\\\nb"),
]


@pytest.mark.parametrize(("answer", "right", "wrong"), ANSWERS)
def test_an_answer_with_a_grammar_of_its_own_may_stand_beside_calls_and_after_reasoning(
    answer: Grammar, right: str, wrong: str
) -> None:
    lark = calls_or_answer(writing("hermes", reasoning=THINK), [WEATHER], answer, single=True)
    for before in ("", "<think>\nhm\n</think>\n\n"):
        assert accepts(lark, before + right)
        assert accepts(lark, before + write_calls("hermes", ONE))
        assert not accepts(lark, before + wrong)
        assert not accepts(lark, before + write_calls("hermes", [("f", {})]))
    for each in (lark, calls_or_answer(writing("hermes"), [WEATHER], answer, single=True)):
        assert not accepts(each, f"\n{right}")
        assert accepts(each, "\n" + write_calls("hermes", ONE))
    assert not accepts(reasoned_answer(writing("hermes", reasoning=THINK), answer), f"\n{right}")
    opened = Writing({}, reasoning=THINK, opened=True)
    assert accepts(reasoned_answer(opened, answer), f"hm\n</think>\n\n{right}")
    assert not accepts(reasoned_answer(opened, answer), right)
    assert not accepts(reasoned_answer(opened, answer), f"hm\n</think>\n\n{wrong}")


@pytest.mark.parametrize("text", ["\\", "a\\", "a\\\\\\"])
def test_an_expression_that_ends_within_an_escape_is_refused(text: str) -> None:
    answer = Grammar(GrammarKind.REGEX, text, "structured_outputs.regex")
    with pytest.raises(InvalidRequest, match="escapes nothing"):
        COMPILERS["text"].compile(answer)
    with pytest.raises(ValueError, match="escapes nothing"):
        reasoned_answer(Writing({}, reasoning=THINK), answer)


def test_what_is_wrong_with_an_expression_is_said_of_it_alone() -> None:
    lark = reasoned_answer(Writing({}, reasoning=THINK), Grammar(GrammarKind.REGEX, "(a"))
    with pytest.raises(InvalidRequest, match=r"^grammar: the expression: invalid regex"):
        COMPILERS["text"].compile(Grammar(GrammarKind.LARK, lark))


def test_a_lark_grammar_cannot_be_part_of_another() -> None:
    with pytest.raises(ValueError, match="cannot be combined with tools"):
        calls_or_answer(writing("hermes"), [WEATHER], Grammar(GrammarKind.LARK, "start: /a/"), single=True)


@pytest.mark.parametrize("name", FORMATS)
def test_what_cannot_be_held_to_is_refused_with_the_function_s_name(name: str) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "nullable": True}}}
    with pytest.raises(ValueError, match=r"the parameters of 'bad': at /properties/a: .*nullable"):
        required_calls(writing(name), [Function("bad", parameters)], single=True)
    with pytest.raises(ValueError, match="'type' must be 'object', found 'string'"):
        required_calls(writing(name), [Function("bad", {"type": "string"})], single=True)


def test_what_does_not_compile_is_said_of_its_function() -> None:
    functions = [WEATHER, Function("bad", {"properties": {"a": {"not": {"type": "string"}}}})]
    for lark in (
        required_calls(writing("hermes"), functions, single=True),
        triggered_calls(writing("hermes"), functions, single=True),
    ):
        with pytest.raises(
            InvalidRequest, match=r"^tools: the parameters of 'bad': failed to compile JSON schema: [^\n]*not[^\n]*$"
        ):
            COMPILERS["control"].compile(Grammar(GrammarKind.LARK, lark, "tools"))


# --- Gemma's notation -------------------------------------------------------------------------------------------------

REFERENCES = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "n": {"type": "null"}}}},
    "properties": {"head": {"$ref": "#/$defs/node"}},
}
GEMMA_SCHEMAS: list[tuple[Mapping[str, Any], list[Any], list[Any]]] = [
    ({}, [{}, {"a": [1, {"b": "x", "c": [None, True]}]}], []),
    ({"additionalProperties": {"type": "integer"}}, [{}, {"a": 1, "b": -2}], [{"a": "x"}]),
    (
        {"properties": {"a": True, "b": {"const": 1}}, "required": ["b"]},
        [{"a": {}, "b": 1}, {"b": 1}],
        [{}, {"a": 1}, {"b": 2}],
    ),
    ({"properties": {"a": {"type": ["integer", "null"]}}}, [{"a": 3}, {"a": None}, {}], [{"a": "x"}]),
    (
        {"properties": {"a": {"anyOf": [{"type": "boolean"}, {"enum": ["x", 3]}]}}},
        [{"a": True}, {"a": "x"}, {"a": 3}],
        [{"a": 4}],
    ),
    (
        {"properties": {"a": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 2}}},
        [{"a": [1.5]}, {"a": [1, -2e3]}],
        [{"a": []}, {"a": [1, 2, 3]}],
    ),
    ({"properties": {"a": {"type": "string", "minLength": 2, "maxLength": 3}}}, [{"a": "xy"}], [{"a": "x"}, {"a": "wxyz"}]),
    ({"properties": {"a b": {"type": "string"}}}, [{"a b": "x"}], [{"a": "x"}]),
    ({"properties": {"a": {"type": "integer"}}, "required": ["b"]}, [{"a": 1, "b": "x"}, {"b": []}], [{}, {"a": 1}]),
    ({"properties": {"a": {"type": "string", "format": "date"}}}, [{"a": "2026-11-30"}], [{"a": "2026-13-30"}, {"a": "x"}]),
    ({"properties": {"a": {"type": "integer", "minimum": 3, "maximum": 12}}}, [{"a": 3}, {"a": 12}], [{"a": 2}, {"a": 13}]),
    (REFERENCES, [{}, {"head": {"next": {"next": {}, "n": None}}}], [{"head": {"next": 1}}]),
]


@pytest.mark.slow
@pytest.mark.parametrize("schema", GEMMA_SCHEMAS, ids=range(len(GEMMA_SCHEMAS)))
@pytest.mark.parametrize("name", sorted(GEMMA_QUOTES))
def test_gemma_s_notation_is_held_to_the_schema(name: str, schema: tuple[Mapping[str, Any], list[Any], list[Any]]) -> None:
    parameters, right, wrong = schema
    lark = required_calls(writing(name), [Function("f", parameters)], single=True)

    def written(arguments: Any) -> str:
        text = write_calls(name, [("f", arguments)])
        return text.replace("a b:", f"{GEMMA_QUOTES[name]}a b{GEMMA_QUOTES[name]}:")

    for arguments in right:
        assert accepts(lark, written(arguments)), arguments
        ((_, read_back),) = calls_of(read(tool_reading(name), written(arguments)))
        assert json.loads(read_back) == arguments
    for arguments in wrong:
        assert not accepts(lark, written(arguments)), arguments


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "at /properties/a: 'pattern' is not supported"),
        ({"properties": {"a": {"type": "string", "format": "time"}}}, "at /properties/a: the format 'time' is not supported"),
        ({"properties": {"a": {"$ref": "other.json"}}}, "is not into the schema itself"),
        ({"properties": {"a": {"$ref": "#/$defs/a"}}}, "leads nowhere"),
        ({"properties": {"a": {"enum": []}}}, "nothing is allowed"),
        ({"properties": {"a": {"type": "date"}}}, "there is no type 'date'"),
    ],
)
def test_what_gemma_s_notation_cannot_say_is_refused(schema: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        required_calls(writing("gemma"), [Function("f", schema)], single=True)


# --- the Berkeley function-calling leaderboard ------------------------------------------------------------------------

BFCL_TYPES = {"dict": "object", "float": "number", "tuple": "array"}


def bfcl_schema(schema: Any) -> Any:
    """The schema with types as JSON Schema calls them."""
    if isinstance(schema, list):
        return [bfcl_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    fixed = {key: bfcl_schema(value) for key, value in schema.items() if key != "optional"}
    if isinstance(fixed.get("type"), str):
        fixed["type"] = BFCL_TYPES.get(fixed["type"], fixed["type"])
        if fixed["type"] == "any":
            del fixed["type"]
    return fixed


def bfcl_lines(shared: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (shared / "data" / "tools" / f"BFCL_v4_{name}.json").read_text().splitlines()]


def bfcl_functions(line: dict[str, Any]) -> list[Function]:
    return [Function(function["name"], bfcl_schema(function["parameters"])) for function in line["function"]]


@pytest.mark.slow
@pytest.mark.parametrize("file", ["simple_python", "multiple", "parallel", "irrelevance"])
def test_a_grammar_of_every_function_in_the_wild_compiles(shared: Path, file: str) -> None:
    for number, line in enumerate(bfcl_lines(shared, file)):
        name = ("hermes", "gemma")[number % 2]
        lark = required_calls(writing(name), bfcl_functions(line), single=False)
        COMPILERS["control"].compile(Grammar(GrammarKind.LARK, lark))


def first_choice(value: Any) -> Any:
    """An argument of an answer, where fields of objects are lists of what is right."""
    if isinstance(value, dict):
        return {key: first_choice(choices[0]) for key, choices in value.items() if choices[0] != ""}
    return [first_choice(item) for item in value] if isinstance(value, list) else value


@pytest.mark.slow
def test_answers_in_the_wild_are_accepted_and_read_back(shared: Path) -> None:
    """What the leaderboard takes for right, its first choice of each argument, in every form in turn; a few are not."""
    wrong = []
    lines = {line["id"]: line for line in bfcl_lines(shared, "simple_python")}
    for number, answer in enumerate(bfcl_lines(shared, "simple_python_answers")):
        (call,) = answer["ground_truth"]
        ((function, choices),) = call.items()
        given = {key: [value for value in values if value != ""] for key, values in choices.items()}
        arguments = {key: first_choice(values[0]) for key, values in given.items() if values}
        (schema,) = bfcl_functions(lines[answer["id"]])
        name = FORMATS[number % len(FORMATS)]
        properties = schema.parameters.get("properties", {})
        ordered = {key: arguments[key] for key in properties if key in arguments}
        written = write_calls(name, [(function, ordered)])
        parts = read(replace(tool_reading(name), names=frozenset({function})), written)
        assert [(called, json.loads(text)) for called, text in calls_of(parts)] == [(function, ordered)]
        lark = required_calls(writing(name), [schema], single=True)
        if not accepts(lark, written):
            wrong.append((answer["id"], written))
    assert [answer_id for answer_id, _ in wrong] == ["simple_python_307"]  # a boolean for a string


# --- hostile schemas --------------------------------------------------------------------------------------------------

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(alphabet='a"\\/{}[]<>%\n\x00é', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='ab"\\', max_size=3), inner, max_size=3),
    max_leaves=5,
)
KEYWORDS = sorted([*gemma_schema._KNOWN, "$anchor", "not", "oneOf", "allOf", "pattern", "prefixItems", "patternProperties"])
SCHEMAS = st.recursive(
    JUNK | st.sampled_from([{"type": "string"}, {"$ref": "#"}, {"$ref": "#/properties/a"}, {"type": ["integer", "null"]}]),
    lambda inner: st.dictionaries(
        st.sampled_from(KEYWORDS),
        inner | st.dictionaries(st.sampled_from(["a", "b c", '"', "\\", "<escape>"]), inner, max_size=3),
    ),
    max_leaves=8,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hermes", "gemma"])
@given(schema=st.dictionaries(st.sampled_from(KEYWORDS), SCHEMAS, max_size=4))
def test_whatever_a_schema_is_it_is_compiled_or_refused(name: str, schema: dict[str, Any]) -> None:
    try:
        lark = required_calls(writing(name), [Function("f", schema)], single=False)
    except ValueError:
        return
    with contextlib.suppress(InvalidRequest):
        COMPILERS["control"].compile(Grammar(GrammarKind.LARK, lark))
