"""Files that callers sent or that batches made: `ID.json`, what is known of a file, beside `ID`, its content.

A file is there as soon as its record is, which comes after the content and goes before it; so whatever has no record is what
a killed server left behind. Knows nothing of what files mean.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path

from jaxserve.disk import sync_directory, write_whole
from jaxserve.errors import NotFound, TooLarge
from jaxserve.server.store.folder import Order, new_id, read_record, storing, write_record

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
"""Seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What is known of a file beside its content.

    Attributes:
        owner: label of the API key whose file it is, or "".
        order: greater than that of every older file.
        created_at, expires_at: seconds since 1970; None where it stays until it is deleted.
    """

    file_id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    order: int
    expires_at: int | None = None


class FileStore:
    """The files in a folder that nobody else changes.

    Args:
        now: the clock by which files expire.
    """

    def __init__(self, folder: Path, now: Clock = time.time) -> None:
        self._folder = folder
        self._now = now
        self._lock = threading.Lock()
        self._records = {record.file_id: record for record in _read_records(folder)}
        self._order = Order(max((record.order for record in self._records.values()), default=0))
        self._remove_rests()

    def _remove_rests(self) -> None:
        kept = {name for path in self._folder.glob("*.json") for name in (path.name, path.stem)}
        for path in self._folder.iterdir():
            if path.name not in kept:
                logger.info("removed %s, which a server left behind that was killed", path)
                path.unlink()

    def __len__(self) -> int:
        return len(self._records)

    def get(self, owner: str, file_id: str, *, param: str | None = None) -> FileRecord:
        """The file of that owner with that id.

        Args:
            param: the request field that names the file, for the error.

        Raises:
            NotFound: there is none, or it is another's.
        """
        record = self._records.get(file_id)
        if record is None or record.owner != owner or self._expired(record):
            raise NotFound(f"there is no file {file_id!r:.100}", param=param)
        return record

    def of(self, owner: str) -> list[FileRecord]:
        """The owner's files, oldest first."""
        with self._lock:
            records = list(self._records.values())
        mine = [record for record in records if record.owner == owner and not self._expired(record)]
        return sorted(mine, key=lambda record: record.order)

    def path(self, record: FileRecord) -> Path:
        """Where its content is."""
        return self._folder / record.file_id

    def download(self, record: FileRecord) -> Download:
        """Its content on its way out. Nothing is open before `open`."""
        return Download(self.path(record))

    def begin(self, max_bytes: int) -> Upload:
        """A file on its way in, of at most `max_bytes`. Nothing is on disk before its first `write`."""
        file_id = new_id("file-")
        return Upload(file_id, self._folder / f"{file_id}.part", max_bytes)

    def commit(
        self, upload: Upload, *, owner: str, filename: str, purpose: str, seconds_to_live: int | None = None
    ) -> FileRecord:
        """Have what was uploaded be a file, or nothing.

        Raises:
            StorageFailed: it cannot be written.
        """
        try:
            with storing("the file cannot be stored"):
                num_bytes = upload.finish(self._folder / upload.file_id)
                return self._add(upload.file_id, owner, filename, purpose, num_bytes, seconds_to_live)
        finally:
            upload.abort()

    def put(
        self,
        file_id: str,
        chunks: Iterable[bytes],
        *,
        owner: str,
        filename: str,
        purpose: str,
        seconds_to_live: int | None = None,
    ) -> FileRecord:
        """Make a file, or make it again: whoever is killed between this and what follows may do it once more.

        Raises:
            StorageFailed: it cannot be written.
        """
        with storing("a file of results cannot be stored"):
            num_bytes = write_whole(self._folder / file_id, chunks)
            return self._add(file_id, owner, filename, purpose, num_bytes, seconds_to_live)

    def _add(
        self, file_id: str, owner: str, filename: str, purpose: str, num_bytes: int, seconds_to_live: int | None
    ) -> FileRecord:
        created = int(self._now())
        with self._lock:
            order = self._order.next()
        record = FileRecord(
            file_id=file_id,
            owner=owner,
            filename=filename,
            purpose=purpose,
            num_bytes=num_bytes,
            created_at=created,
            order=order,
            expires_at=None if seconds_to_live is None else created + seconds_to_live,
        )
        try:
            write_record(self._record_path(file_id), asdict(record))
        except OSError:
            with suppress(OSError):
                os.unlink(self._folder / file_id)
            raise
        with self._lock:
            self._records[file_id] = record
        return record

    def delete(self, owner: str, file_id: str) -> None:
        """Remove a file; whoever reads it now reads it to the end.

        Raises:
            NotFound: there is none, or it is another's.
            StorageFailed: it cannot be removed.
        """
        self.get(owner, file_id)
        with storing("the file cannot be deleted"):
            self._remove(file_id)

    def sweep(self) -> int:
        """Remove what has expired; how many files that was.

        Raises:
            StorageFailed: one cannot be removed.
        """
        with self._lock:
            expired = [record.file_id for record in self._records.values() if self._expired(record)]
        with storing("expired files cannot be removed"):
            for file_id in expired:
                self._remove(file_id)
        return len(expired)

    def _remove(self, file_id: str) -> None:
        with suppress(FileNotFoundError):  # two who delete it at once
            os.unlink(self._record_path(file_id))
        with self._lock:
            self._records.pop(file_id, None)
        with suppress(FileNotFoundError):
            os.unlink(self._folder / file_id)
        sync_directory(self._folder)

    def _expired(self, record: FileRecord) -> bool:
        return record.expires_at is not None and record.expires_at <= self._now()

    def _record_path(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.json"

    def check_integrity(self) -> None:
        """Assert that the folder holds the files that are known, whole, and nothing else but what is on its way in."""
        on_disk = {path.name for path in self._folder.iterdir() if not path.name.endswith((".part", ".tmp"))}
        assert on_disk == {name for file_id in self._records for name in (file_id, f"{file_id}.json")}
        for record in self._records.values():
            assert self.path(record).stat().st_size == record.num_bytes


class Upload:
    """A file on its way in. Ends with `FileStore.commit` or `abort`; until then it is no file."""

    def __init__(self, file_id: str, path: Path, max_bytes: int) -> None:
        self.file_id = file_id
        self._path = path
        self._max_bytes = max_bytes
        self._num_bytes = 0
        # A write, the first too, may go on in a thread while the one who waited for it gives up.
        self._lock = threading.Lock()
        self._file: FileIO | None = None
        self._is_over = False

    def write(self, chunk: bytes) -> None:
        """Add to it, unless it is aborted.

        Raises:
            TooLarge: it has become larger than allowed.
            StorageFailed: it cannot be written.
        """
        self._num_bytes += len(chunk)
        if self._num_bytes > self._max_bytes:
            raise TooLarge(f"file must have at most {self._max_bytes} bytes (--max-file-bytes)", param="file")
        with self._lock, storing("the file cannot be stored"):
            if self._is_over:
                return
            file, rest = self._opened(), memoryview(chunk)
            while rest:
                rest = rest[file.write(rest) :]

    def _opened(self) -> FileIO:
        if self._file is None:
            self._file = FileIO(self._path, "xb")
        return self._file

    def finish(self, path: Path) -> int:
        """Have `path` hold it; its size in bytes.

        Raises:
            OSError: it cannot be written.
        """
        with self._lock:
            with self._opened() as file:
                os.fsync(file.fileno())
            os.replace(self._path, path)
            self._is_over = True
        return self._num_bytes

    def abort(self) -> None:
        """Forget it, unless it is a file by now. Safe to call again."""
        with self._lock:
            self._is_over = True
            if self._file is not None:
                self._file.close()
                with suppress(OSError):
                    os.unlink(self._path)


class Download:
    """A file's content on its way out. Ends with `close`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # As of an upload: opening it may go on in a thread while the one who waited for it gives up.
        self._lock = threading.Lock()
        self._file: FileIO | None = None
        self._is_over = False

    def open(self) -> None:
        """From here on all of it can be read, also if the file is deleted. Nothing, once it is closed.

        Raises:
            FileNotFoundError: it has been deleted.
        """
        with self._lock:
            if not self._is_over:
                self._file = FileIO(self._path)

    def read(self, num_bytes: int) -> bytes:
        """The next bytes, at most so many; none at the end, and once it is closed."""
        with self._lock:
            return b"" if self._file is None or self._is_over else self._file.read(num_bytes)

    def close(self) -> None:
        """Have nothing open of it. Safe to call again."""
        with self._lock:
            self._is_over = True
            if self._file is not None:
                self._file.close()


def _read_records(folder: Path) -> Iterable[FileRecord]:
    for path in folder.glob("*.json"):
        value = read_record(path)
        try:
            record = None if value is None else FileRecord(**value)
        except TypeError as error:
            logger.error("%s is left alone, since it is no record of a file: %s", path, error)
            continue
        if record is not None and path.stem == record.file_id and (folder / record.file_id).is_file():
            yield record
