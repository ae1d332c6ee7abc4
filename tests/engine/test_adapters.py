"""Names and slots of adapters: who finds one, who keeps it, and when its slot is free."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.adapters import NO_ADAPTERS, AdapterTable, load_first, named_adapters
from jaxserve.errors import ConfigError, Conflict, NotFound
from jaxserve.request import Adapter


def loaded(table: AdapterTable, name: str) -> Adapter:
    adapter = table.reserve(name)
    table.publish(adapter, f"/adapters/{name}", 0)
    table.check_integrity()
    return adapter


def test_an_adapter_is_found_between_publish_and_retire() -> None:
    table = AdapterTable(2)
    adapter = table.reserve("a")
    assert table.names == ()
    table.publish(adapter, "path", 5)
    assert table.names == ("a",)
    with table.held("a") as held:
        assert held is adapter
    assert table.retire("a", lambda: None) is adapter
    with pytest.raises(NotFound, match="no adapter 'a'"), table.held("a"):
        pass
    table.release(adapter)
    table.check_integrity()


def test_slots_are_used_again_and_loads_are_not() -> None:
    table = AdapterTable(1)
    first = loaded(table, "a")
    with pytest.raises(Conflict, match="max_adapters is 1; unload one first"):
        table.reserve("b")
    table.retire("a", lambda: None)
    with pytest.raises(Conflict, match="max_adapters is 1"):
        table.reserve("b")
    table.release(first)
    second = loaded(table, "a")
    assert (first.slot, second.slot) == (0, 0)
    assert first.load != second.load


def test_names_are_taken_while_something_has_them() -> None:
    table = AdapterTable(3, ("model",))
    with pytest.raises(Conflict, match="'model' is the model's own name"):
        table.reserve("model")
    adapter = table.reserve("a")
    with pytest.raises(Conflict, match="'a' is being loaded or unloaded"):
        table.reserve("a")
    with pytest.raises(NotFound):
        table.retire("a", lambda: None)
    table.publish(adapter, "", 0)
    with pytest.raises(Conflict, match="'a' is loaded already"):
        table.reserve("a")
    with pytest.raises(Conflict):
        NO_ADAPTERS.reserve("a")


def test_who_holds_an_adapter_keeps_it() -> None:
    table = AdapterTable(1)
    adapter = loaded(table, "a")
    told: list[str] = []
    with table.held("a"):
        with table.held("a"):
            table.retire("a", lambda: told.append("unused"))
            assert table.names == ()
        assert not told, "the other one has it still"
        with pytest.raises(AssertionError, match="given back and in use"):
            table.release(adapter)
    assert told == ["unused"]
    table.release(adapter)
    table.check_integrity()


class Source:
    """Notes what it is asked for."""

    num_slots = 2

    def __init__(self) -> None:
        self.installed: list[tuple[int, Any]] = []

    def read(self, path: str) -> Any:
        return f"weights of {path}"

    def install(self, slot: int, weights: Any) -> None:
        self.installed.append((slot, weights))


def test_adapters_of_the_command_line() -> None:
    table, source = AdapterTable(2, ("model",)), Source()
    load_first(table, source, [("a", "x"), ("b", "y")], 7)
    assert source.installed == [(0, "weights of x"), (1, "weights of y")]
    assert [(one.adapter.name, one.path, one.since) for one in table.loaded] == [("a", "x", 7), ("b", "y", 7)]
    with pytest.raises(ConfigError, match="adapter model=z: 'model' is the model's own name"):
        load_first(AdapterTable(2, ("model",)), source, [("model", "z")], 0)


def test_how_the_command_line_names_them() -> None:
    named = named_adapters(EngineConfig(max_adapters=3, adapter=("a=x", "b=/y/z=1")))
    assert named == [("a", "x"), ("b", "/y/z=1")]


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (("a",), "adapter must be NAME=PATH, found 'a'"),
        (("=x",), "adapter must be NAME=PATH"),
        (("a=",), "adapter must be NAME=PATH"),
        (("a=x", "a=y"), "'a' is given twice"),
        (("a=x", "b=y", "c=z"), "max_adapters is 2, too few for 3"),
    ],
)
def test_how_it_does_not(adapter: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        named_adapters(EngineConfig(max_adapters=2, adapter=adapter))
