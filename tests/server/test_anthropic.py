"""`/v1/messages`: the same conversations and answers as those of chat completions, in Anthropic's form."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from jaxserve.config import HttpConfig
from jaxserve.engine.output import OutputDelta
from jaxserve.engine.tools.dialect import Reading
from jaxserve.engine.tools.parts import CallArguments, CallBegin, Part, Reasoning, Text
from jaxserve.errors import EngineError, InvalidRequest
from jaxserve.request import FinishReason
from jaxserve.server.anthropic import parse_messages
from jaxserve.server.anthropic_form import MessagesForm
from jaxserve.server.call import Call
from jaxserve.server.joining import Begun, Deltas
from jaxserve.server.openai import parse_chat
from jaxserve.server.schema.anthropic import MessagesRequest
from jaxserve.server.schema.anthropic_answers import MessageEvent
from jaxserve.server.schema.body import limited_fields
from tests.engine import tiny_tokenizers as tiny
from tests.server.serving import BYTE_LEVEL, MODEL, Serving, says, serving
from tests.server.test_tools import CALL, HERMES, TOOLS, USER, WEATHER, answering, anything

HELLO = [{"role": "user", "content": "hello"}]
SHOWS_ALL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.tool_call_id }}:{{ m.content }}"
    "{% if not loop.last or add_generation_prompt %}<|im_end|>{% endif %}{% endfor %}"
)


def parse(tokenizer: Any = BYTE_LEVEL, **fields: Any) -> Call:
    body = {"model": "m", "messages": HELLO, "max_tokens": 9, **fields}
    return parse_messages(json.dumps(body).encode(), tokenizer, model="m", max_context=512, call_id="c")


def chat(messages: Any, tokenizer: Any = BYTE_LEVEL, **fields: Any) -> Call:
    body = {"model": "m", "messages": messages, "max_tokens": 9, **fields}
    return parse_chat(body, tokenizer, model="m", max_context=512, call_id="c")


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in texts]


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


# --- bodies -----------------------------------------------------------------------------------------------------------


def test_sampling_is_that_of_chat() -> None:
    fields = {"temperature": 0.5, "top_k": 4, "top_p": 0.5, "seed": 3, "stream": True, "cache_salt": "s", "priority": "batch"}
    assert parse(**fields, stop_sequences=["END"], metadata={"user_id": "u"}) == chat(HELLO, **fields, stop=["END"], user="u")


def test_turns() -> None:
    system = [{"role": "system", "content": "be"}, *HELLO]
    assert parse(system="be") == parse(system=text("be")) == chat(system)
    assert parse(messages=[{"role": "user", "content": text("hello")}]) == chat(HELLO)
    answered = [*HELLO, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
    thought = [{"type": "thinking", "thinking": "well", "signature": ""}, *text("yes")]
    assert parse(messages=[*HELLO, {"role": "assistant", "content": thought}, answered[2]]) == chat(answered)


def test_turns_of_one_role_count_as_one() -> None:
    tokenizer = tiny.sentencepiece()  # its template wants roles to alternate
    twice = [{"role": "user", "content": "he"}, {"role": "user", "content": text("llo", "you")}]
    assert parse(tokenizer, messages=twice) == chat([{"role": "user", "content": parts("he", "llo", "you")}], tokenizer)


def test_an_answer_that_has_begun_goes_on() -> None:
    begun = [*HELLO, {"role": "assistant", "content": "ye"}]
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    assert parse(messages=begun) == chat(begun, **goes_on)
    assert BYTE_LEVEL.decode(parse(messages=begun).requests[0].prompt).endswith("ye")


def test_results_of_tools() -> None:
    tokenizer = tiny.byte_level(SHOWS_ALL)
    blocks = [
        {"type": "tool_result", "tool_use_id": "a", "content": "42"},
        {"type": "tool_result", "tool_use_id": "b", "content": text("no"), "is_error": True},
        {"type": "tool_result", "tool_use_id": "c"},
        *text("so?"),
    ]
    expected = [
        {"role": "tool", "tool_call_id": "a", "content": "42"},
        {"role": "tool", "tool_call_id": "b", "content": "Error: no"},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": "so?"},
    ]
    assert parse(tokenizer, messages=[{"role": "user", "content": blocks}]) == chat(expected, tokenizer)


def test_thinking() -> None:
    plain = tiny.byte_level()
    assert parse(plain, thinking={"type": "disabled"}) == parse(plain)
    with pytest.raises(InvalidRequest, match="thinking is not supported other than as it is: the model does not think"):
        parse(plain, thinking={"type": "adaptive"})
    thinks = tiny.byte_level(tiny.CHATML + "{# <think> #}")
    assert parse(thinks, thinking={"type": "adaptive"}) == parse(thinks)
    with pytest.raises(InvalidRequest, match="the model thinks whatever it is told"):
        parse(thinks, thinking={"type": "disabled"})
    switches = tiny.byte_level(tiny.CHATML + "{{ enable_thinking }}{# <think> #}")
    on, off = (parse(switches, thinking={"type": kind}).requests[0].prompt for kind in ("adaptive", "disabled"))
    assert (switches.decode(on)[-4:], switches.decode(off)[-5:]) == ("True", "False")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].type"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "often"}}, "thinking.type"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"container": "x"}, "container"),
        ({"max_token": 5}, "max_token"),
    ],
)
def test_what_is_refused_is_named_as_it_was_sent(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert param in str(caught.value)


def test_errors_of_the_conversation_name_the_turn_that_was_sent() -> None:
    """The system prompt and results of tools become messages, so that the numbers of chat's messages are others."""
    silent = tiny.byte_level("{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}")
    result = [{"type": "tool_result", "tool_use_id": "a", "content": "42"}]
    with pytest.raises(InvalidRequest) as caught:
        parse(silent, system="be", messages=[*HELLO, {"role": "user", "content": [*text("x"), *result]}])
    assert caught.value.param == "messages[1].content[1].content"
    assert str(caught.value) == f"{caught.value.param}: the model's chat template drops messages of this role"


# --- the README's tables ------------------------------------------------------------------------------------------------

SECTION = (Path(__file__).resolve().parents[2] / "README.md").read_text().split("\n### Messages\n", 1)[1].split("\n## ", 1)[0]


def rows(begin: str) -> list[tuple[list[str], str]]:
    """The names of each row of a table, and what it says of them."""
    cells = [line.strip("|").split("|") for line in SECTION.split(begin, 1)[1].split("\n\n", 1)[0].splitlines() if "`" in line]
    return [(re.findall(r"`([^`]+)`", names), said) for names, said in cells]


WORKS = [name for names, _ in rows("| parameter of `/v1/messages` |") for name in names]
REFUSED = {
    name: [json.loads(value) for value in re.findall(r"`([^`]+)`", said)]
    for names, said in rows("| refused | unless it is |")
    for name in names
}
TAKES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "stream": True,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "seed": 7,
    "priority": "batch",
    "timeout": 1.5,
    "cache_salt": "s",
    "messages": [{"role": "user", "content": "bye"}],
    "system": "be",
    "stop_sequences": ["x"],
    "tools": [],
    "tool_choice": {"type": "none"},
    "thinking": {"type": "disabled"},
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    "metadata": {"user_id": "u"},
    "cache_control": {"type": "ephemeral", "ttl": "5m"},
}
CHANGES_NOTHING = ("model", "tools", "tool_choice", "thinking", "metadata", "cache_control")
"""Of those the ones that change nothing in this conversation with this model."""


def test_the_tables_are_the_schema() -> None:
    limited = {name: list(values) for name, values in limited_fields(MessagesRequest)}
    assert limited == REFUSED
    assert sorted(WORKS) == sorted(set(MessagesRequest.__struct_fields__) - set(limited))


@pytest.mark.parametrize("name", WORKS)
def test_what_works(name: str) -> None:
    assert (parse(**{name: TAKES[name]}) == parse()) == (name in CHANGES_NOTHING)
    if name not in ("model", "max_tokens", "messages"):
        assert parse(**{name: None}) == parse()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    for value in [*REFUSED[name], None]:
        assert parse(**{name: value}) == parse()
    with pytest.raises(InvalidRequest) as caught:
        parse(**{name: 5})
    assert caught.value.param == name


# --- answers ----------------------------------------------------------------------------------------------------------


async def events(server: Serving, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 50, "stream": True, **fields}
    async with server.http.post(f"{server.url}/v1/messages", json=body) as response:
        assert response.content_type == "text/event-stream"
        return read_events(await response.read())


def read_events(data: bytes) -> list[dict[str, Any]]:
    found = []
    for event in data.decode().split("\n\n")[:-1]:
        name, value = event.split("\n")
        msgspec.json.decode(value.removeprefix("data: "), type=MessageEvent)
        found.append(json.loads(value.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def replay(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together of the events, as Anthropic's documentation has it."""
    assert [stream[0]["type"], *(event["type"] for event in stream[-2:])] == ["message_start", "message_delta", "message_stop"]
    message: dict[str, Any] = stream[0]["message"]
    is_open = False
    for event in stream[1:-1]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                message["content"].append(
                    event["content_block"] | ({"input": ""} if "input" in event["content_block"] else {})
                )
                is_open = True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(message["content"]) - 1
                delta = {key: value for key, value in event["delta"].items() if key != "type"}
                ((name, value),) = delta.items()
                message["content"][-1]["input" if name == "partial_json" else name] += value
            case "content_block_stop":
                assert is_open
                is_open = False
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(message["content"][-1]["input"] or "{}")
    assert not is_open
    return message | stream[-2]["delta"] | {"usage": stream[-2]["usage"]}


async def test_whole_and_streamed_say_the_same() -> None:
    async with serving(says("hello", "hello wörld 😀")) as server:
        status, whole = await server.post("/v1/messages", {"model": MODEL, "messages": HELLO, "max_tokens": 50})
        assert status == 200
        assert whole["content"] == [{"type": "text", "text": "hello wörld 😀"}]
        assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", MODEL)
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
        num_prompt = len(BYTE_LEVEL.encode_chat(HELLO))
        assert sum(whole["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")) == num_prompt
        assert whole["usage"]["output_tokens"] == len(BYTE_LEVEL.encode_plain("hello wörld 😀")) + 1
        streamed = replay(await events(server))
        same = ("content", "stop_reason", "stop_sequence", "role", "model")
        assert {name: streamed[name] for name in same} == {name: whole[name] for name in same}
        assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


async def test_why_it_stopped() -> None:
    async with serving(says("hello", "hello world")) as server:
        for fields, expected in (
            ({"stop_sequences": ["zz", "wor"]}, ("stop_sequence", "wor", "hello ")),
            ({"max_tokens": 1}, ("max_tokens", None, "hello")),
        ):
            body = {"model": MODEL, "messages": HELLO, "max_tokens": 50, **fields}
            for message in ((await server.post("/v1/messages", body))[1], replay(await events(server, **fields))):
                assert (message["stop_reason"], message["stop_sequence"], message["content"][0]["text"]) == expected


async def test_thoughts_are_a_block_of_their_own() -> None:
    tokenizer = tiny.byte_level(tiny.CHATML + "{# <think> #}")
    expected = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "hello world"}]
    async with serving(
        says("hello", "<think>\nhm\n</think>\n\nhello world", tokenizer=tokenizer), tokenizer=tokenizer
    ) as server:
        _, whole = await server.post("/v1/messages", {"model": MODEL, "messages": HELLO, "max_tokens": 90})
        assert whole["content"] == expected
        assert replay(await events(server, max_tokens=90))["content"] == expected


# --- tools ------------------------------------------------------------------------------------------------------------

ANTHROPIC_TOOLS = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"].get("description"),
        "input_schema": tool["function"].get("parameters", {"type": "object"}),
    }
    for tool in TOOLS[:1]
]


def with_tools(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [USER], "tools": ANTHROPIC_TOOLS, "max_tokens": 200, "temperature": 0, **fields}


async def test_calls_are_blocks() -> None:
    async with serving(answering(f"Let me see.\n{CALL}", tools=TOOLS[:1]), tokenizer=HERMES) as server:
        _, whole = await server.post("/v1/messages", with_tools())
        streamed = replay(await events(server, **with_tools()))
    for message in (whole, streamed):
        said, call = message["content"]
        assert said == {"type": "text", "text": "Let me see."}
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", {"city": "Paris", "days": 3})
        assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=["any", "tool"])
async def test_a_call_that_must_be_made_is_made(choice: dict[str, Any]) -> None:
    async with serving(anything(), tokenizer=HERMES) as server:
        body = with_tools(tool_choice={**choice, "disable_parallel_tool_use": True}, temperature=1, max_tokens=400)
        for message in ((await server.post("/v1/messages", body))[1], replay(await events(server, **body))):
            (call,) = message["content"]
            assert (call["type"], call["name"]) == ("tool_use", "get_weather")
            jsonschema.validate(call["input"], WEATHER["parameters"])
            assert message["stop_reason"] == "tool_use"


def test_calls_and_results_are_those_of_chat() -> None:
    turns = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                *text("Let me see."),
                {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Paris", "days": 3}},
                {"type": "tool_use", "id": "call_2", "name": "get_weather", "input": {"city": "Rome", "days": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "sun"},
                {"type": "tool_result", "tool_use_id": "call_2", "content": text("rain")},
            ],
        },
    ]
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps(arguments)}}
        for i, arguments in ((1, {"city": "Paris", "days": 3}), (2, {"city": "Rome", "days": 1}))
    ]
    messages = [
        USER,
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
        {"role": "tool", "tool_call_id": "call_2", "content": "rain"},
    ]
    assert parse(HERMES, messages=turns, tools=ANTHROPIC_TOOLS) == chat(messages, HERMES, tools=TOOLS[:1])
    nothing_said = [USER, {"role": "assistant", "content": turns[1]["content"][2:3]}, USER]
    same = [USER, {"role": "assistant", "content": None, "tool_calls": calls[:1]}, USER]
    assert parse(HERMES, messages=nothing_said, tools=ANTHROPIC_TOOLS) == chat(same, HERMES, tools=TOOLS[:1])


async def test_a_schema_that_cannot_be_is_named_as_it_was_sent() -> None:
    wrong = {"name": "f", "input_schema": {"type": "object", "properties": {"x": {"type": "not-a-type"}}}}
    async with serving(anything(), tokenizer=HERMES) as server:
        for fields, param in (
            ({"tools": [wrong], "tool_choice": {"type": "any"}}, "tools"),
            ({"tools": [], "output_config": {"format": {"type": "json_schema", "schema": {"type": "egg"}}}}, "output_config"),
            ({"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ):
            status, answer = await server.post("/v1/messages", with_tools(**fields))
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
            assert answer["error"]["param"].startswith(param)
            assert param in answer["error"]["message"]
            assert "function" not in answer["error"]["param"]


# --- counting, and errors ---------------------------------------------------------------------------------------------


async def test_tokens_are_counted() -> None:
    async with serving() as server:
        body = {"model": MODEL, "messages": HELLO, "system": "be"}
        count = await server.post("/v1/messages/count_tokens", body)
        system = [{"role": "system", "content": "be"}, *HELLO]
        assert count == (200, {"input_tokens": len(BYTE_LEVEL.encode_chat(system))})
        status, answer = await server.post("/v1/messages/count_tokens", {**body, "max_tokens": 5})
        assert (status, answer["error"]["param"]) == (400, "max_tokens")


async def test_errors_have_anthropic_s_shape() -> None:
    async with serving(config=HttpConfig(port=0, api_key="sk")) as server:
        url, good = f"{server.url}/v1/messages", {"model": MODEL, "messages": HELLO, "max_tokens": 1}
        for headers, body, status, kind in (
            ({}, good, 401, "authentication_error"),
            ({"x-api-key": "wrong"}, good, 401, "authentication_error"),
            ({"x-api-key": "sk"}, {**good, "model": "other"}, 404, "not_found_error"),
            ({"x-api-key": "sk"}, {**good, "max_tokens": 0}, 400, "invalid_request_error"),
        ):
            async with server.http.post(url, json=body, headers={**headers, "anthropic-version": "2023-06-01"}) as response:
                answer = await response.json()
                assert (response.status, answer["type"], answer["error"]["type"]) == (status, "error", kind)
                assert answer["request_id"] == response.headers["request-id"]
        async with server.http.post(url, json=good, headers={"x-api-key": "sk"}) as response:
            assert response.status == 200


# --- answers of parts, from no engine ---------------------------------------------------------------------------------


class Scripted:
    """A source of deltas that are known beforehand."""

    num_output, num_cached, num_reasoning = 7, 2, None

    def __init__(self, *deltas: OutputDelta) -> None:
        self._deltas = list(deltas)

    async def read(self) -> Deltas:
        return [(0, self._deltas.pop(0))] if self._deltas else []


def begun(deltas: list[tuple[Part, ...]], reason: FinishReason) -> Begun:
    script = [OutputDelta("", (), None, parts=parts) for parts in deltas] + [OutputDelta("", (), reason, parts=())]
    return Begun(replace(parse(), reading=Reading()), 0, Scripted(*script))


DELTAS: list[tuple[Part, ...]] = [
    (Reasoning("let me "),),
    (Reasoning("see"), Text("I ")),
    (Text("look"), CallBegin(0, "call-1", "find"), CallArguments(0, '{"what"')),
    (CallArguments(0, ':"x"}'), CallBegin(1, "call-2", "stop")),
]
EXPECTED = [
    {"type": "thinking", "thinking": "let me see", "signature": ""},
    {"type": "text", "text": "I look"},
    {"type": "tool_use", "id": "call-1", "name": "find", "input": {"what": "x"}},
    {"type": "tool_use", "id": "call-2", "name": "stop", "input": {}},
]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [(FinishReason.TOOL_CALLS, "tool_use"), (FinishReason.STOP, "tool_use"), (FinishReason.LENGTH, "max_tokens")],
)
async def test_calls_and_thoughts(reason: FinishReason, expected: str) -> None:
    form = MessagesForm(BYTE_LEVEL, "m")
    whole = await form.whole(begun(DELTAS, reason))
    call = begun(DELTAS, reason)
    stream = form.events(call)
    data = stream.opening()
    while deltas := await call.source.read():
        data += stream.deltas(deltas)
    streamed = replay(read_events(data + stream.ending()))
    for message in (whole, streamed):
        assert message["content"] == EXPECTED
        assert message["stop_reason"] == expected
    assert streamed["usage"] == whole["usage"]
    assert whole["usage"]["cache_read_input_tokens"] == 2


async def test_a_call_that_was_cut_off_has_no_input() -> None:
    cut: list[tuple[Part, ...]] = [(CallBegin(0, "c", "find"), CallArguments(0, '{"wh'))]
    whole = await MessagesForm(BYTE_LEVEL, "m").whole(begun(cut, FinishReason.LENGTH))
    assert whole["content"] == [{"type": "tool_use", "id": "c", "name": "find", "input": {}}]
    assert whole["stop_reason"] == "max_tokens"


async def test_an_error_in_a_stream_is_an_event() -> None:
    stream = MessagesForm(BYTE_LEVEL, "m").events(begun([], FinishReason.STOP))
    for error in (EngineError("it broke"), "it broke"):
        (event,) = read_events(stream.failure(error))
        assert (event["type"], event["error"]["type"], event["error"]["message"]) == ("error", "api_error", "it broke")
