"""Whether a chat template reads a message's content as a string or as a list of parts.

Found by trying: each role's content is given both ways, and what is rendered has to show it. Other engines read the template's
syntax tree for a loop over content; both ways go wrong for some template, trying only where it treats parts in ways that
depend on their text. Knows templates as a function only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Try = Callable[[Sequence[Mapping[str, Any]]], str | None]

FIRST, SECOND = "first97part", "second89part"
PARTS = [{"type": "text", "text": FIRST}, {"type": "text", "text": SECOND}]
SEPARATOR = "\n"
"""Between the texts of parts where a template reads strings."""


@dataclass(frozen=True, slots=True)
class ContentForm:
    """How to give content to a template.

    Attributes:
        as_parts: roles whose content may be a list of parts.
        only_parts: those whose content may be nothing else.
    """

    as_parts: frozenset[str] = frozenset()
    only_parts: frozenset[str] = frozenset()

    def shown(self, role: Any, content: Any) -> Any:
        """`content`, text or a list of text parts, as the template reads that role's."""
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if role in self.only_parts else content
        if not isinstance(content, (list, tuple)) or role in self.as_parts:
            return content
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            return content
        return SEPARATOR.join(part["text"] for part in content)


def content_form(render: Try) -> ContentForm:
    """What `render`, which gives None where the template fails, shows of content in either form."""

    def shows(role: str, content: Any) -> bool:
        rendered = render(_conversation(role, content)) or ""
        # A list that was only printed shows its texts too, as Python or JSON spells them.
        printed = any(quoted in rendered for quoted in ("'type'", '"type"'))
        return FIRST in rendered and SECOND in rendered and not printed

    as_parts = frozenset(role for role in ("system", "user", "assistant") if shows(role, PARTS))
    only_parts = frozenset(role for role in as_parts if not shows(role, FIRST + SECOND))
    return ContentForm(as_parts, only_parts)


def _conversation(role: str, content: Any) -> list[dict[str, Any]]:
    user = {"role": "user", "content": content if role == "user" else "Hello"}
    if role == "user":
        return [user]
    message = {"role": role, "content": content}
    return [message, user] if role == "system" else [user, message]
