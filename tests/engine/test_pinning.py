"""A prefix that is computed at start-up and stays; and dropping what else is cached."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from jaxserve.engine.pinning import pin_prefix, prefix_tokens
from jaxserve.errors import ConfigError, EngineError, InvalidRequest, NotReady
from jaxserve.request import Request, SamplingParams
from tests.engine import tiny_tokenizers as tiny
from tests.engine.engines import LIMITS, FakeEngine, fake_engine

TOKENIZER = tiny.byte_level()
TEXT = "You are a helpful assistant that answers in rhymes, always."


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "system.txt"
    path.write_text(TEXT + "\n")
    return path


def ask(fake: FakeEngine, said: str, request_id: str = "a", salt: str = "") -> int:
    """How many tokens of a conversation under the system prompt were cached."""
    prompt = TOKENIZER.encode_chat([{"role": "system", "content": TEXT}, {"role": "user", "content": said}])
    params = SamplingParams(temperature=0.0, max_tokens=2)
    fake.core.add(Request(request_id=request_id, prompt=tuple(prompt), params=params, cache_salt=salt))
    events = []
    while fake.core.has_work:
        events += fake.core.step()
    fake.scheduler.check_integrity()
    return events[-1].num_cached


def test_the_first_conversation_finds_it(path: Path) -> None:
    fake = fake_engine(prefixes=True)
    pin_prefix(fake.core, TOKENIZER, path)
    num_full = len(prefix_tokens(TOKENIZER, TEXT)) // LIMITS.page_size * LIMITS.page_size
    assert num_full > 0
    assert ask(fake, "What is a page?") >= num_full
    assert fake.core.stats().pinned_pages == num_full // LIMITS.page_size


def test_neither_dropping_nor_pressure_takes_it(path: Path) -> None:
    fake = fake_engine(prefixes=True)
    pin_prefix(fake.core, TOKENIZER, path)
    fake.core.drop_cache()
    pinned = fake.core.stats().pinned_pages
    for number in range(8):
        fake.core.add(Request(request_id=str(number), prompt=(number,) * 500, params=SamplingParams(max_tokens=8)))
    while fake.core.has_work:
        fake.core.step()
    assert fake.core.stats().num_evicted_pages > 0
    assert ask(fake, "Still there?") >= pinned * LIMITS.page_size


def test_a_salt_does_not_see_it(path: Path) -> None:
    fake = fake_engine(prefixes=True)
    pin_prefix(fake.core, TOKENIZER, path)
    assert ask(fake, "Hello?", salt="mine") == 0


def test_it_is_kept_again_after_a_failure(path: Path) -> None:
    fake = fake_engine(prefixes=True, fail_on_submit=[6])
    pin_prefix(fake.core, TOKENIZER, path)
    while fake.core.stats().num_failures == 0:
        ask(fake, "Hello?")
    assert ask(fake, "Who are you?") == 0
    fake.core.drop_cache()
    assert ask(fake, "Who are you?") >= fake.core.stats().pinned_pages * LIMITS.page_size


def test_requests_may_not_need_what_is_pinned(path: Path) -> None:
    fake = fake_engine(dataclasses.replace(LIMITS, num_pages=40), prefixes=True)
    pin_prefix(fake.core, TOKENIZER, path)
    left = 40 - fake.core.stats().pinned_pages
    with pytest.raises(InvalidRequest, match=f"> the pool's {left}"):
        fake.core.add(Request(request_id="a", prompt=(1,) * (left * 8 + 1)))
    fake.core.add(Request(request_id="a", prompt=(1,) * (left * 8)))
    while fake.core.has_work:
        fake.core.step()


@pytest.mark.parametrize(
    ("text", "message"), [(None, "system.txt cannot be read"), ("\n", "is empty"), ("x" * 3000, "cannot be pinned")]
)
def test_what_cannot_be_pinned_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "system.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        pin_prefix(fake_engine(prefixes=True).core, TOKENIZER, path)


def test_a_prefix_that_cannot_be_computed_is_an_error(path: Path) -> None:
    with pytest.raises(EngineError, match="could not be computed"):
        pin_prefix(fake_engine(prefixes=True, fail_on_submit=[0]).core, TOKENIZER, path)


async def test_dropping_waits_its_turn_in_the_engine_s_thread() -> None:
    fake = fake_engine(prefixes=True, step_seconds=0.001)
    engine = fake.start()
    request = Request(request_id="a", prompt=tuple(range(100)), params=SamplingParams(temperature=0.0, max_tokens=20))
    events = [event async for event in engine.generate(request)]
    assert events[-1].finish_reason is not None
    while engine.stats.running:
        await asyncio.sleep(0.001)
    num_output = sum(len(event.tokens) for event in events)  # an event has several where the loop fell behind
    assert await engine.drop_cache() == (100 + num_output - 1) // LIMITS.page_size
    assert engine.stats.cached_pages == 0
    await engine.close()
    with pytest.raises(NotReady):
        await engine.drop_cache()
