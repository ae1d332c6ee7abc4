"""`/v1/files`: uploads that go to disk as they come, lists, contents that come from disk as they are read, and deletion.

Owns the form and what a file looks like over the wire. Where files are is the store's business, who asks that of `access`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from jaxserve.errors import InvalidRequest, NotFound, TooLarge
from jaxserve.server.access import SERVICE, caller_of, store_of
from jaxserve.server.limits import in_time
from jaxserve.server.listing import list_object, parse_query
from jaxserve.server.schema.decoding import decode
from jaxserve.server.schema.stored import MAX_SECONDS_TO_LIVE, ExpiresAfter, FileQuery
from jaxserve.server.store.files import FileRecord, FileStore, Upload

CHUNK_BYTES = 256 * 1024
MAX_FIELD_BYTES = 1024
FORM_BYTES = 64 * 1024
"""What a form may have beside its file."""

MAX_NAME = 255

FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")


def file_object(record: FileRecord) -> dict[str, Any]:
    """A file over the wire."""
    expires = {} if record.expires_at is None else {"expires_at": record.expires_at}
    return {
        "id": record.file_id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": record.created_at,
        **expires,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
    }


# --- upload -----------------------------------------------------------------------------------------------------------


@dataclass
class _Form:
    """What has come of a form.

    Attributes:
        fields: by name, but for the file.
        upload: the file's content, on disk, until it is handed over.
    """

    fields: dict[str, str] = field(default_factory=dict)
    filename: str = ""
    upload: Upload | None = None

    def abort(self) -> None:
        """Leave nothing of it."""
        if self.upload is not None:
            self.upload.abort()


async def create_file(request: web.Request) -> web.Response:
    """`POST /v1/files`."""
    files, owner = store_of(request).files, caller_of(request).label
    max_bytes = request.app[SERVICE].config.max_file_bytes
    if (request.content_length or 0) > max_bytes + FORM_BYTES:
        raise TooLarge(f"file must have at most {max_bytes} bytes (--max-file-bytes)", param="file")
    form = _Form()
    try:
        async with in_time(request, request.app[SERVICE].config.body_timeout):
            await _read_form(request, form, files, max_bytes)
        return web.json_response(file_object(await _commit(form, files, owner)))
    finally:
        form.abort()


async def _commit(form: _Form, files: FileStore, owner: str) -> FileRecord:
    purpose = form.fields.get("purpose")
    if purpose != "batch":
        found = "nothing" if purpose is None else repr(purpose)
        raise InvalidRequest(f"purpose must be 'batch', found {found:.100}", param="purpose")
    if form.upload is None:
        raise InvalidRequest("file must be a file, found nothing", param="file")
    seconds = _seconds_to_live(form.fields)
    upload, form.upload = form.upload, None
    commit = asyncio.to_thread(
        files.commit, upload, owner=owner, filename=form.filename, purpose=purpose, seconds_to_live=seconds
    )
    # To its end, also if the client leaves: it is a file, or it is not.
    return await asyncio.shield(commit)


def _seconds_to_live(fields: dict[str, str]) -> int:
    """Of `expires_after`, by default the longest that there is, as the API's reference has it for this purpose."""
    names = ("anchor", "seconds")
    parts: dict[str, Any] = {name: fields[f"expires_after[{name}]"] for name in names if f"expires_after[{name}]" in fields}
    if not parts:
        return MAX_SECONDS_TO_LIVE
    if re.fullmatch(r"\d{1,9}", parts.get("seconds", "")):
        parts["seconds"] = int(parts["seconds"])
    try:
        return decode(parts, ExpiresAfter).seconds
    except InvalidRequest as error:
        raise InvalidRequest(f"expires_after: {error}", param="expires_after") from None


async def _read_form(request: web.Request, form: _Form, files: FileStore, max_bytes: int) -> None:
    async for part in _parts(request):
        name = part.name or ""
        if name not in FIELDS:
            raise InvalidRequest(f"unknown field {name!r:.100}; the form has {', '.join(FIELDS)}", param=name[:100])
        if name != "file":
            if name in form.fields:
                raise InvalidRequest(f"{name:.100} is there more than once", param=name[:100])
            form.fields[name] = await _read_field(part, name)
        elif form.upload is not None:
            raise InvalidRequest("file is there more than once", param="file")
        else:
            form.filename = (part.filename or "")[:MAX_NAME]
            form.upload = files.begin(max_bytes)
            while chunk := await _chunk(part, CHUNK_BYTES):
                await asyncio.to_thread(form.upload.write, bytes(chunk))


async def _parts(request: web.Request) -> AsyncIterator[BodyPartReader]:
    if request.content_type != "multipart/form-data":
        raise InvalidRequest(f"the body must be multipart/form-data, found {request.content_type:.100}")
    with _reading():
        reader = await request.multipart()
    while (part := await _next(reader)) is not None:
        if not isinstance(part, BodyPartReader):
            raise InvalidRequest("the form has a form inside")
        if part.headers.get("Content-Transfer-Encoding", "binary").lower() not in ("binary", "7bit", "8bit"):
            raise InvalidRequest("a part of the form is encoded; send it as it is")
        yield part


async def _next(reader: MultipartReader) -> MultipartReader | BodyPartReader | None:
    with _reading():
        return await reader.next()


async def _chunk(part: BodyPartReader, num_bytes: int) -> bytes:
    with _reading():
        return await part.read_chunk(num_bytes)


@contextmanager
def _reading() -> Iterator[None]:
    """Tell what the framework says of a form that it cannot read."""
    try:
        yield
    except HttpProcessingError as error:
        raise InvalidRequest(f"the form cannot be read: {error.message:.200}") from None
    except (ValueError, AssertionError, web.RequestPayloadError) as error:
        raise InvalidRequest(f"the form cannot be read: {error!s:.200}") from None


async def _read_field(part: BodyPartReader, name: str) -> str:
    data = bytearray()
    while chunk := await _chunk(part, MAX_FIELD_BYTES):
        data += chunk
        if len(data) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"{name:.100} must have at most {MAX_FIELD_BYTES} bytes", param=name[:100])
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{name:.100} must be text in UTF-8", param=name[:100]) from None


# --- what is there ----------------------------------------------------------------------------------------------------


async def list_files(request: web.Request) -> web.Response:
    """`GET /v1/files`."""
    query = parse_query(request.query, FileQuery)
    records = store_of(request).files.of(caller_of(request).label)
    if query.purpose is not None:
        records = [record for record in records if record.purpose == query.purpose]
    if query.order == "desc":
        records.reverse()
    listed = list_object(records, limit=query.limit, after=query.after, id_of=lambda record: record.file_id, show=file_object)
    return web.json_response(listed)


async def get_file(request: web.Request) -> web.Response:
    """`GET /v1/files/{file_id}`."""
    return web.json_response(file_object(_file_of(request)))


async def get_content(request: web.Request) -> web.StreamResponse:
    """`GET /v1/files/{file_id}/content`."""
    record = _file_of(request)
    with closing(store_of(request).files.download(record)) as content:
        try:
            await asyncio.to_thread(content.open)
        except FileNotFoundError:  # deleted since
            raise NotFound(f"there is no file {record.file_id!r}") from None
        response = web.StreamResponse(
            headers={"Content-Type": "application/octet-stream", "Content-Length": str(record.num_bytes)}
        )
        await response.prepare(request)
        if request.method != "HEAD":
            while chunk := await asyncio.to_thread(content.read, CHUNK_BYTES):
                await response.write(chunk)
        await response.write_eof()
    return response


async def delete_file(request: web.Request) -> web.Response:
    """`DELETE /v1/files/{file_id}`. Batches that read it go on."""
    record = _file_of(request)
    await asyncio.to_thread(store_of(request).files.delete, record.owner, record.file_id)
    return web.json_response({"id": record.file_id, "object": "file", "deleted": True})


def _file_of(request: web.Request) -> FileRecord:
    return store_of(request).files.get(caller_of(request).label, request.match_info["file_id"])


ROUTES = [
    web.post("/v1/files", create_file),
    web.get("/v1/files", list_files),
    web.get("/v1/files/{file_id}", get_file),
    web.delete("/v1/files/{file_id}", delete_file),
    web.get("/v1/files/{file_id}/content", get_content),
]
