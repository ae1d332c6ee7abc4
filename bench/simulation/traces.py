"""Traces of traffic: who comes when, with how many prompt tokens, for how many output tokens.

Owns the three formats that are read. Knows nothing of servers.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from jaxserve.errors import ConfigError

BLOCK_TOKENS = 512
"""Tokens that one of Mooncake's hash ids stands for."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Attributes:
        at: seconds from the first.
        blocks: ids of the prompt's blocks of `BLOCK_TOKENS` tokens; prompts that begin with the same ids share these tokens.
            Empty where nothing is known, so that nothing is shared.
    """

    at: float
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...] = ()


def read_trace(path: Path, *, rate: float | None = None, seed: int = 0) -> list[Arrival]:
    """Read a trace, whose format follows from its first line.

    - `TIMESTAMP,ContextTokens,GeneratedTokens`: Azure's LLM inference traces.
    - JSON objects with timestamp (ms), input_length, output_length and hash_ids: Mooncake's.
    - `first_prompt_tokens,first_reply_tokens,...`: lengths alone, which need a `rate`.

    Args:
        rate: requests a second that arrive at random (Poisson) instead of at the trace's own times.

    Raises:
        ConfigError: the file cannot be read, its format is unknown, or it has no times and there is no `rate`.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
            file.seek(0)
            arrivals, has_times = _read_lines(path, first, file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path}: {error}") from None
    except (KeyError, ValueError) as error:
        raise ConfigError(f"trace {path} has a line that does not fit its format: {error!r}") from None
    if not arrivals:
        raise ConfigError(f"trace {path} has no requests")
    if rate is not None:
        return at_rate(arrivals, rate, seed)
    if not has_times:
        raise ConfigError(f"trace {path} has lengths but no times; give --rate R, requests a second")
    start = min(arrival.at for arrival in arrivals)
    return sorted((replace(arrival, at=arrival.at - start) for arrival in arrivals), key=lambda arrival: arrival.at)


def _read_lines(path: Path, first: str, file: Iterator[str]) -> tuple[list[Arrival], bool]:
    if first.startswith("TIMESTAMP,"):
        return [_azure(row) for row in csv.DictReader(file)], True
    if first.startswith("first_prompt_tokens,"):
        rows = csv.DictReader(file)
        return [_usable(0.0, int(row["first_prompt_tokens"]), int(row["first_reply_tokens"])) for row in rows], False
    if first.startswith("{"):
        return [_mooncake(json.loads(line)) for line in file if line.strip()], True
    raise ConfigError(f"trace {path}: expected Azure's CSV, Mooncake's JSON lines or a CSV of lengths, found {first[:60]!r}")


def _azure(row: dict[str, str]) -> Arrival:
    # Seven digits of a second are one more than Python takes.
    at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
    return _usable(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _mooncake(row: dict) -> Arrival:
    return _usable(row["timestamp"] / 1000, row["input_length"], row["output_length"], tuple(row["hash_ids"]))


def _usable(at: float, num_prompt: int, num_output: int, blocks: tuple[int, ...] = ()) -> Arrival:
    """No request is empty, nor answered with nothing."""
    return Arrival(at, max(1, num_prompt), max(1, num_output), blocks)


def at_rate(arrivals: Sequence[Arrival], rate: float, seed: int) -> list[Arrival]:
    """The same requests in the same order, arriving at random, `rate` a second."""
    if rate <= 0:
        raise ConfigError(f"the rate must be positive, found {rate}")
    draw = random.Random(seed)
    at, moved = 0.0, []
    for arrival in arrivals:
        at += draw.expovariate(rate)
        moved.append(replace(arrival, at=at))
    return moved


def clip(arrivals: Sequence[Arrival], *, max_prompt: int, max_output: int) -> list[Arrival]:
    """Lengths cut to these; 0 leaves them."""
    return [
        replace(
            arrival,
            num_prompt=min(arrival.num_prompt, max_prompt or arrival.num_prompt),
            num_output=min(arrival.num_output, max_output or arrival.num_output),
        )
        for arrival in arrivals
    ]


def prompt_tokens(arrival: Arrival, number: int) -> tuple[int, ...]:
    """Ids for the prompt of request `number`: a block's are its own id throughout, so equal blocks are equal tokens; without
    blocks they are one id that no other request has."""
    if not arrival.blocks:
        return (2 * number + 1,) * arrival.num_prompt
    tokens: list[int] = []
    for block in arrival.blocks:
        tokens += (2 * block + 2,) * BLOCK_TOKENS
    missing = arrival.num_prompt - len(tokens)
    return tuple(tokens[: arrival.num_prompt]) + (2 * number + 1,) * missing
