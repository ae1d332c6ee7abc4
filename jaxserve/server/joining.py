"""Retries of a call that still runs: they join it, see all of its answer from the beginning, and it is computed once.

Owns the calls that were given a key and still run, and who reads each. Does not know HTTP, bodies or engines: how a call
begins, and where its deltas come from, it is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from jaxserve.engine.output import OutputDelta
from jaxserve.engine.tools.parts import merge as merge_parts
from jaxserve.errors import EngineError, KeyReused
from jaxserve.server.call import Call
from jaxserve.server.echo import PromptLogprobs

Deltas = list[tuple[int, OutputDelta]]

Key = tuple[str, str]
"""A tenant, and the key that it gave the call."""


class Source(Protocol):
    """Where an answer comes from; `server.generation.Generation` is one."""

    @property
    def num_output(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def num_reasoning(self) -> int | None: ...
    def prompt_logprobs(self, prompt: int) -> PromptLogprobs | None: ...
    async def read(self) -> Deltas: ...


@dataclass(frozen=True, slots=True)
class Begun:
    """A call that the engine works on.

    Attributes:
        created: when it began, in seconds since 1970.
    """

    call: Call
    created: int
    source: Source


Begin = Callable[[], Awaitable[AbstractContextManager[Begun]]]
"""Starts a call, or raises what is wrong with it; leaving the context aborts what has not finished."""


class _Parts:
    """Deltas of each choice, merged as far as nobody needs them apart: as large as the text that they hold."""

    def __init__(self) -> None:
        self._choices: dict[int, list[OutputDelta]] = {}

    def __bool__(self) -> bool:
        return bool(self._choices)

    def add(self, deltas: Deltas) -> None:
        for index, delta in deltas:
            parts = self._choices.setdefault(index, [])
            parts.append(delta)
            if len(parts) > 64:
                parts[:] = [_merge(parts)]

    def merged(self) -> Deltas:
        return [(index, parts[0] if len(parts) == 1 else _merge(parts)) for index, parts in self._choices.items()]


def _merge(parts: list[OutputDelta]) -> OutputDelta:
    return OutputDelta(
        "".join([part.text for part in parts]),
        tuple(token for part in parts for token in part.tokens),
        parts[-1].finish_reason,
        parts[-1].stopped_by,
        None if parts[-1].parts is None else merge_parts(part for delta in parts for part in delta.parts or ()),
    )


class SharedCall:
    """One call, a task that reads its answer, and those who wait for it. Made by `CallRegistry.join`."""

    def __init__(self, fingerprint: bytes, begin: Begin, on_end: Callable[[SharedCall], None]) -> None:
        self.fingerprint = fingerprint
        self._on_end = on_end
        self._begun: Begun | None = None
        self._said = _Parts()
        self._error: Exception | None = None
        self._ended = False
        self._readers: set[Reader] = set()
        self._task = asyncio.create_task(self._run(begin))

    async def _run(self, begin: Begin) -> None:
        try:
            with await begin() as begun:
                self._begun = begun
                self._wake()
                while deltas := await begun.source.read():
                    self._said.add(deltas)
                    for reader in self._readers:
                        reader._unread.add(deltas)
                    self._wake()
        except Exception as error:
            self._error = error
        except asyncio.CancelledError:
            self._error = EngineError("the call was given up")
            raise
        finally:
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._on_end(self)
        self._wake()

    def _wake(self) -> None:
        for reader in self._readers:
            reader._changed.set()

    def _join(self) -> Reader:
        reader = Reader(self)
        reader._unread.add(self._said.merged())
        self._readers.add(reader)
        return reader

    def _leave(self, reader: Reader) -> None:
        self._readers.discard(reader)
        if not self._readers and not self._ended:
            self._on_end(self)
            self._task.cancel()


class Reader:
    """One client's view of a shared call: a source that begins with the answer's first token whenever it joined.

    Close it, or use it as a context manager; once all readers are closed, the call is aborted.
    """

    def __init__(self, shared: SharedCall) -> None:
        self._shared = shared
        self._unread = _Parts()
        self._changed = asyncio.Event()

    async def begun(self) -> Begun:
        """The call, once the engine works on it; its source is this reader.

        Raises:
            Whatever kept it from beginning.
        """
        while True:
            self._changed.clear()
            if (begun := self._shared._begun) is not None:
                return Begun(begun.call, begun.created, self)
            self._check_error()
            await self._changed.wait()

    @property
    def num_output(self) -> int:
        """Output tokens of all choices so far."""
        return 0 if self._shared._begun is None else self._shared._begun.source.num_output

    @property
    def num_cached(self) -> int:
        """Prompt tokens that were not computed."""
        return 0 if self._shared._begun is None else self._shared._begun.source.num_cached

    @property
    def num_reasoning(self) -> int | None:
        """Output tokens that are reasoning, so far; None if the answer is not read for it."""
        return None if self._shared._begun is None else self._shared._begun.source.num_reasoning

    def prompt_logprobs(self, prompt: int) -> PromptLogprobs | None:
        """What `prompt_logprobs` shows of a prompt, by its index, once a choice of it has been read."""
        return None if self._shared._begun is None else self._shared._begun.source.prompt_logprobs(prompt)

    async def read(self) -> Deltas:
        """What this reader has not seen yet, at most one delta a choice; empty once every choice has ended.

        Raises:
            Whatever reading the answer raised, to every reader.
        """
        while True:
            self._changed.clear()
            if self._unread:
                unread, self._unread = self._unread, _Parts()
                return unread.merged()
            self._check_error()
            if self._shared._ended:
                return []
            await self._changed.wait()

    def _check_error(self) -> None:
        if self._shared._error is not None:
            raise self._shared._error

    def close(self) -> None:
        """Wait for no more of it. Safe to call again."""
        self._shared._leave(self)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CallRegistry:
    """The shared calls that still run, by key. A key is free again as soon as its call has ended.

    Args:
        on_join: called for each request that joins one.
    """

    def __init__(self, on_join: Callable[[], None] = lambda: None) -> None:
        self._calls: dict[Key, SharedCall] = {}
        self._on_join = on_join

    def __len__(self) -> int:
        return len(self._calls)

    def join(self, key: Key, fingerprint: bytes, begin: Begin) -> Reader:
        """A reader of the call with this key; of a new one, begun by `begin`, if none runs.

        Args:
            fingerprint: the same for the same request, and for no other.

        Raises:
            KeyReused: the call that runs has another fingerprint.
        """
        shared = self._calls.get(key)
        if shared is None:
            shared = self._calls[key] = SharedCall(fingerprint, begin, lambda ended: self._forget(key, ended))
        elif shared.fingerprint != fingerprint:
            raise KeyReused(
                f"the idempotency key {key[1]!r:.80} belongs to a request that still runs and has another body", param=None
            )
        else:
            self._on_join()
        return shared._join()

    def _forget(self, key: Key, ended: SharedCall) -> None:
        if self._calls.get(key) is ended:
            del self._calls[key]
