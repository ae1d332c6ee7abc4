"""Bodies of `/v1/responses` as calls, by way of the chat completion that asks for the same.

Pure. Owns how items become messages, and that errors name the fields that the caller wrote. What chat completions mean is in
`openai`, how an answer looks in `response_items`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from jaxserve.engine.text import Tokenizer
from jaxserve.errors import InvalidRequest
from jaxserve.request import SamplingParams
from jaxserve.server.call import NO_DEFAULTS, Call, Defaults, Served
from jaxserve.server.openai import Data, parse_chat
from jaxserve.server.schema import responses as schema
from jaxserve.server.schema.decoding import decode, decode_part, invalid
from jaxserve.server.schema.responses import ResponsesRequest
from jaxserve.server.wording import Wording

NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    ".function": "",
    ".allowed_tools": "",
}
"""Names of fields of a chat completion that are called otherwise here."""


def parse_responses(
    data: Data, tokenizer: Tokenizer, *, model: Served, max_context: int, call_id: str, defaults: Defaults = NO_DEFAULTS
) -> Call:
    """Understand a body of `/v1/responses`; as `openai.parse_completion`.

    Raises:
        InvalidRequest: naming the field.
        ModelNotFound: it asks for another model.
    """
    body = decode(data, ResponsesRequest)
    conversation = _Conversation()
    if body.instructions is not None:
        conversation.say("instructions", "system", body.instructions)
    if isinstance(body.input, str):
        conversation.say("input", "user", body.input)
    else:
        for i, value in enumerate(body.input):
            conversation.add(f"input[{i}]", value)
    wording = Wording(NAMES, conversation.origins, texts=("input", "instructions"))
    try:
        chat = _chat_body(body, conversation.messages)
        call = parse_chat(chat, tokenizer, model=model, max_context=max_context, call_id=call_id, defaults=defaults)
    except InvalidRequest as error:
        wording.translate(error)
        raise
    return replace(wording.of_call(call), echo=_echo(body, call.requests[0].params))


def _chat_body(body: ResponsesRequest, messages: list[dict[str, Any]]) -> dict[str, Any]:
    wanted: dict[str, Any] = {name: getattr(body, name) for name in schema.PASSED_ON}
    wanted |= {
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": bool(body.include),
        "top_logprobs": body.top_logprobs,
        "tools": None if body.tools is None else [_chat_tool(tool) for tool in body.tools],
        "tool_choice": _chat_tool_choice(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "chat_template_kwargs": body.chat_template_kwargs,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "response_format": _chat_format(body),
        "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": body.safety_identifier,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def _chat_tool(tool: schema.FunctionTool) -> dict[str, Any]:
    fields = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {"type": "function", "function": {"name": tool.name} | {k: v for k, v in fields.items() if v is not None}}


def _chat_tool_choice(body: ResponsesRequest) -> Any:
    match body.tool_choice:
        case schema.NamedFunction(name=name):
            return _named(name)
        case schema.AllowedFunctions(mode=mode, tools=tools):
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [_named(tool.name) for tool in tools]}}
    return body.tool_choice


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _chat_format(body: ResponsesRequest) -> dict[str, Any] | None:
    match body.text and body.text.format:
        case schema.JsonSchemaFormat(name=name, schema=json_schema, strict=strict):
            return {"type": "json_schema", "json_schema": {"name": name, "schema": json_schema, "strict": strict}}
        case schema.JsonObjectFormat():
            return {"type": "json_object"}
    return None


class _Conversation:
    """Messages in the making, and for each the field of the body that it began with."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.origins: list[str] = []
        self._reasoning: tuple[str, str] | None = None

    def say(self, origin: str, role: str, content: str, **fields: Any) -> None:
        """Add a message."""
        if role == "assistant" and self._reasoning is not None:
            origin, fields["reasoning_content"] = self._reasoning
        self._reasoning = None
        self.messages.append({"role": role, "content": content, **fields})
        self.origins.append(origin)

    def add(self, origin: str, value: dict[str, Any]) -> None:
        """Add what one item of the input says."""
        kind = value.get("type") or "message"
        if not isinstance(kind, str) or kind not in schema.ITEMS:
            raise invalid(f"{origin}.type", f"one of {', '.join(schema.ITEMS)}", kind)
        match decode_part(origin, value, schema.ITEMS[kind]):
            case schema.MessageItem(role=role, content=content):
                self.say(origin, role, _text_of(content))
            case schema.CallItem() as item:
                self._call(origin, item)
            case schema.CallOutputItem(call_id=call_id, output=output):
                self.say(origin, "tool", _text_of(output), tool_call_id=call_id)
            case schema.ReasoningItem(content=parts):
                text = "".join(part.text for part in parts or ())
                self._reasoning = (origin, text) if text else None

    def _call(self, origin: str, item: schema.CallItem) -> None:
        """A call belongs to what the model said before it, and to the calls that it made along with it."""
        if not self.messages or self.messages[-1]["role"] != "assistant" or self._reasoning is not None:
            self.say(origin, "assistant", "")
        call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        self.messages[-1].setdefault("tool_calls", []).append(call)


def _text_of(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _echo(body: ResponsesRequest, params: SamplingParams) -> dict[str, Any]:
    """What an answer repeats of the body that it answers, with the defaults filled in."""
    text_format = msgspec.to_builtins(body.text.format) if body.text and body.text.format else {"type": "text"}
    choice = body.tool_choice
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "text": {"format": {name: value for name, value in text_format.items() if value is not None}},
        "tool_choice": msgspec.to_builtins(choice) if choice is not None else "auto",
        "tools": [_echo_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
    } | ({} if body.user is None else {"user": body.user})


def _echo_tool(tool: schema.FunctionTool) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    return {"type": "function"} | {name: getattr(tool, name) for name in names}
