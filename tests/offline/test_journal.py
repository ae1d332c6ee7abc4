"""The journal: whole after any crash, done once, refused where it belongs to another run, honest when the disk is full."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve import disk as disk_module
from jaxserve import journal as journal_module
from jaxserve.errors import ConfigError, OutputError
from jaxserve.journal import encode_json
from jaxserve.offline import journal as offline_journal
from jaxserve.offline.journal import discard, finish, has_failed, journal_path, open_journal, output_of_run

MODULES = (disk_module, journal_module, offline_journal)
FINGERPRINT = {"input": "abc", "options": {"seed": 1}}
NUM_LINES = 9
WORK = (1, 2, 4, 5, 7, 9)  # the rest is blank


def result_of(line: int) -> dict[str, Any]:
    error = {"message": "no"} if line == 4 else None
    return {"id": f"r{line}", "text": f'line {line} "quoted" {{"result": 日本}}\u2028\n' * line, "error": error}


def run(output: Path, order: tuple[int, ...]) -> int:
    """A run that gives results in this order; how many it had to make."""
    journal = open_journal(output, FINGERPRINT, NUM_LINES)
    made = 0
    for line in order:
        if not journal.has(line):
            journal.append(line, result_of(line), failed=line == 4)
            made += 1
    assert (journal.num_done, journal.num_failed) == (len(WORK), 1)
    finish(journal, output)
    return made


EXPECTED = "".join(encode_json(result_of(line)) + "\n" for line in WORK).encode()


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_the_output_is_in_the_order_of_the_input(output: Path) -> None:
    assert run(output, (9, 4, 1, 7, 5, 2)) == len(WORK)
    assert output.read_bytes() == EXPECTED
    assert sorted(path.name for path in output.parent.iterdir()) == ["out.jsonl"]
    assert [json.loads(line)["id"] for line in EXPECTED.splitlines()] == ["r1", "r2", "r4", "r5", "r7", "r9"]


def test_results_can_be_seen_as_they_finish(output: Path) -> None:
    journal = open_journal(output, FINGERPRINT, NUM_LINES)
    for count, line in enumerate((7, 1), 1):
        journal.append(line, result_of(line), failed=False)
        records = [json.loads(raw) for raw in journal_path(output).read_text().splitlines()[1:]]
        assert len(records) == count
        assert records[-1] == {"line": line, "failed": False, "result": result_of(line)}
    assert not output.exists()
    journal.close()


# --- crashes ----------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process is gone: no operation after it has any effect."""


class CrashingOs:
    """`os`, in which one call that changes the disk is the last to have an effect: if it writes, half of it."""

    def __init__(self, crash_at: int) -> None:
        self.calls_left = crash_at
        self._open: set[int] = set()

    def open(self, *args: Any) -> int:
        fd = os.open(*args)
        self._open.add(fd)
        return fd

    def close(self, fd: int) -> None:
        if fd in self._open:
            self._open.remove(fd)
            os.close(fd)

    def die(self) -> None:
        """What the system does for a process that is gone."""
        for fd in list(self._open):
            self.close(fd)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _crashes(self) -> bool:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise Crash
        return self.calls_left == 0

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        if self._crashes():
            os.pwrite(fd, data[: len(data) // 2], offset)
            raise Crash
        return os.pwrite(fd, data, offset)

    def ftruncate(self, fd: int, size: int) -> None:
        self._crashes()
        os.ftruncate(fd, size)

    def fsync(self, fd: int) -> None:
        self._crashes()
        os.fsync(fd)

    def replace(self, source: Path, target: Path) -> None:
        self._crashes()
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        self._crashes()
        os.unlink(path)


@pytest.mark.parametrize("seed", range(6))
def test_a_crash_at_any_call_leaves_what_a_rerun_makes_whole(output: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Every call that touches the disk is the last one once; the rerun takes over in another order of completion."""
    choice = random.Random(seed)
    monkeypatch.setattr(journal_module, "SYNC_SECONDS", choice.choice([0.0, 1e9]))
    for crash_at in range(1, 1000):
        order, reorder = (tuple(choice.sample(WORK, len(WORK))) for _ in range(2))
        crashing = CrashingOs(crash_at)
        for module in MODULES:
            monkeypatch.setattr(module, "os", crashing)
        finished = True
        try:
            run(output, order)
        except Crash:
            finished = False
        crashing.die()
        for module in MODULES:
            monkeypatch.setattr(module, "os", os)
        if finished and crashing.calls_left > 0:
            break
        done = recorded(output)
        assert output.exists() <= (done == len(WORK))
        if output.exists():
            assert output.read_bytes() == EXPECTED
        if journal_path(output).exists() or not output.exists():
            assert run(output, reorder) == len(WORK) - done
        assert output.read_bytes() == EXPECTED
        assert sorted(path.name for path in output.parent.iterdir()) == ["out.jsonl"]
        output.unlink()
    assert crash_at > 10


def recorded(output: Path) -> int:
    """Whole records in the journal, read independently; all are done where it is gone and the output is there."""
    path = journal_path(output)
    if not path.exists():
        return len(WORK) if output.exists() else 0
    lines = path.read_bytes().split(b"\n")[:-1]
    return max(0, len(lines) - 1)


@given(data=st.data())
def test_any_cut_or_damaged_tail_is_repaired(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    output = tmp_path_factory.mktemp("cut") / "out.jsonl"
    journal = open_journal(output, FINGERPRINT, NUM_LINES)
    ends = [journal_path(output).stat().st_size]
    for line in WORK:
        journal.append(line, result_of(line), failed=line == 4)
        ends.append(journal_path(output).stat().st_size)
    journal.close()
    whole = journal_path(output).read_bytes()
    cut = data.draw(st.integers(0, len(whole)) | st.sampled_from([*ends, *(end - 1 for end in ends)]))
    again = whole[ends[0] : ends[1]]
    outside = b'{"line": 10, "failed": false, "result": {}}\n'
    junk = data.draw(
        st.sampled_from([b"", b"\0" * 50, b"\0" * 9 + b"\n", b"{}\n", b'{"line": 3}\n', b"\xff\n", again, outside])
    )
    if cut < ends[1] and junk == again:  # it is no damage there
        junk = b""
    journal_path(output).write_bytes(whole[:cut] + (junk if cut >= ends[0] else b""))

    resumed = open_journal(output, FINGERPRINT, NUM_LINES)
    kept = max((i for i, end in enumerate(ends) if end <= cut), default=0)
    assert [line for line in range(1, NUM_LINES + 1) if resumed.has(line)] == list(WORK[:kept])
    assert resumed.num_done == kept
    assert resumed.num_failed == (kept >= 3)
    assert journal_path(output).read_bytes() == whole[: ends[kept]]
    resumed.close()
    run(output, WORK)
    assert output.read_bytes() == EXPECTED


def test_what_was_cut_is_told(output: Path) -> None:
    open_journal(output, FINGERPRINT, NUM_LINES).close()
    with journal_path(output).open("ab") as file:
        file.write(b'{"line": 1, "fai')
    journal = open_journal(output, FINGERPRINT, NUM_LINES)
    assert journal.num_bytes_cut == 16
    journal.close()


# --- whose journal it is ----------------------------------------------------------------------------------------------


def test_a_journal_of_another_run_is_refused(output: Path) -> None:
    open_journal(output, FINGERPRINT, NUM_LINES).close()
    before = journal_path(output).read_bytes()
    with pytest.raises(ConfigError, match=r"input was 'abc', is 'xyz'\. .*--restart"):
        open_journal(output, FINGERPRINT | {"input": "xyz"}, NUM_LINES)
    with pytest.raises(ConfigError, match="temperature was None, is 1"):
        open_journal(output, FINGERPRINT | {"temperature": 1}, NUM_LINES)
    assert journal_path(output).read_bytes() == before
    open_journal(output, FINGERPRINT, NUM_LINES).close()


@pytest.mark.parametrize("content", [b'{"id": "mine"}\n', b"text\n", b'["list"]\n', b"\xff\xfe\n"])
def test_a_file_that_is_no_journal_is_left_alone(output: Path, content: bytes) -> None:
    journal_path(output).write_bytes(content)
    with pytest.raises(ConfigError, match=r"is not a journal of results.*--restart"):
        open_journal(output, FINGERPRINT, NUM_LINES)
    assert journal_path(output).read_bytes() == content


def test_one_run_at_a_time(output: Path) -> None:
    journal = open_journal(output, FINGERPRINT, NUM_LINES)
    for attempt in (lambda: open_journal(output, FINGERPRINT, NUM_LINES), lambda: discard(output)):
        with pytest.raises(ConfigError, match="another run with this output is going on"):
            attempt()
    journal.close()
    open_journal(output, FINGERPRINT, NUM_LINES).close()


def test_discarding_begins_again(output: Path) -> None:
    discard(output)
    journal = open_journal(output, FINGERPRINT, NUM_LINES)
    journal.append(1, result_of(1), failed=False)
    journal.close()
    discard(output)
    assert not journal_path(output).exists()
    journal = open_journal(output, FINGERPRINT | {"input": "xyz"}, NUM_LINES)
    assert journal.num_done == 0
    journal.close()


def test_open_files_are_given_back(output: Path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    run(output, WORK)
    open_journal(output, FINGERPRINT, NUM_LINES).close()
    with pytest.raises(ConfigError):
        open_journal(output, {}, NUM_LINES)
    journal_path(output).unlink()
    assert count() == before


# --- trouble ----------------------------------------------------------------------------------------------------------


class FullDisk:
    """`os` on a disk with `room` bytes left for the journal."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        written = os.pwrite(fd, data[: self.room], offset)
        self.room -= written
        return written


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    disk = FullDisk(700)
    monkeypatch.setattr(journal_module, "os", disk)
    return disk


def test_a_full_disk_keeps_what_was_done(output: Path, full_disk: FullDisk) -> None:
    journal = open_journal(output, FINGERPRINT, NUM_LINES)
    for line in WORK[:3]:
        journal.append(line, result_of(line), failed=line == 4)
    with pytest.raises(OutputError, match=r"No space left on device; the 3 results so far are kept in .*\.partial"):
        journal.append(5, result_of(5), failed=False)
    journal.close()
    assert journal_path(output).read_bytes().endswith(b"}\n")
    full_disk.room = 1 << 20
    assert run(output, WORK) == len(WORK) - 3
    assert output.read_bytes() == EXPECTED


def test_a_disk_that_fills_up_at_the_end_keeps_the_journal(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(output, FINGERPRINT, NUM_LINES)
    for line in WORK:
        journal.append(line, result_of(line), failed=line == 4)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_module.os, "replace", fail)
    with pytest.raises(OutputError, match=r"No space left on device; the 6 results are kept in .*partial"):
        finish(journal, output)
    monkeypatch.undo()
    journal.close()
    assert sorted(path.name for path in output.parent.iterdir()) == ["out.jsonl.partial"]
    assert run(output, WORK) == 0
    assert output.read_bytes() == EXPECTED


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No such file or directory"):
        open_journal(tmp_path / "none" / "out.jsonl", FINGERPRINT, NUM_LINES)


# --- an output that is whole ------------------------------------------------------------------------------------------


def test_an_output_is_known_by_its_run(output: Path) -> None:
    run(output, WORK)
    assert output_of_run(output, "r1", len(WORK)) == (len(WORK), 1)
    assert output_of_run(output, "r2", len(WORK)) is None
    assert output_of_run(output, "r1", len(WORK) + 1) is None
    assert output_of_run(output, None, 0) is None
    output.write_text("")
    assert output_of_run(output, None, 0) == (0, 0)
    output.write_text("notes\n")
    assert output_of_run(output, "r1", 1) is None


@pytest.mark.parametrize(
    ("result", "failed"),
    [
        ({"text": "a", "error": None}, False),
        ({"error": {"message": "no"}}, True),
        ({"response": {"status_code": 200}, "error": None}, False),
        ({"response": {"status_code": 400}, "error": None}, True),
        ({"response": None, "error": {"message": "no"}}, True),
    ],
)
def test_failures_show_in_either_format(result: dict[str, Any], failed: bool) -> None:
    assert has_failed(result) is failed


def test_json_is_one_line_for_every_reader() -> None:
    text = encode_json({"a": "日本\u2028\u2029\u0085\n\x1c"})
    assert text.splitlines() == [text]
    assert json.loads(text) == {"a": "日本\u2028\u2029\u0085\n\x1c"}
    assert "日本" in text
