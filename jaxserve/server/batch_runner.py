"""The batches that a server works on: each that has not ended, from when the model is there until the server stops.

Owns which run there is for a batch, what the batches of one API key may take, and the removal of files that have expired.
What a run does is in `batch_run`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiohttp import web

from jaxserve.errors import NotReady, StorageFailed
from jaxserve.server.batch_run import BatchRun, Lane, Workplace, check_cancellable
from jaxserve.server.service import Model, Service
from jaxserve.server.store.batches import BatchRecord, Counts, LineError
from jaxserve.server.store.store import Store

logger = logging.getLogger(__name__)

BATCHES: web.AppKey[BatchRunner | None] = web.AppKey("batches")

RUNNING_PER_KEY = 4
"""Batches of an API key that run at once; the others wait for one of them to end."""

LIVE_PER_SLOT = 2
"""Lines of an API key's batches in the engine for each sequence that it can run at once."""

READERS = 2
"""Whole files that are gone through at once."""

SWEEP_SECONDS = 60.0
"""Between two removals of files that have expired."""


class BatchRunner:
    """Lives on the event loop's thread, between `start` and `close`.

    Args:
        now: seconds since 1970.
    """

    def __init__(self, service: Service, store: Store, now: Callable[[], float] = time.time) -> None:
        self._service = service
        self._store = store
        self.now = now
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="jaxserve-batches")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="jaxserve-batch-files")
        self._place: Workplace | None = None
        self._max_seqs = 1
        self._lanes: dict[str, Lane] = {}
        self._runs: dict[str, BatchRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        service.metrics.batches.set_function(lambda: len(self._runs))

    def start(self, model: Model) -> None:
        """Work on all batches that have not ended, now that there is a model."""
        self._place = Workplace(self._service, model.name, self._store, self._disk, self._readers, asyncio.Lock(), self.now)
        self._max_seqs = model.terms.limits.max_seqs
        for record in self._store.batches.unfinished():
            logger.info("carrying on with %s, which is %s", record.batch_id, record.status.value)
            self.submit(record)
        self._keep(self._sweep())

    async def add(self, record: BatchRecord, input_file: Path) -> BatchRecord:
        """Keep a new batch that reads `input_file`, and work on it; the record with its order.

        Raises:
            NotFound: the file has just been deleted.
            StorageFailed: it cannot be written.
        """
        record = await asyncio.to_thread(self._store.batches.add, record, input_file)
        self.submit(record)
        return record

    def submit(self, record: BatchRecord) -> None:
        """Work on a batch that nobody works on."""
        if self._place is None or self._closed:
            return
        caller = self._service.keys.named(record.owner)
        run = self._runs[record.batch_id] = BatchRun(record, self._place, self._lane(record.owner), caller)
        self._keep(run.run()).add_done_callback(lambda _: self._runs.pop(record.batch_id, None))

    def newest(self, record: BatchRecord) -> tuple[BatchRecord, Counts, LineError | None]:
        """The batch as it is now, what is done of it, and why it does not go on, if it does not."""
        run = self._runs.get(record.batch_id)
        if run is None:
            return record, record.counts, None
        return run.record, run.counts, run.trouble

    async def cancel(self, record: BatchRecord) -> None:
        """Answer no more lines of a batch.

        Raises:
            Conflict: it has ended, or is about to.
            NotReady: nobody works on batches yet, or any more.
            StorageFailed: that cannot be written.
        """
        run = self._runs.get(record.batch_id)
        if run is not None:
            # To its end, also if whoever asked for it leaves.
            await asyncio.shield(self._keep(run.cancel()))
            return
        check_cancellable(record)
        raise NotReady("batches are not worked on while the model loads or the server shuts down")

    async def close(self) -> None:
        """Give up the lines that are under way, which the next server answers. Safe to call again."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for threads in (self._readers, self._disk):
            await asyncio.to_thread(threads.shutdown)

    def _lane(self, owner: str) -> Lane:
        if owner not in self._lanes:
            lines = asyncio.Semaphore(LIVE_PER_SLOT * self._max_seqs)
            self._lanes[owner] = Lane(asyncio.Semaphore(RUNNING_PER_KEY), lines)
        return self._lanes[owner]

    def _keep(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _sweep(self) -> None:
        while True:
            try:
                await asyncio.get_running_loop().run_in_executor(self._disk, self._store.files.sweep)
            except StorageFailed as error:
                logger.error("%s", error)
            await asyncio.sleep(SWEEP_SECONDS)
