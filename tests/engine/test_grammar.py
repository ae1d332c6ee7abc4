"""Grammars: what compiles, what each lets through, what is refused and how, and what hostile ones cost."""

import contextlib
import json
import re
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.constraint import Grammar, GrammarKind
from jaxserve.engine import grammar as grammar_module
from jaxserve.engine.grammar import MAX_GRAMMAR_CHARACTERS, GrammarCompiler
from jaxserve.engine.json_schema import ecma_regex
from jaxserve.errors import EngineError, InvalidRequest
from tests.engine import tiny_tokenizers
from tests.engine.grammars import (
    COMPILER,
    END_ID,
    ID_OF_BYTE,
    TOKENIZER,
    VOCAB_SIZE,
    accepts,
    allowed,
    compiled,
    json_schema,
    regex,
)

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


PATTERNS = [{"anyOf": [{"type": "string", "pattern": f"{i}.*{j}"} for j in range(9)]} for i in range(9)]
TANGLE = {
    f"d{i}": {"anyOf": [{"type": "array", "items": {"$ref": f"#/$defs/d{(i + j) % 60}"}} for j in range(20)]}
    for i in range(60)
}


def lark(text):
    return Grammar(GrammarKind.LARK, text)


def choice(*choices):
    return Grammar(GrammarKind.CHOICE, json.dumps(choices))


def refusal(grammar):
    with pytest.raises(InvalidRequest) as caught:
        COMPILER.compile(grammar)
    assert caught.value.param == grammar.param
    return str(caught.value)


class TestKinds:
    @pytest.mark.parametrize(
        ("grammar", "good", "bad"),
        [
            (regex("a+b"), ["ab", "aaab"], ["", "b", "abc", "xab"]),
            (regex("(?i)yes|no"), ["YES", "no"], ["yesno"]),
            (regex("a/b"), ["a/b"], ["a\\/b"]),
            (choice("red", "dark green", 'quo"te', "naïve"), ["red", "dark green", 'quo"te', "naïve"], ["re", "reddark"]),
            (lark('start: "a" (" " NAME)*\nNAME: /[a-z]+/'), ["a", "a bc d"], ["a ", "b"]),
            (lark('start: "<" inner ">"\ninner: %json {"type": "integer"}'), ["<12>"], ["<x>", "<>"]),
            (json_schema(PERSON), ['{"name":"é","age":3}', '{ "name" : "" , "age": -1 }'], ['{"age":3,"name":"x"}', "{}"]),
            (json_schema({"type": "object"}), ["{}", '{"a":[1,null,{"b":"c"}]}'], ["[]", "1", "{", " {}", '{"a":1} ']),
            (json_schema(True), ["1", '"a"'], ["a", ""]),
        ],
    )
    def test_texts(self, grammar, good, bad):
        assert [text for text in good if not accepts(grammar, text)] == []
        assert [text for text in bad if accepts(grammar, text)] == []

    def test_whitespace_in_json_is_one_space_at_most(self):
        assert accepts(json_schema(PERSON), '{ "name" : "a" , "age" : 1 }')
        for text in ('{  "name":"a","age":1}', '{"name":"a",\n"age":1}', '{"name":"a","age":1 \n}', '{"name":"a","age":1}  '):
            assert not accepts(json_schema(PERSON), text)

    def test_a_key_cannot_be_spelt_so_that_it_escapes_its_schema(self):
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
        assert accepts(json_schema(schema), '{"a":1,"b":"x"}')
        for text in ('{"\\u0061":"x"}', '{"a":1,"a":"x"}', '{"b":"x","a":"y"}'):
            assert not accepts(json_schema(schema), text)

    @pytest.mark.parametrize(
        ("schema", "good"),
        [
            ({"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}, '{"a":{"a":{}}}'),
            ({"type": "array", "items": {"$ref": "#"}}, "[[],[[]]]"),
            ({"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"type": "null"}]}, "[[null]]"),
            ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "null"}}, "$ref": "#/$defs/a"}, "null"),
            ({"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, '{"a":null}'),
        ],
    )
    def test_schemas_that_refer_to_themselves(self, schema, good):
        assert accepts(json_schema(schema), good)


class TestMatcher:
    def follow(self, grammar, text):
        matcher = compiled(grammar).start()
        for byte in text.encode():
            matcher.advance(ID_OF_BYTE[byte])
        return matcher

    def test_masks_have_the_logits_width_and_no_ids_without_text(self):
        mask = compiled(regex(r"(?s:.)*")).start().mask()
        assert len(mask) == VOCAB_SIZE // 8
        ids = allowed(mask)
        assert END_ID in ids
        assert tiny_tokenizers.IM_START_ID not in ids
        assert max(ids) < TOKENIZER.vocab_size
        assert all(TOKENIZER.token_bytes(token_id) for token_id in ids)

    def test_the_end_comes_only_where_the_text_is_whole(self):
        assert END_ID not in allowed(self.follow(regex("ab?"), "").mask())
        matcher = self.follow(regex("ab?"), "a")
        assert allowed(matcher.mask()) == {ID_OF_BYTE[ord("b")], END_ID}
        assert not matcher.done
        matcher.advance(ID_OF_BYTE[ord("b")])
        assert matcher.done
        assert allowed(matcher.mask()) == {END_ID}

    def test_after_the_end_only_ends_follow(self):
        matcher = self.follow(regex("a*"), "aa")
        for _ in range(3):
            matcher.advance(END_ID)
            assert matcher.done
            assert allowed(matcher.mask()) == {END_ID}
            assert matcher.forced() == ()

    def test_all_end_tokens_are_allowed_at_the_end(self):
        compiler = GrammarCompiler(TOKENIZER, VOCAB_SIZE, (END_ID, tiny_tokenizers.EOS_ID))
        matcher = compiler.compile(regex("a?")).start()
        assert {END_ID, tiny_tokenizers.EOS_ID} < allowed(matcher.mask())

    def test_forced_tokens_are_those_of_masks_with_one_bit(self):
        matcher = compiled(json_schema(PERSON)).start()
        num_forced = 0
        for text in ("", ' "', "hello", '"', ","):
            for byte in text.encode():
                matcher.advance(ID_OF_BYTE[byte])
            for token_id in matcher.forced():
                assert allowed(matcher.mask()) == {token_id}
                matcher.advance(token_id)
                num_forced += 1
        assert num_forced > 4

    def test_sequences_of_one_constraint_do_not_touch_each_other(self):
        constraint = compiled(regex("ab|cd"))
        first, second = constraint.start(), constraint.start()
        first.advance(ID_OF_BYTE[ord("a")])
        assert allowed(first.mask()) == {ID_OF_BYTE[ord("b")]}
        assert allowed(second.mask()) == {ID_OF_BYTE[ord("a")], ID_OF_BYTE[ord("c")]}

    def test_a_matcher_that_fails_for_what_others_have_used_up_begins_again(self):
        matcher = compiled(regex("abc")).start()
        matcher.advance(ID_OF_BYTE[ord("a")])
        matcher._matcher.consume_token(ID_OF_BYTE[ord("x")])
        assert matcher._matcher.is_error()
        assert allowed(matcher.mask()) == {ID_OF_BYTE[ord("b")]}

    def test_a_grammar_that_becomes_too_complex_says_so(self):
        matcher = compiled(regex("(?:a?){2000}a{2000}")).start()

        def follow():
            for _ in range(10):
                matcher.mask()
                matcher.advance(ID_OF_BYTE[ord("a")])

        with pytest.raises(EngineError, match="grammar could not be followed: lexer"):
            follow()

    def test_a_sentencepiece_vocabulary(self):
        tokenizer = tiny_tokenizers.sentencepiece()
        compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, (2,))
        matcher = compiler.compile(regex(" hello| help")).start()
        texts = {tokenizer.token_bytes(token_id) for token_id in allowed(matcher.mask())}
        assert texts == {b" ", b" h", b" hel", b" hell", b" hello"}


class TestRefusals:
    @pytest.mark.parametrize(
        ("schema", "reason"),
        [
            ({"type": "not-a-type"}, "not-a-type"),
            ({"$ref": "#"}, "no text satisfies it"),
            ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "requires itself in itself"),
            ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "requires itself in itself"),
            ({"$defs": {"a/b": {"allOf": [{"$ref": "#/$defs/a~1b"}]}}, "$ref": "#/$defs/a~1b"}, "no text satisfies it"),
            ({"anyOf": [{"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}]}, "requires itself in itself"),
            ({"$ref": "#/$defs/missing"}, "/\\$defs/missing"),
            ({"$ref": "https://example.com/schema.json"}, "example.com"),
            ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
            ({"type": "string", "pattern": "["}, "regex"),
            ({"type": "number", "minimum": 3, "maximum": 2}, "minimum"),
            ({"enum": []}, "empty"),
            ({"not": {"type": "string"}}, "not"),
            ({"uniqueItems": True}, "uniqueItems"),
            ({"if": {}, "then": {}}, "if"),
            ({"format": "no-such-format"}, "no-such-format"),
            (False, "an object"),
            ([], "an object"),
            ("string", "an object"),
            ({"properties": {"a": 5}}, "/properties/a"),
            ({"properties": {"a": {"nullable": True, "type": "string"}}}, "nullable"),
            ({"divisibleBy": 2}, "multipleOf"),
            ({"properties": {"a": {"required": True}}}, "at /properties/a: 'required' must be an array"),
            ({"x-guidance": {"lenient": True}}, "x-guidance"),
            ({"type": "object", "minProperties": 2}, "minProperties"),
            ({"const": "a\0b"}, "control character"),
            ({"oneOf": [{"minimum": 1}, {"maximum": 5}]}, "oneOf"),
        ],
    )
    def test_schemas(self, schema, reason):
        message = refusal(json_schema(schema))
        assert message.startswith("grammar: ")
        assert len(message) < 600
        assert re.search(reason, message), message

    @pytest.mark.parametrize(
        ("grammar", "reason"),
        [
            (Grammar(GrammarKind.JSON_SCHEMA, "{", "response_format"), "response_format: not JSON"),
            (Grammar(GrammarKind.JSON_SCHEMA, "[" * 100_000), "nested too deeply"),
            (regex("("), "regex"),
            (regex(r"\bword\b"), "not supported"),
            (regex("x" * (MAX_GRAMMAR_CHARACTERS + 1)), "characters"),
            (lark("start: missing"), "missing"),
            (lark("start: start"), "no text satisfies it"),
            (lark(""), "Empty grammar"),
            (lark("<<<"), "1"),
            (choice(), "at least one"),
            (choice(""), "not empty"),
            (choice(1), "strings"),
        ],
    )
    def test_others(self, grammar, reason):
        assert reason in refusal(grammar)

    def test_a_schema_nested_deeply(self):
        schema = {"type": "string"}
        for _ in range(100):
            schema = {"type": "array", "items": schema}
        assert "nested more than" in refusal(json_schema(schema))

    def test_a_model_without_an_end_token(self):
        with pytest.raises(InvalidRequest, match="no end-of-sequence token"):
            GrammarCompiler(TOKENIZER, VOCAB_SIZE, ()).compile(regex("a"))

    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            (r"\s+\S", r"[\s\x{FEFF}]+[^\s\x{FEFF}]"),
            (r"[\s,]\\s", r"[\s\x{FEFF},]\\s"),
            (r"\[\S", r"\[[^\s\x{FEFF}]"),
            (r"a.[.]\.", r"a[^\n\r\x{2028}\x{2029}][.]\."),
            (r"[[a]&&--", r"[\[a]&&--"),
            (r"[a-z&&[b--c~~d]", r"[a-z&\&\[b-\-c~\~d]"),
        ],
    )
    def test_patterns_mean_what_ecma_means_by_them(self, pattern, expected):
        assert ecma_regex(pattern) == expected

    @pytest.mark.parametrize(
        ("pattern", "right", "wrong"),
        [
            ("^.$", ["a", "é", "-"], ["\u2028", "\u2029", "\\n", "\\r", "ab"]),
            ("^[[a&&b]$", ["[", "a", "&", "b"], ["c", ""]),
            ("^[+--/]$", ["+", ",", "-", "/"], ["."]),
            (r"^\d\w$", ["1a"], ["٣a", "1é"]),
        ],
    )
    def test_what_patterns_let_pass(self, pattern, right, wrong):
        grammar = json_schema({"type": "string", "pattern": pattern})
        assert [text for text in (*right, *wrong) if accepts(grammar, f'"{text}"')] == right

    @pytest.mark.parametrize("pattern", ["a\\", "[]a]", "[^]a]"])
    def test_patterns_that_would_be_read_otherwise_are_refused(self, pattern):
        assert "at /properties/a: the pattern" in refusal(json_schema({"properties": {"a": {"pattern": pattern}}}))
        assert "the pattern" in refusal(json_schema({"patternProperties": {pattern: {}}}))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["#", "#/$defs/a", "string", "object", "a", "\0", "["]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "type", "$ref"]), inner, max_size=3),
    max_leaves=4,
)
KEYWORDS = st.sampled_from(
    [
        *("type", "properties", "required", "items", "prefixItems", "minItems", "maxItems", "enum", "const", "anyOf", "allOf"),
        *("oneOf", "$ref", "$defs", "additionalProperties", "patternProperties", "pattern", "minProperties", "format", "not"),
        *("minimum", "multipleOf", "maxLength", "nullable", "x-guidance", "$id", "$anchor", "definitions"),
    ]
)


@given(st.recursive(VALUES, lambda inner: st.dictionaries(KEYWORDS, inner, max_size=4), max_leaves=6))
def test_any_json_compiles_or_is_refused(schema):
    with contextlib.suppress(InvalidRequest):
        COMPILER.compile(json_schema(schema)).start().mask()


class TestCost:
    def test_what_was_compiled_is_kept(self, monkeypatch):
        monkeypatch.setattr(grammar_module, "CACHED_GRAMMARS", 2)
        compiler = GrammarCompiler(TOKENIZER, VOCAB_SIZE, (END_ID,))
        first = compiler.compile(regex("a"))
        compiler.compile(regex("b"))
        assert compiler.compile(regex("a")) is first
        compiler.compile(regex("c"))
        assert compiler.compile(regex("a")) is first
        assert len(compiler._compiled) == 2

    def test_the_vocabulary_is_built_once_and_when_asked(self, monkeypatch):
        built = []

        class Counted(grammar_module._Vocabulary):
            def __init__(self, *args):
                built.append(args)
                super().__init__(*args)

        monkeypatch.setattr(grammar_module, "_Vocabulary", Counted)
        compiler = GrammarCompiler(TOKENIZER, VOCAB_SIZE, (END_ID,))
        assert not built
        compiler.prepare()
        assert len(built) == 1
        compiler.compile(regex("a"))
        compiler.prepare()
        assert len(built) == 1

    def test_a_grammar_that_comes_while_the_vocabulary_is_built_waits_for_that(self, monkeypatch):
        building, go_on, built = threading.Event(), threading.Event(), []

        class Slow(grammar_module._Vocabulary):
            def __init__(self, *args):
                built.append(args)
                building.set()
                assert go_on.wait(10)
                super().__init__(*args)

        monkeypatch.setattr(grammar_module, "_Vocabulary", Slow)
        compiler = GrammarCompiler(TOKENIZER, VOCAB_SIZE, (END_ID,))
        compiled = []
        threads = [
            threading.Thread(target=compiler.prepare),
            threading.Thread(target=lambda: compiled.append(compiler.compile(regex("a")))),
        ]
        threads[0].start()
        assert building.wait(10)
        threads[1].start()
        go_on.set()
        for thread in threads:
            thread.join(10)
        assert (len(built), len(compiled)) == (1, 1)

    def test_without_an_end_there_is_nothing_to_prepare(self):
        GrammarCompiler(TOKENIZER, VOCAB_SIZE, ()).prepare()

    def test_many_threads_may_compile_at_once(self):
        compiler = GrammarCompiler(TOKENIZER, VOCAB_SIZE, (END_ID,))
        results = []

        def work():
            for number in range(20):
                matcher = compiler.compile(regex(f"a{number % 5}")).start()
                results.append(allowed(matcher.mask()) == {ID_OF_BYTE[ord("a")]})

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [True] * 80

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "grammar",
        [
            regex("((a{0,100}){0,100}){0,100}"),
            regex("(?:a?){2000}a{2000}"),
            regex("(a|b)*a(a|b){5000}"),
            regex(r"(\p{L}\p{M}*){1,5000}" * 20),
            regex("(" * 5000 + "a" + ")" * 5000),
            json_schema({"type": "array", "minItems": 1_000_000, "maxItems": 1_000_000, "items": {"type": "string"}}),
            json_schema({"enum": [f"{i}-{i * 7919 % 10007}" for i in range(9000)]}),
            json_schema({"allOf": PATTERNS}),
            json_schema({"$defs": TANGLE, "$ref": "#/$defs/d0"}),
            lark("start: a\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(40)) + '\na40: "x"\na: a0'),
            lark("start: e\ne: e e | e e e | /a/ |"),
        ],
        ids=range(11),
    )
    def test_what_is_hostile_is_refused_or_followed_within_bounds(self, grammar):
        # Times are of the process, which others on the machine do not change.
        started = time.process_time()
        try:
            matcher = COMPILER.compile(grammar).start()
        except InvalidRequest:
            assert time.process_time() - started < 3.0
            return
        assert time.process_time() - started < 3.0
        worst = 0.0
        try:
            for _ in range(200):
                before = time.process_time()
                ids = allowed(matcher.mask())
                worst = max(worst, time.process_time() - before)
                matcher.advance(min(ids - {END_ID}, default=END_ID))
        except EngineError:
            pass
        assert worst < 0.5
