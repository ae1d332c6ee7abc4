"""One batch's life: its input is checked, its lines are answered, and what came of them becomes files.

Owns the order of all that, and what happens when it is cancelled, expires, or the disk fails. What is done is on disk before
it is told, so a run may end anywhere, be it by a kill, and another carries on. Does not know HTTP, which batches there are, or
what an answer looks like (`endpoints`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxserve.batch_file import InputFile, answered
from jaxserve.errors import ConfigError, Conflict, JaxserveError, NotReady, OutputError, QueueFull, StorageFailed
from jaxserve.journal import Journal
from jaxserve.request import BATCH_PRIORITY
from jaxserve.server.endpoints import BATCH_ENDPOINTS, answer_body
from jaxserve.server.keys import Caller
from jaxserve.server.service import Service
from jaxserve.server.store.batches import BatchRecord, BatchStatus, Counts, LineError
from jaxserve.server.store.lines import LineToDo, check_input, counts_of, lines_to_do, result_id, write_results
from jaxserve.server.store.store import Store
from jaxserve.server.wire import error_body, status_of

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""How often a line is tried under which the engine fails: most are only there when another one makes it fail."""

MAX_WAIT_SECONDS = 5.0
"""After which a line is tried again that there was no room for."""

RETRY_SECONDS = 30.0
"""After which a batch goes on whose results could not be written."""


@dataclass(frozen=True)
class Lane:
    """What the batches of one API key may take at once.

    Attributes:
        running: batches that answer lines.
        lines: lines in the engine, so that a free slot never waits for the disk, and memory does not grow with the file.
    """

    running: asyncio.Semaphore
    lines: asyncio.Semaphore


@dataclass(frozen=True)
class Workplace:
    """What runs share.

    Attributes:
        model_name: of the model that is served.
        disk: one thread, which writes all that has to be written in order.
        readers: threads that go through whole files.
        checking: held by the run that reads its whole input.
        now: seconds since 1970.
    """

    service: Service
    model_name: str
    store: Store
    disk: ThreadPoolExecutor
    readers: ThreadPoolExecutor
    checking: asyncio.Lock
    now: Callable[[], float]


@dataclass(frozen=True)
class _Work:
    """A checked input, and the results so far."""

    input_file: InputFile
    journal: Journal


class BatchRun:
    """Drives one batch to its end.

    Args:
        caller: whose batch it is; None if nobody with that name is known any more.

    Attributes:
        record: of the batch, as on disk.
        trouble: why it does not go on at the moment, if it does not.
    """

    def __init__(self, record: BatchRecord, place: Workplace, lane: Lane, caller: Caller | None) -> None:
        self.record = record
        self.trouble: LineError | None = None
        self._place = place
        self._lane = lane
        self._caller = None if caller is None else as_batch(caller)
        self._cancelled = asyncio.Event()
        self._changing = asyncio.Lock()
        self._work: _Work | None = None

    @property
    def counts(self) -> Counts:
        """What is done so far."""
        work = self._work
        if work is None or self.record.ended:
            return self.record.counts
        return counts_of(work.journal, work.input_file.num_requests)

    async def run(self) -> None:
        """Go on until the batch has ended, whatever fails on the way; cancel it to stop, and run another one to carry on."""
        while not self.record.ended:
            try:
                await self._go_on()
            except (OutputError, StorageFailed) as error:
                self._note_trouble("storage_failed", str(error))
                await asyncio.sleep(RETRY_SECONDS)
            except Exception:
                logger.exception("%s failed", self.record.batch_id)
                self._note_trouble("internal_error", "the server failed; its log says how. It will try again")
                await asyncio.sleep(RETRY_SECONDS)

    async def cancel(self) -> None:
        """Answer no more lines. Those that are answered stay so.

        Raises:
            Conflict: it has ended, or is about to.
            StorageFailed: that cannot be written.
        """
        async with self._changing:
            if self.record.status is BatchStatus.CANCELLING:
                return
            check_cancellable(self.record)
            await self._change(BatchStatus.CANCELLING)
        self._cancelled.set()

    # --- its stations

    async def _go_on(self) -> None:
        try:
            if (input_file := await self._prepare()) is not None:
                await self._carry_out(await self._on_disk(self._open, input_file))
        except ConfigError as error:
            await self._fail((LineError(code="unreadable_input", message=str(error)),))
        finally:
            await self._on_disk(self._close)

    def _open(self, input_file: InputFile) -> _Work:
        """Open the journal. For the disk's thread, where it comes before `_close` also if nobody waits for it any more."""
        fingerprint = {"batch": self.record.batch_id, "input": input_file.sha256}
        path = self._place.store.batches.journal_path(self.record.batch_id)
        self._work = _Work(input_file, Journal(path, fingerprint, input_file.num_lines))
        return self._work

    def _close(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.journal.close()

    async def _carry_out(self, work: _Work) -> None:
        ending = await self._answer_until_it_ends(work)
        if ending is not BatchStatus.CANCELLED:
            async with self._changing:
                if self.record.status is BatchStatus.CANCELLING:
                    ending = BatchStatus.CANCELLED
                else:
                    await self._change(BatchStatus.FINALIZING)
        await self._finish(work, ending)

    async def _prepare(self) -> InputFile | None:
        """Check the input, or read it again; None if it is wrong, which ends the batch."""
        path = self._place.store.batches.input_path(self.record.batch_id)
        if self.record.status is not BatchStatus.VALIDATING:
            return await self._through(InputFile, path)
        async with self._place.checking:
            limit = self._place.service.max_body_bytes
            checked = await self._through(check_input, path, self.record.endpoint, limit)
        if checked.errors:
            await self._fail(checked.errors)
            return None
        async with self._changing:
            if self.record.status is BatchStatus.VALIDATING:
                await self._change(BatchStatus.IN_PROGRESS, counts=Counts(total=checked.file.num_requests))
        return checked.file

    async def _answer_until_it_ends(self, work: _Work) -> BatchStatus:
        """Answer lines until there are none, or the batch is cancelled or expires: how it ends."""
        if self.record.status is BatchStatus.CANCELLING:
            return BatchStatus.CANCELLED
        if work.journal.num_done == work.input_file.num_requests:
            return BatchStatus.COMPLETED
        if self.record.status is BatchStatus.FINALIZING:
            return BatchStatus.EXPIRED
        answering = asyncio.create_task(self._answer_lines(work))
        cancelled = asyncio.create_task(self._cancelled.wait())
        try:
            seconds = max(0.0, self.record.expires_at - self._place.now())
            await asyncio.wait({answering, cancelled}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if cancelled.done():
                return BatchStatus.CANCELLED
            if answering.done():
                answering.result()
                return BatchStatus.COMPLETED
            return BatchStatus.EXPIRED
        finally:
            for task in (answering, cancelled):
                task.cancel()
            await asyncio.gather(answering, cancelled, return_exceptions=True)

    async def _finish(self, work: _Work, ending: BatchStatus) -> None:
        # Lines that were given up may have left results on their way to the journal.
        await self._on_disk(lambda: None)
        changes = await self._through(
            write_results, self.record, ending, self._place.store.files, work.input_file, work.journal
        )
        async with self._changing:
            await self._change(ending, **changes)
        counts = self.record.counts
        logger.info("%s %s: %d answers, %d errors", self.record.batch_id, ending.value, counts.completed, counts.failed)

    async def _fail(self, errors: tuple[LineError, ...]) -> None:
        async with self._changing:
            await self._change(BatchStatus.FAILED, errors=errors)
        logger.info("%s failed: %s", self.record.batch_id, errors[0].message)

    async def _change(self, status: BatchStatus, **changes: Any) -> None:
        """Come to another status, on disk first. The caller holds `_changing`."""
        record = self.record.at(status, self._place.now(), **changes)
        await self._on_disk(self._place.store.batches.update, record)
        self.record, self.trouble = record, None

    def _note_trouble(self, code: str, message: str) -> None:
        self.trouble = LineError(code=code, message=message)
        logger.error("%s waits for %g s: %s", self.record.batch_id, RETRY_SECONDS, message)

    async def _on_disk[T](self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._place.disk, partial(call, *args, **options))

    async def _through[T](self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._place.readers, partial(call, *args))

    # --- its lines

    async def _answer_lines(self, work: _Work) -> None:
        """Answer what has no result yet; for ever if this server may not.

        Raises:
            OutputError: a result cannot be written.
        """
        if (reason := self._held_because()) is not None:
            self._note_held(reason)
            await asyncio.get_running_loop().create_future()
        caller = self._caller
        assert caller is not None
        async with self._lane.running:
            self.trouble = None
            lines = lines_to_do(work.input_file, self.record.endpoint, work.journal)
            try:
                async with asyncio.TaskGroup() as group:
                    while (line := await self._next_line(lines)) is not None:
                        await self._lane.lines.acquire()
                        task = group.create_task(self._answer_line(line, caller, work.journal))
                        task.add_done_callback(lambda _: self._lane.lines.release())
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
            finally:
                await self._on_disk(lines.close)

    def _held_because(self) -> str | None:
        model = self._place.model_name
        if self._caller is None:
            return f"there is no API key {self.record.owner!r} any more"
        return None if self.record.model == model else f"it is for the model {self.record.model!r}, and this is {model!r}"

    def _note_held(self, reason: str) -> None:
        self.trouble = LineError(code="held", message=f"the batch waits: {reason}")
        logger.warning("%s is left alone: %s", self.record.batch_id, reason)

    async def _next_line(self, lines: Generator[LineToDo]) -> LineToDo | None:
        return await self._on_disk(next, lines, None)

    async def _answer_line(self, line: LineToDo, caller: Caller, journal: Journal) -> None:
        status, body = await self._answer(line, caller)
        custom_id = line.custom_id
        name = result_id(self.record.batch_id, line.number)
        result = answered(name, custom_id, name.replace("batch_req_", "req_"), status, body)
        await self._on_disk(journal.append, line.number, result, failed=status != 200)
        outcome = "ok" if status == 200 else "error"
        self._place.service.metrics.batch_lines.labels(self.record.owner, outcome).inc()

    async def _answer(self, line: LineToDo, caller: Caller) -> tuple[int, dict[str, Any]]:
        """What the endpoint says to a line: status and body."""
        service = self._place.service
        endpoint = BATCH_ENDPOINTS[self.record.endpoint]
        attempts = 1
        while True:
            try:
                return 200, await answer_body(line.body, endpoint, caller, service)
            except QueueFull as error:
                await asyncio.sleep(min(error.retry_after, MAX_WAIT_SECONDS))
            except NotReady:
                await asyncio.sleep(MAX_WAIT_SECONDS)
            except JaxserveError as error:
                status = status_of(error)
                if status == 500 and service.failure is not None:
                    await asyncio.sleep(MAX_WAIT_SECONDS)
                elif status == 500 and attempts < MAX_ATTEMPTS:
                    attempts += 1
                else:
                    return status, error_body(error, status=status, code="engine_error" if status == 500 else None)
            except Exception:
                logger.exception("line %d of %s failed", line.number, self.record.batch_id)
                return 500, error_body("the server failed; its log says how", status=500, code="internal_error")


def check_cancellable(record: BatchRecord) -> None:
    """Raise `Conflict` unless the batch can still be cancelled."""
    if record.status not in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING):
        raise Conflict(f"a batch that is {record.status.value} cannot be cancelled")


def as_batch(caller: Caller) -> Caller:
    """`caller`, who may ask for nothing more urgent than batch priority here."""
    return replace(caller, priority=max(BATCH_PRIORITY, BATCH_PRIORITY if caller.priority is None else caller.priority))
