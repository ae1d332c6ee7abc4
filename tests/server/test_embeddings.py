"""`/v1/embeddings`, through the unmodified OpenAI client: vectors, forms of input, what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import openai
import pytest

from jaxserve.config import HttpConfig
from jaxserve.errors import EngineError, InvalidRequest
from jaxserve.server.embeddings import normalise, parse_embeddings
from jaxserve.server.endpoints import EMBEDDINGS, answer_body
from jaxserve.server.schema.body import limited_fields
from jaxserve.server.schema.embeddings import EmbeddingRequest
from tests.engine.engines import fake_engine
from tests.fakes import FAKE_HIDDEN_SIZE, fake_hidden
from tests.server.serving import BYTE_LEVEL, MODEL, Serving, serving

README = Path(__file__).resolve().parents[2] / "README.md"
TEXT = "hello wörld"


def vector(text: str) -> Any:
    values = fake_hidden(BYTE_LEVEL.encode(text))
    return pytest.approx([value / math.hypot(*values) for value in values], abs=1e-6)


async def embed(server: Serving, what: Any = TEXT, **fields: Any) -> openai.types.CreateEmbeddingResponse:
    return await server.client.embeddings.create(model=MODEL, input=what, **fields)


async def test_every_form_of_input() -> None:
    """The client asks for base64 unless told otherwise."""
    ids = BYTE_LEVEL.encode(TEXT)
    async with serving() as server:
        for one in (TEXT, ids):
            answer = await embed(server, one)
            assert (answer.object, answer.model, len(answer.data)) == ("list", MODEL, 1)
            assert answer.data[0].embedding == vector(TEXT)
            assert answer.usage.model_dump() == {"prompt_tokens": len(ids), "total_tokens": len(ids)}
        for several in (["a", TEXT, "a"], [BYTE_LEVEL.encode("a"), ids, BYTE_LEVEL.encode("a")]):
            answer = await embed(server, several, encoding_format="float")
            assert [(each.index, each.embedding) for each in answer.data] == [
                (0, vector("a")), (1, vector(TEXT)), (2, vector("a"))
            ]  # fmt: skip
            assert answer.usage.prompt_tokens == len(ids) + 2


async def test_the_end_of_an_input_is_kept() -> None:
    """`vllm bench serve` sends -1 with each."""
    ids = BYTE_LEVEL.encode(TEXT)
    async with serving() as server:
        for kept, expected in ((-1, ids), (3, ids[-3:]), (1000, ids)):
            answer = await embed(server, [TEXT, TEXT], extra_body={"truncate_prompt_tokens": kept})
            alone = await embed(server, expected)
            assert [each.embedding for each in answer.data] == [alone.data[0].embedding] * 2
            assert answer.usage.prompt_tokens == 2 * len(expected)
        long = [7, 8, 9] * 1000
        cut = await embed(server, long, extra_body={"truncate_prompt_tokens": -1})
        assert cut.usage.prompt_tokens == 512
        assert cut.data[0].embedding == (await embed(server, long[-512:])).data[0].embedding


async def test_the_spelling() -> None:
    async with serving() as server:
        body = {"model": MODEL, "input": TEXT}
        _, as_floats = await server.post("/v1/embeddings", body)
        _, as_base64 = await server.post("/v1/embeddings", {**body, "encoding_format": "base64"})
        (floats,), (spelled,) = as_floats["data"], as_base64["data"]
        assert floats == {"object": "embedding", "index": 0, "embedding": vector(TEXT)}
        assert math.hypot(*floats["embedding"]) == pytest.approx(1.0)
        packed = base64.b64decode(spelled["embedding"])
        assert struct.unpack(f"<{FAKE_HIDDEN_SIZE}f", packed) == vector(TEXT)


async def test_no_step_beyond_the_inputs() -> None:
    """And no output token is counted, nor a page kept."""
    fake = fake_engine(prefixes=True)
    async with serving(fake) as server:
        await asyncio.gather(*(embed(server, f"{TEXT} {i}" * 3) for i in range(20)))
        await server.idle()
        stats = server.engine.stats
        assert stats.num_output_tokens == 0
        before = fake.runner.num_steps
        assert (await embed(server, TEXT * 3)).data[0].embedding == vector(TEXT * 3)
        assert fake.runner.num_steps == before + 1, "one step"
        text = server.service.metrics.export().decode()
        assert re.search(r'jaxserve_requests_total\{.*endpoint="embeddings".*outcome="ok".*\} 21', text)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": ""}, "input must have at least 1 token, found 0", "input"),
    ({"input": ["a", ""]}, r"input\[1\] must have at least 1 token", "input"),
    ({"input": []}, "input must be a string, an array of strings", "input"),
    ({"input": [["a"]]}, r"input\[0\]\[0\] must be a token id", "input[0][0]"),
    ({"input": ["a", [5]]}, r"input\[1\] must be of one kind", "input[1]"),
    ({"input": [5, 272]}, "token ids from 0 to 271, found 272", "input"),
    ({"input": [5] * 513}, "513 tokens; this model's maximum context length is 512", "input"),
    ({"input": ["a"] * 2049}, "2049 prompts > 2048", "input"),
    ({"dimensions": 4}, "dimensions must be 8, as this model's states have, found 4", "dimensions"),
    ({"encoding_format": "int8"}, 'encoding_format must be one of "base64", "float"', "encoding_format"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1, or -1", "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be", "truncate_prompt_tokens"),
    ({"user": 5}, "user must be a string", "user"),
    ({"inputs": "a"}, "unknown field 'inputs'; did you mean 'input'", "inputs"),
]


async def test_what_is_refused() -> None:
    async with serving() as server:
        for fields, message, param in REFUSED:
            status, answer = await server.post("/v1/embeddings", {"model": MODEL, "input": "a", **fields})
            assert (status, answer["error"]["param"]) == (400, param)
            assert re.search(message, answer["error"]["message"]), answer
        assert (await embed(server, [5] * 512, dimensions=8, user="someone")).data


async def test_priorities_keys_and_lines_of_batches() -> None:
    async with serving(config=HttpConfig(port=0, request_timeout=5.0)) as server:
        asked = {"priority": "batch", "timeout": 3, "cache_salt": "s", "add_special_tokens": False}
        status, answer = await server.post("/v1/embeddings", {"model": MODEL, "input": TEXT, **asked})
        assert status == 200
        caller = server.service.keys.identify(None)
        body = json.dumps({"model": MODEL, "input": TEXT}).encode()
        assert await answer_body(body, EMBEDDINGS, caller, server.service) == answer


def test_what_the_fields_mean() -> None:
    body = {"model": "m", "input": ["a", "b"], "priority": 5, "cache_salt": "s", "timeout": 2.5}
    call = parse_embeddings(json.dumps(body).encode(), BYTE_LEVEL, model="m", max_context=512, call_id="c")
    assert [(request.request_id, request.priority, request.cache_salt, request.embed) for request in call.requests] == [
        ("c-0", 5, "s", True), ("c-1", 5, "s", True)
    ]  # fmt: skip
    assert (call.timeout, call.stream, call.embeds_as) == (2.5, False, "float")
    with pytest.raises(InvalidRequest, match="at least 1 token"):
        parse_embeddings(b'{"model":"m","input":""}', BYTE_LEVEL, model="m", max_context=512, call_id="c")


def test_a_vector_of_zeros_has_no_direction() -> None:
    assert normalise([0.0, 0.0]) == [0.0, 0.0]
    assert normalise([3.0, -4.0]) == pytest.approx([0.6, -0.8])
    with pytest.raises(EngineError, match="is not finite"):
        normalise([math.nan, 1.0])


def test_the_readme_has_every_field() -> None:
    section = README.read_text().split("| parameter of `/v1/embeddings` |", 1)[1].split("\n\n", 1)[0]
    names = {
        name for line in section.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert names == set(EmbeddingRequest.__struct_fields__)
    assert not limited_fields(EmbeddingRequest)
