"""Request bodies: every field works or is refused by name."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequest, ModelNotFound, RequestError
from jaxserve.request import SamplingParams
from jaxserve.server.call import Call
from jaxserve.server.openai import parse_chat, parse_completion
from jaxserve.server.schema.chat import ChatRequest
from jaxserve.server.schema.completions import CompletionRequest
from tests.engine import tiny_tokenizers as tiny

TOKENIZER = tiny.byte_level()
HELLO = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> Call:
    body = json.dumps({"model": "m", "prompt": "hello", **fields}).encode()
    return parse_completion(body, TOKENIZER, model="m", max_context=512, call_id="c")


def chat(**fields: Any) -> Call:
    body = json.dumps({"model": "m", "messages": HELLO, **fields}).encode()
    return parse_chat(body, TOKENIZER, model="m", max_context=512, call_id="c")


def fields_of(parse: Any) -> list[str]:
    return list((ChatRequest if parse is chat else CompletionRequest).__struct_fields__)


BOTH = pytest.mark.parametrize("parse", [completion, chat])


# --- fields that work -------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("max_tokens", 7, 7),
        ("min_tokens", 3, 3),
        ("temperature", 0, 0.0),
        ("temperature", 1.5, 1.5),
        ("top_p", 0.5, 0.5),
        ("top_k", 40, 40),
        ("top_k", -1, -1),
        ("min_p", 0.1, 0.1),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("presence_penalty", -2, -2.0),
        ("frequency_penalty", 2.0, 2.0),
        ("repetition_penalty", 1.1, 1.1),
        ("stop", "END", ("END",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", [], ()),
        ("stop_token_ids", [5, 6], (5, 6)),
        ("ignore_eos", True, True),
        ("logit_bias", {"5": -100, "17": 2.5}, ((5, -100.0), (17, 2.5))),
    ],
)
def test_sampling_fields(parse: Any, field: str, value: Any, expected: Any) -> None:
    fields = {"max_tokens": 9, field: value}
    (request,) = parse(**fields).requests
    assert getattr(request.params, field) == expected


@BOTH
def test_null_is_the_default(parse: Any) -> None:
    nulls = dict.fromkeys(name for name in fields_of(parse) if name not in ("model", "prompt", "messages"))
    assert parse(**nulls) == parse()


def test_defaults_are_openai_s() -> None:
    assert completion().requests[0].params == SamplingParams(max_tokens=16)
    assert chat().requests[0].params == SamplingParams(max_tokens=None)
    assert not completion().stream
    assert not completion().include_usage


@BOTH
def test_priority_and_labels(parse: Any) -> None:
    (request,) = parse(priority=-3, user="u", safety_identifier="s", prompt_cache_key="k").requests
    assert request.priority == -3


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", [TOKENIZER.encode("hello")]),
        (["hello", "world"], [TOKENIZER.encode("hello"), TOKENIZER.encode("world")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        ("<|im_start|>user", [TOKENIZER.encode("<|im_start|>user")]),
    ],
)
def test_prompts(prompt: Any, expected: list[list[int]]) -> None:
    call = completion(prompt=prompt)
    assert [list(request.prompt) for request in call.requests] == expected
    assert call.num_prompt_tokens == sum(map(len, expected))


@BOTH
def test_prompts_are_cut_to_their_ends(parse: Any) -> None:
    whole = parse().requests[0].prompt
    for kept in (1, 2, len(whole), len(whole) + 1):
        assert parse(truncate_prompt_tokens=kept).requests[0].prompt == whole[-kept:]


def test_a_prompt_that_was_cut_is_echoed_as_its_tokens() -> None:
    call = completion(prompt=["hello world", "hello"], truncate_prompt_tokens=2, echo=True)
    assert call.prompt_texts == (None, "hello")
    assert call.num_prompt_tokens == 3
    long = "hello world " * 1000
    with pytest.raises(InvalidRequest, match="context"):
        completion(prompt=long)
    assert completion(prompt=long, truncate_prompt_tokens=9).num_prompt_tokens == 9
    with pytest.raises(InvalidRequest, match="context"):
        completion(prompt=long * 100, truncate_prompt_tokens=9)


def test_choices_are_ordered_by_prompt_and_seeded_apart() -> None:
    call = completion(prompt=[[5], [6, 7]], n=3, seed=10)
    assert [r.prompt for r in call.requests] == [(5,)] * 3 + [(6, 7)] * 3
    assert [r.params.seed for r in call.requests] == [10, 11, 12] * 2
    assert [r.request_id for r in call.requests] == [f"c-{i}" for i in range(6)]
    assert call.num_prompt_tokens == 3
    assert [r.params.seed for r in completion(n=2).requests] == [None, None]
    assert [r.params.seed for r in completion(n=2, seed=2**64 - 1).requests] == [2**64 - 1, 0]


def test_logprobs_of_both_shapes() -> None:
    assert completion(logprobs=0).requests[0].params.logprobs == 0
    assert completion(logprobs=20).requests[0].params.logprobs == 20
    assert chat(logprobs=True).requests[0].params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).requests[0].params.logprobs == 5
    assert chat(logprobs=False, top_logprobs=0).requests[0].params.logprobs is None


def test_both_names_of_max_tokens() -> None:
    assert chat(max_completion_tokens=5).requests[0].params.max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).requests[0].params.max_tokens == 5
    with pytest.raises(InvalidRequest, match="old name") as caught:
        chat(max_completion_tokens=5, max_tokens=6)
    assert caught.value.param == "max_tokens"


def test_usage_in_streams() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={}).include_usage
    assert chat(stream=True).stream


@BOTH
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 1),
        ("suffix", None),
        ("tools", []),
        ("tool_choice", "none"),
        ("response_format", {"type": "text"}),
        ("store", False),
        ("metadata", None),
        ("service_tier", "auto"),
        ("modalities", ["text"]),
        ("parallel_tool_calls", True),
        ("parallel_tool_calls", False),
    ],
)
def test_fields_that_change_nothing_are_accepted(parse: Any, field: str, value: Any) -> None:
    if field in fields_of(parse):
        assert parse(**{field: value}) == parse()
    else:
        with pytest.raises(InvalidRequest, match="unknown field"):
            parse(**{field: value})


# --- fields that are refused ------------------------------------------------------------------------------------------

WRONG: dict[str, list[Any]] = {
    "max_tokens": [-1, 1.0, "5", True, [5], 2**40],
    "min_tokens": [-1, 0.5, "1", False],
    "temperature": [-0.1, 1000, "1", True, math.nan, math.inf, 10**400, "hot"],
    "top_p": [0, 1.1, "0.5", math.nan],
    "top_k": [-2, 1.5, "5", True, 2**31],
    "min_p": [-0.1, 1.1, -math.inf],
    "seed": [1.0, "1", True, 2**64, -(2**63) - 1],
    "presence_penalty": [2.1, "x", math.nan],
    "frequency_penalty": [-2.1, {}, math.inf],
    "repetition_penalty": [0, -1, 101],
    "stop": ["", ["a", ""], [1], 5, {"a": 1}, ["a"] * 17, "x" * 257, ["\ud800"], True],
    "stop_token_ids": [5, ["5"], [1.0], [True], list(range(17))],
    "ignore_eos": [1, "true"],
    "logit_bias": [
        [],
        {"x": 1},
        {"5": "1"},
        {"5": 101},
        {"5": math.nan},
        {"-1": 1},
        {"1_0": 1},
        {"05": 1},
        {"٣": 1},
        {"9" * 4000: 1},
        {str(i): 1 for i in range(301)},
    ],
    "n": [0, -1, 129, 1.0, "2", True],
    "stream": [1, "true", []],
    "stream_options": [{"include_usage": True}, [], True],
    "priority": [1.5, "1", True, 2**40],
    "user": [5, {}, "\ud800"],
    "echo": [0, "false"],
    "store": [True, 0],
    "metadata": [{"a": "b"}, []],
    "service_tier": ["flex", 1],
    "response_format": [{"type": "json_schema", "json_schema": {}}, "text"],
    "prompt_logprobs": [-1, 21, True, "1"],
    "skip_special_tokens": [0, 1, "false"],
    "include_stop_str_in_output": [0, 1, "true"],
    "spaces_between_special_tokens": [False, 1],
    "add_special_tokens": [0, "no"],
}
WRONG_COMPLETION: dict[str, list[Any]] = {
    "best_of": [0, 129, True, 1.0],
    "suffix": ["tail", 1],
    "logprobs": [-1, 21, True, 1.0, "5"],
    "prompt": [None, 5, {}, [], True, "\ud800", 1.5],
}
WRONG_CHAT: dict[str, list[Any]] = {
    "max_completion_tokens": [0, 1.5, True],
    "max_tokens": [0],
    "echo": [True],
    "logprobs": [1, 5, "true"],
    "top_logprobs": [5, 21, -1, True],
    "tools": [[{"type": "function", "function": {"name": "f"}}], {}, [{"type": "custom"}], [{"type": "function"}]],
    "tool_choice": ["required", "some", {"type": "function"}, {"type": "function", "function": {"name": "f"}}],
    "functions": [[{"name": "f"}]],
    "modalities": [["text", "audio"], ["audio"]],
    "reasoning_effort": ["low", "extreme", 5],
    "parallel_tool_calls": [0, "no"],
    "messages": [None, [], "hi", {}, 5],
    "chat_template": ["{{ 1 }}", 5, "x" * 70_000],
    "add_generation_prompt": [0, "no"],
    "continue_final_message": [1, "yes"],
}


def cases(wrong: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(field, value) for field, values in wrong.items() for value in values]


def check_refused(parse: Any, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**{field: value})
    assert caught.value.param is not None
    assert re.fullmatch(rf"{field}([.\[].*)?", caught.value.param)
    assert field in str(caught.value)
    assert len(str(caught.value)) < 500


@BOTH
@pytest.mark.parametrize(("field", "value"), cases(WRONG))
def test_wrong_values_are_refused_by_name(parse: Any, field: str, value: Any) -> None:
    check_refused(parse, field, value)


@pytest.mark.parametrize(("field", "value"), cases(WRONG_COMPLETION))
def test_wrong_values_of_completions(field: str, value: Any) -> None:
    check_refused(completion, field, value)


@pytest.mark.parametrize(("field", "value"), cases(WRONG_CHAT))
def test_wrong_values_of_chat(field: str, value: Any) -> None:
    check_refused(chat, field, value)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (["a", 5], "prompt[1]"),
        ([5, "a"], "prompt[1]"),
        ([[5], "a"], "prompt[1]"),
        ([[5], [True]], "prompt[1][0]"),
        ([5, True], "prompt[1]"),
        ([5, -1], "prompt[1]"),
        (["a", "\udfff"], "prompt[1]"),
        ([None], "prompt[0]"),
    ],
)
def test_mixed_prompts_are_refused_where_they_differ(prompt: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt)
    assert caught.value.param == param


def test_one_body_cannot_ask_for_too_many_sequences() -> None:
    for prompt, n in (([[5]] * 2049, 1), (["a"] * 2049, 1), ([[5]] * 100, 128)):
        with pytest.raises(InvalidRequest, match="2048 sequences"):
            completion(prompt=prompt, n=n)


def test_text_that_cannot_fit_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "_encode", lambda _: pytest.fail("must not encode"))
    long = "a" * 10_000_000
    for parse, fields, name in (
        (completion, {"prompt": long}, "prompt"),
        (completion, {"prompt": ["a" * 10_000_000]}, r"prompt\[0\]"),
        (chat, {"messages": [{"role": "user", "content": long}]}, "messages"),
        (chat, {"messages": [{"role": "user", "content": "a" * 1000}] * 10_000}, "messages"),
    ):
        with pytest.raises(InvalidRequest, match=rf"^{name} has \d{{8}} characters, .* maximum context length is 512 tokens$"):
            parse(**fields)


@BOTH
@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("temprature", "did you mean 'temperature'"),
        ("max_token", "did you mean 'max_tokens'"),
        ("top_K", "did you mean 'top_k'"),
        ("zzz", "unknown field 'zzz'"),
        ("x" * 5000, "unknown field"),
        ("\ud800", "must be text, found half of a surrogate pair"),
    ],
)
def test_unknown_fields_name_the_nearest(parse: Any, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        parse(**{field: None})
    assert len(str(caught.value)) < 500


@BOTH
def test_wrong_types_say_what_was_found(parse: Any) -> None:
    cases: list[tuple[Any, str]] = [
        ("hot", "found string 'hot'"),
        (True, "found true"),
        ([1, 2], "found array of 2"),
        ({"a": 1}, "found object of 1"),
        (-0.5, "found number -0.5"),
        (101, "found integer 101"),
        ("x" * 10_000, r"found string 'x{60}'\.\.\. of 10000 characters"),
    ]
    for value, found in cases:
        with pytest.raises(InvalidRequest, match=f"^temperature must be a number from 0 to 100, {found}$"):
            parse(temperature=value)


@pytest.mark.parametrize("value", [[], None, 1, "x", True, 1.5])
def test_a_body_that_is_no_object(value: Any) -> None:
    for parse in (parse_completion, parse_chat):
        with pytest.raises(InvalidRequest, match="the body must be a JSON object, found"):
            parse(value, TOKENIZER, model="m", max_context=512, call_id="c")


@BOTH
def test_models(parse: Any) -> None:
    with pytest.raises(ModelNotFound, match="'gpt-4' does not exist; this server has 'm'"):
        parse(model="gpt-4")
    for wrong in (None, 5, ["m"]):
        with pytest.raises(InvalidRequest, match="model must be a string"):
            parse(model=wrong)


# --- anything ---------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(fields=st.dictionaries(st.sampled_from(sorted({*fields_of(chat), *fields_of(completion)})), JSON, max_size=4))
def test_any_body_is_a_call_or_a_request_error(fields: dict[str, Any]) -> None:
    for parse in (parse_completion, parse_chat):
        try:
            call = parse({"model": "m", **fields}, TOKENIZER, model="m", max_context=512, call_id="c")
        except RequestError:
            continue
        assert call.requests
