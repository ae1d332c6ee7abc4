"""AsyncEngine: streams, aborts, draining, death and closing, over a core with a fake runner."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from jaxserve.engine import async_engine
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.errors import EngineError, InvalidRequest, NotReady, QueueFull
from jaxserve.request import FinishReason, Request, SamplingParams, TokenEvent
from tests.engine.engines import LIMITS, FakeEngine, fake_engine
from tests.fakes import expected_output


def request(request_id: str, *, num_prompt: int = 5, max_tokens: int = 20, seed: int | None = 0) -> Request:
    params = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)
    return Request(request_id=request_id, prompt=tuple(range(3, 3 + num_prompt)), params=params)


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "jaxserve-engine"]


@asynccontextmanager
async def running(fake: FakeEngine) -> AsyncIterator[AsyncEngine]:
    """Yields a started engine; afterwards nothing may be left of it."""
    tasks = asyncio.all_tasks()
    engine = fake.start()
    try:
        yield engine
    finally:
        await engine.close()
    assert asyncio.all_tasks() == tasks
    assert engine_threads() == []
    assert engine.num_live == fake.admission.queued_requests == 0
    fake.admission.check_integrity()
    if engine.failure is None:
        fake.scheduler.check_integrity()
        assert fake.scheduler.num_free_pages == LIMITS.num_pages


async def free_pages(engine: AsyncEngine) -> int:
    """Free pages once nothing runs and the thread has seen every abort."""
    async with asyncio.timeout(5):
        while engine.stats.running or engine.stats.waiting:
            await asyncio.sleep(0.002)
    return engine.stats.free_pages


async def collect(engine: AsyncEngine, *requests: Request) -> dict[str, list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = {r.request_id: [] for r in requests}
    async for event in engine.generate(*requests):
        events[event.request_id].append(event)
    return events


def tokens(events: list[TokenEvent]) -> tuple[int, ...]:
    return tuple(token for event in events for token in event.tokens)


async def test_streams_give_each_request_its_own_tokens() -> None:
    fake = fake_engine()
    requests = [request(str(i), num_prompt=1 + 7 * i, max_tokens=1 + 3 * i, seed=i) for i in range(12)]
    async with running(fake) as engine:
        results = await asyncio.gather(*(collect(engine, r) for r in requests))
    for r, result in zip(requests, results, strict=True):
        expected, reason = expected_output(r, LIMITS, next_token=fake.runner.next_token)
        events = result[r.request_id]
        assert tokens(events) == expected
        assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + [reason]


async def test_an_engine_waits_for_a_loop_that_falls_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "MAX_UNDELIVERED", 4)
    fake, asked = fake_engine(), request("0", max_tokens=60)
    async with running(fake) as engine:
        with engine.open(asked) as stream:
            time.sleep(0.2)  # as a loop that has something else to do
            assert 4 <= engine.stats.num_output_tokens <= 5, "one is made and waits to be delivered"
            found = []
            while events := await stream.read():
                found += events
    assert tokens(found) == expected_output(asked, LIMITS, next_token=fake.runner.next_token)[0]


async def test_one_stream_may_hold_several_requests() -> None:
    fake = fake_engine()
    requests = [request(str(i), max_tokens=4 + i, seed=i) for i in range(3)]
    async with running(fake) as engine:
        results = await collect(engine, *requests)
    for r in requests:
        assert tokens(results[r.request_id]) == expected_output(r, LIMITS, next_token=fake.runner.next_token)[0]


async def test_a_slow_reader_finds_one_merged_event() -> None:
    fake = fake_engine()
    wanted = Request(request_id="slow", prompt=(3,), params=SamplingParams(max_tokens=50, seed=1, logprobs=2, ignore_eos=True))
    async with running(fake) as engine:
        with engine.open(wanted) as stream:
            while engine.num_live:
                await asyncio.sleep(0.001)
            (event,) = await stream.read()
            assert await stream.read() == []
    assert event.tokens == expected_output(wanted, LIMITS, next_token=fake.runner.next_token)[0]
    assert len(event.logprobs) == event.num_output == 50
    assert event.finish_reason is FinishReason.LENGTH


async def test_leaving_a_stream_returns_its_pages() -> None:
    async with running(fake_engine(step_seconds=0.002)) as engine:
        async with aclosing(engine.generate(request("left", max_tokens=400))) as events:
            async for _ in events:
                break
        assert await free_pages(engine) == LIMITS.num_pages


async def test_cancelling_a_reader_returns_its_pages() -> None:
    async with running(fake_engine(step_seconds=0.002)) as engine:
        for delay in (0.0, 0.001, 0.02):  # before the thread has seen it, in its prompt, in its output
            task = asyncio.create_task(collect(engine, request("cancelled", num_prompt=100, max_tokens=400)))
            await asyncio.sleep(delay)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await free_pages(engine) == LIMITS.num_pages
            assert engine.num_live == 0


async def test_an_id_may_be_used_again_after_an_abort() -> None:
    """Events of the aborted request that are still under way must not reach the new one."""
    fake = fake_engine()
    async with running(fake) as engine:
        for seed in range(30):
            with engine.open(request("same", max_tokens=100, seed=seed)) as stream:
                await stream.read()
        last = request("same", max_tokens=30, seed=99)
        events = (await collect(engine, last))["same"]
    assert tokens(events) == expected_output(last, LIMITS, next_token=fake.runner.next_token)[0]


async def test_events_under_way_do_not_reach_the_next_of_that_id() -> None:
    fake = fake_engine()
    async with running(fake) as engine:
        first = engine.open(request("same", max_tokens=3, seed=1))
        time.sleep(0.1)  # holds up the loop, until the thread has sent all events of the first
        first.close()
        second = request("same", max_tokens=30, seed=2)
        events = (await collect(engine, second))["same"]
    assert tokens(events) == expected_output(second, LIMITS, next_token=fake.runner.next_token)[0]


async def test_refusals_are_raised_and_leave_nothing_behind() -> None:
    async with running(fake_engine(max_queue_requests=2)) as engine:
        with pytest.raises(InvalidRequest, match="at least 1 token"):
            engine.open(Request(request_id="empty", prompt=()))
        with pytest.raises(InvalidRequest, match=r"prompt 8 .* 510 .* 512"):
            engine.open(request("long", num_prompt=8, max_tokens=510))
        engine.open(request("first"), request("second"))
        with pytest.raises(QueueFull) as caught:
            engine.open(request("third"))
        assert caught.value.retry_after > 0
        assert engine.num_live == 2


async def test_all_of_a_group_or_none() -> None:
    async with running(fake_engine()) as engine:
        with pytest.raises(InvalidRequest):
            engine.open(request("good"), request("bad", max_tokens=10_000))
        assert engine.num_live == 0


async def test_the_thread_sleeps_while_idle() -> None:
    async with running(fake_engine()) as engine:
        await collect(engine, request("warm"))
        started = time.process_time()
        await asyncio.sleep(0.3)
        assert time.process_time() - started < 0.1


async def test_drain_lets_running_requests_finish() -> None:
    fake = fake_engine(step_seconds=0.005)
    async with running(fake) as engine:
        wanted = request("running", max_tokens=20)
        reader = asyncio.create_task(collect(engine, wanted))
        await asyncio.sleep(0.02)
        drained = asyncio.create_task(engine.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(NotReady, match="draining"):
            engine.open(request("late"))
        await drained
        assert tokens((await reader)["running"]) == expected_output(wanted, LIMITS, next_token=fake.runner.next_token)[0]


async def test_drain_aborts_what_takes_too_long() -> None:
    async with running(fake_engine(step_seconds=0.01)) as engine:
        reader = asyncio.create_task(collect(engine, request("long", max_tokens=400)))
        await asyncio.sleep(0.02)
        await engine.drain(0.05)
        with pytest.raises(NotReady, match="shut down"):
            await reader
        assert await free_pages(engine) == LIMITS.num_pages


async def test_close_ends_every_stream() -> None:
    async with running(fake_engine(step_seconds=0.01)) as engine:
        readers = [asyncio.create_task(collect(engine, request(str(i), max_tokens=400))) for i in range(20)]
        await asyncio.sleep(0.05)
        await engine.close()
        await engine.close()
        for result in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(result, NotReady)
        with pytest.raises(NotReady):
            engine.open(request("late"))


async def test_close_without_start() -> None:
    await AsyncEngine(fake_engine().core, fake_engine().admission).close()
    assert engine_threads() == []


async def test_one_failed_step_fails_its_requests_only() -> None:
    async with running(fake_engine(fail_on_submit=[3])) as engine:
        with pytest.raises(EngineError, match="failed while it worked on this request"):
            await collect(engine, request("unlucky"))
        assert engine.failure is None
        assert len(tokens((await collect(engine, request("next")))["next"])) == 20


async def test_a_dead_core_fails_every_stream() -> None:
    async with running(fake_engine(fail_on_submit=range(10_000))) as engine:
        for attempt in range(3):
            with pytest.raises(EngineError):
                await collect(engine, request(f"attempt {attempt}"))
        async with asyncio.timeout(5):
            while engine.failure is None:
                await asyncio.sleep(0.001)
        with pytest.raises(EngineError, match="dead"):
            engine.open(request("late"))


@pytest.mark.parametrize("where", ["step", "abort"])
async def test_calls_that_a_dead_engine_owes_fail_and_those_nobody_waits_for_do_no_harm(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A call that was cancelled must not keep the engine from telling that it has ended, and closing from its end."""
    fake = fake_engine(step_seconds=0.001)
    reached, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        go_on.wait(10)

    def fail(*_: object) -> None:
        wait()
        raise ZeroDivisionError

    async with asyncio.timeout(20), running(fake) as engine:
        stream = engine.open(request("a", max_tokens=50))
        monkeypatch.setattr(fake.core, where, fail)
        if where == "abort":  # the turn after this call has both: the abort that fails, and the calls
            before = asyncio.ensure_future(engine.between_steps(wait))
        await asyncio.to_thread(reached.wait, 10)
        if where == "abort":
            stream.close()
        waiting, left = (asyncio.ensure_future(engine.between_steps(lambda: None)) for _ in range(2))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(EngineError, match="the engine ended first"):
            await waiting
        if where == "abort":
            await before
        stream.close()


async def test_a_core_that_raises_fails_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_engine(step_seconds=0.002)

    def broken() -> list[TokenEvent]:
        raise ZeroDivisionError("a bug of ours")

    async with running(fake) as engine:
        readers = [asyncio.create_task(collect(engine, request(str(i), max_tokens=400))) for i in range(3)]
        await asyncio.sleep(0.02)
        monkeypatch.setattr(fake.core, "step", broken)
        for result in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(result, EngineError)
            assert "a bug of ours" in str(result)
        assert isinstance(engine.failure, ZeroDivisionError)


async def test_events_cross_once_a_step() -> None:
    fake = fake_engine(step_seconds=0.003)
    async with running(fake) as engine:
        loop, crossings = asyncio.get_running_loop(), 0
        original = loop.call_soon_threadsafe

        def counting(*args: object, **kwargs: object) -> object:
            nonlocal crossings
            crossings += 1
            return original(*args, **kwargs)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = counting  # type: ignore[method-assign, assignment]
        await collect(engine, *(request(str(i), max_tokens=30) for i in range(8)))
        loop.call_soon_threadsafe = original  # type: ignore[method-assign]
        assert crossings <= fake.runner.num_steps
