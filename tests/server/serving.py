"""A real server on a loopback port with a scripted model behind it, and the unmodified OpenAI client before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
from aiohttp import web

from jaxserve.config import HttpConfig
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.text import Tokenizer
from jaxserve.server.access import SERVICE
from jaxserve.server.app import Server, build_app
from jaxserve.server.service import ServerParts, Service
from tests.engine import tiny_tokenizers as tiny
from tests.engine.engines import LIMITS, FakeEngine, fake_engine
from tests.fakes import NextToken, hash_next_token

MODEL = "tiny"
BYTE_LEVEL = tiny.byte_level()


def scripted(answers: Mapping[Seq[int], Seq[int]], *, vocab_size: int = LIMITS.vocab_size) -> NextToken:
    """A model that continues each prompt with its answer, and then, like any other prompt, with hashes."""
    hashed = hash_next_token(vocab_size)
    scripts = {tuple(prompt): [*prompt, *answer] for prompt, answer in answers.items()}

    def next_token(tokens: Seq[int], seed: int) -> int:
        for prompt, script in scripts.items():
            if tuple(tokens[: len(prompt)]) == prompt and len(tokens) < len(script) and list(tokens) == script[: len(tokens)]:
                return script[len(tokens)]
        return hashed(tokens, seed)

    return next_token


def says(prompt: str, answer: str | Seq[int], *, tokenizer: Tokenizer = BYTE_LEVEL) -> FakeEngine:
    """An engine that answers `prompt` (a raw one, or a user's only message) with `answer`, then ends."""
    ids = tokenizer.encode_plain(answer) if isinstance(answer, str) else answer
    prompts = [tokenizer.encode(prompt), tokenizer.encode_chat([{"role": "user", "content": prompt}])]
    assert tokenizer.eos_token_id is not None
    return fake_engine(
        next_token=scripted({tuple(ids_of_prompt): [*ids, tokenizer.eos_token_id] for ids_of_prompt in prompts}),
        eos_token_ids=(tokenizer.eos_token_id,),
    )


@dataclass
class Serving:
    """A running server.

    Attributes:
        client: OpenAI's, which does not retry.
        http: for what that client cannot say.
    """

    url: str
    fake: FakeEngine
    service: Service
    app: web.Application
    server: Server
    client: openai.AsyncOpenAI
    http: aiohttp.ClientSession

    @property
    def engine(self) -> AsyncEngine:
        return self.service.require_model().engine

    async def post(self, path: str, body: Any = None, *, data: Any = None, **options: Any) -> tuple[int, Any]:
        """Status and parsed JSON of a POST, which must be answered with JSON."""
        async with self.http.post(self.url + path, json=body, data=data, **options) as response:
            assert response.content_type == "application/json"
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and parsed JSON of a GET."""
        async with self.http.get(self.url + path) as response:
            return response.status, await response.json()

    async def idle(self) -> None:
        """Wait until nothing runs; then all pages must be free."""
        async with asyncio.timeout(10):
            while self.engine.num_live or self.engine.stats.running or self.engine.stats.waiting:
                await asyncio.sleep(0.002)
        assert self.engine.stats.free_pages == self.engine.stats.total_pages


@asynccontextmanager
async def serving(
    fake: FakeEngine | None = None,
    *,
    tokenizer: Tokenizer = BYTE_LEVEL,
    config: HttpConfig | None = None,
    model_name: str = MODEL,
    **more: Any,
) -> AsyncIterator[Serving]:
    """A server on a free port. After it has stopped, no task and no page may be left.

    Args:
        more: further `ServerParts`.
    """
    fake = fake or fake_engine()
    tasks = asyncio.all_tasks()
    parts = ServerParts(core=fake.core, limits=fake.runner.limits, tokenizer=tokenizer, model_name=model_name, **more)
    loading: asyncio.Future[ServerParts] = asyncio.get_running_loop().create_future()
    loading.set_result(parts)
    config = config or HttpConfig(port=0, drain_seconds=5.0)
    app = build_app(loading, config)
    server = Server(app, config)
    url = await server.start()
    await asyncio.sleep(0)
    try:
        async with (
            openai.DefaultAsyncHttpxClient(trust_env=False) as transport,
            aiohttp.ClientSession() as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=transport) as client,
        ):
            yield Serving(url, fake, app[SERVICE], app, server, client, http)
    finally:
        await server.stop()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == tasks
    fake.scheduler.check_integrity()
    assert fake.scheduler.num_free_pages == fake.runner.limits.num_pages
