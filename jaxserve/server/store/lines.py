"""The lines of a batch on disk: whether its input is one, what is still to do, and the files of what came of it.

Reading and writing is spread over time, so that threads which serve go first. Knows the format of lines, not what a body
means.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.batch_file import InputFile, custom_id_of, parse_batch_line, unanswered
from jaxserve.errors import InvalidRequest
from jaxserve.journal import Journal, encode_json
from jaxserve.server.schema.decoding import check_crumbs
from jaxserve.server.store.batches import BatchRecord, BatchStatus, Counts, LineError
from jaxserve.server.store.files import FileStore

MAX_LINES = 50_000
"""Requests of one batch, as the API's reference has it."""

MAX_ERRORS = 100
"""Errors of an input file that are told."""

BUSY_SECONDS = 0.002
IDLE_SECONDS = 0.001

WHY_UNANSWERED = {
    BatchStatus.EXPIRED: ("batch_expired", "the batch's completion window ended before this request was answered"),
    BatchStatus.CANCELLED: ("batch_cancelled", "the batch was cancelled before this request was answered"),
}


@dataclass(frozen=True, slots=True)
class Checked:
    """An input file that was read once, and what is wrong with it."""

    file: InputFile
    errors: tuple[LineError, ...]


def check_input(path: Path, endpoint: str, max_line_bytes: int) -> Checked:
    """Read an input file whose lines must be requests for `endpoint`, each with an id of its own.

    Args:
        max_line_bytes: a longer line is not read: nothing else gets to run meanwhile.

    Raises:
        ConfigError: it cannot be read.
    """
    file = InputFile(path)
    if not file.num_requests:
        return Checked(file, (LineError(code="empty_file", message="the input file has no requests"),))
    if file.num_requests > MAX_LINES:
        message = f"the input file has {file.num_requests} requests, at most {MAX_LINES} may be in one batch"
        return Checked(file, (LineError(code="too_many_requests", message=message),))
    errors: list[LineError] = []
    num_more = 0
    for error in _line_errors(file, endpoint, max_line_bytes):
        if len(errors) < MAX_ERRORS:
            errors.append(error)
        else:
            num_more += 1
    if num_more:
        errors.append(LineError(code="more_errors", message=f"{num_more} further lines are wrong too"))
    return Checked(file, tuple(errors))


def _line_errors(file: InputFile, endpoint: str, max_line_bytes: int) -> Iterator[LineError]:
    taken: dict[bytes, int] = {}
    for number, raw in _politely(file.lines()):
        if len(raw) > max_line_bytes:
            message = f"the line is longer than {max_line_bytes} bytes, the most that this server reads of a request"
            yield LineError(code="line_too_long", message=message, line=number)
            continue
        try:
            check_crumbs(raw)
            custom_id = parse_batch_line(number, raw, endpoint).custom_id
        except InvalidRequest as error:
            code = "invalid_json_line" if error.param is None else f"invalid_{error.param}"
            yield LineError(code=code, message=str(error), param=error.param, line=number)
            continue
        first = taken.setdefault(_digest(custom_id or ""), number)
        if first != number:
            message = f"custom_id {custom_id!r:.100} is that of line {first} already"
            yield LineError(code="duplicate_custom_id", message=message, param="custom_id", line=number)


@dataclass(frozen=True, slots=True)
class LineToDo:
    """A line that has no result yet. `body` is JSON, as it would come over HTTP."""

    number: int
    custom_id: str | None
    body: bytes


def lines_to_do(file: InputFile, endpoint: str, journal: Journal) -> Generator[LineToDo]:
    """The lines of a checked file that have no result yet, in order.

    Raises:
        ConfigError: it cannot be read, or is not what it was.
    """
    for number, raw in file.lines():
        if not journal.has(number):
            line = parse_batch_line(number, raw, endpoint)
            yield LineToDo(number, line.custom_id, json.dumps(line.body, ensure_ascii=False).encode())


def counts_of(journal: Journal, num_requests: int) -> Counts:
    """What is done so far."""
    failed = journal.num_failed
    return Counts(total=num_requests, completed=journal.num_done - failed, failed=failed)


def write_results(
    record: BatchRecord, ending: BatchStatus, files: FileStore, input_file: InputFile, journal: Journal
) -> dict[str, Any]:
    """Make the files of answers and of errors, in the order of the input; each only if there is something for it.

    Done again it makes the same files again. Lines without a result become errors that say why.

    Returns:
        What changes in `record`.

    Raises:
        ConfigError: the input cannot be read.
        StorageFailed: a file cannot be written.
    """
    completed = journal.num_done - journal.num_failed
    counts = Counts(total=input_file.num_requests, completed=completed, failed=input_file.num_requests - completed)
    usage: Counter[str] = Counter()

    def put(kind: str, results: Iterable[bytes]) -> str:
        stored = files.put(
            f"file-{_digest(record.batch_id, kind).hex()}",
            results,
            owner=record.owner,
            filename=f"{record.batch_id}_{kind}.jsonl",
            purpose="batch_output",
            seconds_to_live=record.output_seconds,
        )
        return stored.file_id

    def answers() -> Iterator[bytes]:
        for _, failed, result in _politely(journal.results()):
            if not failed:
                usage.update(_usage_of(result))
                yield result

    return {
        "output_file_id": put("output", answers()) if counts.completed else None,
        "error_file_id": put("error", _errors(record, ending, input_file, journal)) if counts.failed else None,
        "counts": counts,
        "usage": dict(usage),
    }


def _errors(record: BatchRecord, ending: BatchStatus, input_file: InputFile, journal: Journal) -> Iterator[bytes]:
    results = journal.results()
    for number, raw in _politely(input_file.lines()):
        if journal.has(number):
            _, failed, result = next(results)
            if failed:
                yield result
        else:
            code, message = WHY_UNANSWERED[ending]
            line = unanswered(result_id(record.batch_id, number), custom_id_of(raw), code, message)
            yield encode_json(line).encode() + b"\n"


def _usage_of(result: bytes) -> dict[str, int]:
    """Token counts of an answer, whose usage is spelled in one of two ways."""
    usage = json.loads(result)["response"]["body"].get("usage") or {}
    old = "prompt_tokens" in usage
    prompt, output = ("prompt_tokens", "completion_tokens") if old else ("input_tokens", "output_tokens")
    return {
        "input_tokens": usage.get(prompt, 0),
        "cached_tokens": (usage.get(f"{prompt}_details") or {}).get("cached_tokens", 0),
        "output_tokens": usage.get(output, 0),
        "reasoning_tokens": (usage.get(f"{output}_details") or {}).get("reasoning_tokens", 0),
        "total_tokens": usage.get("total_tokens", 0),
    }


def result_id(batch_id: str, number: int) -> str:
    """The id of the result of a line, the same whenever it is made."""
    return f"batch_req_{_digest(batch_id, str(number)).hex()}"


def _digest(*parts: str) -> bytes:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).digest()


def _politely[T](items: Iterable[T]) -> Iterator[T]:
    """`items`, with pauses: Python runs one thread at a time, and there are some that someone waits for."""
    since = time.perf_counter()
    for item in items:
        yield item
        if time.perf_counter() - since > BUSY_SECONDS:
            time.sleep(IDLE_SECONDS)
            since = time.perf_counter()
