"""What is on disk at every moment of an offline run: the journal from which a killed run carries on, and the output.

Owns these two files. Knows line numbers and results as JSON, not what they mean.

While a run goes on, `OUTPUT.partial` is its journal: a header that says which run it belongs to, then one record a result,
in the order in which they finish. At the end the results are put into the order of the input in `OUTPUT.tmp`, which then
becomes `OUTPUT` in one rename. So `OUTPUT` is whole or absent, and whoever kills the run when, the journal's whole records
are what is done: a half-written one at its end is cut off, and nothing that is recorded is computed again.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from array import array
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError, OutputError

SYNC_SECONDS = 1.0

_HEADER_KEY = "jaxserve_offline_journal"
# Valid inside a JSON string, but taken for line ends by readers that split on every Unicode line break.
_LINE_BREAKS = str.maketrans({"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


class Journal:
    """Results of one run as they finish, and at the end the output. One process at a time holds it.

    Args:
        output: where the results go in the end; its directory exists.
        fingerprint: what determines the results. A journal with another one is refused.
        num_lines: of the input, and so the highest line number.

    Attributes:
        num_done: lines that have a result.
        num_failed: those of them whose result is an error.
        num_bytes_cut: what an earlier run had left half-written.

    Raises:
        ConfigError: when another run holds the journal, when it belongs to a run with another fingerprint, or is none.
        OutputError: when it cannot be written.
    """

    def __init__(self, output: Path, fingerprint: Mapping[str, Any], num_lines: int) -> None:
        self.path = journal_path(output)
        self._output = output
        # Where each line's record begins; 0, where the header is, for those without.
        self._offsets = array("q", bytes(8 * (num_lines + 1)))
        self.num_done = self.num_failed = self.num_bytes_cut = 0
        self._synced_at = time.monotonic()
        try:
            self._fd = _open_locked(self.path)
        except OSError as error:
            raise OutputError(f"{self.path}: {error.strerror}") from None
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

    def finish(self) -> None:
        """Make the output, in the order of the input, and remove the journal.

        Raises:
            OutputError: when it cannot be written; the journal is kept.
        """
        temporary = self._output.with_name(self._output.name + ".tmp")
        try:
            with self.path.open("rb") as records, temporary.open("wb") as file:
                for offset in self._offsets:
                    if offset:
                        records.seek(offset)
                        file.write(_result_of(records.readline()))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._output)
            _sync_directory(self._output.parent)
            os.unlink(self.path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(temporary)
            raise self._error(error) from None
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
        _sync_directory(self.path.parent)
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
            f"{self._output}: {error.strerror}; the {self.num_done} results so far are kept in {self.path}. "
            "Put that right (free some space?) and run the same command again"
        )


def journal_path(output: Path) -> Path:
    """Where the journal of a run with this output is."""
    return output.with_name(output.name + ".partial")


def encode_json(value: Mapping[str, Any]) -> str:
    """One line of JSON, readable in any language."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).translate(_LINE_BREAKS)


def output_of_run(output: Path, first_id: str | None, num_results: int) -> tuple[int, int] | None:
    """How many results a whole output holds and how many of them failed; None if it is not the output of this run.

    Args:
        first_id: the id of the first result; ids are derived from the run. None if the run has no results.
    """
    count = failed = 0
    with output.open("rb") as file:
        for raw in file:
            try:
                result = json.loads(raw)
            except ValueError:
                return None
            if not isinstance(result, dict) or (count == 0 and result.get("id") != first_id):
                return None
            count += 1
            failed += has_failed(result)
    return (count, failed) if count == num_results else None


def has_failed(result: Mapping[str, Any]) -> bool:
    """Whether a result is an error, in either output format."""
    response = result.get("response") or {}
    return result.get("error") is not None or response.get("status_code", 200) != 200


def _result_of(record: bytes) -> bytes:
    start = record.index(b'"result": ') + len(b'"result": ')
    return record[start:].removesuffix(b"}\n") + b"\n"


def discard(output: Path) -> None:
    """Remove the journal of an unfinished run with this output, if there is one.

    Raises:
        ConfigError: when another run holds it.
    """
    path = journal_path(output)
    if path.exists():
        fd = _open_locked(path)
        os.unlink(path)
        os.close(fd)


def _open_locked(path: Path) -> int:
    """Open or make the journal and lock it; the lock goes with the process."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder may have finished, and removed the file, between our two calls.
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(f"{path} is in use: another run with this --output is going on") from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _check_header(header: bytes, fingerprint: Mapping[str, Any], path: Path) -> None:
    try:
        found = json.loads(header)
        recorded = found["fingerprint"] if found[_HEADER_KEY] == 1 else None
    except (ValueError, KeyError, TypeError):
        recorded = None
    if not isinstance(recorded, dict):
        raise ConfigError(f"{path} is not a journal of an offline run; move it away, or choose another --output")
    changed = sorted(key for key in {*recorded, *fingerprint} if recorded.get(key) != fingerprint.get(key))
    if changed:
        differences = "; ".join(f"{key} was {recorded.get(key)!r}, is {fingerprint.get(key)!r}" for key in changed)
        raise ConfigError(
            f"{path} belongs to an unfinished run that differs: {differences}. "
            "Give what it was given to carry on, --restart to begin again, or another --output"
        )


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
