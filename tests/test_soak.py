"""A thousand mixed requests through the whole house at once: HTTP, engine, scheduler and a real device.

Clients leave in the middle, and the pool is too small for what runs. What must hold afterwards is that nothing is left
over: no page, no stream, no task, no compiled program, no memory. That the answers are the right ones is proven elsewhere.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import multiprocessing
import random
import resource
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from checkpoints.checkpoint import TokenizerFiles
from checkpoints.hf_files import write_tokenizer
from jaxserve.config import EngineConfig, HttpConfig, ServeConfig
from jaxserve.engine.constraints import Constraints
from jaxserve.launch import Engine, build_engine
from jaxserve.server.access import SERVICE
from jaxserve.server.app import Server, build_app
from jaxserve.server.service import ServerParts
from jaxserve.serving import parts_of
from tests.engine.tiny_tokenizers import CHATML, byte_level_library
from tests.references.load import load_tiny, write_hf_directory

MODEL = "tiny"
VOCAB_SIZE = 272
EOS_ID = 2
MAX_PROMPT = 120
MAX_TOKENS = 40
NUM_REQUESTS, NUM_BEFORE_BASELINE, CONCURRENCY = 1000, 300, 32
MAX_GROWTH_MIB = 15
LIMITS = EngineConfig(max_seqs=12, max_step_tokens=64, prefill_chunk=32, max_context=192, page_size=8, num_pages=36)
"""An eighth of the pages that twelve of the longest sequences want: some are preempted, however fast the others leave."""

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"seed": 7},
    {"temperature": 0.7, "top_k": 20},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"logit_bias": {"50": 5, "60": -100}},
)


def write_tiny_model(path: Path) -> Path:
    """Write a tiny random Llama whose vocabulary is a byte-level tokenizer's, as a Hugging Face directory."""
    reference = load_tiny("nine_heads_tied")
    name = "model.embed_tokens.weight"
    old = reference.weights[name]
    embedding = np.random.default_rng(0).normal(0, old.std(), (VOCAB_SIZE, old.shape[1])).astype(np.float32)
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "eos_token_id": EOS_ID}
    write_hf_directory(
        dataclasses.replace(reference, config={**reference.config, **sizes}, weights={**reference.weights, name: embedding}),
        path,
    )
    library = byte_level_library()
    assert library.get_vocab_size() == VOCAB_SIZE
    write_tokenizer(
        path,
        TokenizerFiles(
            tokenizer_json=library.to_str(), chat_template=CHATML, bos_token="<|endoftext|>", eos_token="<|im_end|>"
        ),
    )
    return path


# --- what clients send ------------------------------------------------------------------------------------------------


def draw_body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """An endpoint and a body for it, of every kind that the API has."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": rng.randint(1, MAX_TOKENS), "n": rng.choice([1, 1, 1, 2])}
    for sampling in rng.sample(SAMPLINGS, 2):
        body |= sampling
    if rng.random() < 0.5:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if rng.random() < 0.2:
        body["stop"] = [chr(rng.randrange(97, 123)), "xyz"]
    if rng.random() < 0.03:
        body["temperature"] = "hot"
    wants_logprobs = rng.random() < 0.2
    if rng.random() < 0.5:
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, MAX_PROMPT))]
        body["prompt"] = prompt if rng.random() < 0.7 else "hello world " * rng.randint(1, 6)
        return "completions", body | ({"logprobs": rng.randint(0, 5)} if wants_logprobs else {})
    words = [rng.choice(["hello", "world", "é", "🙂"]) for _ in range(rng.randint(1, 12))]
    body["messages"] = [{"role": "user", "content": " ".join(words)}]
    return "chat/completions", body | ({"logprobs": True, "top_logprobs": rng.randint(0, 5)} if wants_logprobs else {})


@dataclasses.dataclass(slots=True)
class Answer:
    """What came of a request's choices, streamed or not."""

    texts: dict[int, str] = dataclasses.field(default_factory=dict)
    finish_reasons: dict[int, str] = dataclasses.field(default_factory=dict)
    with_logprobs: set[int] = dataclasses.field(default_factory=set)
    num_output: int = 0

    def take(self, data: dict[str, Any]) -> None:
        """Add a body, or a chunk of one."""
        assert "error" not in data, data
        for choice in data["choices"]:
            index = choice["index"]
            message = choice.get("delta") or choice.get("message") or {}
            self.texts[index] = self.texts.get(index, "") + (choice.get("text") or message.get("content") or "")
            if choice["finish_reason"] is not None:
                assert index not in self.finish_reasons, "it ended twice"
                self.finish_reasons[index] = choice["finish_reason"]
            if choice.get("logprobs"):
                self.with_logprobs.add(index)
        if data.get("usage"):
            self.num_output = data["usage"]["completion_tokens"]

    def check(self, body: dict[str, Any]) -> None:
        """Whether it is what `body` asked for, as far as one can see from its form."""
        every = set(range(body["n"]))
        assert self.texts.keys() == self.finish_reasons.keys() == every
        assert set(self.finish_reasons.values()) <= {"stop", "length"}
        assert 1 <= self.num_output <= body["n"] * body["max_tokens"]
        assert not [stop for stop in body.get("stop", ()) for text in self.texts.values() if stop in text]
        if "logprobs" in body:
            assert self.with_logprobs <= every
            assert self.with_logprobs or self.num_output <= len(every), "no log probabilities came"
        else:
            assert not self.with_logprobs


def chunks_of(data: bytes) -> Iterator[dict[str, Any]]:
    """The chunks of a whole stream of server-sent events."""
    *events, done, after = data.decode().split("\n\n")
    assert (done, after) == ("data: [DONE]", "")
    return (json.loads(event.removeprefix("data: ")) for event in events if not event.startswith(":"))


async def ask(http: aiohttp.ClientSession, url: str, rng: random.Random) -> str:
    """Send one request, which a fifth of the clients leave at a random moment; how it ended."""
    endpoint, body = draw_body(rng)
    leaves = rng.random() < 0.2
    patience = rng.uniform(0, 0.3) if leaves and rng.random() < 0.5 else 60.0
    num_bytes = rng.randint(1, 2000) if leaves else -1
    try:
        async with asyncio.timeout(patience), http.post(f"{url}/v1/{endpoint}", json=body) as response:
            if response.status == 200 and leaves and body.get("stream"):
                await response.content.read(num_bytes)
                response.close()
                return "left"
            data = await response.read()
    except TimeoutError:
        assert leaves, f"no answer in {patience} s to {body}"
        return "left"
    if response.status != 200:
        assert (response.status, body["temperature"]) == (400, "hot"), data
        return "refused"
    answer = Answer()
    for part in chunks_of(data) if body.get("stream") else [json.loads(data)]:
        answer.take(part)
    answer.check(body)
    return "ok"


async def ask_many(http: aiohttp.ClientSession, url: str, rng: random.Random, count: int) -> Counter[str]:
    """`count` requests, `CONCURRENCY` at a time; how they ended."""
    outcomes: Counter[str] = Counter()
    left = iter(range(count))

    async def client() -> None:
        for _ in left:
            outcomes[await ask(http, url, rng)] += 1

    async with asyncio.TaskGroup() as clients:
        for _ in range(CONCURRENCY):
            clients.create_task(client())
    return outcomes


# --- what must be left of it ------------------------------------------------------------------------------------------


async def until(condition: Any, what: str) -> None:
    """Wait for what takes the server a moment after its client has gone."""
    try:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"{what}, 10 s after the last request")


async def scrape(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The unlabelled figures of `/metrics`."""
    async with http.get(f"{url}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


def resident_mib() -> float:
    """Memory of this process, garbage not counted."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class Remains:
    """What a thousand requests left of themselves.

    Attributes:
        growth: memory of the process after all of them, over that after the first, in MiB.
        figures: of `/metrics`, at the end.
        num_tasks: how many are left that were not there before the server.
    """

    outcomes: Counter[str]
    growth: float
    figures: dict[str, float]
    num_compiles: int
    num_tasks: int


def soak(folder: Path, compile_cache: Path) -> Remains:
    """Serve the requests from this process, which nobody else should use."""
    limits = dataclasses.replace(LIMITS, compile_cache=str(compile_cache))
    config = ServeConfig(model=str(write_tiny_model(folder / MODEL)), engine=limits, http=HttpConfig(port=0))
    prepared: list[Constraints] = []
    engine = build_engine(config, meanwhile=prepared.append)
    assert prepared == [engine.constraints]
    return asyncio.run(serve_and_ask(engine))


async def serve_and_ask(engine: Engine) -> Remains:
    rng = random.Random(0)
    tasks_before = asyncio.all_tasks()
    loading: asyncio.Future[ServerParts] = asyncio.get_running_loop().create_future()
    parts = dataclasses.replace(parts_of(engine), num_compiles=lambda: engine.runner.compiles_since_ready)
    loading.set_result(parts)
    config = HttpConfig(port=0, max_queue_tokens=1_000_000)
    app = build_app(loading, config)
    server = Server(app, config)
    url = await server.start()
    try:
        await asyncio.sleep(0.1)
        serving = app[SERVICE].require_model().engine
        tasks_serving = asyncio.all_tasks()

        def idle() -> bool:
            return not (serving.num_live or serving.stats.running or serving.stats.waiting)

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONCURRENCY)) as http:
            outcomes = await ask_many(http, url, rng, NUM_BEFORE_BASELINE)
            await until(idle, "requests are live")
            resident_before = resident_mib()
            outcomes += await ask_many(http, url, rng, NUM_REQUESTS - NUM_BEFORE_BASELINE)
            await until(idle, "requests are live")
            growth = resident_mib() - resident_before
            figures = await scrape(http, url)
        await until(lambda: asyncio.all_tasks() <= tasks_serving, "tasks of requests are left")
    finally:
        await server.stop()
    await asyncio.sleep(0)
    return Remains(outcomes, growth, figures, engine.runner.compiles_since_ready, len(asyncio.all_tasks() - tasks_before))


@pytest.mark.slow
def test_a_thousand_mixed_requests_leave_nothing_behind(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """In a process of its own: how much memory a server takes is not to be seen in one that ran hundreds of tests."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        remains = process.submit(soak, tmp_path, pytestconfig.cache.mkdir("compiled")).result()
    outcomes, figures = remains.outcomes, remains.figures
    assert outcomes.total() == NUM_REQUESTS
    assert outcomes["ok"] > 700, outcomes
    assert outcomes["left"] > 100, outcomes
    assert outcomes["refused"] > 10, outcomes
    assert figures["jaxserve_preemptions_total"] > 0, "the pool was never short of pages"
    assert figures["jaxserve_free_pages"] == figures["jaxserve_total_pages"] == LIMITS.num_pages
    assert figures["jaxserve_queued_requests"] == figures["jaxserve_queued_tokens"] == 0
    assert figures["jaxserve_step_failures_total"] == 0
    assert figures["jaxserve_compiles_total"] == remains.num_compiles == 0
    assert remains.num_tasks == 0
    num_more = NUM_REQUESTS - NUM_BEFORE_BASELINE
    assert remains.growth < MAX_GROWTH_MIB, f"{remains.growth:.1f} MiB more after {num_more} requests more"
