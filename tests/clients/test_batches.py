"""OpenAI's Python client gives a real model a batch, as its documentation says."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import openai
import pytest

from tests.clients.servers import KEY, MODEL


def test_a_batch(url: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 4, "temperature": 0}
    names = [f"question {i}" for i in range(3)]
    lines = [{"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body} for name in names]
    lines.append({**lines[0], "custom_id": "wrong", "body": {**body, "top_p": 7}})
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        file = client.files.create(
            file=("questions.jsonl", content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert client.files.retrieve(file.id).bytes == len(content)
        assert client.files.content(file.id).content == content
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"by": "test"}
        )
        deadline = time.monotonic() + 120
        while (batch := client.batches.retrieve(batch.id)).status != "completed":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (3, 1)
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        assert [answer["custom_id"] for answer in answers] == names
        assert answers[0]["response"]["body"]["choices"][0]["message"]["content"]
        (error,) = client.files.content(batch.error_file_id).text.splitlines()
        assert json.loads(error)["response"]["status_code"] == 400
        assert batch.id in [found.id for found in client.batches.list(limit=5)]
        assert {found.id for found in client.files.list()} >= {file.id, batch.output_file_id, batch.error_file_id}
        assert client.files.delete(file.id).deleted


def test_a_batch_that_is_wrong_or_cancelled(url: str) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": "x"}}
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        for lines, ends in (([line, line], {"failed"}), ([line], {"cancelled", "completed"})):
            content = "".join(json.dumps(item) + "\n" for item in lines).encode()
            file = client.files.create(file=("a.jsonl", content), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
            if ends != {"failed"}:
                with suppress(openai.ConflictError):  # it was quick
                    batch = client.batches.cancel(batch.id)
            deadline = time.monotonic() + 120
            while batch.status not in ends:
                assert time.monotonic() < deadline
                time.sleep(0.05)
                batch = client.batches.retrieve(batch.id)
        (failed,) = [found for found in client.batches.list() if found.status == "failed"]
        assert failed.errors is not None
        assert [(error.line, error.code) for error in failed.errors.data or []] == [(2, "duplicate_custom_id")]


def test_errors_are_the_client_s_own(url: str) -> None:
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        with pytest.raises(openai.NotFoundError):
            client.batches.retrieve("batch_none")
        with pytest.raises(openai.NotFoundError):
            client.files.content("file-none")
        with pytest.raises(openai.NotFoundError) as unknown:
            client.batches.create(input_file_id="file-none", endpoint="/v1/completions", completion_window="24h")
        assert unknown.value.param == "input_file_id"
        with pytest.raises(openai.BadRequestError):
            client.files.create(file=("x", b"x"), purpose="paint")  # type: ignore[arg-type]
