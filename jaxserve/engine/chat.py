"""Rendering a conversation through a model's chat template, in the Jinja dialect that Hugging Face templates are written in.

Owns the sandboxed environment and what a template may see. Knows text, not tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.errors import InvalidRequest, ModelLoadError

Message = Mapping[str, Any]


class _GenerationBlock(Extension):
    """`{% generation %}` marks assistant tokens for training; for serving its body is all that counts."""

    tags = {"generation"}  # noqa: RUF012 - the attribute's type is Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which would put &lt; and \u003c before the model.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled chat template.

    Attributes:
        variables: names that the template reads and does not set, such as `messages` or `enable_thinking`.

    Raises:
        ModelLoadError: the template does not compile.
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)) - set(environment.globals))
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(f"chat template, line {error.lineno}: {error.message}") from None
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The conversation as the model was trained to see it.

        Args:
            variables: further names that the template reads.

        Raises:
            InvalidRequest: the template refused (`raise_exception`) or could not use the messages.
        """
        context = {**self._tokens, **variables, "messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(context)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"messages: the model's chat template says: {error}", param="messages") from None
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
            raise InvalidRequest(
                f"messages: the model's chat template cannot use them: {type(error).__name__}: {error}", param="messages"
            ) from None
