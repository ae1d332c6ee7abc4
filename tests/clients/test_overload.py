"""A server with too much to do: who gives up frees it, who is refused is told so in each client's own way, and may wait."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import litellm
import openai
import pytest
from langchain_openai import ChatOpenAI

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


def until(url: str, *, running: int, queued: int, seconds: float = 20.0) -> None:
    """Wait until so many sequences of the server run, and so many have no token yet."""
    wanted = {f"jaxserve_running_sequences {running:.1f}", f"jaxserve_queued_requests {queued:.1f}"}
    deadline = time.monotonic() + seconds
    found: set[str] = set()
    while not wanted <= found:
        assert time.monotonic() < deadline, sorted(line for line in found if line.startswith("jaxserve_"))
        with urllib.request.urlopen(f"{url}/metrics") as response:
            found = set(response.read().decode().splitlines())


def until_idle(url: str) -> None:
    until(url, running=0, queued=0)


LONG: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 500, "extra_body": {"ignore_eos": True}}
"""Ten seconds of work for the busy server."""


def busy_client(url: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", **{"max_retries": 0, **options})


def test_a_client_that_gives_up_frees_the_server(busy_server: str) -> None:
    with busy_client(busy_server, timeout=0.3) as client, pytest.raises(openai.APITimeoutError):
        client.completions.create(**LONG)
    until_idle(busy_server)
    with busy_client(busy_server) as client, client.completions.create(stream=True, **LONG) as stream:
        next(iter(stream))
    until_idle(busy_server)


def test_a_time_limit_in_the_request(busy_server: str) -> None:
    extra = {"ignore_eos": True, "timeout": 0.3}
    with busy_client(busy_server, max_retries=2) as client:
        with pytest.raises(openai.APIStatusError) as whole:
            client.completions.create(**{**LONG, "extra_body": extra})
        assert whole.value.status_code == 408
        with pytest.raises(openai.APIError, match="time ran out"):
            list(client.completions.create(**{**LONG, "extra_body": extra}, stream=True))


@contextmanager
def crowded(url: str, num_tokens: int) -> Iterator[None]:
    """The server with four that run, for so many of its steps, and one that waits, which is all that may."""
    until_idle(url)
    answers: list[Any] = []
    with busy_client(url) as client:
        long = {**LONG, "max_tokens": num_tokens}
        threads = [threading.Thread(target=lambda: answers.append(client.completions.create(**long))) for _ in range(5)]
        for number, thread in enumerate(threads):
            thread.start()
            until(url, running=min(number + 1, 4), queued=number // 4)
        yield
        for thread in threads:
            thread.join()
    assert len(answers) == 5


def test_retry_after_is_honoured(busy_server: str) -> None:
    """With the queue full the client is told how long to wait, waits that long, and then is served."""
    with crowded(busy_server, 150), busy_client(busy_server) as client:
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(**{**LONG, "max_tokens": 1})
        assert refused.value.code == "queue_full"
        wait = float(refused.value.response.headers["Retry-After"])
        started = time.monotonic()
        patient = client.with_options(max_retries=20)
        assert patient.completions.create(**{**LONG, "max_tokens": 1}).usage is not None
        assert time.monotonic() - started >= wait


def test_each_client_has_its_name_for_it(busy_server: str) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1}
    options: dict[str, Any] = {"api_key": "none", "max_retries": 0}
    claude = anthropic.Anthropic(base_url=busy_server, **options)
    chat = ChatOpenAI(model="tiny", base_url=f"{busy_server}/v1", **options)
    calls = {
        anthropic.RateLimitError: lambda: claude.messages.create(**asked),
        openai.RateLimitError: lambda: chat.invoke("hello"),
        litellm.RateLimitError: lambda: litellm.completion(
            **{**asked, "model": "openai/tiny"}, api_base=f"{busy_server}/v1", **options
        ),
    }
    for call in calls.values():  # what it imports at its first call takes seconds
        assert call()
    with crowded(busy_server, 500):
        for kind, call in calls.items():
            with pytest.raises(kind):
                call()
