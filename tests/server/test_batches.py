"""Batches over HTTP: a whole life, what goes wrong in it, and what a server that comes back makes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec
import openai
import pytest

from jaxserve.request import BATCH_PRIORITY, Request
from jaxserve.server import batch_run, batches
from jaxserve.server.endpoints import BATCH_ENDPOINTS
from jaxserve.server.schema.operations import OPERATIONS
from jaxserve.server.schema.stored import BatchEndpoint
from jaxserve.server.store.batches import BatchRecord, BatchStatus
from jaxserve.server.store.store import Store
from tests.engine.engines import LIMITS, FakeEngine, fake_engine
from tests.server.batching import COMPLETIONS, Batching, batching, jsonl, line
from tests.server.serving import MODEL
from tests.server.test_files import KEYS, form, small_disk

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
HELLO = [{"role": "user", "content": "hello"}]


def watched(fake: FakeEngine) -> list[Request]:
    """The requests that the engine is given from now on."""
    seen: list[Request] = []
    add = fake.core.add

    def watched_add(request: Request) -> None:
        seen.append(request)
        add(request)

    fake.core.add = watched_add  # type: ignore[method-assign]
    return seen


def slow_lines(num: int) -> list[dict[str, Any]]:
    return [line(f"id{i}", prompt=f"line {i}", max_tokens=20, ignore_eos=True, temperature=0) for i in range(num)]


def ids(lines: list[dict[str, Any]]) -> list[str]:
    return [found["custom_id"] for found in lines]


async def until_some_are_done(server: Batching, batch: openai.types.Batch, num: int = 3) -> None:
    async with asyncio.timeout(20):
        while (counts := (await server.client.batches.retrieve(batch.id)).request_counts) is None or counts.completed < num:
            await asyncio.sleep(0.002)


# --- a whole life -----------------------------------------------------------------------------------------------------


async def test_a_whole_life(tmp_path: Path) -> None:
    async with batching(tmp_path) as server:
        lines = [
            line("a", prompt="one"),
            "",
            line("wrong", top_p=7),
            line("b", prompt=["two", "three"], n=2),
            line("other", model="other"),
            line("streamed", stream=True),
            line("urgent", priority=0),
        ]
        batch = await server.create(lines, metadata={"for": "tests"})
        assert (batch.status, batch.object, batch.model) == ("validating", "batch", MODEL)
        assert (batch.endpoint, batch.completion_window, batch.metadata) == (COMPLETIONS, "24h", {"for": "tests"})
        assert batch.expires_at == batch.created_at + 24 * 3600
        done = await server.until(batch)
        assert done.status == "completed"
        assert done.request_counts is not None
        assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (6, 2, 4)
        times = [done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at]
        assert all(times)
        assert times == sorted(times)  # type: ignore[type-var]
        assert done.errors is None
        assert done.usage is not None
        assert (done.usage.output_tokens, done.usage.total_tokens) == (25, 25 + done.usage.input_tokens)

        answers, errors = [await server.lines_of(file_id) for file_id in (done.output_file_id, done.error_file_id)]
        assert ids(answers) == ["a", "b"]
        assert all(set(found) == {"id", "custom_id", "response", "error"} for found in answers + errors)
        assert [found["response"]["status_code"] for found in answers] == [200, 200]
        assert len(answers[1]["response"]["body"]["choices"]) == 4
        told = {found["custom_id"]: found["response"] for found in errors}
        statuses = [(name, response["status_code"]) for name, response in told.items()]
        assert statuses == [("wrong", 400), ("other", 404), ("streamed", 400), ("urgent", 403)]
        assert [found["body"]["error"]["param"] for found in told.values()] == ["top_p", "model", "stream", "priority"]
        assert len({found["id"] for found in answers + errors}) == 6

        async with server.server.http.get(server.server.url + "/metrics") as response:
            exported = await response.text()
        assert 'jaxserve_batch_lines_total{outcome="ok",tenant=""} 2.0' in exported
        assert 'jaxserve_batch_lines_total{outcome="error",tenant=""} 4.0' in exported
        assert "jaxserve_output_tokens_total 25.0" in exported
        assert "jaxserve_time_to_first_token_seconds_count 0.0" in exported, "nobody waits for a line"
        assert done.output_file_id is not None
        output = await server.client.files.retrieve(done.output_file_id)
        assert (output.purpose, output.filename, output.expires_at) == ("batch_output", f"{batch.id}_output.jsonl", None)


def without_ids(value: Any) -> Any:
    """An answer without what differs from one to the next: ids and times."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    own = ("id", "created", "created_at", "completed_at")
    return {name: without_ids(item) for name, item in value.items() if name not in own}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        pytest.param(
            COMPLETIONS, {"prompt": ["x", "y"], "n": 2, "seed": 4, "logprobs": 2, "stop": "z"}, marks=pytest.mark.slow
        ),
        pytest.param(EMBEDDINGS, {"input": ["one", "two"]}, marks=pytest.mark.slow),
        pytest.param(RESPONSES, {"input": "hello", "max_output_tokens": 9, "seed": 7}, marks=pytest.mark.slow),
        (CHAT, {"messages": HELLO, "seed": 7, "logprobs": True, "top_logprobs": 3, "max_tokens": 9}),
    ],
)
async def test_a_line_is_answered_as_over_http(tmp_path: Path, endpoint: str, body: Mapping[str, Any]) -> None:
    async with batching(tmp_path) as server:
        item = line("a", url=endpoint, **body)
        done = await server.until(await server.create([item], endpoint=endpoint))
        (found,) = await server.lines_of(done.output_file_id)
        status, direct = await server.server.post(endpoint, item["body"])
        assert status == found["response"]["status_code"] == 200
        assert without_ids(found["response"]["body"]) == without_ids(direct)
        assert done.usage is not None
        assert done.usage.input_tokens > 0


def test_what_lines_may_be_for_is_what_the_document_says() -> None:
    assert get_args(BatchEndpoint) == tuple(BATCH_ENDPOINTS)


@pytest.mark.slow
async def test_lines_take_what_others_leave_a_bounded_number_at_a_time(tmp_path: Path) -> None:
    fake = fake_engine(step_seconds=0.002)
    seen = watched(fake)
    most = 0
    step = fake.core.step

    def watched_step() -> Any:
        nonlocal most
        stats = fake.core.stats()
        most = max(most, stats.running + stats.waiting)
        return step()

    fake.core.step = watched_step  # type: ignore[method-assign]
    async with batching(tmp_path, fake) as server:
        done = await server.until(await server.create([line(f"{i}", max_tokens=3) for i in range(150)]))
        assert len(await server.lines_of(done.output_file_id)) == 150
    assert len(seen) == 150
    assert {request.priority for request in seen} == {BATCH_PRIORITY}
    assert {request.deadline for request in seen} == {None}
    assert 1 < most <= 2 * LIMITS.max_seqs


@pytest.mark.slow
async def test_lines_wait_where_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "MAX_WAIT_SECONDS", 0.005)
    async with batching(tmp_path, max_queue_requests=2) as server:
        done = await server.until(await server.create(slow_lines(12)))
        assert (done.request_counts.completed, done.request_counts.failed) == (12, 0)  # type: ignore[union-attr]


@pytest.mark.slow
async def test_lines_are_tried_again_under_which_the_engine_failed(tmp_path: Path) -> None:
    async with batching(tmp_path, fake_engine(fail_on_submit={2})) as server:
        done = await server.until(await server.create(slow_lines(5)))
        assert (done.request_counts.completed, done.request_counts.failed) == (5, 0)  # type: ignore[union-attr]


@pytest.mark.slow
async def test_lines_have_the_time_that_they_give_themselves(tmp_path: Path) -> None:
    async with batching(tmp_path, fake_engine(step_seconds=0.002), request_timeout=0.05) as server:
        lines = [line("long", max_tokens=200, ignore_eos=True), line("late", max_tokens=400, timeout=0.01)]
        done = await server.until(await server.create(lines))
        assert ids(await server.lines_of(done.output_file_id)) == ["long"]
        (late,) = await server.lines_of(done.error_file_id)
        assert (late["custom_id"], late["response"]["status_code"]) == ("late", 408), "its own limit holds, not the server's"


@pytest.mark.slow
async def test_answers_are_as_the_document_says(tmp_path: Path) -> None:
    seen: set[tuple[str, str]] = set()
    async with batching(tmp_path) as server:

        async def ask(method: str, route: str, **options: Any) -> Any:
            path = route.format(file_id=file_id, batch_id=batch_id)
            async with server.server.http.request(method, server.server.url + path, **options) as response:
                data = await response.read()
                assert response.status == 200, data
                seen.add((method, route))
                answer = OPERATIONS[method, route].answer
                if isinstance(answer, str):
                    return response.content_type == answer
                return msgspec.json.decode(data, type=answer)

        file_id = batch_id = ""
        expires = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        file_id = (await ask("POST", "/v1/files", data=form(content=jsonl([line("a"), line("b", n=0)]), **expires))).id
        body = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
        batch_id = (await ask("POST", "/v1/batches", json=body)).id
        while (await ask("GET", "/v1/batches/{batch_id}")).status != "completed":
            await asyncio.sleep(0.005)
        second = await server.create(["x"])
        await server.until(second)
        assert [batch.errors is msgspec.UNSET for batch in (await ask("GET", "/v1/batches")).data] == [False, True]
        batch_id = (await server.create(slow_lines(300))).id
        assert (await ask("POST", "/v1/batches/{batch_id}/cancel")).status == "cancelling"
        assert (await ask("GET", "/v1/files")).data
        for method, route in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            assert await ask(method, "/v1/files/{file_id}" + route)
    assert seen == {key for key in OPERATIONS if key[1].startswith(("/v1/files", "/v1/batches"))}


# --- files that are no batch ------------------------------------------------------------------------------------------


async def test_a_file_that_is_wrong_fails_with_its_lines(tmp_path: Path) -> None:
    lines = [
        line("a"),
        "{broken",
        '"a prompt"',
        {"custom_id": "b", "url": COMPLETIONS, "body": {}},
        line("c", url=CHAT),
        line("d", method="GET"),
        line("a"),
        {**line("e"), "colour": "red"},
        {**line("f"), "body": []},
        {**line(""), "custom_id": 7},
    ]
    async with batching(tmp_path) as server:
        batch = await server.until(await server.create(lines))
        assert batch.status == "failed"
        assert batch.failed_at is not None
        assert (batch.output_file_id, batch.error_file_id, batch.in_progress_at) == (None, None, None)
        assert batch.errors is not None
        assert [(error.line, error.code, error.param) for error in batch.errors.data or []] == [
            (2, "invalid_json_line", None),
            (3, "invalid_json_line", None),
            (4, "invalid_method", "method"),
            (5, "invalid_url", "url"),
            (6, "invalid_method", "method"),
            (7, "duplicate_custom_id", "custom_id"),
            (8, "invalid_colour", "colour"),
            (9, "invalid_body", "body"),
            (10, "invalid_custom_id", "custom_id"),
        ]
        assert "custom_id 'a' is that of line 1 already" in str(batch.errors)
        for content, code in ((b"\n \n", "empty_file"), (b"x\n" * 50_001, "too_many_requests"), (b"x\n" * 120, "more_errors")):
            file = await server.upload(content)
            batch = await server.client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
            errors = (await server.until(batch)).errors
            assert errors is not None
            assert (errors.data or [])[-1].code == code
            assert len(errors.data or []) <= 101


@pytest.mark.slow
async def test_lines_are_as_large_as_bodies_may_be(tmp_path: Path) -> None:
    crumbs = {**line("b"), "body": {"prompt": [[]] * 200_000}}
    lines = [line("a"), crumbs, {**line("c"), "body": {"prompt": "x" * 1_000_000}}]
    async with batching(tmp_path, max_body_bytes=1_000_000) as server:
        batch = await server.until(await server.create(lines))
        assert batch.status == "failed"
        assert batch.errors is not None
        errors = batch.errors.data or []
        assert [(error.line, error.code) for error in errors] == [(2, "invalid_json_line"), (3, "line_too_long")]
        assert "brackets" in (errors[0].message or "")
        assert "longer than 1000000 bytes" in (errors[1].message or "")


WRONG_BATCHES: list[tuple[dict[str, Any], int, str]] = [
    ({"input_file_id": "file-none"}, 404, "input_file_id"),
    ({"input_file_id": 7}, 400, "input_file_id"),
    ({"endpoint": "/v1/moderations"}, 400, "endpoint"),
    ({"completion_window": "1h"}, 400, "completion_window"),
    ({"metadata": {"a": 1}}, 400, "metadata.a"),
    ({"metadata": {str(i): "" for i in range(17)}}, 400, "metadata"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after.seconds"),
    ({"colour": "red"}, 400, "colour"),
]


async def test_what_cannot_be_a_batch_is_refused_by_name(tmp_path: Path) -> None:
    async with batching(tmp_path) as server:
        file = await server.upload(jsonl([line("a")]))
        right = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"}
        for changes, status, param in WRONG_BATCHES:
            found, answer = await server.server.post("/v1/batches", right | changes)
            assert (found, answer["error"]["param"]) == (status, param)
        assert (await server.client.batches.list()).data == []


@pytest.mark.slow
async def test_results_are_no_input_and_may_expire(tmp_path: Path) -> None:
    async with batching(tmp_path) as server:
        batch = await server.create([line("a")], output_expires_after={"anchor": "created_at", "seconds": 3600})
        output_id = (await server.until(batch)).output_file_id
        assert output_id is not None
        output = await server.client.files.retrieve(output_id)
        assert output.expires_at == output.created_at + 3600
        with pytest.raises(openai.BadRequestError, match="must be a file with purpose 'batch', found 'batch_output'"):
            await server.client.batches.create(input_file_id=output_id, endpoint=COMPLETIONS, completion_window="24h")


# --- ends before the end ----------------------------------------------------------------------------------------------


async def test_cancelling_keeps_what_is_done(tmp_path: Path) -> None:
    async with batching(tmp_path, fake_engine(step_seconds=0.002)) as server:
        batch = await server.create(slow_lines(100))
        await until_some_are_done(server, batch)
        cancelling = await server.client.batches.cancel(batch.id)
        assert cancelling.status == "cancelling"
        assert cancelling.cancelling_at is not None
        done = await server.until(batch)
        assert done.status == "cancelled"
        assert done.cancelled_at is not None
        counts = done.request_counts
        assert counts is not None
        answers, errors = [await server.lines_of(file_id) for file_id in (done.output_file_id, done.error_file_id)]
        assert 3 <= len(answers) < 100
        assert (counts.completed, counts.failed, counts.total) == (len(answers), len(errors), 100)
        assert sorted(ids(answers) + ids(errors)) == sorted(f"id{i}" for i in range(100))
        assert {found["error"]["code"] for found in errors} == {"batch_cancelled"}
        assert {found["response"] for found in errors} == {None}
        with pytest.raises(openai.ConflictError, match="that is cancelled cannot be cancelled") as caught:
            await server.client.batches.cancel(batch.id)
        assert caught.value.response.headers["x-should-retry"] == "false"
        await server.server.idle()


@pytest.mark.slow
async def test_a_batch_expires_with_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(batches.WINDOW_SECONDS, "24h", 1)
    async with batching(tmp_path, fake_engine(step_seconds=0.01)) as server:
        done = await server.until(await server.create(slow_lines(400)))
        assert done.status == "expired"
        assert done.expired_at is not None
        assert done.expired_at >= done.expires_at  # type: ignore[operator]
        answers, errors = [await server.lines_of(file_id) for file_id in (done.output_file_id, done.error_file_id)]
        assert len(answers) + len(errors) == 400
        assert {found["error"]["code"] for found in errors} == {"batch_expired"}


@pytest.mark.slow
async def test_deleting_the_input_does_not_hurt_a_batch(tmp_path: Path) -> None:
    async with batching(tmp_path, fake_engine(step_seconds=0.002)) as server:
        batch = await server.create(slow_lines(40))
        await server.client.files.delete(batch.input_file_id)
        done = await server.until(batch)
        assert done.status == "completed"
        assert len(await server.lines_of(done.output_file_id)) == 40


# --- lists, and whose they are ----------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_lists_come_in_pages(tmp_path: Path) -> None:
    async with batching(tmp_path) as server:
        made = [(await server.create([line("a")])).id for _ in range(5)]
        assert [batch.id async for batch in server.client.batches.list(limit=2)] == made[::-1]
        page = await server.client.batches.list(limit=2, after=made[3])
        assert ([batch.id for batch in page.data], page.has_more) == ([made[2], made[1]], True)
        for query, param in (("limit=101", "limit"), ("after=x", "after"), ("order=asc", "order")):
            status, body = await server.server.get(f"/v1/batches?{query}")
            assert (status, body["error"]["param"]) == (400, param)


@pytest.mark.slow
async def test_nobody_sees_the_batches_of_another_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    async with batching(tmp_path / "state", api_keys_file=str(keys)) as server:
        one, two = (server.client.with_options(api_key=key) for key in ("key-one", "key-two"))
        batch = await server.create([line("a")], client=one)
        assert (await one.batches.retrieve(batch.id)).id == batch.id
        assert (await two.batches.list()).data == []
        for call in (two.batches.retrieve, two.batches.cancel):
            with pytest.raises(openai.NotFoundError, match="there is no batch"):
                await call(batch.id)
        while (await one.batches.retrieve(batch.id)).status != "completed":
            await asyncio.sleep(0.005)
        assert (await two.files.list()).data == []
        assert len((await one.files.list()).data) == 2


@pytest.mark.slow
async def test_a_key_has_a_bounded_number_of_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_OPEN", 2)
    async with batching(tmp_path, fake_engine(step_seconds=0.01)) as server:
        for _ in range(2):
            await server.create(slow_lines(50))
        with pytest.raises(openai.RateLimitError, match="2 batches of this API key have not ended"):
            await server.create(slow_lines(1))


# --- servers that stop and come back ----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_next_server_carries_on(tmp_path: Path) -> None:
    async with batching(tmp_path, fake_engine(step_seconds=0.002)) as server:
        batch = await server.create(slow_lines(60))
        await until_some_are_done(server, batch)
    (journal,) = tmp_path.glob("batches/*/results.jsonl")
    num_done = len(journal.read_bytes().splitlines()) - 1
    assert 3 <= num_done < 60
    fake = fake_engine()
    seen = watched(fake)
    async with batching(tmp_path, fake) as server:
        done = await server.until(batch)
        assert ids(await server.lines_of(done.output_file_id)) == [f"id{i}" for i in range(60)]
        assert len(seen) == 60 - num_done
        assert done.error_file_id is None


@pytest.mark.slow
async def test_each_station_is_where_the_next_server_begins(tmp_path: Path) -> None:
    """Killed in any state, a batch comes to the end that it was on its way to."""
    now = int(time.time())
    stations = {
        BatchStatus.VALIDATING: (now + 99, "completed", 4),
        BatchStatus.IN_PROGRESS: (now + 99, "completed", 4),
        BatchStatus.CANCELLING: (now + 99, "cancelled", 0),
        BatchStatus.FINALIZING: (now + 99, "expired", 0),  # it would not have come so far with lines to do
    }
    ends = [*stations.items(), (BatchStatus.IN_PROGRESS, (now - 1, "expired", 0))]
    store = Store(tmp_path)
    upload = store.files.begin(1 << 20)
    upload.write(jsonl(slow_lines(4)))
    file = store.files.commit(upload, owner="", filename="in.jsonl", purpose="batch")
    for number, (status, (expires_at, _, _)) in enumerate(ends):
        record = BatchRecord(
            batch_id=f"batch_{number:032x}",
            owner="",
            endpoint=COMPLETIONS,
            input_file_id=file.file_id,
            model=MODEL,
            completion_window="24h",
            created_at=now,
            expires_at=expires_at,
        )
        store.batches.add(record.at(status, now), store.files.path(file))
    store.close()
    async with batching(tmp_path) as server:
        for number, (_, (_, end, num_answers)) in enumerate(ends):
            done = await server.until(await server.client.batches.retrieve(f"batch_{number:032x}"))
            assert done.status == end
            assert len(await server.lines_of(done.output_file_id)) == num_answers
            assert len(await server.lines_of(done.error_file_id)) == 4 - num_answers


@pytest.mark.slow
async def test_another_model_leaves_a_batch_alone(tmp_path: Path) -> None:
    async with batching(tmp_path, fake_engine(step_seconds=0.002)) as server:
        batch = await server.create(slow_lines(60))
        await until_some_are_done(server, batch)
    async with batching(tmp_path, model_name="other") as server:
        async with asyncio.timeout(5):
            while (found := await server.client.batches.retrieve(batch.id)).errors is None:
                await asyncio.sleep(0.005)
        assert (found.status, found.model) == ("in_progress", MODEL)
        assert "it is for the model 'tiny', and this is 'other'" in str(found.errors)
    async with batching(tmp_path) as server:
        assert (await server.until(batch)).status == "completed"


@pytest.mark.slow
async def test_a_key_that_is_gone_leaves_its_batch_alone(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    async with batching(tmp_path / "state", fake_engine(step_seconds=0.01), api_keys_file=str(keys)) as server:
        batch = await server.create(slow_lines(60), client=server.client.with_options(api_key="key-one"))
    async with batching(tmp_path / "state", api_key="key-one") as server:
        with pytest.raises(openai.NotFoundError):
            await server.client.with_options(api_key="key-one").batches.retrieve(batch.id)
        (record,) = server.store.batches.unfinished()
        assert record.owner == "one"


@pytest.mark.slow
async def test_an_input_that_is_gone_or_another_ends_its_batch(tmp_path: Path) -> None:
    """Nobody but the server changes the folder, so this ends it, rather than try for ever."""
    batch_ids = []
    async with batching(tmp_path, fake_engine(step_seconds=0.01)) as server:
        for _ in range(2):
            batch = await server.create(slow_lines(60))
            await server.until(batch, "in_progress")
            batch_ids.append(batch.id)
    gone, changed = (tmp_path / "batches" / batch_id / "input.jsonl" for batch_id in batch_ids)
    gone.unlink()
    changed.unlink()
    changed.write_bytes(jsonl(slow_lines(2)))
    async with batching(tmp_path) as server:
        for batch_id, message in zip(batch_ids, ("No such file or directory", "differs: input was"), strict=True):
            done = await server.until(await server.client.batches.retrieve(batch_id))
            assert done.status == "failed"
            assert message in str(done.errors)


# --- a disk that does not do what it is told --------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_batch_waits_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "RETRY_SECONDS", 0.01)
    async with batching(tmp_path) as server:
        with small_disk(9_000):
            batch = await server.create(slow_lines(40))
            async with asyncio.timeout(10):
                while (found := await server.client.batches.retrieve(batch.id)).errors is None:
                    await asyncio.sleep(0.002)
            assert found.status == "in_progress"
            assert "File too large" in str(found.errors)
            assert (await server.client.completions.create(model=MODEL, prompt="x")).choices
        done = await server.until(batch)
        assert (done.status, done.errors) == ("completed", None)
        assert ids(await server.lines_of(done.output_file_id)) == [f"id{i}" for i in range(40)]
