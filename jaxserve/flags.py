"""Command-line flags made from the configuration's dataclasses, and back: TOML file, then flags, then `ServeConfig`.

Owns the spelling of flags and their help, which is each attribute's own documentation. Knows no field by name but `model`
and those about chats.
"""

from __future__ import annotations

import argparse
import re
import textwrap
import tomllib
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from jaxserve.config import EngineConfig, HttpConfig, ServeConfig
from jaxserve.errors import ConfigError
from jaxserve.from_mapping import from_mapping

CHAT_FIELDS = (
    *("chat_template", "tool_format", "reasoning_format", "special_tokens_in_messages"),
    "trust_request_chat_template",
)
"""Of `HttpConfig`, what says how to chat with the model; offline runs have it too."""

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--model` and `--config`."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        metavar="M",
        help="a name from configs/models/, a GGUF file, a Hugging Face or Orbax directory, or hf:ORG/NAME",
    )
    group.add_argument("--config", metavar="FILE.toml", type=Path, help="read settings from a file; flags override it")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of `EngineConfig`."""
    _add_flags(parser, "engine", EngineConfig)


def add_http_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of `HttpConfig`."""
    _add_flags(parser, "http", HttpConfig)


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of `HttpConfig` that is about chats, whoever has them."""
    _add_flags(parser, "http", HttpConfig, CHAT_FIELDS, title="chat")


def serve_config_from_args(args: argparse.Namespace) -> ServeConfig:
    """The settings of `--config`, if any, under the flags that were given.

    Raises:
        ConfigError: when the file cannot be read or has an unknown key, when a value is out of range, or when neither
            the file nor the flags name a model.
    """
    path: Path | None = args.config
    values = {} if path is None else _read_toml(path)
    if args.model is not None:
        values["model"] = args.model
    if "model" not in values:
        raise ConfigError("no model is named: give --model M, or --config FILE.toml with a `model` key")
    for dest, value in vars(args).items():
        table, dot, key = dest.partition(".")
        if dot and value is not None:
            values[table] = {**_table(values, table, path), key: value}
    return from_mapping(ServeConfig, values, where="command line" if path is None else str(path))


def attribute_docs(kind: type) -> dict[str, str]:
    """What the `Attributes:` section of a class docstring says of each name; `a, b: text` says it of both."""
    section = re.search(r"^\s*Attributes:\n(.*?)(?:\n\s*\n|\Z)", kind.__doc__ or "", flags=re.MULTILINE | re.DOTALL)
    if section is None:
        return {}
    entries = re.split(r"^(?=\S)", textwrap.dedent(section[1]), flags=re.MULTILINE)
    split = (entry.partition(":") for entry in entries if entry)
    return {name.strip(): " ".join(text.split()) for names, _, text in split for name in names.split(",")}


def _add_flags(
    parser: argparse.ArgumentParser, table: str, kind: type, names: Collection[str] | None = None, *, title: str = ""
) -> None:
    group = parser.add_argument_group(title or table)
    hints, docs = get_type_hints(kind), attribute_docs(kind)
    for item in fields(kind):
        if names is not None and item.name not in names:
            continue
        expected = hints[item.name]
        default = "" if item.default in ("", ()) else f"default: {item.default}"
        text = re.sub(r"`(\w+)`", lambda name: _flag(name[1]) if name[1] in hints else name[1], docs.get(item.name, ""))
        help_text = "; ".join(filter(None, (text.rstrip("."), default))).replace("%", "%%")
        options: dict[str, Any] = {"dest": f"{table}.{item.name}", "default": None, "help": help_text}
        if expected is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif expected == tuple[str, ...]:
            options |= {"action": "append", "metavar": "TEXT"}
        else:
            options |= {"type": _PARSERS[expected], "metavar": _METAVARS[expected]}
        group.add_argument(_flag(item.name), **options)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def integer(text: str) -> int:
    """An integer, with underscores and a binary unit allowed: `65_536`, `64KiB`."""
    match = re.fullmatch(r"(-?[\d_]+)\s*(KiB|MiB|GiB|)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected an integer such as 512, 65_536 or 2GiB, found {text!r}")
    return int(match[1]) * _UNITS[match[2]]


_PARSERS: dict[type, Any] = {int: integer, float: float, str: str}
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not valid TOML: {error}") from None


def _table(values: dict[str, Any], table: str, path: Path | None) -> dict[str, Any]:
    found = values.get(table, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: {table} must be a table, found {found!r}")
    return found
