"""What the handlers share: the model once it is loaded, and where the server is in its life.

Owns the states loading, ready, draining, hung and failed. Does not know HTTP messages.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from jaxserve.config import HttpConfig
from jaxserve.engine.adapters import NO_ADAPTERS, AdapterSource, AdapterTable
from jaxserve.engine.async_engine import AsyncEngine, Core
from jaxserve.engine.constraints import Constraints
from jaxserve.engine.text import Tokenizer
from jaxserve.errors import EngineError, NotReady
from jaxserve.host.admission import Admission
from jaxserve.plan import RunnerLimits
from jaxserve.server.adapters import Adapters
from jaxserve.server.chat_settings import ChatSettings
from jaxserve.server.joining import CallRegistry
from jaxserve.server.keys import load_keys
from jaxserve.server.metrics import Metrics
from jaxserve.server.terms import Terms

logger = logging.getLogger(__name__)

MIN_BODY_LIMIT = 4 * 1024 * 1024
BODY_BYTES_PER_TOKEN = 64
"""Of the context. A token is some 4 bytes of text, up to 7 as a number, up to 24 where each character is an escape of 6; the
rest is for several prompts in a request."""


@dataclass(frozen=True, kw_only=True)
class ServerParts:
    """What a server needs of a model, loaded and warm.

    Attributes:
        core: an engine core that nobody drives yet.
        limits: of its runner.
        model_name: what requests call the model.
        num_compiles: programs compiled so far, for `/metrics`.
        sampling_defaults: fields of `SamplingParams` that requests have where they do not say.
        constraints: compiles what requests restrict tokens to; None for one that nobody has prepared.
        adapters: those that are loaded.
        adapter_source: brings more; None where there can be none.
    """

    core: Core
    limits: RunnerLimits
    tokenizer: Tokenizer
    model_name: str
    num_compiles: Callable[[], int] = lambda: 0
    constraints: Constraints | None = None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    adapters: AdapterTable = NO_ADAPTERS
    adapter_source: AdapterSource | None = None


class State(enum.StrEnum):
    """Where the server is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    HUNG = "hung"
    FAILED = "failed"


@dataclass(frozen=True)
class Model:
    """A model that is being served."""

    name: str
    tokenizer: Tokenizer
    engine: AsyncEngine
    terms: Terms
    created: int
    constraints: Constraints
    adapters: Adapters
    sampling_defaults: Mapping[str, float]


class Service:
    """One server's model and state. Lives on the event loop's thread.

    Attributes:
        keys: who may call it.
        calls: those that retries may join.
        load_error: why loading failed, or None.

    Raises:
        ConfigError: the API keys or the chat template cannot be read, or there is no such format of calls or reasoning.
    """

    def __init__(self, config: HttpConfig) -> None:
        self._chat = ChatSettings(config)
        self.config = config
        self.metrics = Metrics()
        self.keys = load_keys(config)
        self.calls = CallRegistry(self.metrics.joined.inc)
        self.load_error: BaseException | None = None
        self._model: Model | None = None
        self._draining = False

    async def load(self, loading: Awaitable[ServerParts], *, now: Callable[[], float]) -> None:
        """Wait for the model, and start its engine. A failure is kept in `load_error`."""
        try:
            parts = await loading
            tokenizer = self._chat.apply(parts.tokenizer)
        except Exception as error:
            self.load_error = error
            return
        logger.info("%s", tokenizer.dialect)
        admission = Admission(
            parts.limits,
            max_queue_requests=self.config.max_queue_requests,
            max_queue_tokens=self.config.max_queue_tokens,
            slo_ttft_seconds=self.config.slo_ttft_ms / 1000.0,
            num_tenants=len(self.keys),
        )
        engine = AsyncEngine(parts.core, admission)
        self.metrics.observe_engine(lambda: engine.stats, admission, parts.num_compiles)
        if self._draining:
            admission.drain()
        engine.start()
        terms = Terms(
            limits=parts.limits,
            max_output_tokens=self.config.max_output_tokens,
            max_seconds=self.config.request_timeout,
        )
        constraints = parts.constraints or Constraints(tokenizer, parts.limits.vocab_size, parts.core.eos_token_ids)
        adapters = Adapters(parts.model_name, engine, parts.adapters, parts.adapter_source, self.config.adapter_dir)
        self._model = Model(
            parts.model_name, tokenizer, engine, terms, int(now()), constraints, adapters, parts.sampling_defaults
        )
        logger.info("ready: serving %s", parts.model_name)

    @property
    def state(self) -> State:
        if self.failure is not None:
            return State.FAILED
        if self._draining:
            return State.DRAINING
        if self.hung:
            return State.HUNG
        return State.LOADING if self._model is None else State.READY

    @property
    def failure(self) -> BaseException | None:
        """Why no request will ever be served, or None."""
        if self.load_error is not None:
            return self.load_error
        return None if self._model is None else self._model.engine.failure

    @property
    def seconds_in_step(self) -> float:
        """How long the engine has been in its current step; 0 between steps."""
        return 0.0 if self._model is None else self._model.engine.seconds_in_step

    @property
    def hung(self) -> bool:
        """Whether that is longer than a step may take."""
        return 0.0 < self.config.hang_seconds < self.seconds_in_step

    @property
    def max_body_bytes(self) -> int:
        """What a body may have: as configured, or else far more than the context holds."""
        if self.config.max_body_bytes:
            return self.config.max_body_bytes
        context = 0 if self._model is None else self._model.terms.limits.max_context
        return max(MIN_BODY_LIMIT, BODY_BYTES_PER_TOKEN * context)

    def require_model(self) -> Model:
        """The model, for a request to be served now.

        Raises:
            NotReady: loading, draining or hung.
            EngineError: loading failed, or the engine has died.
        """
        state = self.state
        if state is State.FAILED:
            raise EngineError("the engine is dead; /health says why")
        if state is State.DRAINING:
            raise NotReady("the server is shutting down and takes no new requests")
        if state is State.HUNG:
            raise NotReady(f"the engine hangs: a step has not come back for {self.seconds_in_step:.0f} s")
        if self._model is None:
            raise NotReady("the model is still loading; /ready says when it is not")
        return self._model

    async def drain(self) -> None:
        """Refuse new requests, and let those that run finish, for at most `drain_seconds`."""
        self._draining = True
        if self._model is not None:
            await self._model.engine.drain(self.config.drain_seconds)

    async def close(self) -> None:
        """Stop the engine; requests that still run fail."""
        self._draining = True
        if self._model is not None:
            self._model.adapters.close()
            await asyncio.shield(self._model.engine.close())
