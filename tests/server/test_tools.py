"""Calls of functions through the whole server: what is offered, what must be called, and how calls come back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from jaxserve.config import HttpConfig
from jaxserve.engine.chat import ChatTemplate
from jaxserve.engine.text import Tokenizer
from jaxserve.engine.tools.dialect import choose_dialect
from jaxserve.errors import ConfigError
from jaxserve.server.messages import read_messages
from jaxserve.server.schema.chat import ChatRequest
from jaxserve.server.schema.decoding import decode
from jaxserve.server.service import Service
from jaxserve.server.wire import ChatShape
from tests.engine import tiny_tokenizers as tiny
from tests.engine.engines import LIMITS, FakeEngine, fake_engine
from tests.engine.tools.reading import read, tool_reading
from tests.engine.tools.test_parsers import write_calls
from tests.server.serving import MODEL, Serving, scripted, serving

TOOL_TEMPLATE = (
    '{% if tools %}<tools>{{ tools | tojson }}{# <tool_call>{"name": ..., "arguments": ...} #}</tools>{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.name }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL_TEMPLATE = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}{# [TOOL_CALLS][ #}"
HERMES = tiny.byte_level(TOOL_TEMPLATE)
WEATHER = {
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
NOW = {"name": "now"}
TOOLS: list[Any] = [{"type": "function", "function": function} for function in (WEATHER, NOW)]
USER = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": MODEL, "messages": [USER], "tools": TOOLS, "temperature": 0, "max_tokens": 200}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
CALLS = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
ARGUMENTS = '{"city": "Paris", "days": 3}'


def shown(tools: Sequence[Any]) -> list[dict[str, Any]]:
    return [dict(tool) for tool in tools]


def answering(answer: str | Sequence[int], tokenizer: Tokenizer = HERMES, tools: Sequence[Any] | None = TOOLS) -> FakeEngine:
    """An engine that gives `answer` to the user's message."""
    limits = replace(LIMITS, vocab_size=tokenizer.vocab_size, max_context=1024)
    prompt = tuple(tokenizer.encode_chat([USER], tools=shown(tools) if tools else None))
    ids = tokenizer.encode_plain(answer) if isinstance(answer, str) else answer
    next_token = scripted({prompt: [*ids, tiny.IM_END_ID]}, vocab_size=limits.vocab_size)
    return fake_engine(limits, next_token=next_token, eos_token_ids=(tiny.IM_END_ID,))


def anything() -> FakeEngine:
    """An engine that says what comes to its mind."""
    return fake_engine(replace(LIMITS, max_context=1024), eos_token_ids=(tiny.IM_END_ID,))


async def ask(server: Serving, **fields: Any) -> dict[str, Any]:
    status, answer = await server.post("/v1/chat/completions", {**BODY, **fields})
    assert status == 200, answer
    return answer


async def ask_streamed(server: Serving, **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    """The choice as a client puts it together, and the chunks. Each call's id, type and name come once and first."""
    stream = await server.client.chat.completions.create(**{**BODY, **fields}, stream=True)
    chunks = [chunk async for chunk in stream]
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    reason = None
    for chunk in chunks:
        (choice,) = chunk.choices
        message["content"] += choice.delta.content or ""
        for delta in choice.delta.tool_calls or ():
            assert delta.function is not None
            if delta.index == len(message["tool_calls"]):
                assert delta.id
                assert delta.type == "function"
                assert delta.function.name
                message["tool_calls"].append({"id": delta.id, "name": delta.function.name, "arguments": ""})
            else:
                assert (delta.id, delta.type, delta.function.name) == (None, None, None)
            message["tool_calls"][delta.index]["arguments"] += delta.function.arguments or ""
        assert reason is None
        reason = choice.finish_reason
    return {**message, "finish_reason": reason}, chunks


# --- calls that a model makes of itself -------------------------------------------------------------------------------


async def test_calls_come_back_whole_and_streamed() -> None:
    async with serving(answering(CALLS), tokenizer=HERMES) as server:
        answer = await ask(server, n=2)
        streamed, chunks = await ask_streamed(server)
    first, second = answer["choices"]
    message = first["message"]
    assert message["content"] == "Let me see."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": ARGUMENTS},
        {"name": "now", "arguments": "{}"},
    ]
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in message["tool_calls"])
    ids = [call["id"] for choice in answer["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 4, "of all choices"
    assert first["finish_reason"] == second["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens"] == 2 * (len(HERMES.encode_plain(CALLS)) + 1)
    assert streamed["content"] == "Let me see."
    assert [(call["name"], call["arguments"]) for call in streamed["tool_calls"]] == [
        ("get_weather", ARGUMENTS),
        ("now", "{}"),
    ]
    assert streamed["finish_reason"] == "tool_calls"
    assert all("tool_call>" not in chunk.to_json() for chunk in chunks)


async def test_an_answer_without_calls_ends_as_ever_and_has_no_list_of_them() -> None:
    async with serving(answering("hello"), tokenizer=HERMES) as server:
        choice = (await ask(server))["choices"][0]
        streamed, _ = await ask_streamed(server)
    assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert choice["finish_reason"] == streamed["finish_reason"] == "stop"


async def test_content_beside_nothing_but_calls_is_null_and_all_tokens_have_log_probabilities() -> None:
    async with serving(answering(CALL), tokenizer=HERMES) as server:
        choice = (await ask(server, logprobs=True))["choices"][0]
        _, chunks = await ask_streamed(server, logprobs=True)
    assert choice["message"]["content"] is None
    whole = [token["token"] for token in choice["logprobs"]["content"]]
    assert "".join(whole) == CALL, "also those that only mark a call"
    found = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token.token for logprobs in found if logprobs for token in logprobs.content or ()] == whole


@pytest.mark.parametrize("num_tokens", [5, 40, 60, 75])
async def test_a_call_cut_short_ends_with_length(num_tokens: int) -> None:
    async with serving(answering(CALL), tokenizer=HERMES) as server:
        choice = (await ask(server, max_tokens=num_tokens))["choices"][0]
        streamed, _ = await ask_streamed(server, max_tokens=num_tokens)
    assert choice["finish_reason"] == streamed["finish_reason"] == "length"
    whole = [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"].get("tool_calls", ())]
    assert [(call["name"], call["arguments"]) for call in streamed["tool_calls"]] == whole
    assert all(name == "get_weather" and ARGUMENTS.startswith(arguments) for name, arguments in whole)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 9, 25])
async def test_of_a_call_that_must_be_there_nothing_is_text(num_tokens: int) -> None:
    async with serving(anything(), tokenizer=HERMES) as server:
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            fields = {"tool_choice": choice, "max_tokens": num_tokens}
            whole = (await ask(server, **fields))["choices"][0]
            streamed, _ = await ask_streamed(server, **fields)
            assert (whole["message"]["content"] or "", streamed["content"]) == ("", "")
            assert whole["finish_reason"] == streamed["finish_reason"] == "length"


async def test_no_tools_are_shown_where_none_may_be_called() -> None:
    async with serving(answering(CALL, tools=None), tokenizer=HERMES) as server:
        answer = await ask(server, tool_choice="none")
    assert answer["usage"]["prompt_tokens"] == len(HERMES.encode_chat([USER]))
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_markers_that_are_control_tokens_are_seen() -> None:
    library = tiny.byte_level_library()
    library.add_special_tokens(["[TOOL_CALLS]"])
    tokenizer = Tokenizer(library.to_str(), chat_template=MISTRAL_TEMPLATE, eos_token="<|im_end|>")
    tool_calls = tokenizer.special_ids_by_name(["[TOOL_CALLS]"])["[TOOL_CALLS]"]
    written = tokenizer.encode_plain('[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]')
    for tools, plain in ((TOOLS, False), (None, True)):
        engine = answering([tool_calls, *written], tokenizer, tools)
        async with serving(engine, tokenizer=tokenizer) as server:
            message = (await ask(server, tools=tools))["choices"][0]["message"]
        if plain:
            assert message["content"] == tokenizer.decode(written), "a control token is no text"
        else:
            (call,) = message["tool_calls"]
            assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
            assert len(call["id"]) == 9, "as the templates of such models want it"


# --- calls that a model is made to make -------------------------------------------------------------------------------

GET_WEATHER = {"type": "function", "function": {"name": "get_weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [GET_WEATHER]}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "names", "reason"),
    [
        ("required", {"get_weather", "now"}, "tool_calls"),
        (GET_WEATHER, {"get_weather"}, "stop"),
        (ALLOWED, {"get_weather"}, "tool_calls"),
    ],
    ids=["required", "named", "allowed"],
)
async def test_a_required_call_is_made_and_as_its_schema_has_it(choice: Any, names: set[str], reason: str) -> None:
    async with serving(anything(), tokenizer=HERMES) as server:
        fields = {"tool_choice": choice, "temperature": 1, "max_tokens": 400, "parallel_tool_calls": False}
        answer = await ask(server, **fields, n=4, seed=1)
        streamed, _ = await ask_streamed(server, **fields, seed=2)
    calls = []
    for found in answer["choices"]:
        (call,) = found["message"]["tool_calls"]
        calls.append((call["function"]["name"], call["function"]["arguments"]))
        assert (found["finish_reason"], found["message"]["content"]) == (reason, None)
    (call,) = streamed["tool_calls"]
    assert (streamed["content"], streamed["finish_reason"]) == ("", reason)
    for name, arguments in [*calls, (call["name"], call["arguments"])]:
        assert name in names
        jsonschema.validate(json.loads(arguments), WEATHER["parameters"] if name == "get_weather" else {"maxProperties": 0})


@pytest.mark.slow
async def test_reasoning_comes_before_a_required_call() -> None:
    tokenizer = tiny.byte_level(TOOL_TEMPLATE.replace("assistant\n", "assistant\n<think>\n"))
    engine = answering(f"hello?</think>\n\n{CALL}", tokenizer)
    async with serving(engine, tokenizer=tokenizer) as server:
        choice = (await ask(server, tool_choice="required"))["choices"][0]
    assert choice["message"]["reasoning_content"] == "hello?"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS


@pytest.mark.slow
async def test_strict_functions_and_single_calls_are_held_to_also_where_none_is_required() -> None:
    wrong = CALL.replace("Paris", "Mars")
    strict = [{"type": "function", "function": {**WEATHER, "strict": True}}, TOOLS[1]]
    async with serving(answering(wrong), tokenizer=HERMES) as server:
        free = (await ask(server))["choices"][0]["message"]["tool_calls"][0]
        held = (await ask(server, tools=strict))["choices"][0]["message"]["tool_calls"][0]
    assert "Mars" in free["function"]["arguments"]
    jsonschema.validate(json.loads(held["function"]["arguments"]), WEATHER["parameters"])
    async with serving(answering(CALLS), tokenizer=HERMES) as server:
        assert len((await ask(server, parallel_tool_calls=False))["choices"][0]["message"]["tool_calls"]) == 1


@pytest.mark.slow
async def test_an_answer_in_json_may_stand_beside_calls() -> None:
    wanted = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}}
    async with serving(answering(CALL), tokenizer=HERMES) as server:
        assert (await ask(server, **wanted))["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    async with serving(answering("hello"), tokenizer=HERMES) as server:
        message = (await ask(server, **wanted))["choices"][0]["message"]
    assert message.get("tool_calls") or json.loads(message["content"]) in ("yes", "no")


@pytest.mark.slow
async def test_the_form_of_an_answer_may_be_said_where_there_is_none() -> None:
    def form(schema: Any) -> dict[str, Any]:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}

    async with serving(anything(), tokenizer=HERMES) as server:
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            fields = {**form({"type": "string"}), "tool_choice": choice, "parallel_tool_calls": False}
            (choice_made,) = (await ask(server, **fields))["choices"]
            (call,) = choice_made["message"]["tool_calls"]
            assert choice_made["message"]["content"] is None
            if call["function"]["name"] == "get_weather":
                jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER["parameters"])
        wrong = {**BODY, **form({"type": "not-a-type"}), "tool_choice": "required"}
        status, answer = await server.post("/v1/chat/completions", wrong)
        assert (status, answer["error"]["param"]) == (400, "response_format.json_schema.schema")
        assert "not-a-type" in answer["error"]["message"]
        wrong = {**BODY, "structured_outputs": {"choice": ["yes"]}, "tool_choice": "required"}
        status, answer = await server.post("/v1/chat/completions", wrong)
        assert (status, answer["error"]["param"]) == (400, "structured_outputs.choice")


# --- conversations with calls, and what is wrong with them ------------------------------------------------------------

CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "rain"}


async def prompt_of(server: Serving, messages: list[Any], **fields: Any) -> str:
    _, body = await server.post("/tokenize", {"messages": messages, **fields})
    _, text = await server.post("/detokenize", {"tokens": body["tokens"]})
    prompt: str = text["prompt"]
    return prompt


async def test_calls_and_their_results_are_shown_to_the_model() -> None:
    async with serving(tokenizer=HERMES) as server:
        prompt = await prompt_of(server, [USER, CALLED, RESULT], tools=TOOLS)
        assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}</tool_call>' in prompt
        assert "<|im_start|>tool\nget_weatherrain<|im_end|>" in prompt, "a result is of the function that was called"
        assert f"<tools>{json.dumps(TOOLS)}</tools>" in prompt
        described = [
            {"type": "function", "function": {"name": "f", "description": "<|im_end|>", "parameters": {"<|im_end|>": 1}}}
        ]
        _, body = await server.post("/tokenize", {"messages": [USER], "tools": described})
        assert body["tokens"].count(tiny.IM_END_ID) == 1, "what is said of a function is text"
        for arguments, spelled in (("", "{}"), ('{"a": ', '"{\\"a\\": "'), ("[1]", '"[1]"')):
            broken = json.loads(json.dumps(CALLED))
            broken["tool_calls"][0]["function"]["arguments"] = arguments
            assert f'"arguments": {spelled}}}</tool_call>' in await prompt_of(server, [USER, broken, RESULT])


FUNCTION = TOOLS[:1]
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type", "function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters, digits"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name", "that of another"),
    ({"tools": TOOLS * 65}, "tools", "at most 128"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice", "only where there are tools"),
    ({"tool_choice": "any"}, "tool_choice", "one of"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name", "one of the tools"),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice.allowed_tools.tools",
        "1 to 128",
    ),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
            "tool_choice": "required",
        },
        "tools",
        "the parameters of 'f': 'type' must be 'object'",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}}]}
        | {"tool_choice": "required"},
        "tools",
        "x",
    ),
    ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    ({"function_call": {"name": "f"}}, "function_call", "not supported"),
    ({"messages": [USER, {**CALLED, "function_call": {"name": "f", "arguments": "{}"}}]}, "messages[1].function_call", "not"),
]


async def test_what_is_wrong_is_refused_by_name() -> None:
    async with serving(tokenizer=HERMES) as server:
        for fields, param, said in WRONG:
            status, answer = await server.post("/v1/chat/completions", {**BODY, **fields})
            assert status == 400, fields
            assert said in answer["error"]["message"], answer
            assert answer["error"]["param"] == param or not param, answer


@pytest.mark.slow
async def test_tools_that_the_model_would_not_see_or_could_not_call_are_refused() -> None:
    async with serving() as server:
        for fields, param in (
            ({"messages": [USER]}, "tools"),
            ({"messages": [USER, CALLED, RESULT], "tools": None}, "messages[1].tool_calls"),
        ):
            status, answer = await server.post("/v1/chat/completions", {**BODY, **fields})
            assert (status, answer["error"]["param"]) == (400, param)
            assert "the model's chat template drops" in answer["error"]["message"]
    async with serving(tokenizer=HERMES, config=HttpConfig(port=0, tool_format="none")) as server:
        status, answer = await server.post("/v1/chat/completions", BODY)
        assert (status, answer["error"]["param"]) == (400, "tools")
        assert "--tool-format" in answer["error"]["message"]


# --- templates --------------------------------------------------------------------------------------------------------

SMOLLM2 = Path(__file__).resolve().parents[2] / "configs" / "templates" / "smollm2-tools.jinja"


async def test_a_server_may_have_a_chat_template_of_its_own() -> None:
    config = HttpConfig(port=0, chat_template=str(SMOLLM2))
    async with serving(anything(), config=config) as server:
        calls = (await ask(server, tool_choice=GET_WEATHER, tools=TOOLS[:1]))["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["get_weather"]
    with pytest.raises(ConfigError, match=r"chat_template nowhere: .*No such file"):
        Service(HttpConfig(chat_template="nowhere"))


def test_the_template_for_the_demo_model() -> None:
    template = ChatTemplate(SMOLLM2.read_text())
    assert str(choose_dialect(SMOLLM2.read_text())) == "tool calls: hermes; reasoning: none"
    read = read_messages(decode({**BODY, "messages": [USER, CALLED, RESULT]}, ChatRequest).messages)
    assert template.render(read, tools=TOOLS[1:]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\n\n"
        "You may call functions, which are described here:\n<tools>\n"
        '{"type": "function", "function": {"name": "now"}}\n</tools>\n\n'
        "To call one, write its name and arguments as a JSON object between tags:\n<tool_call>\n"
        '{"name": <function name>, "arguments": <object of arguments>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nhi<|im_end|>\n"
        f"<|im_start|>assistant\n{CALL}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    system = {"role": "system", "content": "Be brief."}
    assert template.render([system, USER], add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    )


SPEAK_TOOLS = {
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral-args",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
}


@pytest.mark.parametrize("path", sorted(SPEAK_TOOLS))
def test_what_a_model_wrote_is_shown_to_it_as_it_wrote_it(shared: Path, path: str) -> None:
    """A call as its own form has it, read, given back by the client, and rendered by templates in the wild: the same call."""
    template = ChatTemplate(
        (shared / "data" / "chat-templates" / f"{path}.jinja").read_text(), bos_token="<s>", eos_token="</s>"
    )
    assert template.shows_tools
    assert template.shows_calls
    name = SPEAK_TOOLS[path]
    written = write_calls(name, [("get_weather", json.loads(ARGUMENTS))])
    message = ChatShape(HERMES).message(read(tool_reading(name), written))["message"]
    call_id = message["tool_calls"][0]["id"]
    messages = [USER, message | {"refusal": None}, {**RESULT, "tool_call_id": call_id}]
    body = decode({**BODY, "messages": messages}, ChatRequest)
    rendered = template.render(read_messages(body.messages), tools=TOOLS[:1])
    # Some templates say which id a call has, which models do not.
    assert written in rendered.replace(f', "id": "{call_id}"', "").replace(f"[CALL_ID]{call_id}", "")
    assert "rain" in rendered


@pytest.mark.parametrize("path", ["HuggingFaceTB-SmolLM3-3B", "google-gemma-2-2b-it", "microsoft-Phi-3.5-mini-instruct"])
def test_templates_in_the_wild_that_drop_tools_are_known(shared: Path, path: str) -> None:
    template = ChatTemplate((shared / "data" / "chat-templates" / f"{path}.jinja").read_text())
    assert not template.shows_tools
    assert not template.shows_calls
