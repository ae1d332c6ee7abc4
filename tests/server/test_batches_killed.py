"""Batches of a server process that is killed in the middle of them, again and again."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.batching import COMPLETIONS, jsonl, line
from tests.server.test_lifetime import Running, process

NUM_LINES = 120
LINES = [line(f"id{i}", prompt=f"line {i}", max_tokens=4 + i % 9, ignore_eos=True, n=1 + i % 2) for i in range(NUM_LINES)]
WRONG = (7, 60, 119)


def recorded(folder: Path) -> dict[int, Any]:
    """Whole results in the journal, read independently; empty where there is none."""
    contents = [journal.read_bytes() for journal in folder.glob("batches/*/results.jsonl")]
    records = [json.loads(record) for content in contents for record in content.split(b"\n")[1:-1]]
    assert len({record["line"] for record in records}) == len(records)
    return {record["line"]: record["result"] for record in records}


def client_of(server: Running) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.slow
async def test_a_killed_server_carries_on_where_it_was(tmp_path: Path) -> None:
    flags = ("--state-dir", str(tmp_path), "--step-seconds", "0.004", "--max-seqs", "4")
    lines = [item if i not in WRONG else line(f"id{i}", temperature=-1) for i, item in enumerate(LINES)]
    choice = random.Random(3)
    known: dict[int, Any] = {}
    batch_id = ""
    for turn in range(30):
        async with process(*flags) as server, client_of(server) as client:
            await server.until_logged("ready")
            if not batch_id:
                file = await client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
                batch = await client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
                batch_id = batch.id
            await asyncio.sleep(choice.uniform(0.1, 0.5))
            batch = await client.batches.retrieve(batch_id)
            if batch.status == "completed":
                assert turn >= 2, "it was never killed"
                assert batch.output_file_id is not None
                assert batch.error_file_id is not None
                contents = [
                    (await client.files.content(file_id)).text for file_id in (batch.output_file_id, batch.error_file_id)
                ]
                break
            server.process.kill()
            await server.exit_code()
        found = recorded(tmp_path)
        assert known.items() <= found.items(), "a result that was there is gone, or was made again"
        known = found
    else:
        raise AssertionError("it made no progress")
    answers, errors = [[json.loads(raw) for raw in content.splitlines()] for content in contents]
    assert [found["custom_id"] for found in answers] == [f"id{i}" for i in range(NUM_LINES) if i not in WRONG]
    assert [found["custom_id"] for found in errors] == [f"id{i}" for i in WRONG]
    by_id = {found["custom_id"]: found for found in answers + errors}
    assert all(by_id[result["custom_id"]] == result for result in known.values())


@pytest.mark.slow
async def test_a_second_process_refuses_the_folder(tmp_path: Path) -> None:
    async with process("--state-dir", str(tmp_path)) as server:
        await server.until_logged("ready")
        command = (sys.executable, "-m", "tests.server.fake_server", "--state-dir", str(tmp_path))
        second = await asyncio.create_subprocess_exec(*command, stderr=PIPE)
        _, errors = await second.communicate()
        assert second.returncode == 1
        assert f"another server (process {server.process.pid}) keeps its files and batches there" in errors.decode()
