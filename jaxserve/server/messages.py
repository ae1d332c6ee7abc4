"""The `messages` of a chat completion: from what the schema has to what a chat template reads.

Owns the check that the template shows what it is given. Knows templates as a function only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.server.schema.chat import AnyMessage, TextPart

Message = dict[str, Any]
Render = Callable[[Sequence[Message]], str]

ROLES_OF_EVERY_TEMPLATE = ("system", "user", "assistant")


def read_messages(messages: Sequence[AnyMessage]) -> list[Message]:
    """Messages as templates read them, with content in the form in which it came."""
    return [_read_message(message) for message in messages]


def _read_message(message: AnyMessage) -> Message:
    read = {"role": message.role, "content": _content_of(message.content)}
    return read if message.name is None else read | {"name": message.name}


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
