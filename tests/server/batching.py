"""A server with a folder for its files and batches, and batches in it, for tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from openai.types import Batch, FileObject

from jaxserve.config import HttpConfig
from jaxserve.server.access import STORE
from jaxserve.server.store.store import Store
from tests.engine.engines import FakeEngine
from tests.server.serving import MODEL, Serving, serving

COMPLETIONS = "/v1/completions"


def line(custom_id: str, *, url: str = COMPLETIONS, method: str = "POST", **body: Any) -> dict[str, Any]:
    if not body.keys() & {"prompt", "messages", "input"}:
        body["prompt"] = "hello"
    length = {} if "input" in body else {"max_tokens": 5}
    return {"custom_id": custom_id, "method": method, "url": url, "body": {"model": MODEL, **length, **body}}


def jsonl(lines: Iterable[Any]) -> bytes:
    """Strings are lines as they are, anything else is spelled as JSON."""
    return b"".join((item if isinstance(item, str) else json.dumps(item)).encode() + b"\n" for item in lines)


@dataclass
class Batching:
    """A running server and what it keeps."""

    server: Serving
    store: Store

    @property
    def client(self) -> openai.AsyncOpenAI:
        return self.server.client

    async def upload(self, content: bytes, *, client: openai.AsyncOpenAI | None = None, **options: Any) -> FileObject:
        return await (client or self.client).files.create(file=("in.jsonl", content), purpose="batch", **options)

    async def create(
        self,
        lines: Iterable[Any],
        *,
        endpoint: Any = COMPLETIONS,
        client: openai.AsyncOpenAI | None = None,
        **options: Any,
    ) -> Batch:
        file = await self.upload(jsonl(lines), client=client)
        create = (client or self.client).batches.create
        return await create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options)

    async def until(self, batch: Batch, *statuses: str) -> Batch:
        """The batch once it has come to one of these statuses, by default to its end."""
        statuses = statuses or ("completed", "failed", "expired", "cancelled")
        async with asyncio.timeout(20):
            while (found := await self.client.batches.retrieve(batch.id)).status not in statuses:
                await asyncio.sleep(0.005)
        return found

    async def lines_of(self, file_id: str | None) -> list[dict[str, Any]]:
        """A file of results; nothing if there is none."""
        if file_id is None:
            return []
        return [json.loads(raw) for raw in (await self.client.files.content(file_id)).text.splitlines()]


@asynccontextmanager
async def batching(
    folder: Path, fake: FakeEngine | None = None, *, model_name: str = MODEL, **config: Any
) -> AsyncIterator[Batching]:
    """A server that keeps its state in `folder`, which must be right when it has stopped."""
    http = HttpConfig(port=0, drain_seconds=5.0, state_dir=str(folder), **config)
    async with serving(fake, config=http, model_name=model_name) as server:
        store = server.app[STORE]
        assert store is not None
        yield Batching(server, store)
    store.files.check_integrity()
    store.batches.check_integrity()
