"""Files over HTTP: what is kept and given back, what is refused, and that nothing is left of what did not come whole."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from jaxserve.errors import ConfigError
from jaxserve.server.store.files import Download, Upload
from tests.server.batching import batching
from tests.server.serving import serving

KEYS = """
[[keys]]
label = "one"
key = "key-one"
[[keys]]
label = "two"
key = "key-two"
"""


def form(*, purpose: str | None = "batch", content: bytes | None = b"{}\n", **fields: str) -> aiohttp.FormData:
    data = aiohttp.FormData(default_to_multipart=True)
    if content is not None:
        data.add_field("file", content, filename="in.jsonl")
    for name, value in (({} if purpose is None else {"purpose": purpose}) | fields).items():
        data.add_field(name, value)
    return data


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "files").iterdir())


# --- the life of a file -----------------------------------------------------------------------------------------------


async def test_what_is_sent_comes_back(tmp_path: Path) -> None:
    content = os.urandom(700_000)
    async with batching(tmp_path) as server:
        file = await server.upload(content)
        assert (file.object, file.bytes, file.filename, file.purpose) == ("file", len(content), "in.jsonl", "batch")
        assert file.expires_at == file.created_at + 30 * 24 * 3600
        assert await server.client.files.retrieve(file.id) == file
        assert (await server.client.files.content(file.id)).content == content
        async with server.server.http.head(f"{server.server.url}/v1/files/{file.id}/content") as response:
            assert (response.status, response.headers["Content-Length"]) == (200, str(len(content)))
    async with batching(tmp_path) as server:
        assert [found.id async for found in server.client.files.list()] == [file.id]
        assert (await server.client.files.content(file.id)).content == content
        deleted = await server.client.files.delete(file.id)
        assert (deleted.id, deleted.deleted) == (file.id, True)
        for call in (server.client.files.retrieve, server.client.files.content, server.client.files.delete):
            with pytest.raises(openai.NotFoundError, match="there is no file"):
                await call(file.id)
        assert left_over(tmp_path) == []


@pytest.mark.slow
async def test_lists_come_in_pages(tmp_path: Path) -> None:
    async with batching(tmp_path) as server:
        ids = [(await server.upload(f"{i}".encode())).id for i in range(5)]
        files = server.client.files
        assert [file.id async for file in files.list()] == ids[::-1]
        assert [file.id async for file in files.list(order="asc", limit=2)] == ids
        page = await files.list(order="asc", limit=2, after=ids[1])
        assert ([file.id for file in page.data], page.has_more) == (ids[2:4], True)
        assert (await files.list(order="asc", after=ids[4])).data == []
        assert (await files.list(purpose="batch_output")).data == []
        assert len((await files.list(purpose="batch")).data) == 5
        for query, param in (
            ("limit=0", "limit"),
            ("limit=x", "limit"),
            ("order=up", "order"),
            ("after=x", "after"),
            ("b=1", "b"),
        ):
            status, body = await server.server.get(f"/v1/files?{query}")
            assert (status, body["error"]["param"]) == (400, param)


@pytest.mark.slow
async def test_nobody_sees_the_files_of_another_key(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    async with batching(tmp_path / "state", api_keys_file=str(tmp_path / "keys.toml")) as server:
        one, two = (server.client.with_options(api_key=key) for key in ("key-one", "key-two"))
        file = await server.upload(b"{}\n", client=one)
        assert (await one.files.retrieve(file.id)).id == file.id
        assert (await two.files.list()).data == []
        for call in (two.files.retrieve, two.files.content, two.files.delete):
            with pytest.raises(openai.NotFoundError):
                await call(file.id)
        with pytest.raises(openai.NotFoundError) as caught:
            await two.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        assert caught.value.param == "input_file_id"
        assert len((await one.files.list()).data) == 1


@pytest.mark.slow
async def test_files_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with batching(tmp_path) as server:
        file = await server.upload(b"x", expires_after={"anchor": "created_at", "seconds": 3600})
        assert file.expires_at == file.created_at + 3600
        kept = await server.upload(b"y")
        monkeypatch.setattr(server.store.files, "_now", lambda: float(file.created_at + 3600))
        assert [found.id async for found in server.client.files.list()] == [kept.id]
        with pytest.raises(openai.NotFoundError):
            await server.client.files.content(file.id)
        assert server.store.files.sweep() == 1
        assert left_over(tmp_path) == [kept.id, f"{kept.id}.json"]


# --- what is refused --------------------------------------------------------------------------------------------------


WRONG_FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"purpose": "fine-tune"}, "purpose", "purpose must be 'batch', found 'fine-tune'"),
    ({"purpose": None}, "purpose", "purpose must be 'batch', found nothing"),
    ({"content": None}, "file", "file must be a file, found nothing"),
    ({"colour": "red"}, "colour", "unknown field 'colour'; the form has file, purpose, expires_after["),
    ({"purpose": "batch" * 300}, "purpose", "purpose must have at most 1024 bytes"),
    ({"expires_after[seconds]": "5000"}, "expires_after", 'anchor must be "created_at", found nothing'),
    (
        {"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"},
        "expires_after",
        "seconds must be an integer from 3600 to 2592000, found integer 60",
    ),
    (
        {"expires_after[anchor]": "created_at", "expires_after[seconds]": "1e4"},
        "expires_after",
        "seconds must be an integer",
    ),
    ({"expires_after": "soon"}, "expires_after", "unknown field 'expires_after'"),
]


async def test_a_form_that_is_wrong_is_refused_by_name(tmp_path: Path) -> None:
    async with batching(tmp_path) as server:
        for changes, param, message in WRONG_FORMS:
            status, body = await server.server.post("/v1/files", data=form(**changes))
            assert (status, body["error"]["param"]) == (400, param)
            assert message in body["error"]["message"]
            assert left_over(tmp_path) == []


@pytest.mark.slow
async def test_what_is_no_form_is_refused(tmp_path: Path) -> None:
    twice = form()
    twice.add_field("file", b"{}", filename="b")
    same = form()
    same.add_field("purpose", "batch")
    part = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n%s\r\n%s\r\n'
    whole = part % (b"purpose", b"", b"batch") + part % (b"file", b"", b"{}") + b"--b--\r\n"
    bodies: list[tuple[Any, str, str]] = [
        (twice, "", "file is there more than once"),
        (same, "", "purpose is there more than once"),
        (b"{}", "application/json", "must be multipart/form-data, found application/json"),
        (b"--b\r\n", "multipart/form-data; boundary=b", "unknown field ''"),
        (b"nothing", "multipart/form-data; boundary=b", "cannot be read"),
        (b"nothing", "multipart/form-data", "cannot be read"),
        (part % (b"file", b"Content-Transfer-Encoding: base64\r\n", b"e30="), "multipart/form-data; boundary=b", "encoded"),
        (whole[: whole.rindex(b"--b--")], "multipart/form-data; boundary=b", "cannot be read"),
        (whole[: whole.rindex(b"{}")], "multipart/form-data; boundary=b", "cannot be read"),
        (part % (b"purpose", b"", b"\xff") + b"--b--\r\n", "multipart/form-data; boundary=b", "must be text in UTF-8"),
    ]
    async with batching(tmp_path) as server:
        for data, content_type, message in bodies:
            headers = {"Content-Type": content_type} if content_type else {}
            status, body = await server.server.post("/v1/files", data=data, headers=headers)
            assert status == 400, body
            assert message in body["error"]["message"]
            assert left_over(tmp_path) == []


@pytest.mark.parametrize("chunked", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_a_file_that_is_too_large_is_refused(tmp_path: Path, chunked: bool) -> None:
    async with batching(tmp_path, max_file_bytes=100_000) as server:
        await server.upload(b"x" * 100_000)
        data = form(content=b"x" * (100_001 if chunked else 300_000))
        status, body = await server.server.post("/v1/files", data=data, chunked=True if chunked else None)
        assert (status, body["error"]["param"], body["error"]["code"]) == (413, "file", "file_too_large")
        assert "100000 bytes" in body["error"]["message"]
        assert len(left_over(tmp_path)) == 2


async def test_an_upload_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    async with batching(tmp_path) as server:
        host, port = server.server.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        kind = "Content-Type: multipart/form-data; boundary=b"
        head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n{kind}\r\n\r\n"
        part = '--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        writer.write((head + part).encode() + b"x" * 400_000)
        async with asyncio.timeout(10):
            while not left_over(tmp_path):
                await asyncio.sleep(0.002)
            writer.close()
            while left_over(tmp_path):
                await asyncio.sleep(0.002)


@dataclass(frozen=True)
class Outlived:
    """When work in a thread began, which does not go on before it is given up, and when it was done."""

    began: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


def outliving(monkeypatch: pytest.MonkeyPatch, kind: type, work: str, end: str) -> Outlived:
    """Have the method `work` of `kind` go on only after its method `end`, as in a thread that outlives who waited for it."""
    outlived, given_up = Outlived(), threading.Event()
    do, give_up = getattr(kind, work), getattr(kind, end)

    def late(self: Any, *args: Any) -> None:
        outlived.began.set()
        assert given_up.wait(10)
        do(self, *args)
        outlived.done.set()

    def tell(self: Any) -> None:
        give_up(self)
        given_up.set()

    monkeypatch.setattr(kind, work, late)
    monkeypatch.setattr(kind, end, tell)
    return outlived


async def test_an_upload_given_up_before_its_first_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = outliving(monkeypatch, Upload, "write", "abort")
    async with batching(tmp_path) as server:
        sending = asyncio.create_task(server.upload(b"x" * 1000))
        assert await asyncio.to_thread(writing.began.wait, 10)
        sending.cancel()
        assert await asyncio.to_thread(writing.done.wait, 10)
        assert left_over(tmp_path) == []


async def test_a_content_given_up_before_it_is_open_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = outliving(monkeypatch, Download, "open", "close")
    async with batching(tmp_path) as server:
        file = await server.upload(b"x" * 1000)
        reading = asyncio.create_task(server.client.files.content(file.id))
        assert await asyncio.to_thread(opening.began.wait, 10)
        reading.cancel()
        assert await asyncio.to_thread(opening.done.wait, 10)
        assert file.id not in {os.path.basename(path) for path in open_paths()}


def open_paths() -> list[str]:
    """Where this process has files open."""
    paths = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed since
            paths.append(os.readlink(f"/proc/self/fd/{name}"))
    return paths


@contextmanager
def small_disk(max_bytes: int) -> Iterator[None]:
    """The limit of a file's size stands for a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
async def test_a_full_disk_is_told_and_hurts_nobody_else(tmp_path: Path) -> None:
    async with batching(tmp_path) as server:
        with small_disk(100_000):
            with pytest.raises(openai.InternalServerError, match="the file cannot be stored: File too large") as caught:
                await server.upload(b"x" * 300_000)
            assert (caught.value.status_code, caught.value.code) == (507, "storage_failed")
            assert (await server.client.completions.create(model="tiny", prompt="x")).choices
            await server.upload(b"small")
        assert len(left_over(tmp_path)) == 2


@pytest.mark.slow
async def test_a_record_that_cannot_be_written_leaves_no_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with batching(tmp_path) as server:

        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("jaxserve.server.store.files.write_record", fail)
        with pytest.raises(openai.InternalServerError, match="No space left on device"):
            await server.upload(b"x")
        assert left_over(tmp_path) == []


# --- the folder -------------------------------------------------------------------------------------------------------


async def test_a_second_server_refuses_the_same_folder(tmp_path: Path) -> None:
    async with batching(tmp_path):
        with pytest.raises(ConfigError, match=rf"--state-dir .*: another server \(process {os.getpid()}\) keeps its files"):
            async with batching(tmp_path):
                pass
    async with batching(tmp_path):
        pass


async def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Not a directory; name a folder that can be written"):
        async with batching(tmp_path / "file"):
            pass


async def test_without_a_folder_there_are_no_files() -> None:
    async with serving() as server:
        for path in ("/v1/files", "/v1/files/file-1", "/v1/batches", "/v1/batches/batch_1"):
            status, body = await server.get(path)
            assert status == 404
            assert "--state-dir" in body["error"]["message"]
        assert (await server.post("/v1/files", data=form()))[0] == 404
