"""The `messages` of a chat completion: from what the schema has to what a chat template reads.

Owns the check that the template shows what it is given. Knows templates as a function only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.server.schema.chat import AnyMessage, AssistantMessage, TextPart, ToolMessage
from jaxserve.server.schema.decoding import invalid
from jaxserve.server.schema.tools import ToolCall

Message = dict[str, Any]
Render = Callable[[Sequence[Message]], str]

ROLES_OF_EVERY_TEMPLATE = ("system", "user", "assistant")


def read_messages(messages: Sequence[AnyMessage]) -> list[Message]:
    """Messages as templates read them, with content in the form in which it came, and results of calls with their function.

    Raises:
        InvalidRequest: one has neither content nor calls.
    """
    called: dict[str, str] = {}
    read = []
    for i, message in enumerate(messages):
        if isinstance(message, AssistantMessage):
            called |= {call.id: call.function.name for call in message.tool_calls or ()}
        read.append(_read_message(message, f"messages[{i}]", called))
    return read


def _read_message(message: AnyMessage, path: str, called: Mapping[str, str]) -> Message:
    """One message; `called` are the functions of the calls so far, by the calls' ids."""
    read: Message = {"role": message.role}
    if message.content is not None:
        read["content"] = _content_of(message.content)
    if message.name is not None:
        read["name"] = message.name
    if isinstance(message, AssistantMessage):
        if message.tool_calls:
            read["tool_calls"] = [_read_call(call) for call in message.tool_calls]
        elif message.content is None:
            raise invalid(f"{path}.content", "a string or an array of text parts where there are no tool_calls", None)
        if message.reasoning_content:
            read["reasoning_content"] = message.reasoning_content
    elif isinstance(message, ToolMessage) and message.tool_call_id is not None:
        read["tool_call_id"] = message.tool_call_id
        if message.tool_call_id in called:
            read.setdefault("name", called[message.tool_call_id])
    return read


def _read_call(call: ToolCall) -> dict[str, Any]:
    """The call with arguments as an object, which is what templates spell; what a model wrote that is none stays text."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        arguments = call.function.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _content_of(content: str | list[TextPart]) -> str | list[dict[str, str]]:
    return content if isinstance(content, str) else [{"type": "text", "text": part.text} for part in content]


def check_shown(messages: Sequence[Message], render: Render) -> None:
    """Check that the template shows names, and messages of roles that not every template knows.

    Many templates skip what they do not know without a word. So these are rendered once more with a marker in place of
    each, which must come out.

    Raises:
        InvalidRequest: naming what the template drops.
    """
    markers: dict[str, str] = {}
    probe: list[Message] = []
    for i, message in enumerate(messages):
        fields = [] if message["role"] in ROLES_OF_EVERY_TEMPLATE or not message.get("content") else ["content"]
        # The name of a tool that gave a result is that of the call's function.
        fields += ["name"] if "name" in message and message["role"] != "tool" else []
        marked = {field: f"marker{i}{field}marker" for field in fields}
        markers |= {f"messages[{i}].{field}": marker for field, marker in marked.items()}
        probe.append(message | marked)
    if not markers:
        return
    rendered = render(probe)
    for path, marker in markers.items():
        if marker not in rendered:
            field = path.rpartition(".")[2]
            what = "names" if field == "name" else "messages of this role"
            raise InvalidRequest(f"{path}: the model's chat template drops {what}", param=path)
