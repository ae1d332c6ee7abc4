"""Rendering a conversation through a model's chat template, in the Jinja dialect that Hugging Face templates are written in.

Owns what a template may see and how long it may take. What it gives is what `transformers` (5.24) gives for the same
messages, but where a template cannot read content in parts (`chat_content`). Knows text, not tokens.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension

from jaxserve.engine.chat_content import ContentForm, content_form
from jaxserve.engine.chat_environment import Refusal, environment
from jaxserve.errors import InvalidRequest, ModelLoadError

Message = Mapping[str, Any]

MAX_SECONDS = 2.0
"""CPU time for one rendering. Real ones take milliseconds; only a hostile conversation, or template, takes longer."""

TRIAL_SECONDS = 0.1
"""As much for each of the conversations that a new template is tried with."""

MAX_CHARACTERS = 64 * 1024 * 1024
MAX_DEPTH = 64
"""Lists and objects within each other, in messages and variables."""

MAX_SHOWN_ERROR = 1000

# Names for what a model thought before it answered; the first is what most templates read.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class _TooLong(Exception):
    """A rendering exceeds its limits."""


_deadline: ContextVar[float] = ContextVar("deadline")


class _Bounds(Extension):
    """Has every turn of a loop and every call of a macro look at the clock."""

    def look(self) -> None:
        if time.thread_time() > _deadline.get():
            raise _TooLong("it takes too long")

    def bind_loops(self, template: nodes.Template) -> None:
        for node in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            assert isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock))
            call = nodes.Call(nodes.ExtensionAttribute(self.identifier, "look"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno, override=True))


_TRIED_NAME = "tried_function"
_TRIED_TOOL = {
    "type": "function",
    "function": {
        "name": _TRIED_NAME,
        "description": "?",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "?"}}},
    },
}


class ChatTemplate:
    """A compiled chat template.

    Args:
        now: what `strftime_now` tells the template.

    Attributes:
        source: as it was given.
        variables: names that the template reads and does not set, such as `messages` or `enable_thinking`.
        literals: strings that the template is made of, among them roles that it compares with.

    Raises:
        ModelLoadError: the template does not compile.
    """

    def __init__(
        self, source: str, *, bos_token: str = "", eos_token: str = "", now: Callable[[], datetime] = datetime.now
    ) -> None:
        self.source = source
        env = environment(now)
        bounds = _Bounds(env)
        env.extensions[bounds.identifier] = bounds
        try:
            tree = env.parse(source)
            self.variables = frozenset(meta.find_undeclared_variables(tree) - set(env.globals))
            constants = (node.value for node in tree.find_all(nodes.Const))
            self.literals = frozenset(value for value in constants if isinstance(value, str))
            bounds.bind_loops(tree)
            self._template = jinja2.Template.from_code(env, env.compile(tree), env.make_globals(None))
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(f"chat template, line {error.lineno}: {error.message}") from None
        except (RecursionError, SyntaxError, MemoryError, OverflowError) as error:  # of Python, which it is compiled to
            raise ModelLoadError(f"chat template: it does not compile: {type(error).__name__}: {error}") from None
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self.content: ContentForm = content_form(self._try)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The conversation as the model was trained to see it.

        Args:
            add_generation_prompt: end with what an answer begins with.
            continue_final_message: end with the content of the last message, for the model to go on with it.
            variables: further names that the template reads, `tools` and `documents` among them.

        Raises:
            InvalidRequest: the template refused (`raise_exception`) or could not use the messages, which are nested too
                deeply, take too long or give too much text; or the last message cannot be continued.
        """
        check_depth(messages=messages, **variables)
        shown = [self._as_read(message) for message in messages]
        if not continue_final_message:
            return self._render(shown, add_generation_prompt, variables)
        if add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other: the answer goes on with the last "
                "message, or begins a new one",
                param="continue_final_message",
            )
        tag = f"continue{secrets.token_hex(8)} "
        final = _append_to_content(shown[-1], tag)
        return _cut_at(self._render([*shown[:-1], final], False, variables), tag)

    def _as_read(self, message: Message) -> dict[str, Any]:
        """The message as templates expect it: no nulls, content in the form it reads, reasoning under each of its names."""
        plain = {key: value for key, value in message.items() if value is not None}
        if plain.get("role") == "developer" and "developer" not in self.literals:
            plain["role"] = "system"  # the same by its older name
        if plain.get("tool_calls"):
            plain.setdefault("content", "")  # clients leave it out, and many templates do not expect that
        if "content" in plain:
            plain["content"] = self.content.shown(plain.get("role"), plain["content"])
        reasoning = next((plain[name] for name in REASONING_FIELDS if name in plain), None)
        return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        try:
            return self._generate(messages, add_generation_prompt, variables, MAX_SECONDS)
        except Refusal as error:
            raise _refused(f"says: {error}") from None
        except _TooLong as error:
            raise _refused(f"cannot use them: {error}") from None
        except Exception as error:  # whatever can go wrong in a program that others wrote, over data that others sent
            raise _refused(f"cannot use them: {type(error).__name__}: {error}") from None

    def _generate(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any], seconds: float
    ) -> str:
        context = {
            "tools": None,
            "documents": None,
            **self._tokens,
            **variables,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        token = _deadline.set(time.thread_time() + seconds)
        try:
            pieces, length = [], 0
            for piece in self._template.generate(context):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_CHARACTERS:
                    raise _TooLong(f"they give more than {MAX_CHARACTERS} characters")
            return "".join(pieces)
        finally:
            _deadline.reset(token)

    @cached_property
    def shows_tools(self) -> bool:
        """Whether it shows the model what it may call. Where a trial fails, which tells nothing, it is taken to."""
        rendered = self._try([{"role": "user", "content": "?"}], tools=[_TRIED_TOOL])
        return rendered is None or _TRIED_NAME in rendered

    @cached_property
    def shows_calls(self) -> bool:
        """Whether it shows the calls of an assistant's message. Where a trial fails, which tells nothing, it is taken to."""
        call = {"id": "call12345", "type": "function", "function": {"name": _TRIED_NAME, "arguments": {}}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        rendered = self._try([{"role": "user", "content": "?"}, called], tools=[_TRIED_TOOL])
        without = self._try([{"role": "user", "content": "?"}], tools=[_TRIED_TOOL])
        if rendered is None or without is None:
            return True
        return rendered.count(_TRIED_NAME) > without.count(_TRIED_NAME)

    def _try(self, messages: Sequence[Message], **variables: Any) -> str | None:
        """What these messages give, as they are; None if the template cannot use them."""
        try:
            return self._generate([dict(message) for message in messages], False, variables, TRIAL_SECONDS)
        except Exception:
            return None


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"messages: the model's chat template {why}"[:MAX_SHOWN_ERROR], param="messages")


def check_depth(**values: Any) -> None:
    """Check that none of the values is nested more than `MAX_DEPTH` deep.

    Raises:
        InvalidRequest: with the name of the one that is.
    """
    for name, value in values.items():
        if not _is_shallow(value):
            raise InvalidRequest(f"{name} must be nested at most {MAX_DEPTH} levels deep", param=name)


def _is_shallow(value: Any) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                inner.extend(item.values())
            elif isinstance(item, (list, tuple)):
                inner.extend(item)
        if not inner:
            return True
        level = inner
    return False


def _append_to_content(message: dict[str, Any], tag: str) -> dict[str, Any]:
    """The message with `tag` after its text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + tag}
    if isinstance(content, list) and content and "text" in content[-1]:
        return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + tag}]}
    raise InvalidRequest(
        "continue_final_message: the last message has no text that could be continued", param="continue_final_message"
    )


def _cut_at(rendered: str, tag: str) -> str:
    """What comes before `tag`; where the template trimmed the content, as the lost space after the tag shows, that trimmed."""
    position = rendered.rfind(tag.rstrip())
    if position < 0:
        raise InvalidRequest(
            "continue_final_message: the model's chat template does not show the content of the last message",
            param="continue_final_message",
        )
    # The template may have shown the content before, as in a summary.
    before = rendered[:position].replace(tag, "").replace(tag.rstrip(), "")
    return before if rendered.startswith(tag, position) else before.rstrip()
