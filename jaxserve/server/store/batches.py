"""Batches: a folder each, with the record, the input, and the journal of results until these are files.

Owns what is known of a batch and the states that it goes through. A batch is there as soon as its record is. Its input is a
second name of the file that was sent, so that this may be deleted, or expire, while the batch goes on. Knows nothing of how
lines are answered.
"""

from __future__ import annotations

import enum
import logging
import os
import shutil
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxserve.disk import sync_directory
from jaxserve.errors import NotFound
from jaxserve.server.store.folder import Order, read_record, storing, write_record

logger = logging.getLogger(__name__)


class BatchStatus(enum.StrEnum):
    """Where a batch is in its life, in the API's words."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


FINAL = frozenset({BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class LineError:
    """What is wrong with an input file, and on which line, from 1, if it is a line's fault."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Lines of a batch: all, and those that have an answer or an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """What is known of a batch.

    Attributes:
        owner: label of the API key whose batch it is, or "".
        order: greater than that of every older batch.
        endpoint: the path that each line is for.
        model: which the server had when the batch came, and which alone may answer it.
        output_seconds: how long files of results are kept; None until they are deleted.
        created_at, expires_at: seconds since 1970; at the second it is given up.
        times: when it came to each later status, likewise.
        counts: as of its last change of status; while it runs, the journal knows better.
        usage: tokens of all answers, once it has ended.
    """

    batch_id: str
    owner: str
    order: int = 0
    endpoint: str
    input_file_id: str
    model: str
    completion_window: str
    metadata: Mapping[str, str] | None = None
    output_seconds: int | None = None
    status: BatchStatus = BatchStatus.VALIDATING
    created_at: int
    expires_at: int
    times: Mapping[str, int] = field(default_factory=dict)
    counts: Counts = Counts()
    errors: tuple[LineError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    usage: Mapping[str, int] | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in FINAL

    def at(self, status: BatchStatus, now: float, **changes: Any) -> BatchRecord:
        """The batch once it has come to `status`."""
        return replace(self, status=status, times={**self.times, status.value: int(now)}, **changes)


class BatchStore:
    """The batches in a folder that nobody else changes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._records = {record.batch_id: record for record in _read_records(folder)}
        self._order = Order(max((record.order for record in self._records.values()), default=0))
        self._remove_rests()

    def _remove_rests(self) -> None:
        for path in self._folder.iterdir():
            if path.is_dir() and not _record_path(path).exists():
                logger.info("removed %s, which a server left behind that was killed", path)
                shutil.rmtree(path)
        for record in self._records.values():
            if record.ended:
                self._remove_work(record.batch_id)

    def get(self, owner: str, batch_id: str) -> BatchRecord:
        """The batch of that owner with that id.

        Raises:
            NotFound: there is none, or it is another's.
        """
        record = self._records.get(batch_id)
        if record is None or record.owner != owner:
            raise NotFound(f"there is no batch {batch_id!r:.100}")
        return record

    def of(self, owner: str) -> list[BatchRecord]:
        """The owner's batches, oldest first."""
        return [record for record in self._all() if record.owner == owner]

    def unfinished(self) -> list[BatchRecord]:
        """Everyone's batches that have not ended, oldest first."""
        return [record for record in self._all() if not record.ended]

    def _all(self) -> list[BatchRecord]:
        with self._lock:
            records = list(self._records.values())
        return sorted(records, key=lambda record: record.order)

    def add(self, record: BatchRecord, input_file: Path) -> BatchRecord:
        """Have a new batch read `input_file`, whatever becomes of that name of it; the record with its order.

        Raises:
            NotFound: the input has just been deleted.
            StorageFailed: it cannot be written.
        """
        folder = self._folder / record.batch_id
        with self._lock:
            record = replace(record, order=self._order.next())
        try:
            with storing("the batch cannot be stored"):
                folder.mkdir()
                _link(input_file, self.input_path(record.batch_id))
                write_record(_record_path(folder), asdict(record))
                sync_directory(self._folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        with self._lock:
            self._records[record.batch_id] = record
        return record

    def update(self, record: BatchRecord) -> None:
        """Replace what is known of a batch. One that has ended keeps nothing but that.

        Raises:
            StorageFailed: it cannot be written; what was known before still is.
        """
        with storing("the batch's state cannot be stored"):
            write_record(_record_path(self._folder / record.batch_id), asdict(record))
            with self._lock:
                self._records[record.batch_id] = record
            if record.ended:
                self._remove_work(record.batch_id)

    def input_path(self, batch_id: str) -> Path:
        """Where the input of a batch is that has not ended."""
        return self._folder / batch_id / "input.jsonl"

    def journal_path(self, batch_id: str) -> Path:
        """Where the results of a batch are that has not ended."""
        return self._folder / batch_id / "results.jsonl"

    def _remove_work(self, batch_id: str) -> None:
        for path in (self.input_path(batch_id), self.journal_path(batch_id)):
            with suppress(FileNotFoundError):
                os.unlink(path)

    def check_integrity(self) -> None:
        """Assert that the folder holds the batches that are known, and those that have ended hold nothing but their record."""
        assert {path.name for path in self._folder.iterdir()} == set(self._records)
        for record in self._records.values():
            names = {path.name for path in (self._folder / record.batch_id).iterdir()}
            assert names == {"batch.json"} if record.ended else names >= {"batch.json", "input.jsonl"}


def _link(source: Path, target: Path) -> None:
    """A second name for a file, or a copy where a file can have but one."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise NotFound("the input file has just been deleted", param="input_file_id") from None
    except OSError:
        shutil.copyfile(source, target)


def _record_path(folder: Path) -> Path:
    return folder / "batch.json"


def _read_records(folder: Path) -> Iterable[BatchRecord]:
    for path in sorted(folder.glob("*/batch.json")):
        value = read_record(path)
        try:
            record = None if value is None else _from_json(value)
        except (TypeError, ValueError, KeyError) as error:
            logger.error("%s is left alone, since it is no record of a batch: %s", path, error)
            continue
        if record is not None and record.batch_id == path.parent.name:
            yield record


def _from_json(value: dict[str, Any]) -> BatchRecord:
    return BatchRecord(
        **value
        | {
            "status": BatchStatus(value["status"]),
            "counts": Counts(**value["counts"]),
            "errors": tuple(LineError(**error) for error in value["errors"]),
        }
    )
