"""Calls of functions through the clients that make and read them: required ones always come, as their schemas have them."""

from __future__ import annotations

import json
from typing import Any, Literal

import instructor
import litellm
import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.clients.servers import KEY, MODEL

QUESTION = "What is the weather in Paris, in celsius?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


class GetWeather(BaseModel):
    """The current weather of a city."""

    city: str
    unit: Literal["celsius", "fahrenheit"]


TOOL: Any = openai.pydantic_function_tool(GetWeather)
NAMED: Any = {"type": "function", "function": {"name": "GetWeather"}}
ASKED: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], "temperature": 0, "seed": 1}


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")], ids=["required", "named"])
def test_openai_parses_a_required_call_streamed_or_not(client: openai.OpenAI, choice: Any, reason: str) -> None:
    asked = {**ASKED, "tool_choice": choice, "parallel_tool_calls": False}
    (answer,) = client.chat.completions.parse(**asked).choices
    assert answer.message.tool_calls
    (call,) = answer.message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)
    assert answer.finish_reason == reason
    fragments = []
    with client.chat.completions.stream(**asked) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                fragments.append(event.arguments_delta)
        (streamed,) = stream.get_final_completion().choices
    assert streamed.message.tool_calls
    assert streamed.message.tool_calls[0].function.parsed_arguments == call.function.parsed_arguments
    assert "".join(fragments) == call.function.arguments
    assert len(fragments) > 3
    assert streamed.finish_reason == reason


def test_a_result_is_given_back(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(**ASKED, tool_choice="required", parallel_tool_calls=False)
    message = first.choices[0].message
    assert message.tool_calls
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18 degrees, rain"}
    second = client.chat.completions.create(**{**ASKED, "messages": [*MESSAGES, message, result]}, max_tokens=16)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_langchain_binds_tools(url: str) -> None:
    chat = ChatOpenAI(model=MODEL, base_url=url, api_key=KEY, temperature=0, max_retries=0, max_tokens=100)  # type: ignore[arg-type]
    bound = chat.bind_tools([GetWeather], tool_choice="GetWeather")
    answer = bound.invoke(QUESTION)
    (call,) = answer.tool_calls
    GetWeather.model_validate(call["args"])
    message, *rest = bound.stream(QUESTION)
    for chunk in rest:
        message += chunk  # type: ignore[assignment]
    assert message.tool_calls[0]["args"] == call["args"]
    result = ToolMessage("18 degrees, rain", tool_call_id=str(call["id"]))
    assert chat.bind_tools([GetWeather]).invoke([HumanMessage(QUESTION), answer, result]).content is not None
    structured = chat.with_structured_output(GetWeather, method="function_calling").invoke(QUESTION)
    assert isinstance(structured, GetWeather)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT])
def test_instructor_by_way_of_tools(client: openai.OpenAI, mode: instructor.Mode) -> None:
    teacher = instructor.from_openai(client, mode=mode)
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_retries": 0}
    assert isinstance(teacher.chat.completions.create(response_model=GetWeather, **asked), GetWeather)


def test_litellm(url: str) -> None:
    answer = litellm.completion(
        model=f"openai/{MODEL}",
        base_url=url,
        api_key=KEY,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice="required",
        temperature=0,
    )
    call = answer.choices[0].message.tool_calls[0]
    GetWeather.model_validate(json.loads(call.function.arguments))
