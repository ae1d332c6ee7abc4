"""One offline run: lines in, results into the journal as they finish, a bounded number of requests in the engine between.

Owns which lines are still to do and what is under way. Knows neither flags nor where the engine came from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from jaxserve.batch_file import InputFile, InputLine, custom_id_of
from jaxserve.errors import EngineError, InvalidRequest, RequestError
from jaxserve.journal import Journal
from jaxserve.offline.generation import Completion, Engine, Generation
from jaxserve.offline.results import RequestOptions, Result, Translator
from jaxserve.request import FinishReason, Request
from jaxserve.server.call import Call

MAX_ATTEMPTS = 3
"""How often a request is tried under which the engine fails: most are only there when another one makes it fail."""

LIVE_PER_SLOT = 2
"""Requests in the engine for each that can run at once, so that a free slot never waits for the file."""

ParseLine = Callable[[int, bytes], InputLine]


class Observer(Protocol):
    """What is told about a run as it goes."""

    def line_done(self) -> None: ...
    def line_failed(self, number: int, message: str) -> None: ...
    def step_done(self, num_output: int, num_running: int, num_waiting: int) -> None: ...


@dataclass(slots=True)
class _Work:
    """A line whose requests are in the engine."""

    line: InputLine
    call: Call
    completions: dict[int, Completion] = field(default_factory=dict)


class BatchRun:
    """Does what a journal says is not done.

    Args:
        parse_line: `parse_json_line` or `parse_text_line`.
    """

    def __init__(
        self,
        engine: Engine,
        input_file: InputFile,
        parse_line: ParseLine,
        journal: Journal,
        options: RequestOptions,
        observer: Observer,
    ) -> None:
        self._engine = engine
        self._input = input_file
        self._parse_line = parse_line
        self._journal = journal
        self._observer = observer
        self._translator = Translator(engine, options)
        self._generation = Generation(engine)
        self._live: dict[str, tuple[_Work, int]] = {}
        self._attempts: dict[str, int] = {}

    def run(self) -> None:
        """Work through the input; afterwards every line has its result in the journal.

        Raises:
            ConfigError: the input changed meanwhile.
            EngineError: the engine is dead. What is in the journal stays done.
            OutputError: the journal cannot be written. Likewise.
        """
        max_live = LIVE_PER_SLOT * self._engine.limits.max_seqs
        works = self._works()
        exhausted = False
        while True:
            while not exhausted and self._generation.num_live < max_live:
                work = next(works, None)
                exhausted = work is None
                if work is not None:
                    self._start(work)
            if not self._generation.num_live:
                break
            for request_id, completion in self._generation.step():
                self._take(request_id, completion)
            stats = self._engine.core.stats()
            self._observer.step_done(self._generation.num_output, stats.running, stats.waiting)
        self._generation.close()

    def _works(self) -> Iterator[_Work]:
        """Lines to do that can be served, in order; the others get their result here."""
        taken: dict[bytes, int] = {}
        for number, raw in self._input.lines():
            try:
                line = self._parse_line(number, raw)
                _check_new(line, taken)
            except InvalidRequest as error:
                if not self._journal.has(number):
                    self._fail(number, self._translator.unreadable(number, custom_id_of(raw), error), str(error))
                continue
            if self._journal.has(number):
                continue
            try:
                call = self._translator.parse(line)
            except RequestError as error:
                self._fail(number, self._translator.refusal(line, error), str(error))
                continue
            yield _Work(line, call)

    def _start(self, work: _Work) -> None:
        for index, request in enumerate(work.call.requests):
            self._add(work, index, request)

    def _add(self, work: _Work, index: int, request: Request) -> None:
        self._live[request.request_id] = (work, index)
        self._generation.add(request, work.call.reading, lists_stop_token=work.call.echoes)

    def _take(self, request_id: str, completion: Completion) -> None:
        work, index = self._live.pop(request_id)
        request = work.call.requests[index]
        if completion.finish_reason is FinishReason.ERROR:
            self._attempts[request_id] = self._attempts.get(request_id, 1) + 1
            if self._attempts[request_id] <= MAX_ATTEMPTS:
                self._add(work, index, request)
                return
        self._attempts.pop(request_id, None)
        work.completions[index] = completion
        if len(work.completions) == len(work.call.requests):
            self._finish(work)

    def _finish(self, work: _Work) -> None:
        number = work.line.number
        completions = [work.completions[index] for index in range(len(work.call.requests))]
        if any(completion.finish_reason is FinishReason.ERROR for completion in completions):
            error = EngineError(f"the engine failed {MAX_ATTEMPTS} times while it worked on this request")
            self._fail(number, self._translator.refusal(work.line, error), str(error))
            return
        self._journal.append(number, self._translator.answer(work.line, work.call, completions), failed=False)
        self._observer.line_done()

    def _fail(self, number: int, result: Result, message: str) -> None:
        self._journal.append(number, result, failed=True)
        self._observer.line_failed(number, message)
        self._observer.line_done()


def _check_new(line: InputLine, taken: dict[bytes, int]) -> None:
    """Note the line's custom_id; about 150 bytes of memory for each."""
    if line.custom_id is None:
        return
    digest = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
    first = taken.setdefault(digest, line.number)
    if first != line.number:
        raise InvalidRequest(f"custom_id {line.custom_id!r:.100} is that of line {first} already", param="custom_id")
