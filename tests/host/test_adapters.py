"""Adapters in plans, and what the prefix cache keeps apart: pages of 4 tokens, the same prompt for all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.request import Adapter, Request
from tests.host.driver import Driver, make_limits, make_request

ONE, OTHER = Adapter("one", 0, 1), Adapter("other", 3, 2)
ONE_AGAIN = Adapter("one", 0, 3)
"""Loaded after `ONE` was unloaded: the same name and slot."""


def ask(driver: Driver, adapter: Adapter | None = None, salt: str = "") -> tuple[int, int]:
    """Run a request of 10 tokens: the slot of its rows, and how many of its tokens were cached."""
    request = replace(make_request("a", 10, max_tokens=1), adapter=adapter, cache_salt=salt)
    seq = driver.scheduler.add(request)
    (row,) = driver.plan().values()
    driver.commit()
    assert seq.cached is not None
    return row.adapter, seq.cached


@pytest.fixture(params=[{}, {"local_pages": 40, "local_window": 6}], ids=["one_pool", "local_pages"])
def driver(request: pytest.FixtureRequest) -> Driver:
    return Driver(make_limits(max_adapters=4, **request.param), prefixes=True)


def test_rows_name_the_slot_of_their_adapter(driver: Driver) -> None:
    assert [ask(driver, adapter)[0] for adapter in (None, ONE, OTHER)] == [-1, 0, 3]


def test_adapters_share_pages_with_nobody_but_themselves(driver: Driver) -> None:
    """vllm I30931."""
    for adapter in (None, ONE, OTHER, ONE_AGAIN):
        assert ask(driver, adapter)[1] == 0
    for adapter in (None, ONE, OTHER, ONE_AGAIN):
        assert ask(driver, adapter)[1] == 8


@pytest.mark.parametrize("salt", ["one", "1", "1:", "0:", ":", "1:one", "\0001"])
def test_no_salt_is_an_adapter(driver: Driver, salt: str) -> None:
    """vllm I44701: the name of an adapter as another's salt."""
    ask(driver, ONE)
    ask(driver, ONE, "x")
    ask(driver)
    assert ask(driver, None, salt)[1] == 0
    assert ask(driver, OTHER, salt)[1] == 0
    assert ask(driver, ONE, salt)[1] == 0
    assert ask(driver, ONE, salt)[1] == 8


def test_pages_of_an_adapter_are_forgotten_with_it(driver: Driver) -> None:
    for salt in ("", "x"):
        ask(driver, ONE, salt)
        ask(driver, Adapter("eleventh", 0, 11), salt)  # its number begins like that of `ONE`
    ask(driver)
    memory = driver.scheduler.memory
    before = memory.num_cached
    assert memory.forget_adapter(ONE.load) == 4
    assert memory.num_cached == before - 4
    driver.scheduler.check_integrity()
    assert driver.scheduler.num_free_pages == driver.limits.num_pages
    assert ask(driver, ONE)[1] == 0
    assert ask(driver, Adapter("eleventh", 0, 11))[1] == ask(driver)[1] == 8
    assert memory.forget_adapter(99) == 0


def test_nothing_comes_back_from_the_host_for_another() -> None:
    driver = Driver(make_limits(max_adapters=4, num_pages=4, host_pages=64), prefixes=True)
    ask(driver, ONE)
    ask(driver, OTHER)
    ask(driver)
    assert driver.runner.num_saves > 0
    assert ask(driver, ONE_AGAIN)[1] == 0
    assert ask(driver, ONE)[1] == 8
    assert driver.runner.num_loads == 2


def test_a_request_without_an_adapter_is_what_it_was() -> None:
    assert Request(request_id="a", prompt=(1,)).cache_root == ("", 0)
