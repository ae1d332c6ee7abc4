"""Forms that nobody's client would send: each is a file, or a refusal; none is a server error, and none leaves anything."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.server.batching import Batching, batching

BOUNDARY = b"b0undary"
FORM = b"\r\n".join(
    [
        b"--b0undary",
        b'Content-Disposition: form-data; name="purpose"',
        b"",
        b"batch",
        b"--b0undary",
        b'Content-Disposition: form-data; name="file"; filename="in.jsonl"',
        b"Content-Type: application/octet-stream",
        b"",
        b'{"custom_id": "a"}\n',
        b"--b0undary--",
        b"",
    ]
)
PIECES = [
    *(
        b"\r\n",
        b"\n",
        b"\r",
        b"--b0undary\r\n",
        b"--b0undary--\r\n",
        b"--",
        b"\x00",
        b"\xff",
        b"\r\n\r\n",
        b":",
        b";",
        b'"',
        b"=",
    ),
    *(b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Content-Length: x\r\n", b"Transfer-Encoding: chunked\r\n"),
    *(
        b"Content-Encoding: gzip\r\n",
        b"Content-Transfer-Encoding: base64\r\n",
        b"Content-Transfer-Encoding: quoted-printable\r\n",
    ),
    *(
        b"Content-Type: multipart/mixed; boundary=b0undary\r\n",
        b"Content-Type: text/plain; charset=none\r\n",
        b"a" * 9000,
        b"A: b\r\n" * 999,
    ),
    *(
        b"Content-Disposition: form-data\r\n",
        b"name*=utf-8''%ff",
        b'filename*0="a"; filename*1="b"',
        b" (bad header)\r\n",
        b": empty\r\n",
    ),
]


def broken(rng: random.Random) -> bytes:
    """The form with a few things cut out, put in or written over."""
    data = FORM
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(data) + 1)
        end = start + rng.choice([0, 0, 1, 2, 10, 100])
        data = data[:start] + rng.choice([b"", *PIECES]) + data[end:]
    return data


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # aiohttp says so of headers that it skips
async def test_any_form_is_a_file_or_refused(tmp_path: Path) -> None:
    rng = random.Random(0)
    forms = [FORM, b"", b"\r\n", FORM[:-1], FORM[:-20], *(FORM.replace(b"\r\n", piece, 1) for piece in PIECES)]
    forms += [FORM.replace(b'"in.jsonl"\r\n', b'"in.jsonl"\r\n' + piece, 1) for piece in PIECES]
    forms += [broken(rng) for _ in range(400)]
    at_once = asyncio.Semaphore(16)

    async def post(batches: Batching, data: bytes) -> int:
        headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY.decode()}"}
        async with at_once:
            status, body = await batches.server.post("/v1/files", data=data, headers=headers)
        assert status in (200, 400, 413), (data, status, body)
        assert status == 200 or body["error"]["message"]
        return status

    async with batching(tmp_path) as batches:
        statuses = await asyncio.gather(*(post(batches, data) for data in forms))
        assert statuses[0] == 200
        assert statuses.count(400) > 100
        files = [file async for file in batches.client.files.list()]
        assert len(files) == statuses.count(200)


@pytest.mark.parametrize(
    "content_type", ["multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; boundary=" + "b" * 99]
)
async def test_forms_without_a_boundary(tmp_path: Path, content_type: str) -> None:
    async with batching(tmp_path) as batches:
        status, body = await batches.server.post("/v1/files", data=FORM, headers={"Content-Type": content_type})
        assert status == 400
        assert "form" in body["error"]["message"]
