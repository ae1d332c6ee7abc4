"""What a store makes of a folder that a killed server, or a bad disk, left behind."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.server.store.batches import BatchRecord
from jaxserve.server.store.files import FileRecord
from jaxserve.server.store.folder import default_root
from jaxserve.server.store.store import Store


def put(store: Store, content: bytes) -> FileRecord:
    upload = store.files.begin(1 << 20)
    upload.write(content)
    return store.files.commit(upload, owner="", filename="a", purpose="batch")


def add_batch(store: Store, batch_id: str) -> BatchRecord:
    record = BatchRecord(
        batch_id=batch_id,
        owner="",
        endpoint="/v1/completions",
        input_file_id="",
        model="m",
        completion_window="24h",
        created_at=0,
        expires_at=9,
    )
    return store.batches.add(record, store.files.path(put(store, b"x")))


def test_what_never_was_a_file_or_batch_is_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    kept = put(store, b"kept")
    store.close()
    for rest in ("file-1", "file-3.part", "file-2.json.tmp", f"{kept.file_id}.json.tmp"):
        (tmp_path / "files" / rest).write_bytes(b"rest")
    (tmp_path / "batches" / "batch_1").mkdir()
    (tmp_path / "batches" / "batch_1" / "input.jsonl").write_bytes(b"rest")
    store = Store(tmp_path)
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == [kept.file_id, f"{kept.file_id}.json"]
    assert list((tmp_path / "batches").iterdir()) == []
    assert store.files.of("") == [kept]
    store.close()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"colour": "red"}', b"\xff"])
def test_a_damaged_record_is_told_and_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes) -> None:
    store = Store(tmp_path)
    hurt, well = put(store, b"hurt"), put(store, b"well")
    batch = add_batch(store, "batch_" + "1" * 32)
    records = [tmp_path / "files" / f"{hurt.file_id}.json", tmp_path / "batches" / batch.batch_id / "batch.json"]
    store.close()
    for path in records:
        path.write_bytes(damage)
    with caplog.at_level(logging.ERROR):
        store = Store(tmp_path)
    assert all(str(path) in caplog.text for path in records)
    assert well in store.files.of("")
    assert hurt not in store.files.of("")
    assert store.batches.of("") == []
    assert (tmp_path / "files" / hurt.file_id).read_bytes() == b"hurt"
    assert all(path.read_bytes() == damage for path in records)
    store.close()


def test_what_came_later_stays_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a clock that was set back between two starts."""
    ids = []
    for turn in range(3):
        monkeypatch.setattr("time.time_ns", lambda turn=turn: 1000 - turn)
        store = Store(tmp_path)
        ids += [put(store, b"x").file_id for _ in range(3)]
        assert [record.file_id for record in store.files.of("")] == ids
        store.close()


def test_a_folder_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    Store(tmp_path).close()
    (tmp_path / "files" / "file-1").mkdir()  # stands for what cannot be removed
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"--state-dir .*; put that right, or name another folder"):
            Store(tmp_path)


def test_a_server_on_another_port_has_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_CACHE", "/cache")
    assert default_root(8000) == Path("/cache/state/port-8000")
    monkeypatch.delenv("JAXSERVE_CACHE")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert default_root(8001) == Path("/state/jaxserve/port-8001")
    for relative in ("here", ""):
        monkeypatch.setenv("XDG_STATE_HOME", relative)
        assert default_root(1) == Path.home() / ".local/state/jaxserve/port-1"


def test_a_copy_stands_for_a_link_where_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.link", refuse)
    store = Store(tmp_path)
    batch = add_batch(store, "batch_" + "2" * 32)
    assert store.batches.input_path(batch.batch_id).read_bytes() == b"x"
    store.close()
