"""What holds for every route, those of tomorrow too: who is let in, and which model answers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jaxserve.config import HttpConfig
from jaxserve.server.handlers import ROUTES
from tests.server.serving import MODEL, serving

WITHOUT_KEY = {"/health", "/ready"}

HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/embeddings": {"input": "hello"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5]},
}
"""The least that each route takes beside a model."""

WITHOUT_MODEL = {
    *("/v1/files", "/v1/batches", "/v1/batches/{batch_id}/cancel"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
}
"""Routes that take a body and no model."""


def url_of(path: str) -> str:
    return re.sub(r"\{\w+(:[^}]*)?\}", "x", path)


@pytest.mark.parametrize("path", sorted({route.path for route in ROUTES if route.method == "POST"} - WITHOUT_MODEL))
async def test_another_model_is_not_found(path: str) -> None:
    """sglang I7035, I31404: any name was answered."""
    async with serving() as server:
        for model in ("gpt-4", MODEL.upper(), f"{MODEL} ", f"org/{MODEL}", "", "x" * 10_000):
            status, answer = await server.post(path, {**BODIES[path], "model": model})
            error = answer["error"]
            assert (status, error["code"], error["param"]) == (404, "model_not_found", "model"), (model, error)
            assert repr(MODEL) in error["message"]
        assert (await server.post(path, {**BODIES[path], "model": MODEL}))[0] == 200


PROMPTS = {
    "/v1/completions": ("prompt", "max_tokens"),
    "/v1/chat/completions": ("messages", "max_completion_tokens"),
    "/v1/responses": ("input", "max_output_tokens"),
    "/v1/messages": ("messages", "max_tokens"),
    "/v1/embeddings": ("input", None),
}
"""What bodies call their prompt, and how many tokens of output they want."""


@pytest.mark.slow
@pytest.mark.parametrize("path", PROMPTS)
async def test_what_does_not_fit_is_named_as_the_body_names_it(path: str) -> None:
    """vllm I33418: with the wrong numbers. The server finds out late, where all requests are alike."""
    prompt, length = PROMPTS[path]
    text = "a" * 600
    long = [{"role": "user", "content": text}] if prompt == "messages" else text
    async with serving(config=HttpConfig(port=0, max_output_tokens=100)) as server:
        status, answer = await server.post(path, {**BODIES[path], "model": MODEL, prompt: long})
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, prompt, "context_length_exceeded")
        assert re.match(rf"{prompt} (has )?6\d\d ", answer["error"]["message"])
        if length is not None:
            status, answer = await server.post(path, {**BODIES[path], "model": MODEL, length: 101})
            assert (status, answer["error"]["param"]) == (400, length)
            assert answer["error"]["message"].startswith(f"{length} must be at most 100")
    if length is not None:
        async with serving() as server:
            status, answer = await server.post(path, {**BODIES[path], "model": MODEL, length: 512})
            assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, length, "context_length_exceeded")
            assert re.match(rf"{prompt} \d+ \+ {length} 512 > context 512;", answer["error"]["message"])


async def test_a_key_is_asked_for_before_anything_else() -> None:
    """vllm I58144, I18892: some routes forgot it. Without it nobody learns even whether there is such a route."""
    routes = [(route.method, url_of(route.path)) for route in ROUTES if route.path not in WITHOUT_KEY]
    routes += [("GET", "/no/such/route"), ("PUT", "/v1/models"), ("POST", "/invocations"), ("GET", "/")]
    async with serving(config=HttpConfig(port=0, api_key="sk-a", admin_key="sk-root")) as server:
        for method, path in routes:
            for key in (None, "", "Bearer", "Bearer ", "Bearer sk-b", "Basic sk-a", "sk-a", "Bearer sk-a sk-a", "Bearer SK-A"):
                headers = {} if key is None else {"Authorization": key}
                async with server.http.request(method, server.url + path, headers=headers, data=b"{") as response:
                    assert response.status == 401, (method, path, key)
                    if method != "HEAD":
                        assert (await response.json())["error"]["code"] == "invalid_api_key"
        for path in WITHOUT_KEY:
            async with server.http.get(server.url + path) as response:
                assert response.status == 200
