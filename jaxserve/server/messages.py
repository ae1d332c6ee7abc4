"""The `messages` of a chat completion: from JSON to what a chat template reads.

Owns roles, content parts, and the check that the template shows what it is given. Knows templates as a function only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.server.body import Body, check_text, describe, invalid

Message = dict[str, str]
Render = Callable[[Sequence[Message]], str]

ROLES = ("system", "developer", "user", "assistant", "tool")
ROLES_OF_EVERY_TEMPLATE = ("system", "user", "assistant")

# Values at which fields that are not implemented change nothing.
NO_OP_FIELDS: dict[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "reasoning_content": ("",),
}
FIELDS = ("role", "content", "name", "tool_call_id", *NO_OP_FIELDS)


def parse_messages(value: Any) -> list[Message]:
    """Messages with string content; text parts are joined by newlines.

    Raises:
        InvalidRequest: naming the message and field, as in `messages[2].content[0].type`.
    """
    if not isinstance(value, list) or not value:
        raise invalid("messages", "an array of at least one message", value)
    return [_parse_message(message, f"messages[{i}]") for i, message in enumerate(value)]


def _parse_message(value: Any, where: str) -> Message:
    body = Body(value, FIELDS, where=where)
    for name, no_op in NO_OP_FIELDS.items():
        body.refuse_unless(name, no_op)
    role = body.require("role", f"one of {', '.join(ROLES)}")
    if role not in ROLES:
        raise invalid(body.path("role"), f"one of {', '.join(ROLES)}", role)
    message = {"role": role, "content": _parse_content(body)}
    if (author := body.string("name")) is not None:
        message["name"] = author
    # It says which call a result belongs to, and there are no calls in text.
    body.string("tool_call_id")
    return message


def _parse_content(body: Body) -> str:
    name = body.path("content")
    content = body.require("content", "a string or an array of text parts")
    if isinstance(content, str):
        return check_text(name, content)
    if not isinstance(content, list) or not content:
        raise invalid(name, "a string or an array of text parts", content)
    return "\n".join(_parse_part(part, f"{name}[{i}]") for i, part in enumerate(content))


def _parse_part(value: Any, where: str) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind != "text":
        if isinstance(kind, str):
            raise InvalidRequest(f'{where}.type must be "text", found {describe(kind)}', param=f"{where}.type")
        raise invalid(where, "a text part", value)
    body = Body(value, ("type", "text"), where=where)
    body.require("text", "a string")
    return body.string("text") or ""


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
        fields = [] if message["role"] in ROLES_OF_EVERY_TEMPLATE or not message["content"] else ["content"]
        fields += ["name"] if "name" in message else []
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
