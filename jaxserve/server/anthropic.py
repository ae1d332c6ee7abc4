"""Anthropic's `/v1/messages`: its bodies as chat completions, which are then read like any other. Pure.

Owns what its fields mean in that other API, and that errors name the fields that the caller sent. The way back is in
`anthropic_form`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from jaxserve.engine.text import Tokenizer
from jaxserve.errors import InvalidRequest
from jaxserve.server.call import NO_DEFAULTS, Call, Defaults, Served
from jaxserve.server.openai import parse_chat
from jaxserve.server.schema import anthropic as schema
from jaxserve.server.schema.decoding import check_depth, decode
from jaxserve.server.wording import Wording

Json = dict[str, Any]

THINKING_VARIABLE = "enable_thinking"
"""What templates of models that may think or not read."""

ERROR_PREFIX = "Error: "
"""What the model sees before the result of a tool that failed."""

SAME_FIELDS = ("temperature", "top_k", "top_p", "seed", "priority", "timeout", "cache_salt")
"""Fields of both APIs."""

NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    ".function.parameters": ".input_schema",
    ".function": "",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "chat_template_kwargs": "thinking",
}
"""Names of fields of a chat completion that are called otherwise here."""


def parse_messages(
    data: bytes | Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    model: Served,
    max_context: int,
    call_id: str,
    defaults: Defaults = NO_DEFAULTS,
) -> Call:
    """Understand a body of `/v1/messages`; as `openai.parse_completion`."""
    body = decode(data, schema.MessagesRequest)
    fields = {
        "max_completion_tokens": body.max_tokens,
        "stream": body.stream,
        "stop": body.stop_sequences,
        "user": body.metadata.user_id if body.metadata else None,
        **{name: getattr(body, name) for name in SAME_FIELDS},
    }
    return _parse(body, fields, tokenizer, model=model, max_context=max_context, call_id=call_id, defaults=defaults)


def count_tokens(data: bytes | Mapping[str, Any], tokenizer: Tokenizer, *, model: Served, max_context: int) -> int:
    """Tokens that the conversation in a body of `/v1/messages/count_tokens` takes.

    Raises:
        InvalidRequest, ModelNotFound: as `parse_messages`.
    """
    body = decode(data, schema.CountTokensRequest)
    return _parse(body, {}, tokenizer, model=model, max_context=max_context, call_id="").num_prompt_tokens


def _parse(body: schema.CountTokensRequest, fields: Json, tokenizer: Tokenizer, **where: Any) -> Call:
    """The call of a conversation; `where` is as `parse_chat` takes it."""
    messages = _Messages(body)
    chat = {
        **fields,
        **messages.fields,
        **_tool_fields(body),
        **_output_fields(body),
        "model": body.model,
        "chat_template_kwargs": _thinking_variables(body, tokenizer),
    }
    try:
        call = parse_chat(chat, tokenizer, **where)
    except InvalidRequest as error:
        messages.wording.translate(error)
        raise
    return messages.wording.of_call(call)


class _Messages:
    """A conversation as a chat completion has it, and where each of its messages comes from."""

    def __init__(self, body: schema.CountTokensRequest) -> None:
        self._messages: list[Json] = []
        self._sources: list[str] = []
        if body.system:
            self._add("system", _parts(_blocks(body.system)), "system")
        for i, turn in enumerate(body.messages):
            match turn:
                case schema.UserTurn():
                    self._add_user(turn, f"messages[{i}]")
                case schema.AssistantTurn():
                    self._add_assistant(turn, f"messages[{i}]")
                case schema.SystemTurn():
                    self._add("system", _parts(_blocks(turn.content)), f"messages[{i}]")
        self._goes_on = isinstance(body.messages[-1], schema.AssistantTurn) and not self._messages[-1].get("tool_calls")

    @property
    def fields(self) -> Json:
        """As fields of a body. An answer that has begun is gone on with."""
        goes_on = {"continue_final_message": True, "add_generation_prompt": False} if self._goes_on else {}
        return {"messages": [message | {"content": _simplest(message)} for message in self._messages], **goes_on}

    @property
    def wording(self) -> Wording:
        """For errors about the chat completion that it became."""
        return Wording(NAMES, self._sources, texts=("system",))

    def _add(self, role: str, parts: list[Json], source: str, **fields: Any) -> None:
        """Add a message, or to the last one if that is of the same role, since turns of one role count as one."""
        last = self._messages[-1] if self._messages else {}
        if last.get("role") == role and role != "tool" and not fields and last.keys() <= {"role", "content"}:
            last["content"] += parts
            return
        self._messages.append({"role": role, "content": parts, **fields})
        self._sources.append(source)

    def _add_user(self, turn: schema.UserTurn, source: str) -> None:
        blocks = _blocks(turn.content)
        for i, block in enumerate(blocks):
            if isinstance(block, schema.ToolResultBlock):
                parts = _parts(_blocks(block.content or ""))
                if block.is_error:
                    parts = [{"type": "text", "text": ERROR_PREFIX + parts[0]["text"]}, *parts[1:]]
                self._add("tool", parts, f"{source}.content[{i}]", tool_call_id=block.tool_use_id)
        said = _parts(blocks)
        if said:
            self._add("user", said, source)

    def _add_assistant(self, turn: schema.AssistantTurn, source: str) -> None:
        blocks = _blocks(turn.content)
        calls = []
        for i, block in enumerate(blocks):
            if isinstance(block, schema.ToolUseBlock):
                check_depth(f"{source}.content[{i}].input", block.input)
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                calls.append({"id": block.id, "type": "function", "function": function})
        fields: Json = {"tool_calls": calls} if calls else {}
        thoughts = "".join(block.thinking for block in blocks if isinstance(block, schema.ThinkingBlock))
        if thoughts:
            fields["reasoning_content"] = thoughts
        self._add("assistant", _parts(blocks), source, **fields)


def _blocks(content: str | Iterable[Any]) -> list[Any]:
    return [schema.Text(text=content)] if isinstance(content, str) else list(content)


def _parts(blocks: Iterable[Any]) -> list[Json]:
    return [{"type": "text", "text": block.text} for block in blocks if isinstance(block, schema.Text)]


def _simplest(message: Json) -> str | list[Json] | None:
    """Content as every template reads it, where there is but one part or none."""
    parts: list[Json] = message["content"]
    if not parts:
        return None if "tool_calls" in message else ""
    return str(parts[0]["text"]) if len(parts) == 1 else parts


def _tool_fields(body: schema.CountTokensRequest) -> Json:
    fields: Json = {}
    if body.tools:
        for i, tool in enumerate(body.tools):
            check_depth(f"tools[{i}].input_schema", tool.input_schema)
        fields["tools"] = [{"type": "function", "function": _function(tool)} for tool in body.tools]
    match body.tool_choice:
        case schema.AutoChoice():
            fields["tool_choice"] = "auto"
        case schema.AnyChoice():
            fields["tool_choice"] = "required"
        case schema.NamedChoice(name=name):
            fields["tool_choice"] = {"type": "function", "function": {"name": name}}
        case schema.NoChoice():
            fields["tool_choice"] = "none"
    if getattr(body.tool_choice, "disable_parallel_tool_use", None):
        fields["parallel_tool_calls"] = False
    return fields


def _function(tool: schema.Tool) -> Json:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    return {name: value for name, value in function.items() if value is not None}


def _output_fields(body: schema.CountTokensRequest) -> Json:
    config = body.output_config or schema.OutputConfig()
    fields: Json = {"reasoning_effort": config.effort}
    if config.format is not None:
        check_depth("output_config.format.schema", config.format.schema)
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": config.format.schema, "strict": True},
        }
    return fields


def _thinking_variables(body: schema.CountTokensRequest, tokenizer: Tokenizer) -> Json | None:
    """What the template is told of thinking.

    Raises:
        InvalidRequest: the model does not do as it should.
    """
    if body.thinking is None:
        return None
    switchable = tokenizer.template is not None and THINKING_VARIABLE in tokenizer.template.variables
    thinks = tokenizer.dialect.reasoning is not None
    wanted = not isinstance(body.thinking, schema.ThinkingDisabled)
    if switchable:
        return {THINKING_VARIABLE: wanted}
    if wanted != thinks:
        does = "thinks whatever it is told" if thinks else "does not think"
        raise InvalidRequest(f"thinking is not supported other than as it is: the model {does}", param="thinking")
    return None
