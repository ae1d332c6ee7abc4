"""Calls of functions in files: in OpenAI's batch format they come as over HTTP, with ids that a resumed run repeats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.offline.runs import HELLO, Runs, batch

TEMPLATE = (
    "{{ tools | tojson if tools }}{{ messages[0].content }}{# <think> #}"
    '{# <|start_header_id|>{"name": ..., "parameters": ...} #}'
)
FIELDS: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "now"}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 60,
}


def results_of(folder: Path, *lines: Any) -> list[dict[str, Any]]:
    folder.mkdir()
    runs = Runs(folder, engine_options={"chat_template": TEMPLATE})
    runs.write(lines)
    runs()
    return runs.results()


def test_calls_come_in_batch_format_and_only_there(tmp_path: Path) -> None:
    lines = (batch("a", messages=HELLO, **FIELDS), {"messages": HELLO, **FIELDS})
    called, refused = results_of(tmp_path / "one", *lines)
    (choice,) = called["response"]["body"]["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], choice["finish_reason"]) == ("now", "tool_calls")
    assert "reasoning_tokens" in called["response"]["body"]["usage"]["completion_tokens_details"]
    assert (refused["text"], refused["error"]["param"]) == (None, "tools")
    assert "batch format" in refused["error"]["message"]
    assert results_of(tmp_path / "two", *lines) == [called, refused]
