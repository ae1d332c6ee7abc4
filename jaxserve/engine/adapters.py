"""Which LoRA adapters are loaded, in which slot each lies, and who uses it.

Owns names, slots and the numbers of loads. Does not know weights, or who brings them to the device: an adapter is found by its
name only between `publish` and `retire`, and its slot is free again once `release` says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, Conflict, NotFound
from jaxserve.request import Adapter


class AdapterSource(Protocol):
    """Brings adapters from disk to the device; `jaxserve.adapters` has one."""

    def read(self, path: str) -> Any:
        """The weights in the folder `path`, checked against the model and on the device. Takes long; any thread may call it.

        Raises:
            ModelLoadError: it cannot be read, or does not fit.
        """
        ...

    def install(self, slot: int, weights: Any) -> None:
        """Put what `read` gave into a slot that no live request has. For the thread that drives the engine, between steps."""
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """An adapter that requests can have.

    Attributes:
        path: where it was read.
        since: seconds since 1970.
    """

    adapter: Adapter
    path: str
    since: int


class AdapterTable:
    """The adapters by name. Not thread-safe.

    Args:
        reserved: names that no adapter may have, such as the model's own.
    """

    def __init__(self, num_slots: int, reserved: tuple[str, ...] = ()) -> None:
        self.num_slots = num_slots
        self._reserved = reserved
        self._free = list(range(num_slots - 1, -1, -1))
        self._loaded: dict[str, Loaded] = {}
        self._in_between: set[str] = set()  # names of those that are being loaded or unloaded
        self._num_users: Counter[Adapter] = Counter()
        self._when_unused: dict[Adapter, Callable[[], None]] = {}
        self._num_loads = 0

    @property
    def loaded(self) -> list[Loaded]:
        """Those that requests can have, the first loaded first."""
        return list(self._loaded.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self._loaded)

    def reserve(self, name: str) -> Adapter:
        """A slot for a new adapter, which nobody finds yet: `publish` it once its weights are there, or `release` it.

        Raises:
            Conflict: the name is taken, or no slot is free.
        """
        if name in self._reserved:
            raise Conflict(f"{name!r} is the model's own name; call the adapter something else", param="lora_name")
        if name in self._loaded:
            raise Conflict(f"the adapter {name!r} is loaded already; unload it first", param="lora_name")
        if name in self._in_between:
            raise Conflict(f"the adapter {name!r} is being loaded or unloaded", param="lora_name")
        if not self._free:
            raise Conflict(
                f"no slot is free for the adapter {name!r}: max_adapters is {self.num_slots}; unload one first",
                param="lora_name",
            )
        self._in_between.add(name)
        self._num_loads += 1
        return Adapter(name, self._free.pop(), self._num_loads)

    def publish(self, adapter: Adapter, path: str, since: int) -> None:
        """Let requests have it."""
        self._in_between.remove(adapter.name)
        self._loaded[adapter.name] = Loaded(adapter, path, since)

    def retire(self, name: str, when_unused: Callable[[], None]) -> Adapter:
        """Let no further request have it; then `release` it.

        Args:
            when_unused: called once, when the last of those that have it lets it go; now, if none has it.

        Raises:
            NotFound: there is none of that name.
        """
        found = self._loaded.pop(name, None)
        if found is None:
            raise NotFound(f"there is no adapter {name!r}", param="lora_name")
        self._in_between.add(name)
        if self._num_users[found.adapter]:
            self._when_unused[found.adapter] = when_unused
        else:
            when_unused()
        return found.adapter

    def release(self, adapter: Adapter) -> None:
        """Give back its slot and its name."""
        assert not self._num_users[adapter], f"{adapter} is given back and in use"
        self._in_between.remove(adapter.name)
        self._free.append(adapter.slot)

    @contextmanager
    def held(self, name: str) -> Iterator[Adapter]:
        """The adapter of that name, which stays until whoever holds it lets it go.

        Raises:
            NotFound: there is none.
        """
        if name not in self._loaded:
            raise NotFound(f"there is no adapter {name!r}", param="model")
        adapter = self._loaded[name].adapter
        self._num_users[adapter] += 1
        try:
            yield adapter
        finally:
            self._num_users[adapter] -= 1
            if not self._num_users[adapter]:
                del self._num_users[adapter]
                self._when_unused.pop(adapter, lambda: None)()

    def check_integrity(self) -> None:
        """Assert that each slot is free or somebody's. Only those on their way have slots that are neither."""
        taken = [one.adapter.slot for one in self._loaded.values()]
        slots = sorted([*taken, *self._free])
        assert len(set(slots)) == len(slots) == self.num_slots - len(self._in_between), f"slots {slots} of {self.num_slots}"
        assert not self._in_between & self._loaded.keys(), "loaded, and on its way"


NO_ADAPTERS = AdapterTable(0)
"""Of a server that has none: nothing can be loaded into it."""


def named_adapters(config: EngineConfig) -> list[tuple[str, str]]:
    """Name and path of each adapter that is to be loaded first.

    Raises:
        ConfigError: one is not NAME=PATH, a name is given twice, or there are too many.
    """
    if len(config.adapter) > config.max_adapters:
        raise ConfigError(f"max_adapters is {config.max_adapters}, too few for {len(config.adapter)} that adapter names")
    pairs: list[tuple[str, str]] = []
    for text in config.adapter:
        name, _, path = text.partition("=")
        if not (name and path):
            raise ConfigError(f"adapter must be NAME=PATH, found {text!r}")
        if any(name == other for other, _ in pairs):
            raise ConfigError(f"adapter: {name!r} is given twice")
        pairs.append((name, path))
    return pairs


def load_first(table: AdapterTable, source: AdapterSource, named: list[tuple[str, str]], now: int) -> None:
    """Load adapters before the first step.

    Raises:
        ConfigError: a name that cannot be had.
        ModelLoadError: as `AdapterSource.read`.
    """
    for name, path in named:
        try:
            adapter = table.reserve(name)
        except Conflict as error:
            raise ConfigError(f"adapter {name}={path}: {error}") from None
        source.install(adapter.slot, source.read(path))
        table.publish(adapter, path, now)
