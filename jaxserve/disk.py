"""Files that are whole or absent whatever happens to the process: replaced in one rename, synced, held by one process.

Standard library only. Knows nothing of what is in them. Errors are the system's.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, chunks: Iterable[bytes]) -> int:
    """Have `path` hold `chunks` one after the other, or what it held before; how many bytes that are.

    It survives a crash of the machine. Whatever is raised, by `chunks` too, leaves `path` as it was.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    num_bytes = 0
    try:
        with temporary.open("wb") as file:
            for chunk in chunks:
                num_bytes += file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync_directory(path.parent)
    return num_bytes


def sync_directory(path: Path) -> None:
    """Make what was renamed into a folder, or removed from it, survive a crash of the machine.

    Raises:
        OSError: it cannot be done.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_locked(path: Path) -> int:
    """Open or make a file to read and write, and lock it; the lock goes with the process. A file descriptor.

    Raises:
        BlockingIOError: another process, or another open of this one, has it.
        OSError: it cannot be opened.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder may have finished, and removed the file, between our two calls.
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
