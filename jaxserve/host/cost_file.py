"""Step costs as TOML files: a fit with where it comes from, or a chip's figures.

Owns the format. Knows neither how costs are measured nor what they are used for.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.from_mapping import from_mapping
from jaxserve.host.cost import ChipCost, FittedCost, KindCost, StepCost


@dataclass(frozen=True, slots=True, kw_only=True)
class CostOrigin:
    """Where a cost comes from.

    Attributes:
        model: whose steps it is of.
        machine: which they ran on.
        date: day of the measurement, as YYYY-MM-DD.
        num_steps: shapes and contents that were measured.
        median_error, p95_error: of the fit on those, as shares of the measured times.
        kv_bytes_per_token: K and V of one position in all layers, from which the pool's size follows.
        window: positions that every layer sees at most, as `RunnerLimits.window` has it; 0 where one sees all.
        request_seconds: that a request spends on its way into the engine.
        reply_seconds: that a token spends on its way out of it, to whoever reads it.
        spread: measured over predicted of single steps, from the least to the most; empty where they were not looked at.
        note: anything else that a reader should know.
    """

    model: str = ""
    machine: str = ""
    date: str = ""
    num_steps: int = 0
    median_error: float = 0.0
    p95_error: float = 0.0
    kv_bytes_per_token: float = 0.0
    window: int = 0
    request_seconds: float = 0.0
    reply_seconds: float = 0.0
    spread: tuple[float, ...] = ()
    note: str = ""


def format_cost(cost: FittedCost, origin: CostOrigin) -> str:
    """The file's text; `parse_cost` reads it."""
    lines = ["# Seconds of a step of the engine. Written by `python -m bench.calibrate`.", "[origin]", *_lines(origin)]
    for name in ("decode", "chunked"):
        lines += ["", f"[fitted.{name}]", *_lines(getattr(cost, name))]
    return "\n".join(lines) + "\n"


def _lines(values: Any) -> list[str]:
    return [f"{field.name} = {_value(getattr(values, field.name))}" for field in fields(values)]


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, float):
        return f"{value:.6g}" if value == 0 or abs(value) >= 1e-4 else f"{value:.5e}"
    if isinstance(value, str):
        # Of what TOML's basic strings must escape, machine and model names may hold these two.
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)


def read_cost(path: Path) -> tuple[StepCost, CostOrigin]:
    """Read a cost file.

    Raises:
        ConfigError: it cannot be read, or is not a cost file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cost file {path}: {error.strerror}; `python -m bench.calibrate` writes one") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"cost file {path} is not text: {error}") from None
    return parse_cost(text, where=str(path))


def parse_cost(text: str, *, where: str) -> tuple[StepCost, CostOrigin]:
    """What `format_cost` wrote, or a file with a `[chip]` table instead of `[fitted]`.

    Raises:
        ConfigError: naming `where` and what is wrong.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from None
    unknown = sorted(values.keys() - {"origin", "fitted", "chip"})
    if unknown or ("fitted" in values) == ("chip" in values):
        raise ConfigError(f"{where}: expected a table [chip] or [fitted], and [origin] if you like, found {sorted(values)}")
    origin = _origin(values.get("origin", {}), f"{where}: origin")
    if "chip" in values:
        return from_mapping(ChipCost, values["chip"], where=f"{where}: chip"), origin
    tables = {name: _kind(table, f"{where}: fitted.{name}") for name, table in values["fitted"].items()}
    if set(tables) != {"decode", "chunked"}:
        raise ConfigError(f"{where}: expected [fitted.decode] and [fitted.chunked], found {sorted(tables)}")
    return FittedCost(**tables), origin


def _origin(table: Any, where: str) -> CostOrigin:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table, found {table!r}")
    spread = table.get("spread", [])
    if not isinstance(spread, list) or not all(type(value) in (int, float) and value > 0 for value in spread):
        raise ConfigError(f"{where}: spread must be an array of positive numbers, found {spread!r}")
    return from_mapping(CostOrigin, {**table, "spread": tuple(spread)}, where=where)


def _kind(table: Any, where: str) -> KindCost:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table, found {table!r}")
    for name in ("places", "seconds"):
        values = table.get(name)
        if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
            raise ConfigError(f"{where}: {name} must be an array of numbers, found {values!r}")
    try:
        return from_mapping(KindCost, {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}, where=where)
    except ConfigError as error:
        raise error if str(error).startswith(where) else ConfigError(f"{where}: {error}") from None
