"""The folder that a server keeps its state in: one server at a time holds it, and every change in it is whole or absent.

Owns the layout and the lock, and what of a failing disk callers are told.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jaxserve.disk import open_locked, write_whole
from jaxserve.errors import ConfigError, StorageFailed

logger = logging.getLogger(__name__)


def default_root(port: int) -> Path:
    """Where the server on a port keeps its state that is told nothing else: `state/port-N` in `$JAXSERVE_CACHE`, else
    `jaxserve/port-N` in `$XDG_STATE_HOME`, else in `~/.local/state`.
    """
    if own := os.environ.get("JAXSERVE_CACHE"):
        root = Path(own).expanduser() / "state"
    else:
        base = Path(os.environ.get("XDG_STATE_HOME", ""))
        # The XDG specification has relative paths ignored.
        root = (base if base.is_absolute() else Path.home() / ".local" / "state") / "jaxserve"
    return root / f"port-{port}"


class StateFolder:
    """A folder with `files/` and `batches/`, held until `close`.

    Raises:
        ConfigError: another server holds it, or it cannot be made or written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = root / "files"
        self.batches = root / "batches"
        lock = root / "lock"
        try:
            for folder in (self.files, self.batches):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = open_locked(lock)
        except BlockingIOError:
            raise ConfigError(
                f"--state-dir {root}: another server{_holder(lock)} keeps its files and batches there; "
                "stop it, or give this one a folder of its own"
            ) from None
        except OSError as error:
            raise ConfigError(f"--state-dir {root}: {error.strerror}; name a folder that can be written") from None
        with suppress(OSError):  # it is only told to whoever comes second
            os.truncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Let another server have it. Safe to call again."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _holder(lock: Path) -> str:
    try:
        pid = lock.read_text().strip()
    except OSError:
        return ""
    return f" (process {pid})" if pid else ""


@contextmanager
def storing(what: str) -> Iterator[None]:
    """Have a disk that does not do what it is told fail with `what` for the caller, and in full in the log.

    Raises:
        StorageFailed: in place of `OSError`.
    """
    try:
        yield
    except OSError as error:
        logger.error("%s: %s", what, error)
        raise StorageFailed(f"{what}: {error.strerror or error}; the server's disk is at fault, not the request") from None


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Replace a file with `record` as JSON.

    Raises:
        OSError: it cannot be written; what was there still is.
    """
    write_whole(path, [json.dumps(record, ensure_ascii=False).encode() + b"\n"])


def read_record(path: Path) -> dict[str, Any] | None:
    """What `write_record` wrote; None, and a line in the log, if it is something else."""
    try:
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError(f"expected an object, found {type(value).__name__}")
    except (OSError, ValueError) as error:
        logger.error("%s is left alone, since it cannot be read: %s", path, error)
        return None
    return value


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return prefix + secrets.token_hex(16)


class Order:
    """Numbers that grow from record to record, also over restarts: nanoseconds since 1970, or one more than the last."""

    def __init__(self, last: int = 0) -> None:
        self._last = last

    def next(self) -> int:
        """The number of a new record. Callers hold a lock."""
        self._last = max(self._last + 1, time.time_ns())
        return self._last
