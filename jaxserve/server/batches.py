"""`/v1/batches`: a file of requests is answered while the server has time, and files of results come of it.

Owns what a batch looks like over the wire. Who works on it is `batch_runner`'s business.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from jaxserve.errors import InvalidRequest, QueueFull
from jaxserve.server.access import SERVICE, caller_of, store_of
from jaxserve.server.batch_runner import BATCHES, BatchRunner
from jaxserve.server.listing import list_object, parse_query
from jaxserve.server.schema.decoding import decode
from jaxserve.server.schema.stored import BatchQuery, BatchRequest
from jaxserve.server.store.batches import BatchRecord, BatchStatus, Counts, LineError
from jaxserve.server.store.folder import new_id

WINDOW_SECONDS = {"24h": 24 * 3600}

MAX_OPEN = 100
"""Batches of an API key that have not ended."""


def batch_object(record: BatchRecord, counts: Counts, trouble: LineError | None = None) -> dict[str, Any]:
    """A batch over the wire. What is not known yet is left out, as the API's reference has it."""
    errors = [*record.errors, *([] if trouble is None else [trouble])]
    fields = {
        "id": record.batch_id,
        "object": "batch",
        "endpoint": record.endpoint,
        "model": record.model,
        "errors": {"object": "list", "data": [_error_object(error) for error in errors]} if errors else None,
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": record.status.value,
        "output_file_id": record.output_file_id,
        "error_file_id": record.error_file_id,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        **{f"{status.value}_at": record.times.get(status) for status in BatchStatus if status is not BatchStatus.VALIDATING},
        "request_counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed},
        "usage": None if record.usage is None else _usage_object(record.usage),
    }
    return {name: value for name, value in fields.items() if value is not None} | {"metadata": record.metadata}


def _error_object(error: LineError) -> dict[str, Any]:
    return {"code": error.code, "message": error.message, "param": error.param, "line": error.line}


def _usage_object(usage: Any) -> dict[str, Any]:
    return {
        "input_tokens": usage.get("input_tokens", 0),
        "input_tokens_details": {"cached_tokens": usage.get("cached_tokens", 0)},
        "output_tokens": usage.get("output_tokens", 0),
        "output_tokens_details": {"reasoning_tokens": usage.get("reasoning_tokens", 0)},
        "total_tokens": usage.get("total_tokens", 0),
    }


async def create_batch(request: web.Request) -> web.Response:
    """`POST /v1/batches`."""
    asked = decode(await request.read(), BatchRequest)
    store, runner, caller = store_of(request), _runner(request), caller_of(request)
    model = request.app[SERVICE].require_model()
    file = store.files.get(caller.label, asked.input_file_id, param="input_file_id")
    if file.purpose != "batch":
        raise InvalidRequest(
            f"input_file_id must be a file with purpose 'batch', found {file.purpose!r}", param="input_file_id"
        )
    num_open = sum(not record.ended for record in store.batches.of(caller.label))
    if num_open >= MAX_OPEN:
        raise QueueFull(f"{num_open} batches of this API key have not ended", retry_after=60.0, code="too_many_batches")
    now = int(runner.now())
    record = BatchRecord(
        batch_id=new_id("batch_"),
        owner=caller.label,
        endpoint=asked.endpoint,
        input_file_id=file.file_id,
        model=model.name,
        completion_window=asked.completion_window,
        metadata=asked.metadata,
        output_seconds=None if asked.output_expires_after is None else asked.output_expires_after.seconds,
        created_at=now,
        expires_at=now + WINDOW_SECONDS[asked.completion_window],
    )
    # To its end, also if the client leaves: whatever is on disk is worked on.
    record = await asyncio.shield(runner.add(record, store.files.path(file)))
    return web.json_response(batch_object(record, record.counts))


async def list_batches(request: web.Request) -> web.Response:
    """`GET /v1/batches`, newest first."""
    query = parse_query(request.query, BatchQuery)
    records = store_of(request).batches.of(caller_of(request).label)
    runner = _runner(request)
    listed = list_object(
        records[::-1],
        limit=query.limit,
        after=query.after,
        id_of=lambda record: record.batch_id,
        show=lambda record: batch_object(*runner.newest(record)),
    )
    return web.json_response(listed)


async def get_batch(request: web.Request) -> web.Response:
    """`GET /v1/batches/{batch_id}`."""
    return web.json_response(batch_object(*_runner(request).newest(_batch_of(request))))


async def cancel_batch(request: web.Request) -> web.Response:
    """`POST /v1/batches/{batch_id}/cancel`."""
    runner, record = _runner(request), _batch_of(request)
    await runner.cancel(record)
    return web.json_response(batch_object(*runner.newest(_batch_of(request))))


def _batch_of(request: web.Request) -> BatchRecord:
    return store_of(request).batches.get(caller_of(request).label, request.match_info["batch_id"])


def _runner(request: web.Request) -> BatchRunner:
    store_of(request)
    runner = request.app[BATCHES]
    assert runner is not None
    return runner


ROUTES = [
    web.post("/v1/batches", create_batch),
    web.get("/v1/batches", list_batches),
    web.get("/v1/batches/{batch_id}", get_batch),
    web.post("/v1/batches/{batch_id}/cancel", cancel_batch),
]
