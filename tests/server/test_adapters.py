"""Adapters over HTTP: as a request's model, loaded and unloaded while others run, and what nobody may load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import HttpConfig
from jaxserve.engine.adapters import AdapterTable
from jaxserve.errors import ModelLoadError
from tests.engine.engines import LIMITS, FakeEngine, fake_engine
from tests.server.serving import MODEL, Serving, serving

BODY: dict[str, Any] = {"prompt": list(range(20, 61)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}


class Source:
    """Adapters whose weights are the names of their folders."""

    num_slots = 2

    def __init__(self) -> None:
        self.slots: dict[int, str] = {}

    def read(self, path: str) -> Any:
        if path.endswith("broken"):
            raise ModelLoadError("q_proj has rank 64, more than max_adapter_rank, which is 16")
        return Path(path).name

    def install(self, slot: int, weights: Any) -> None:
        self.slots[slot] = weights


@asynccontextmanager
async def serving_adapters(
    folder: Path, fake: FakeEngine | None = None, source: Source | None = None, **config: Any
) -> AsyncIterator[Serving]:
    for name in ("one", "two", "three", "broken"):
        (folder / "adapters" / name).mkdir(parents=True, exist_ok=True)
    source = source or Source()
    fake = fake or fake_engine(replace(LIMITS, max_adapters=2), prefixes=True)
    settings = HttpConfig(**{"port": 0, "drain_seconds": 5.0, "adapter_dir": str(folder / "adapters"), **config})
    table = AdapterTable(source.num_slots, (MODEL,))
    async with serving(fake, config=settings, adapters=table, adapter_source=source) as server:
        yield server
        table.check_integrity()


async def load(server: Serving, name: str, path: str | None = None, **options: Any) -> tuple[int, Any]:
    body = {"lora_name": name, "lora_path": name if path is None else path}
    return await server.post("/v1/load_lora_adapter", body, **options)


async def unload(server: Serving, name: str) -> tuple[int, Any]:
    return await server.post("/v1/unload_lora_adapter", {"lora_name": name})


async def complete(server: Serving, model: str, **fields: Any) -> tuple[int, Any]:
    return await server.post("/v1/completions", BODY | {"model": model} | fields)


def cached(answer: Any) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


async def test_an_adapter_is_a_model_from_load_to_unload(tmp_path: Path) -> None:
    source = Source()
    async with serving_adapters(tmp_path, source=source) as server:
        assert (await complete(server, "one"))[0] == 404
        assert await load(server, "one") == (200, {"object": "adapter", "id": "one", "loaded": True})
        assert source.slots == {0: "one"}
        status, answer = await complete(server, "one")
        assert (status, answer["model"]) == (200, "one")
        assert server.fake.runner.last_plan.rows[0].adapter == 0
        status, answer = await complete(server, MODEL)
        assert (status, answer["model"]) == (200, MODEL)
        assert server.fake.runner.last_plan.rows[0].adapter == -1
        assert await unload(server, "one") == (200, {"object": "adapter", "id": "one", "loaded": False})
        status, answer = await complete(server, "one")
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")


async def test_models_are_listed_with_their_parent(tmp_path: Path) -> None:
    async with serving_adapters(tmp_path) as server:
        await load(server, "mine", "two")
        _, models = await server.get("/v1/models")
        base, mine = models["data"]
        assert (base["id"], "parent" in base) == (MODEL, False)
        assert (mine["id"], mine["parent"], mine["root"], mine["object"]) == ("mine", MODEL, "two", "model")
        assert await server.get("/v1/models/mine") == (200, mine)
        assert (await server.get("/v1/models/one"))[0] == 404
        assert [model.id async for model in await server.client.models.list()] == [MODEL, "mine"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 16}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}),
        ("/v1/embeddings", {"input": "hello"}),
    ],
)
async def test_every_api_has_them(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async with serving_adapters(tmp_path) as server:
        await load(server, "one")
        await load(server, "two")
        status, answer = await server.post(path, body | {"model": "two"})
        assert (status, answer["model"]) == (200, "two")
        assert server.fake.runner.last_plan.rows[0].adapter == 1


async def test_a_stream_names_its_adapter(tmp_path: Path) -> None:
    async with serving_adapters(tmp_path) as server:
        await load(server, "one")
        chunks = await server.client.completions.create(
            model="one", prompt=BODY["prompt"], max_tokens=4, stream=True, extra_body={"ignore_eos": True}
        )
        assert {chunk.model async for chunk in chunks} == {"one"}


async def test_pages_are_an_adapters_own(tmp_path: Path) -> None:
    """vllm I30931, I44701; and a name that is loaded again begins anew."""
    async with serving_adapters(tmp_path) as server:
        await load(server, "one")
        await load(server, "two")
        for model in (MODEL, "one", "two"):
            assert cached((await complete(server, model))[1]) == 0
            assert cached((await complete(server, model))[1]) == 40
        assert cached((await complete(server, MODEL, cache_salt="one"))[1]) == 0
        assert cached((await complete(server, "one", cache_salt="one"))[1]) == 0
        before = server.engine.stats.cached_pages
        await unload(server, "one")
        assert server.engine.stats.cached_pages == before - 10, "5 pages for each of its two salts"
        await load(server, "one")
        assert cached((await complete(server, "one"))[1]) == 0


async def test_unloading_waits_for_those_that_have_it(tmp_path: Path) -> None:
    """Never another's weights: its slot is not free, nor its name, before the last of them has ended."""
    fake = fake_engine(replace(LIMITS, max_adapters=2), prefixes=True, step_seconds=0.002)
    source = Source()
    async with serving_adapters(tmp_path, fake, source) as server:
        await load(server, "one")
        await load(server, "two")
        running = asyncio.create_task(complete(server, "one", max_tokens=100))
        while not server.engine.stats.running:
            await asyncio.sleep(0.002)
        going = asyncio.create_task(unload(server, "one"))
        while "one" in server.service.require_model().adapters.names:
            await asyncio.sleep(0.002)
        assert (await complete(server, "one"))[0] == 404
        for name in ("one", "three"):
            assert (await load(server, name))[0] == 409
        assert (await unload(server, "one"))[0] == 404
        assert not going.done()
        status, answer = await running
        assert (status, len(answer["choices"][0]["logprobs"] or []), answer["usage"]["completion_tokens"]) == (200, 0, 100)
        assert (await going)[0] == 200
        assert (await load(server, "three"))[0] == 200
        assert source.slots == {0: "three", 1: "two"}


async def test_unloading_goes_on_when_its_client_has_left(tmp_path: Path) -> None:
    fake = fake_engine(replace(LIMITS, max_adapters=2), prefixes=True, step_seconds=0.002)
    async with serving_adapters(tmp_path, fake) as server:
        await load(server, "one")
        running = asyncio.create_task(complete(server, "one", max_tokens=60))
        while not server.engine.stats.running:
            await asyncio.sleep(0.002)
        going = asyncio.create_task(unload(server, "one"))
        while "one" in server.service.require_model().adapters.names:
            await asyncio.sleep(0.002)
        going.cancel()
        await running
        async with asyncio.timeout(10):
            while (await load(server, "one"))[0] != 200:
                await asyncio.sleep(0.005)


async def test_a_server_stops_while_an_adapter_is_on_its_way_out(tmp_path: Path) -> None:
    fake = fake_engine(replace(LIMITS, max_adapters=2), step_seconds=0.002)
    async with serving_adapters(tmp_path, fake, drain_seconds=0.0) as server:
        await load(server, "one")
        running = asyncio.create_task(complete(server, "one", max_tokens=400))
        while not server.engine.stats.running:
            await asyncio.sleep(0.002)
        going = asyncio.create_task(unload(server, "one"))
        await asyncio.sleep(0.02)
        for task in (running, going):
            task.cancel()
        await asyncio.gather(running, going, return_exceptions=True)


@pytest.mark.parametrize(
    ("name", "path", "status", "param", "message"),
    [
        ("x", "../secret", 403, "lora_path", "must lie in the server's folder"),
        ("x", "/etc", 403, "lora_path", "must lie in the server's folder"),
        ("x", "link", 403, "lora_path", "must lie in the server's folder"),
        ("x", ".", 403, "lora_path", "must lie in the server's folder"),
        ("x", "one/../../adapters2", 403, "lora_path", "must lie in the server's folder"),
        ("x", "nothing", 400, "lora_path", "must be a folder with an adapter"),
        ("x", "a\0b", 400, "lora_path", "null"),
        ("x", "broken", 400, "lora_path", "rank 64, more than max_adapter_rank"),
        ("x", "", 400, "lora_path", "a path of 1 to 4096 characters"),
        ("", "one", 400, "lora_name", "a name of 1 to 256 characters"),
        (MODEL, "one", 409, "lora_name", "the model's own name"),
        (5, "one", 400, "lora_name", "must be"),
    ],
)
async def test_what_cannot_be_loaded(tmp_path: Path, name: Any, path: str, status: int, param: str, message: str) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "adapters2").mkdir()
    async with serving_adapters(tmp_path) as server:
        (tmp_path / "adapters" / "link").symlink_to(tmp_path / "secret")
        found, answer = await load(server, name, path)
        assert (found, answer["error"]["param"]) == (status, param), answer
        assert message in answer["error"]["message"]
        assert (await load(server, "one"))[0] == 200, "its slot is free again"
        assert (await load(server, "two"))[0] == 200


async def test_whole_paths_within_the_folder_are_taken(tmp_path: Path) -> None:
    async with serving_adapters(tmp_path) as server:
        assert (await load(server, "x", str(tmp_path / "adapters" / "one")))[0] == 200


async def test_a_server_without_adapters_says_how_to_have_them(tmp_path: Path) -> None:
    async with serving() as server:
        status, answer = await load(server, "one")
        assert status == 403
        assert "--max-adapters" in answer["error"]["message"]
        assert (await unload(server, "one"))[0] == 404
    async with serving_adapters(tmp_path, adapter_dir="") as server:
        status, answer = await load(server, "one")
        assert status == 403
        assert "--adapter-dir" in answer["error"]["message"]


@pytest.mark.parametrize(("key", "expected"), [(None, 401), ("sk-user", 403), ("sk-admin", 200)])
async def test_where_there_are_keys_it_takes_an_administrators(tmp_path: Path, key: str | None, expected: int) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nlabel = "user"\nkey = "sk-user"\n')
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with serving_adapters(tmp_path, api_keys_file=str(keys), admin_key="sk-admin") as server:
        assert (await load(server, "one", headers=headers))[0] == expected
        status, _ = await server.post("/v1/unload_lora_adapter", {"lora_name": "one"}, headers=headers)
        assert status == expected


async def test_an_admin_key_alone_is_asked_for_too(tmp_path: Path) -> None:
    async with serving_adapters(tmp_path, admin_key="sk-admin") as server:
        assert (await load(server, "one"))[0] == 401
        assert (await complete(server, MODEL))[0] == 200


async def test_lines_of_a_batch_have_them(tmp_path: Path) -> None:
    async with serving_adapters(tmp_path, state_dir=str(tmp_path / "state")) as server:
        await load(server, "one")
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BODY | {"model": "one"}}
        file = await server.client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = await server.client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        async with asyncio.timeout(20):
            while (batch := await server.client.batches.retrieve(batch.id)).status != "completed":
                await asyncio.sleep(0.01)
        assert batch.output_file_id is not None
        result = json.loads((await server.client.files.content(batch.output_file_id)).content)
        assert result["response"]["body"]["model"] == "one"
