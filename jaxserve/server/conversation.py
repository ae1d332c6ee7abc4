"""A body's conversation as token ids: its messages, the variables of the chat template, and how the rendering ends.

Owns what the endpoints that take messages share. Does not know what becomes of the ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxserve.engine.text import Tokenizer
from jaxserve.errors import InvalidRequest
from jaxserve.server.messages import check_shown, read_messages
from jaxserve.server.schema.chat import AnyMessage
from jaxserve.server.schema.decoding import check_depth, unknown_field
from jaxserve.server.schema.tools import FunctionTool

VARIABLES_NOT_OPEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})


class Conversation(Protocol):
    """The fields of a body that has one."""

    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def add_special_tokens(self) -> bool | None: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def tools(self) -> list[FunctionTool] | None: ...


def open_variables(body: Conversation, tokenizer: Tokenizer) -> frozenset[str]:
    """What the chat template reads and a body may set.

    Raises:
        InvalidRequest: there is no template, or the body brings one and may not.
    """
    return tokenizer.template_for(body.chat_template, tools=bool(body.tools)).variables - VARIABLES_NOT_OPEN


def template_variables(body: Conversation, tokenizer: Tokenizer) -> dict[str, Any]:
    """`chat_template_kwargs`, all of which the template reads.

    Raises:
        InvalidRequest: naming one that it does not, or as `open_variables`.
    """
    known = open_variables(body, tokenizer)
    variables = dict(body.chat_template_kwargs or {})
    for name, value in variables.items():
        if name not in known:
            raise unknown_field("chat_template_kwargs", name, known)
        check_depth(f"chat_template_kwargs.{name}", value)
    return variables


def encode_conversation(
    body: Conversation,
    messages: Sequence[AnyMessage],
    tokenizer: Tokenizer,
    variables: dict[str, Any],
    *,
    check: Callable[[str], None],
) -> list[int]:
    """The conversation as ids, with what an answer begins with at its end, or the beginning of an answer itself.

    Args:
        variables: what the template reads beside the messages.
        check: called with the rendered text, to refuse before it is encoded what is too long.

    Raises:
        InvalidRequest: naming the field.
    """
    read = read_messages(messages)
    calls = next((i for i, message in enumerate(read) if "tool_calls" in message), None)
    if calls is not None and not tokenizer.template_for(body.chat_template, tools="tools" in variables).shows_calls:
        path = f"messages[{calls}].tool_calls"
        raise InvalidRequest(f"{path}: the model's chat template drops calls", param=path)
    check_shown(read, lambda probe: tokenizer.render_chat(probe, chat_template=body.chat_template, **variables))

    continued = bool(body.continue_final_message)
    return tokenizer.encode_chat(
        read,
        check=check,
        chat_template=body.chat_template,
        add_special_tokens=bool(body.add_special_tokens),
        add_generation_prompt=not continued if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continued,
        **variables,
    )
