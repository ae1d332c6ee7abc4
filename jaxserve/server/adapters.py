"""LoRA adapters of a server that runs: loaded and unloaded between steps, and held while requests have them.

Owns the order of things: weights are read beside the steps and put in place between two; an adapter that is to go is first
hidden from new requests, then waited for, then forgotten. Does not know what weights are, nor HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from jaxserve.engine.adapters import AdapterSource, AdapterTable, Loaded
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.errors import Forbidden, InvalidRequest, ModelLoadError, ModelNotFound
from jaxserve.request import Adapter, Request

logger = logging.getLogger(__name__)


class Adapters:
    """The adapters of one model, behind an engine that runs. Lives on the event loop's thread.

    Args:
        source: brings them; None where there are none.
        folder: what may be loaded on request lies in it; "" refuses all.
    """

    def __init__(
        self, model_name: str, engine: AsyncEngine, table: AdapterTable, source: AdapterSource | None, folder: str
    ) -> None:
        self._model_name = model_name
        self._engine = engine
        self._table = table
        self._source = source
        self._folder = folder
        self._unloading: set[asyncio.Task[Adapter]] = set()

    @property
    def loaded(self) -> list[Loaded]:
        """Those that requests can have."""
        return self._table.loaded

    @property
    def names(self) -> tuple[str, ...]:
        """What a request can have as `model`, the model's own name first."""
        return self._model_name, *self._table.names

    @contextmanager
    def given(self, model: str, requests: tuple[Request, ...]) -> Iterator[tuple[Request, ...]]:
        """`requests` with the adapter that `model` names, which stays loaded meanwhile.

        Raises:
            ModelNotFound: it has gone since the body was read.
        """
        if model in ("", self._model_name):
            yield requests
            return
        if model not in self._table.names:
            raise ModelNotFound(f"the model {model!r:.200} does not exist any more", param="model")
        with self._table.held(model) as adapter:
            yield tuple(replace(request, adapter=adapter) for request in requests)

    async def load(self, name: str, path: str) -> None:
        """Read the adapter in `path` and let requests have it as `name`.

        Raises:
            Forbidden: nothing may be loaded on request.
            InvalidRequest: it lies elsewhere, cannot be read or does not fit.
            Conflict: the name or every slot is taken.
        """
        source = self._source
        if source is None:
            raise Forbidden("this server was started without adapters; start it with --max-adapters N", param="lora_name")
        folder = self._inside(path)
        adapter = self._table.reserve(name)
        try:
            weights = await asyncio.to_thread(source.read, folder)
            await self._engine.between_steps(partial(source.install, adapter.slot, weights))
        except ModelLoadError as error:
            self._table.release(adapter)
            raise InvalidRequest(str(error), param="lora_path") from None
        except BaseException:
            self._table.release(adapter)
            raise
        self._table.publish(adapter, path, int(time.time()))
        logger.info("adapter %r is loaded from %s into slot %d", name, folder, adapter.slot)

    def _inside(self, path: str) -> str:
        """`path`, which is taken from the folder of adapters, with every link followed; it must lie within that folder."""
        if not self._folder:
            raise Forbidden("this server loads no adapters on request; start it with --adapter-dir FOLDER", param="lora_path")
        root = os.path.realpath(self._folder)
        try:
            found = os.path.realpath(os.path.join(root, path))
        except ValueError as error:  # a null character
            raise InvalidRequest(f"lora_path is no path: {error}", param="lora_path") from None
        if not Path(found).is_relative_to(root) or found == root:
            raise Forbidden(f"lora_path must lie in the server's folder of adapters, found {path!r:.200}", param="lora_path")
        if not os.path.isdir(found):
            raise InvalidRequest(f"lora_path must be a folder with an adapter, and {path!r:.200} is none", param="lora_path")
        return found

    async def unload(self, name: str) -> None:
        """Let no further request have the adapter `name`, wait for those that have it, and free its slot and cached pages.

        It goes on if whoever waits for it does not.

        Raises:
            NotFound: there is none.
            EngineError: the engine died.
        """
        unused = asyncio.Event()
        adapter = self._table.retire(name, unused.set)
        task = asyncio.create_task(self._clear_away(adapter, unused))
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)
        await asyncio.shield(task)

    async def _clear_away(self, adapter: Adapter, unused: asyncio.Event) -> Adapter:
        await unused.wait()
        num_pages = await self._engine.forget_adapter(adapter)
        self._table.release(adapter)
        logger.info("adapter %r is unloaded; %d pages that were cached for it are free", adapter.name, num_pages)
        return adapter

    def close(self) -> None:
        """Wait for nobody any more."""
        for task in self._unloading:
            task.cancel()
