"""A server that is killed at any moment loses no result and doubles none."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve import disk, journal
from jaxserve.batch_file import InputFile, answered
from jaxserve.journal import Journal
from jaxserve.server.store import batches, files
from jaxserve.server.store.batches import BatchRecord, BatchStatus
from jaxserve.server.store.lines import lines_to_do, result_id, write_results
from jaxserve.server.store.store import Store
from tests.server.batching import COMPLETIONS, jsonl, line

LINES = [line(f"id{i}", prompt=f'"}}, \u2028 日本 {i}') for i in range(5)]
BATCH_ID = "batch_" + "7" * 32


def begin(root: Path) -> None:
    """A batch whose lines are still to do."""
    store = Store(root)
    upload = store.files.begin(1 << 20)
    upload.write(jsonl([*LINES[:2], "", *LINES[2:]]))
    file = store.files.commit(upload, owner="", filename="in.jsonl", purpose="batch")
    record = BatchRecord(
        batch_id=BATCH_ID,
        owner="",
        endpoint=COMPLETIONS,
        input_file_id=file.file_id,
        model="m",
        completion_window="24h",
        status=BatchStatus.IN_PROGRESS,
        created_at=0,
        expires_at=99,
    )
    store.batches.add(record, store.files.path(file))
    store.close()


def result_of(custom_id: str, number: int) -> dict[str, Any]:
    body = {"text": f'{custom_id} "failed": true, "result": {{', "usage": {"prompt_tokens": 1, "total_tokens": 1}}
    return answered(result_id(BATCH_ID, number), custom_id, "req", 400 if custom_id == "id3" else 200, body)


def open_journal(store: Store) -> tuple[InputFile, Journal]:
    input_file = InputFile(store.batches.input_path(BATCH_ID))
    return input_file, Journal(store.batches.journal_path(BATCH_ID), {"batch": BATCH_ID}, input_file.num_lines)


def answer_lines(input_file: InputFile, results: Journal, order: random.Random) -> int:
    """Answer what is to do, in any order; how many lines that was."""
    todo = list(lines_to_do(input_file, COMPLETIONS, results))
    order.shuffle(todo)
    for item in todo:
        failed = item.custom_id == "id3"
        results.append(item.number, result_of(item.custom_id or "", item.number), failed=failed)
    return len(todo)


def end(store: Store, order: random.Random) -> None:
    """Answer what is to do, and end the batch."""
    (record,) = store.batches.unfinished()
    input_file, results = open_journal(store)
    try:
        answer_lines(input_file, results, order)
        changes = write_results(record, BatchStatus.COMPLETED, store.files, input_file, results)
        store.batches.update(record.at(BatchStatus.COMPLETED, 1.0, **changes))
    finally:
        results.close()


IDS = [["id0", "id1", "id2", "id4"], ["id3"]]
"""In the file of answers, and in that of errors."""


def ids_in(store: Store, *file_ids: str | None) -> list[list[str]]:
    contents = [store.files.path(store.files.get("", file_id or "")).read_text() for file_id in file_ids]
    return [[json.loads(raw)["custom_id"] for raw in content.splitlines()] for content in contents]


def check_whole(root: Path) -> None:
    """The batch has ended with each line once, in order, and nothing else is left."""
    store = Store(root)
    store.files.check_integrity()
    store.batches.check_integrity()
    record = store.batches.get("", BATCH_ID)
    assert record.status is BatchStatus.COMPLETED
    assert (record.counts.total, record.counts.completed, record.counts.failed) == (5, 4, 1)
    assert record.usage is not None
    assert {name: count for name, count in record.usage.items() if count} == {"input_tokens": 4, "total_tokens": 4}
    assert ids_in(store, record.output_file_id, record.error_file_id) == IDS
    assert len(store.files) == 3
    store.close()


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.mark.usefixtures("no_sync")
def test_a_journal_cut_anywhere_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """Wherever it is cut, it comes back as what was whole of it; and from each such state the batch comes to the same end."""
    begin(tmp_path / "whole")
    store = Store(tmp_path / "whole")
    input_file, results = open_journal(store)
    path = store.batches.journal_path(BATCH_ID)
    ends = [path.stat().st_size]
    for item in lines_to_do(input_file, COMPLETIONS, results):
        results.append(item.number, result_of(item.custom_id or "", item.number), failed=item.custom_id == "id3")
        ends.append(path.stat().st_size)
    results.close()
    whole = path.read_bytes()
    order = random.Random(0)
    (record,) = store.batches.unfinished()
    for cut in range(len(whole) + 1):
        with path.open("r+b") as file:  # some file systems take their time over what was truncated and written again
            file.write(whole[:cut])
            file.truncate()
        kept = max((i for i, end in enumerate(ends) if end <= cut), default=0)
        input_file, results = open_journal(store)
        assert path.read_bytes() == whole[: ends[kept]], cut
        assert results.num_done == kept
        if cut == ends[kept]:
            assert answer_lines(input_file, results, order) == len(LINES) - kept
            changes = write_results(record, BatchStatus.COMPLETED, store.files, input_file, results)
            assert ids_in(store, changes["output_file_id"], changes["error_file_id"]) == IDS
        results.close()
    store.close()


# --- every call that changes the disk is the last one once -----------------------------------------------------------------


class Crash(BaseException):
    """The process is gone."""


class CrashingOs:
    """`os`, in which one call that changes the disk is the last to have an effect, and no later one has any."""

    def __init__(self, crash_at: int) -> None:
        self.calls_left = crash_at

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in ("replace", "unlink", "link", "pwrite", "ftruncate"):
            return real
        return lambda *args: self._call(real, *args)

    def _call(self, real: Callable[..., Any], *args: Any) -> Any:
        if self.calls_left <= 0:
            raise Crash
        self.calls_left -= 1
        done = real(*args)
        if not self.calls_left:
            raise Crash
        return done


@pytest.mark.usefixtures("no_sync")
def test_a_crash_at_any_call_leaves_what_the_next_server_makes_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = random.Random(1)
    for crash_at in range(1, 100):
        root = tmp_path / f"crash{crash_at}"
        begin(root)
        store = Store(root)
        crashing = CrashingOs(crash_at)
        with monkeypatch.context() as patched:
            for module in (disk, journal, files, batches):
                patched.setattr(module, "os", crashing)
            try:
                end(store, order)
                finished = True
            except Crash:
                finished = False
        store.close()
        store = Store(root)
        if store.batches.unfinished():
            end(store, order)
        store.close()
        check_whole(root)
        if finished:
            break
    assert crash_at > 12


@pytest.mark.usefixtures("no_sync")
def test_a_crash_while_a_file_or_batch_begins_leaves_it_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for crash_at in range(1, 20):
        root = tmp_path / f"crash{crash_at}"
        with monkeypatch.context() as patched:
            for module in (disk, files, batches):
                patched.setattr(module, "os", CrashingOs(crash_at))
            patched.setattr("shutil.rmtree", lambda *_, **__: None)
            try:
                begin(root)
                finished = True
            except Crash:
                finished = False
        store = open_after_crash(root)
        store.files.check_integrity()
        store.batches.check_integrity()
        for record in store.files.of(""):
            assert store.files.path(record).read_bytes().startswith(b'{"custom_id"')
        if store.batches.unfinished():
            end(store, random.Random(2))
            store.close()
            check_whole(root)
        store.close()
        if finished:
            return
    raise AssertionError("it never came to the end")


def open_after_crash(root: Path) -> Store:
    """A store that was not closed keeps its lock in this process; that of one that is gone goes with it."""
    (root / "lock").unlink()
    return Store(root)
