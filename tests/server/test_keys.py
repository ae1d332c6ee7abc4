"""API keys: the file, who is let in, and what a key's requests may ask for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from jaxserve.config import HttpConfig
from jaxserve.errors import ConfigError, Forbidden, Unauthorized
from jaxserve.server.keys import ApiKey, Caller, KeyRing, load_keys
from tests.engine.engines import fake_engine
from tests.server.serving import MODEL, Serving, serving

KEYS = """
[[keys]]
label = "team-a"
key = "sk-a"
weight = 3

[[keys]]
label = "nightly"
key = "sk-n"
priority = "batch"

[[keys]]
label = "ops"
key = "sk-o"
admin = true
"""
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 4, "ignore_eos": True}


def write(tmp_path: Path, text: str) -> HttpConfig:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    return HttpConfig(port=0, api_keys_file=str(path))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_file_of_keys(tmp_path: Path) -> None:
    ring = load_keys(write(tmp_path, KEYS))
    assert len(ring) == 3
    assert ring.identify("Bearer sk-a") == Caller(label="team-a", weight=3.0, priority=None, admin=False)
    assert ring.identify("bearer   sk-n") == Caller(label="nightly", weight=1.0, priority=10, admin=False)
    assert ring.identify("Bearer sk-o").admin


def test_the_key_of_the_command_line_is_an_administrator_s(tmp_path: Path) -> None:
    ring = load_keys(HttpConfig(api_key="sk-1"))
    assert ring.identify("Bearer sk-1") == Caller(label="default", admin=True)
    assert "sk-1" not in repr(HttpConfig(api_key="sk-1"))
    assert "sk-1" not in repr(ApiKey(label="x", key="sk-1"))


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer ", "Basic sk-a", "sk-a", "Bearer sk-A", "Bearer sk-a sk-a", "Bearer \udc80"]
)
def test_others_are_not_let_in(tmp_path: Path, authorization: str | None) -> None:
    with pytest.raises(Unauthorized):
        load_keys(write(tmp_path, KEYS)).identify(authorization)


def test_without_keys_everyone_is() -> None:
    assert KeyRing().identify(None) == Caller()


def test_what_only_an_administrator_may_do(tmp_path: Path) -> None:
    ring = load_keys(write(tmp_path, KEYS))
    ring.identify("Bearer sk-o").require_admin()
    with pytest.raises(Forbidden, match="'team-a' may not do this"):
        ring.identify("Bearer sk-a").require_admin()


ONE = '[[keys]]\nlabel = "a"\nkey = "k"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"must have a \[\[keys\]\] table for each key"),
        ("keys = 3", r"must have a \[\[keys\]\] table"),
        ("[[key]]", "unknown key 'key'; did you mean 'keys'"),
        ("[[keys]", "is not valid TOML"),
        ('[[keys]]\nlabel = "a"', "key 1 has no 'key'"),
        (ONE + '[[keys]]\nkey = "b"', "key 2 has no 'label'"),
        (ONE + "weigth = 2", "key 1: unknown key 'weigth'; did you mean 'weight'"),
        (ONE + "weight = 0", "key 1: the weight of 'a' must be above 0, found 0"),
        (ONE + 'weight = "2"', "weight must be float"),
        (ONE + 'priority = "fast"', "the priority of 'a' must be 'interactive', 'batch' or an integer from -100 to 100"),
        (ONE + "priority = 101", "found 101"),
        (ONE + "priority = true", "found True"),
        ('[[keys]]\nlabel = "a b"\nkey = "k"', "label must be up to 64 letters"),
        ('[[keys]]\nlabel = "a"\nkey = "k k"', "key of 'a' must be 1 to 512 printable"),
        (ONE + ONE, "two API keys have the same label: see 'a'"),
        (ONE + ONE.replace('"a"', '"b"'), "two API keys have the same key: see 'a', 'b'"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_keys(write(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.toml: No such file"):
        load_keys(HttpConfig(api_keys_file=str(tmp_path / "no.toml")))


# --- over HTTP --------------------------------------------------------------------------------------------------------


async def samples(server: Serving, name: str) -> dict[str, float]:
    async with server.http.get(server.url + "/metrics", headers=bearer("sk-a")) as response:
        assert response.status == 200
        lines = [line for line in (await response.text()).splitlines() if line.startswith(name)]
    return {line.rpartition(" ")[0].removeprefix(name): float(line.rpartition(" ")[2]) for line in lines}


async def test_all_but_probes_take_a_key(tmp_path: Path) -> None:
    async with serving(config=write(tmp_path, KEYS)) as server:
        for path in ("/health", "/ready"):
            async with server.http.get(server.url + path) as response:
                assert response.status == 200
        for path in ("/v1/models", f"/v1/models/{MODEL}", "/version", "/metrics", "/no/such/route"):
            async with server.http.get(server.url + path) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        status, answer = await server.post("/v1/completions", COMPLETION, headers=bearer("sk-x"))
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
        assert (await server.post("/v1/completions", COMPLETION, headers=bearer("sk-a")))[0] == 200
        assert server.fake.runner.num_steps > 0


async def test_openai_s_client_sends_its_key(tmp_path: Path) -> None:
    async with serving(config=write(tmp_path, KEYS)) as server:
        with pytest.raises(openai.AuthenticationError, match="not known"):
            await server.client.models.list()
        assert [model.id async for model in server.client.with_options(api_key="sk-a").models.list()] == [MODEL]


async def test_requests_have_their_key_s_share_and_priority_and_are_counted_by_its_label(tmp_path: Path) -> None:
    async with serving(config=write(tmp_path, KEYS)) as server:
        seen = []
        add = server.fake.scheduler.add
        server.fake.scheduler.add = lambda request: seen.append(request) or add(request)  # type: ignore[method-assign]
        for key, body in [("sk-a", {}), ("sk-n", {}), ("sk-n", {"priority": 12}), ("sk-a", {"priority": "batch"})]:
            assert (await server.post("/v1/completions", {**COMPLETION, **body}, headers=bearer(key)))[0] == 200
        found = [(request.tenant, request.weight, request.priority) for request in seen]
        assert found == [("team-a", 3.0, 0), ("nightly", 1.0, 10), ("nightly", 1.0, 12), ("team-a", 3.0, 10)]
        status, answer = await server.post("/v1/completions", {**COMPLETION, "priority": 0}, headers=bearer("sk-n"))
        assert (status, answer["error"]["param"], answer["error"]["type"]) == (403, "priority", "permission_error")
        assert "priority must be 10 or a higher number for the API key 'nightly', found 0" in answer["error"]["message"]
        counted = await samples(server, "jaxserve_tenant_requests_total")
        assert counted == {
            '{outcome="ok",tenant="team-a"}': 2.0,
            '{outcome="ok",tenant="nightly"}': 2.0,
            '{outcome="refused",tenant="nightly"}': 1.0,
        }
        tokens = await samples(server, "jaxserve_tenant_tokens_total")
        assert tokens['{kind="output",tenant="team-a"}'] == 8
        assert tokens['{kind="prompt",tenant="nightly"}'] == 2 * len(seen[0].prompt)


async def test_one_key_cannot_fill_the_queue_of_another(tmp_path: Path) -> None:
    config = HttpConfig(port=0, api_keys_file=write(tmp_path, KEYS).api_keys_file, max_queue_requests=6)
    async with serving(fake_engine(step_seconds=0.05), config=config) as server:
        crowd = asyncio.create_task(server.post("/v1/completions", {**COMPLETION, "n": 4}, headers=bearer("sk-a")))
        async with asyncio.timeout(5):
            while (await samples(server, "jaxserve_queued_requests"))[""] < 4:
                await asyncio.sleep(0.002)
        status, answer = await server.post("/v1/completions", COMPLETION, headers=bearer("sk-a"))
        assert (status, answer["error"]["code"]) == (429, "tenant_share")
        assert (await server.post("/v1/completions", COMPLETION, headers=bearer("sk-o")))[0] == 200
        assert (await crowd)[0] == 200
        assert await samples(server, "jaxserve_shed_requests_total") == {'{reason="tenant_share"}': 1.0}
        assert (await samples(server, "jaxserve_shed_share"))[""] == pytest.approx(1 / 6)
