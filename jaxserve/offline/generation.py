"""Requests in, whole outputs with their text out: the plain loop around an engine, without threads.

Owns the text of live requests. Knows neither files nor the API's schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from jaxserve.engine.adapters import AdapterTable
from jaxserve.engine.constraints import Constraints
from jaxserve.engine.core import EngineCore
from jaxserve.engine.output import Output, ShownToken
from jaxserve.engine.text import Tokenizer
from jaxserve.engine.tools.dialect import Reading
from jaxserve.engine.tools.parts import Part, merge
from jaxserve.errors import EngineError
from jaxserve.plan import RunnerLimits
from jaxserve.request import FinishReason, Request, TokenEvent, TokenLogprobs


class Engine(Protocol):
    """What an offline run needs of a built engine; `launch.build_engine` makes one."""

    @property
    def core(self) -> EngineCore: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def model_name(self) -> str: ...
    @property
    def limits(self) -> RunnerLimits: ...
    @property
    def adapters(self) -> AdapterTable: ...
    @property
    def constraints(self) -> Constraints: ...
    @property
    def sampling_defaults(self) -> Mapping[str, float]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The whole output of one request.

    Attributes:
        text: without the stop token or stop string that ended it.
        parts: what the text is made of, if it was read for that; the text is then as the model wrote it.
        num_reasoning: tokens of reasoning, if it was read for it.
        token_ids: what was sampled, the token that ended the output included.
        finish_reason: stop, length, or error when the engine failed under the request.
        logprobs: one entry a token id if the request asked, else empty.
        shown: tokens of the text with their log probabilities and places in it if the request asked, else empty.
        num_prompt: prompt tokens.
        num_cached: those of them that were cached and not computed, which depends on what else ran.
        prompt_logprobs: one entry for each prompt token after the first if the request asked, else empty.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...]
    shown: tuple[ShownToken, ...]
    num_prompt: int
    num_cached: int = 0
    parts: tuple[Part, ...] | None = None
    num_reasoning: int | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def content(self) -> str | tuple[Part, ...]:
        """The text, or what it is made of if it was read for that."""
        return self.text if self.parts is None else self.parts


class Generation:
    """Drives an engine's core, which nobody else may call meanwhile.

    Attributes:
        num_output: output tokens so far, of all requests.
    """

    def __init__(self, engine: Engine) -> None:
        self._core = engine.core
        self._tokenizer = engine.tokenizer
        self._live: dict[str, _Live] = {}
        self.num_output = 0

    @property
    def num_live(self) -> int:
        """Requests that have not finished."""
        return len(self._live)

    def add(self, request: Request, reading: Reading | None = None, *, lists_stop_token: bool = False) -> None:
        """Queue a request.

        Args:
            reading: how its output is read as reasoning, text and calls; None for text alone.
            lists_stop_token: as `Output` has it.

        Raises:
            InvalidRequest: it can never be served, or its id is live.
            EngineError: the engine is dead.
        """
        self._core.add(request)
        self._live[request.request_id] = _Live(Output(request, self._tokenizer, reading, lists_stop_token=lists_stop_token))

    def step(self) -> list[tuple[str, Completion]]:
        """One step of the engine; the outputs that it completed, with their request ids.

        Raises:
            EngineError: the engine is dead, and with it every live request.
        """
        completed = []
        for event in self._core.step():
            self.num_output += len(event.tokens)
            completion = self._take(event)
            if completion is not None:
                del self._live[event.request_id]
                completed.append((event.request_id, completion))
        if self._core.dead:
            raise EngineError(f"the engine failed too often in a row and gave up: {self._core.last_error!r}")
        return completed

    def close(self) -> None:
        """End every live request, of which nothing is given out, and leave the core idle."""
        for request_id in self._live:
            self._core.abort(request_id)
        self._live.clear()
        while self._core.has_work and not self._core.dead:
            self._core.step()

    def _take(self, event: TokenEvent) -> Completion | None:
        live = self._live.get(event.request_id)
        if live is None:  # a stop string ended it while its next token was under way
            return None
        live.push(event)
        if live.output.finish_reason is None:
            return None
        if event.finish_reason is None:
            self._core.abort(event.request_id)
        return live.complete(event.num_prompt, event.num_cached)


@dataclass(slots=True)
class _Live:
    output: Output
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    shown: list[ShownToken] = field(default_factory=list)
    parts: list[Part] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def push(self, event: TokenEvent) -> None:
        delta = self.output.push(event)
        self.pieces.append(delta.text)
        self.shown.extend(delta.tokens)
        if delta.parts is not None:
            self.parts = [*(self.parts or ()), *delta.parts]
        self.token_ids.extend(event.tokens)
        self.logprobs.extend(event.logprobs)
        self.prompt_logprobs += event.prompt_logprobs

    def complete(self, num_prompt: int, num_cached: int) -> Completion:
        assert self.output.finish_reason is not None
        num_tokens = self.output.num_tokens
        return Completion(
            text="".join(self.pieces),
            token_ids=tuple(self.token_ids[:num_tokens]),
            finish_reason=self.output.finish_reason,
            logprobs=tuple(self.logprobs[:num_tokens]),
            shown=tuple(self.shown),
            num_prompt=num_prompt,
            num_cached=num_cached,
            parts=None if self.parts is None else merge(self.parts),
            num_reasoning=self.output.num_reasoning_tokens,
            prompt_logprobs=self.prompt_logprobs,
        )
