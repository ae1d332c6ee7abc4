"""Output: what of a request's events is shown, and what ends it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.output import Output, OutputDelta, ShownToken
from jaxserve.engine.tools.dialect import Reading
from jaxserve.engine.tools.formats import TOOL_FORMATS
from jaxserve.engine.tools.parts import CallBegin, Reasoning, Text, merge
from jaxserve.engine.tools.reasoning import ReasoningFormat
from jaxserve.request import FinishReason, Request, SamplingParams, TokenEvent, TokenLogprobs
from tests.engine import tiny_tokenizers as tiny

TOKENIZER = tiny.byte_level()
EOS = tiny.IM_END_ID


def encode(text: str) -> list[int]:
    return TOKENIZER.encode_plain(text)


def request(**params: object) -> Request:
    return Request(request_id="r", prompt=(3,), params=SamplingParams(**params))  # type: ignore[arg-type]


def event(ids: list[int], reason: FinishReason | None = None, *, num_output: int = 0) -> TokenEvent:
    logprobs = tuple(TokenLogprobs(-float(i), ((i, -float(i)),)) for i in ids)
    return TokenEvent("r", tuple(ids), logprobs, reason, 1, num_output)


def run(wanted: Request, ids: list[int], reason: FinishReason, sizes: list[int]) -> tuple[Output, list[OutputDelta]]:
    """Push `ids` in groups, the last of which ends with `reason`."""
    output = Output(wanted, TOKENIZER)
    return output, push_all(output, ids, reason, sizes)


def push_all(output: Output, ids: list[int], reason: FinishReason, sizes: list[int]) -> list[OutputDelta]:
    deltas: list[OutputDelta] = []
    position = 0
    while output.finish_reason is None:
        size = sizes[len(deltas) % len(sizes)] if sizes else 1
        group, position = ids[position : position + size], position + size
        deltas.append(output.push(event(group, reason if position >= len(ids) else None)))
    return deltas


def test_the_stop_token_is_counted_and_not_shown() -> None:
    for eos in (EOS, *encode("x")):  # a special one, and one that is text
        output, deltas = run(request(logprobs=0), [*encode("hello"), eos], FinishReason.STOP, [])
        assert "".join(delta.text for delta in deltas) == "hello"
        assert [token.token_id for delta in deltas for token in delta.tokens] == encode("hello")
        assert output.num_tokens == len(encode("hello")) + 1
        assert output.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("sizes", [[], [9]], ids=["one_by_one", "at_once"])
@pytest.mark.parametrize(
    ("eos", "params", "expected"),
    [
        (EOS, {}, "hello"),
        (EOS, {"include_stop_str_in_output": True}, "hello"),  # what stopped it has no text
        (EOS, {"skip_special_tokens": False}, "<|im_start|>hello"),
        (EOS, {"skip_special_tokens": False, "include_stop_str_in_output": True}, "<|im_start|>hello<|im_end|>"),
        (encode("!")[0], {}, "hello"),
        (encode("!")[0], {"include_stop_str_in_output": True}, "hello!"),
    ],
)
def test_the_stop_token_s_text_may_stay(eos: int, params: dict[str, bool], expected: str, sizes: list[int]) -> None:
    ids = [tiny.IM_START_ID, *encode("hello"), eos]
    output, deltas = run(request(logprobs=0, **params), ids, FinishReason.STOP, sizes)
    assert "".join(delta.text for delta in deltas) == expected
    assert [delta.stopped_by for delta in deltas] == [None] * (len(deltas) - 1) + [eos]
    shown = [token.token_id for delta in deltas for token in delta.tokens]
    assert shown == (ids if "include_stop_str_in_output" in params else ids[:-1])
    assert output.num_tokens == len(ids)


MARKED = Reading(reasoning=ReasoningFormat("marked", "<|im_start|>", "<|endoftext|>"))
"""Reasoning between special tokens, as some models have it."""


@pytest.mark.parametrize("sizes", [[], [1], [2, 1]])
def test_what_marks_the_parts_of_an_output_is_read_also_where_it_is_special(sizes: list[int]) -> None:
    ids = [tiny.IM_START_ID, *encode("hello"), tiny.EOS_ID, *encode("world"), EOS]
    output = Output(request(), TOKENIZER, MARKED)
    deltas = push_all(output, ids, FinishReason.STOP, sizes)
    assert merge(part for delta in deltas for part in delta.parts or ()) == (Reasoning("hello"), Text("world"))
    assert output.num_reasoning_tokens == 2 + len(encode("hello"))
    assert output.finish_reason is FinishReason.STOP


def test_an_output_that_is_not_read_has_no_parts() -> None:
    output = Output(request(), TOKENIZER)
    delta = output.push(event([tiny.IM_START_ID, tiny.EOS_ID, *encode("hello"), EOS], FinishReason.STOP))
    assert delta == OutputDelta("hello", (), FinishReason.STOP, EOS)
    assert output.num_reasoning_tokens is None


HERMES = Reading(tools=TOOL_FORMATS["hermes"], names=frozenset({"f"}))
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "ending", "named", "expected"),
    [
        (CALL, FinishReason.STOP, False, FinishReason.TOOL_CALLS),
        (CALL, FinishReason.STOP, True, FinishReason.STOP),
        (CALL, FinishReason.LENGTH, False, FinishReason.LENGTH),
        (CALL[:-20], FinishReason.LENGTH, False, FinishReason.LENGTH),
        (CALL[:15], FinishReason.STOP, False, FinishReason.STOP),
        ("hello", FinishReason.STOP, False, FinishReason.STOP),
    ],
)
def test_an_output_that_stops_after_calls_ends_for_their_sake(
    text: str, ending: FinishReason, named: bool, expected: FinishReason
) -> None:
    reading = replace(HERMES, ends_with_calls=not named)
    output = Output(request(), TOKENIZER, reading)
    ids = encode(text) + ([EOS] if ending is FinishReason.STOP else [])
    deltas = push_all(output, ids, ending, [3])
    assert output.finish_reason is expected
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [expected]


def test_ids_of_calls_follow_from_the_request() -> None:
    def first(request_id: str) -> str:
        output = Output(Request(request_id=request_id, prompt=(1,)), TOKENIZER, HERMES)
        (begin, _) = output.push(event([*encode(CALL), EOS], FinishReason.STOP)).parts or ()
        assert isinstance(begin, CallBegin)
        return begin.call_id

    assert first("a") == first("a") != first("b")


@pytest.mark.parametrize(("include", "expected"), [(False, "x hel"), (True, "x hello w")])
def test_a_stop_string_is_named(include: bool, expected: str) -> None:
    wanted = request(stop=("lo w", "w"), include_stop_str_in_output=include)
    output, deltas = run(wanted, encode("x hello world"), FinishReason.LENGTH, [])
    assert "".join(delta.text for delta in deltas) == expected
    assert deltas[-1].stopped_by == "lo w"
    assert output.finish_reason is FinishReason.STOP


def test_the_last_token_is_shown_where_length_ended_it() -> None:
    output, deltas = run(request(), encode("hello w"), FinishReason.LENGTH, [])
    assert "".join(delta.text for delta in deltas) == "hello w"
    assert output.num_tokens == len(encode("hello w"))


def test_a_stop_string_ends_it_before_the_engine_does() -> None:
    output = Output(request(stop=("lo w",), logprobs=0), TOKENIZER)
    assert output.push(event(encode("x hello"))) == OutputDelta("x hel", _shown("x ", "hello"), None)
    ids = encode(" world")
    delta = output.push(event(ids))
    assert (delta.text, delta.tokens, delta.finish_reason) == ("", (), FinishReason.STOP)
    # What was generated beyond the stop string is none of the caller's business.
    assert output.push(event(encode("more"), FinishReason.LENGTH)) == OutputDelta("", (), FinishReason.STOP)
    assert output.num_tokens == len(encode("x hello")) + 1


def _shown(*pieces: str) -> tuple[ShownToken, ...]:
    shown, offset = [], 0
    for piece in pieces:
        for token_id in encode(piece):
            shown.append(ShownToken(token_id, TokenLogprobs(-float(token_id), ((token_id, -float(token_id)),)), offset))
            offset += len(TOKENIZER.token_bytes(token_id))
    return tuple(shown)


def test_half_a_character_at_the_length_limit_is_left_out() -> None:
    ids = encode("a😀")
    for cut in range(1, len(ids)):
        _, deltas = run(request(logprobs=0), ids[:cut], FinishReason.LENGTH, [])
        assert "".join(delta.text for delta in deltas) == "a"
        shown = [token.token_id for delta in deltas for token in delta.tokens]
        assert b"".join(map(TOKENIZER.token_bytes, shown)) == "a😀".encode()[:cut]


def test_half_a_character_before_the_end_is_invalid() -> None:
    _, deltas = run(request(), [*encode("a😀")[:3], EOS], FinishReason.STOP, [])
    assert "".join(delta.text for delta in deltas) == "a\ufffd"


@given(
    text=st.text(alphabet="abé😀 ", max_size=12),
    stops=st.lists(st.text(alphabet="abé😀 ", min_size=1, max_size=4), max_size=2).map(tuple),
    sizes=st.lists(st.integers(1, 4), max_size=3),
    reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_grouping_of_events_does_not_matter(text: str, stops: tuple[str, ...], sizes: list[int], reason: FinishReason) -> None:
    ids = [*encode(text), EOS]
    wanted = request(stop=stops, logprobs=0)
    one, one_deltas = run(wanted, ids, reason, [])
    many, many_deltas = run(wanted, ids, reason, sizes)
    assert [t for d in one_deltas for t in d.tokens] == [t for d in many_deltas for t in d.tokens]
    assert "".join(d.text for d in one_deltas) == "".join(d.text for d in many_deltas)
    assert (one.num_tokens, one.finish_reason) == (many.num_tokens, many.finish_reason)


@given(
    text=st.text(alphabet="abé😀 ", max_size=12), stops=st.lists(st.sampled_from(["ab", "é", "😀 "]), max_size=2).map(tuple)
)
def test_shown_tokens_cover_the_text(text: str, stops: tuple[str, ...]) -> None:
    """Bytes of the shown tokens are those of the text, up to the token that a stop string begins in."""
    ids = encode(text)
    _, deltas = run(request(stop=stops, logprobs=0), ids or [EOS], FinishReason.LENGTH, [])
    shown = [token for delta in deltas for token in delta.tokens]
    whole = "".join(delta.text for delta in deltas)
    data = b"".join(TOKENIZER.text_bytes(token.token_id) for token in shown)
    assert data.startswith(whole.encode())
    if shown and whole:
        assert len(data) - len(whole.encode()) < len(TOKENIZER.text_bytes(shown[-1].token_id))
    if not any(stop in text for stop in stops):
        assert data.decode() == whole == text


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
def test_without_logprobs_no_tokens_are_kept(reason: FinishReason) -> None:
    _, deltas = run(request(), encode("hello world"), reason, [])
    assert all(delta.tokens == () for delta in deltas)
