"""The journal of a file of requests: the result of each line as it comes, from which a killed run carries on.

Owns that file: a header that says which run it belongs to, then one record a result, in the order in which they finish.
Whoever kills the run when, the journal's whole records are what is done: a half-written one at its end is cut off, and
nothing that is recorded is computed again. Knows line numbers and results as JSON, not what they mean. Standard library only.
"""

from __future__ import annotations

import json
import os
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxserve.disk import open_locked, sync_directory
from jaxserve.errors import ConfigError, OutputError

SYNC_SECONDS = 1.0

_HEADER_KEY = "jaxserve_journal"
# Valid inside a JSON string, but taken for line ends by readers that split on every Unicode line break.
_LINE_BREAKS = str.maketrans({"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


class ForeignJournal(ConfigError):
    """There is a journal, and it is not that of this run."""


class Journal:
    """Results of one run as they finish. One process at a time holds it.

    Args:
        path: of the file; its directory exists.
        fingerprint: what determines the results. A journal with another one is refused.
        num_lines: of the input, and so the highest line number.

    Attributes:
        num_done: lines that have a result.
        num_failed: those of them whose result is an error.
        num_bytes_cut: what an earlier run had left half-written.

    Raises:
        ForeignJournal: when it belongs to a run with another fingerprint, or is no journal.
        ConfigError: when another run holds it.
        OutputError: when it cannot be written.
    """

    def __init__(self, path: Path, fingerprint: Mapping[str, Any], num_lines: int) -> None:
        self.path = path
        # Where each line's record begins; 0, where the header is, for those without.
        self._offsets = array("q", bytes(8 * (num_lines + 1)))
        self.num_done = self.num_failed = self.num_bytes_cut = 0
        self._synced_at = time.monotonic()
        self._fd = open_journal_file(path)
        try:
            self._end = self._recover(fingerprint)
        except BaseException:
            os.close(self._fd)
            raise

    def has(self, line: int) -> bool:
        """Whether the line has a result."""
        return self._offsets[line] != 0

    def append(self, line: int, result: Mapping[str, Any], *, failed: bool) -> None:
        """Record the result of a line. It survives the process at once, and the machine within `SYNC_SECONDS` of work.

        Raises:
            OutputError: when it cannot be written; the results before it are kept.
        """
        assert not self.has(line), f"line {line} has a result already"
        record = f'{{"line": {line}, "failed": {json.dumps(failed)}, "result": {encode_json(result)}}}\n'
        start = self._end
        self._write(record.encode())
        self._offsets[line] = start
        self.num_done += 1
        self.num_failed += failed
        if time.monotonic() - self._synced_at >= SYNC_SECONDS:
            self._sync()

    def results(self) -> Iterator[tuple[int, bool, bytes]]:
        """Line numbers, whether they failed, and their results, each one line of JSON, in the order of the input.

        Raises:
            OSError: it cannot be read.
        """
        with self.path.open("rb") as records:
            for line, offset in enumerate(self._offsets):
                if offset:
                    records.seek(offset)
                    yield line, *_result_of(records.readline())

    def remove(self) -> None:
        """Remove it, which says that all of it is kept elsewhere.

        Raises:
            OSError: it cannot be removed.
        """
        os.unlink(self.path)
        self.close()

    def close(self) -> None:
        """Let go of the journal; a later run carries on from it."""
        if self._fd >= 0:
            with suppress(OSError):
                os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _recover(self, fingerprint: Mapping[str, Any]) -> int:
        """Read what is there, cut off what is half-written, and return where the next record goes."""
        size = os.fstat(self._fd).st_size
        with os.fdopen(os.dup(self._fd), "rb") as file:
            header = file.readline()
            if not header.endswith(b"\n"):
                return self._begin(fingerprint, size)
            _check_header(header, fingerprint, self.path)
            end = len(header)
            for record in file:
                if not self._take(record, end):
                    break
                end += len(record)
        if end < size:
            self.num_bytes_cut = size - end
            self._truncate(end)
        return end

    def _begin(self, fingerprint: Mapping[str, Any], size: int) -> int:
        self.num_bytes_cut = size
        self._truncate(0)
        self._end = 0
        self._write(encode_json({_HEADER_KEY: 1, "fingerprint": fingerprint}).encode() + b"\n")
        self._sync()
        sync_directory(self.path.parent)
        return self._end

    def _take(self, record: bytes, offset: int) -> bool:
        """Note the record, if it is whole."""
        try:
            value = json.loads(record)
            line, failed = value["line"], value["failed"]
        except (ValueError, KeyError, TypeError):
            return False
        if not record.endswith(b"\n") or not 1 <= line < len(self._offsets) or self.has(line):
            return False
        self._offsets[line] = offset
        self.num_done += 1
        self.num_failed += failed
        return True

    def _write(self, data: bytes) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._fd, data[written:], self._end + written)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._fd, self._end)
            raise self._error(error) from None
        self._end += len(data)

    def _truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise self._error(error) from None

    def _sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._error(error) from None
        self._synced_at = time.monotonic()

    def _error(self, error: OSError) -> OutputError:
        return OutputError(
            f"{error.strerror}; the {self.num_done} results so far are kept in {self.path}. Put that right (free some space?)"
        )


def encode_json(value: Mapping[str, Any]) -> str:
    """One line of JSON, readable in any language."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).translate(_LINE_BREAKS)


def _result_of(record: bytes) -> tuple[bool, bytes]:
    head, _, result = record.partition(b', "result": ')
    return head.endswith(b"true"), result.removesuffix(b"}\n") + b"\n"


def open_journal_file(path: Path) -> int:
    """Open or make the file of a journal, and hold it.

    Raises:
        ConfigError: another run holds it.
        OutputError: it cannot be opened.
    """
    try:
        return open_locked(path)
    except BlockingIOError:
        raise ConfigError(f"{path} is in use: another run with this output is going on") from None
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror}") from None


def _check_header(header: bytes, fingerprint: Mapping[str, Any], path: Path) -> None:
    try:
        found = json.loads(header)
        recorded = found["fingerprint"] if found[_HEADER_KEY] == 1 else None
    except (ValueError, KeyError, TypeError):
        recorded = None
    if not isinstance(recorded, dict):
        raise ForeignJournal(f"{path} is not a journal of results")
    changed = sorted(key for key in {*recorded, *fingerprint} if recorded.get(key) != fingerprint.get(key))
    if changed:
        differences = "; ".join(f"{key} was {recorded.get(key)!r}, is {fingerprint.get(key)!r}" for key in changed)
        raise ForeignJournal(f"{path} belongs to an unfinished run that differs: {differences}")
