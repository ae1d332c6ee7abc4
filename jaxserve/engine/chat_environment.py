"""The Jinja dialect of chat templates: a sandbox with the filters, functions and tags that Hugging Face's has.

A template reads what it is given, can change none of it and reaches nothing else. Knows nothing of messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace


class Refusal(jinja2.TemplateError):
    """The template itself says that it cannot be used like this (`raise_exception`)."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks assistant tokens for training; for serving its body is all that counts."""

    tags = {"generation"}  # noqa: RUF012 - the attribute's type is Jinja's

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A block of its own, as where it is used for training: what is set inside is not set outside.
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """Jinja's, without names that could be Python's own."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace may not hold {name!r}, which begins with an underscore")
        super().__setitem__(name, value)


def _namespace(*args: Any, **values: Any) -> _Namespace:
    made = _Namespace()
    for name, value in dict(*args, **values).items():
        made[name] = value
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which would put \u003c before the model.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise Refusal(message)


def environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """An environment for one template, in which it is `now()`."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: now().strftime(form)
    made.globals["namespace"] = _namespace
    return made
