"""`/v1/responses`: items as messages and back, events that tell the whole answer, errors in the caller's own names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.output import OutputDelta
from jaxserve.engine.tools.parts import CallArguments, CallBegin, Part, Reasoning, Text, merge
from jaxserve.errors import InvalidRequest
from jaxserve.request import FinishReason
from jaxserve.server.call import Call
from jaxserve.server.openai import parse_chat
from jaxserve.server.response_items import Event, Items
from jaxserve.server.responses import parse_responses
from jaxserve.server.schema.body import limited_fields
from jaxserve.server.schema.responses import PASSED_ON, ResponsesRequest
from jaxserve.server.wire import ChatShape
from tests.engine import tiny_tokenizers as tiny
from tests.server.serving import MODEL, says, serving
from tests.server.test_fields import SAMPLING, reference_fields
from tests.server.test_tools import ARGUMENTS, CALLS, HERMES, TOOLS, answering

README = Path(__file__).resolve().parents[2] / "README.md"
TOKENIZER = tiny.byte_level()
SHAPE = ChatShape(TOKENIZER)
WHERE = {"model": "m", "max_context": 512, "call_id": "resp_1"}


def parse(**fields: Any) -> Call:
    return parse_responses(json.dumps({"model": "m", "input": "hello", **fields}).encode(), TOKENIZER, **WHERE)


def chat(messages: list[Any], **fields: Any) -> Call:
    return parse_chat({"model": "m", "messages": messages, **fields}, TOKENIZER, **WHERE)


# --- what is asked for ------------------------------------------------------------------------------------------------


def test_input_is_a_conversation() -> None:
    items = [
        {"role": "user", "content": "2+2?"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "4", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": [{"type": "input_text", "text": "and"}, {"type": "input_text", "text": "3+3?"}]},
    ]
    call = parse(input=items, instructions="Count.", max_output_tokens=7, temperature=0.5, top_k=3, seed=5)
    same = chat(
        [
            {"role": "system", "content": "Count."},
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "and\n3+3?"},
        ],
        max_completion_tokens=7,
        temperature=0.5,
        top_k=3,
        seed=5,
    )
    assert call.requests == same.requests
    assert parse().requests == chat([{"role": "user", "content": "hello"}]).requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": ["message"]}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": "x", "colour": 1}]}, "input[0].colour"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": "x" * 10_000}, "input"),
        ({"instructions": "x" * 10_000}, "input"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "user", "content": "x" * 10_000}]}, "input"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text.format.name"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"n": 2}, "n"),
    ],
)
def test_what_is_wrong_is_refused_in_the_callers_own_names(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert "messages[" not in str(caught.value)


def test_what_restricts_the_output_is_passed_on() -> None:
    assert parse(allowed_token_ids=[5], min_tokens=1).requests[0].params.allowed_token_ids == (5,)
    grammar = parse(structured_outputs={"regex": "a+"}).requests[0].params.grammar
    assert grammar is not None
    assert (grammar.text, grammar.param) == ("a+", "structured_outputs.regex")


def table(begin: str) -> dict[str, list[Any]]:
    """The fields of a table of README's, and the values in their second column."""
    section = README.read_text().split(begin, 1)[1].split("\n\n", 1)[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return {
        name: [json.loads(value) for value in re.findall(r"`([^`]+)`", values) if value[0] in '"[tf']
        for names, values in rows
        for name in re.findall(r"`([^`]+)`", names)
    }


WORKS = table("| parameter of `/v1/responses` |")
REFUSED = table("| refused | unless it is |")


def fields_of(cls: Any, *inner: str) -> tuple[set[str], dict[str, list[Any]]]:
    """The names of a struct's fields, those of the `inner` ones in their place, that work; and those that are refused."""
    limited = {name: list(values) for name, values in limited_fields(cls)}
    works = set(cls.__struct_fields__) - set(limited)
    for name in inner:
        works.remove(name)
        parts, limits = fields_of(get_args(get_type_hints(cls)[name])[0])
        works |= {f"{name}.{part}" for part in parts}
        limited |= {f"{name}.{part}": values for part, values in limits.items()}
    return works, limited


def test_the_tables_are_the_schema() -> None:
    works, refused = fields_of(ResponsesRequest, "text", "reasoning", "stream_options")
    assert (set(WORKS), REFUSED) == (works, refused)


@pytest.mark.slow
def test_the_tables_have_every_field_of_the_reference(shared: Path) -> None:
    assert reference_fields(shared, "CreateResponse") <= {name.partition(".")[0] for name in (*WORKS, *REFUSED)}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    outer, _, inner = name.partition(".")
    for value in [*REFUSED[name], None]:
        assert parse(**{outer: {inner: value} if inner else value}).requests == parse().requests
    with pytest.raises(InvalidRequest) as caught:
        parse(**{outer: {inner: 5} if inner else 5})
    assert caught.value.param == name


SHARED = {
    **{name: value for name, (value, _) in SAMPLING.items() if name in PASSED_ON},
    "priority": "batch",
    "timeout": 1.5,
    "cache_salt": "s",
    "stream": True,
    "user": "me",
}


@pytest.mark.parametrize("name", [name for name in PASSED_ON if name in WORKS and name != "model"])
def test_what_it_shares_with_chat_means_the_same(name: str) -> None:
    new, same = parse(**{name: SHARED[name]}), chat([{"role": "user", "content": "hello"}], **{name: SHARED[name]})
    assert replace(new, echo={}) == same
    assert name == "user" or new != parse()


# --- what comes back --------------------------------------------------------------------------------------------------


def fold(events: list[Event]) -> list[dict[str, Any]]:
    """The items that events tell of, put together as a client does."""
    items: list[dict[str, Any]] = []
    open_item: dict[str, Any] | None = None
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert open_item is None
                assert event["output_index"] == len(items)
                open_item = json.loads(json.dumps(event["item"]))
            case "content_part.added":
                open_item["content"].append(json.loads(json.dumps(event["part"])))
            case "output_text.delta" | "reasoning_text.delta":
                assert event["delta"]
                open_item["content"][event["content_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta":
                open_item["arguments"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == open_item["content"][0]["text"]
            case "function_call_arguments.done":
                assert (event["arguments"], event["name"]) == (open_item["arguments"], open_item["name"])
            case "content_part.done":
                assert event["part"] == open_item["content"][0]
            case "output_item.done":
                assert {**open_item, "status": event["item"]["status"]} == event["item"]
                items.append(event["item"])
                open_item = None
        if open_item is not None:
            assert event.get("item_id", open_item["id"]) == open_item["id"]
            assert event["output_index"] == len(items)
    assert open_item is None
    return items


PIECES = st.one_of(
    st.builds(Text, st.text(min_size=1)),
    st.builds(Reasoning, st.text(min_size=1)),
    st.builds(lambda name, pieces: (name, pieces), st.text(min_size=1), st.lists(st.text(min_size=1))),
)


def read_parts(pieces: list[Any]) -> list[Part]:
    parts: list[Part] = []
    num_calls = 0
    for piece in pieces:
        if isinstance(piece, tuple):
            parts.append(CallBegin(num_calls, f"call_{num_calls}", piece[0]))
            parts += [CallArguments(num_calls, fragment) for fragment in piece[1]]
            num_calls += 1
        else:
            parts.append(piece)
    return parts


@given(st.lists(PIECES), st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS]))
def test_events_tell_the_items_whatever_the_deltas(pieces: list[Any], reason: FinishReason) -> None:
    parts = read_parts(pieces)
    apart, together = Items("k", SHAPE), Items("k", SHAPE)
    events = [event for part in parts for event in apart.push(OutputDelta("", (), None, parts=(part,)))]
    events += apart.push(OutputDelta("", (), reason, parts=()))
    assert fold(events) == apart.done
    assert fold(together.push(OutputDelta("", (), reason, parts=merge(parts)))) == together.done == apart.done
    assert all(item["status"] == "completed" for item in apart.done[:-1])
    assert apart.done[-1]["status"] == ("incomplete" if reason is FinishReason.LENGTH else "completed")
    said = "".join(part.text for part in parts if isinstance(part, Text))
    assert "".join(item["content"][0]["text"] for item in apart.done if item["type"] == "message") == said


async def test_a_response_whole_and_streamed() -> None:
    async with serving(says("hello", "good day")) as server:
        whole = await server.client.responses.create(model=MODEL, input="hello", temperature=0, metadata={"a": "b"})
        assert (whole.status, whole.output_text, whole.metadata) == ("completed", "good day", {"a": "b"})
        assert whole.usage is not None
        assert whole.usage.output_tokens == len(TOKENIZER.encode_plain("good day")) + 1
        events = []
        async with server.client.responses.stream(model=MODEL, input="hello", temperature=0, metadata={"a": "b"}) as stream:
            async for event in stream:
                events.append(event)
            final = await stream.get_final_response()
        assert final.output_text == whole.output_text
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        replace = {"id": whole.id, "created_at": 0, "completed_at": 0}
        assert final.to_dict() | replace | {"output": []} == whole.to_dict() | replace | {"output": []}


async def test_a_response_that_is_cut_short_is_incomplete() -> None:
    async with serving(says("hello", "good day")) as server:
        cut = await server.client.responses.create(model=MODEL, input="hello", temperature=0, max_output_tokens=1)
        assert cut.status == "incomplete"
        assert cut.incomplete_details.reason == "max_output_tokens"
        assert cut.output[0].status == "incomplete"


async def test_answers_are_input_again() -> None:
    async with serving(says("hello", "good day")) as server:
        first = await server.client.responses.create(model=MODEL, input="hello", temperature=0)
        conversation = [{"role": "user", "content": "hello"}, *first.to_dict()["output"], {"role": "user", "content": "again"}]
        again = await server.client.responses.create(model=MODEL, input=conversation, temperature=0, max_output_tokens=2)
        asked = [
            request.prompt
            for request in (
                chat(
                    [
                        {"role": "user", "content": "hello"},
                        {"role": "assistant", "content": "good day"},
                        {"role": "user", "content": "again"},
                    ]
                ).requests
            )
        ]
        assert again.usage.input_tokens == len(asked[0])


# --- calls, reasoning and forms of text -------------------------------------------------------------------------------

FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]


async def test_calls_are_items() -> None:
    async with serving(answering(CALLS), tokenizer=HERMES) as server:
        asked: dict[str, Any] = {"model": MODEL, "input": "hi", "tools": FLAT_TOOLS, "temperature": 0}
        whole = await server.client.responses.create(**asked)
        async with server.http.post(f"{server.url}/v1/responses", json={**asked, "stream": True}) as response:
            events = [json.loads(line[6:]) for line in (await response.text()).splitlines() if line.startswith("data: ")]
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
    message, first, second = whole.to_dict()["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert (first["name"], first["arguments"], second["name"]) == ("get_weather", ARGUMENTS, "now")
    assert whole.status == "completed"
    keys = ("type", "name", "arguments", "status")
    assert [[item.get(key) for key in keys] for item in fold(events)] == [
        [item.get(key) for key in keys] for item in whole.to_dict()["output"]
    ]
    assert [tool.name for tool in whole.tools] == ["get_weather", "now"]


def test_calls_and_what_they_gave_are_input() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
    other = {**call, "call_id": "c2", "id": "fc_1", "status": "completed"}
    given = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
    items = [{"role": "user", "content": "hi"}, call, other, given, {**given, "call_id": "c2"}]
    body = json.dumps({"model": "m", "input": items, "tools": FLAT_TOOLS, "parallel_tool_calls": False}).encode()
    calls = [{"id": c, "type": "function", "function": {"name": "now", "arguments": "{}"}} for c in ("c1", "c2")]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
    ]
    same = parse_chat({"model": "m", "messages": messages, "tools": TOOLS, "parallel_tool_calls": False}, HERMES, **WHERE)
    assert [request.prompt for request in parse_responses(body, HERMES, **WHERE).requests] == [
        request.prompt for request in same.requests
    ]


@pytest.mark.slow
async def test_log_probabilities_are_those_of_the_text_however_it_comes() -> None:
    tokenizer = HERMES.with_formats(tool_format="hermes", reasoning_format="think")
    asked = {"model": MODEL, "input": "hi", "temperature": 0, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    for tools in ({"tools": FLAT_TOOLS}, {}):
        said = f"<think>\nDay 1\n</think>\n\nDay 1: é. {CALLS}\nDone."
        fake = answering(said, tokenizer, TOOLS if tools else None)
        async with serving(fake, tokenizer=tokenizer) as server:
            _, whole = await server.post("/v1/responses", {**asked, **tools})
            async with server.http.post(f"{server.url}/v1/responses", json={**asked, **tools, "stream": True}) as response:
                events = [json.loads(line[6:]) for line in (await response.text()).splitlines() if line.startswith("data: ")]
        messages = [item["content"][0] for item in whole["output"] if item["type"] == "message"]
        assert len(messages) == 1 + bool(tools)
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        for message in messages:
            told = b"".join(bytes(token["bytes"]) for token in message["logprobs"])
            assert told.decode() == message["text"]
        assert [token for event in deltas for token in event["logprobs"]] == [
            token for message in messages for token in message["logprobs"]
        ]


def test_allowed_functions_are_those_of_chat() -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
    body = {"model": "m", "input": "hi", "tools": FLAT_TOOLS, "tool_choice": allowed}
    call = parse_responses(json.dumps(body).encode(), HERMES, **WHERE)
    inner = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    same = {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": inner}}
    messages = [{"role": "user", "content": "hi"}]
    assert call.requests == parse_chat({"model": "m", "messages": messages, **same}, HERMES, **WHERE).requests
    assert call.echo["tool_choice"] == allowed


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"tools": FLAT_TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FLAT_TOOLS[0]]}},
            "tool_choice.tools[0].description",
        ),
        (
            {
                "tools": FLAT_TOOLS,
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]},
            },
            "tool_choice.tools[0].name",
        ),
        ({"tools": FLAT_TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "not-a-type"}}]}, "tools"),
        ({"tools": FLAT_TOOLS, "tool_choice": {"type": "function", "name": "none"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_chat_refuses_has_the_callers_own_names_too(fields: dict[str, Any], param: str) -> None:
    body = json.dumps({"model": "m", "input": "hi", "tool_choice": "required", **fields}).encode()
    with pytest.raises(InvalidRequest) as caught:
        parse_responses(body, HERMES, **WHERE)
    assert caught.value.param == param


async def test_a_form_of_text_is_kept_to_or_refused_by_its_own_name() -> None:
    async with serving() as server:
        body = {"model": MODEL, "input": "hi", "max_output_tokens": 60}
        for schema, status in (({"enum": ["yes", "no"]}, 200), ({"type": "not-a-type"}, 400)):
            text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
            found, answer = await server.post("/v1/responses", {**body, "text": text})
            assert found == status
            if status == 200:
                assert json.loads(answer["output"][0]["content"][0]["text"]) in ("yes", "no")
            else:
                assert answer["error"]["param"] == "text.format.schema"
