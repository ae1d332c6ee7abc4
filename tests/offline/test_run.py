"""Offline runs from start to end: formats, results, seeds, bad lines, wrong flags."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import ServeConfig
from jaxserve.engine.adapters import AdapterTable
from jaxserve.offline.cli import main
from tests.offline.runs import HELLO, Runs, batch
from tests.offline.toy import ToyEngine, alone

# --- formats ----------------------------------------------------------------------------------------------------------


def test_plain_prompts_in_every_form(runs: Runs) -> None:
    runs.write(['"once"', {"prompt": "once", "custom_id": "x"}, "", {"prompt": [111, 110, 99, 101]}, {"messages": HELLO}])
    assert runs("--max-seqs", "4") == 0
    once, named, ids, chat = runs.results()
    assert once["index"] == 0
    assert once["prompt"] == "once"
    assert once["error"] is None
    assert list(once) == ["id", "index", "prompt", "text", "finish_reason", "usage", "error"]
    assert named == once | {"id": named["id"], "index": 1, "custom_id": "x"}
    assert (ids["index"], ids["prompt"]) == (3, [111, 110, 99, 101])
    assert (chat["index"], chat["messages"]) == (4, HELLO)
    for result in (once, named, ids, chat):
        assert result["finish_reason"] in ("stop", "length")
        assert result["usage"]["total_tokens"] == result["usage"]["prompt_tokens"] + result["usage"]["completion_tokens"]
        assert result["usage"]["completion_tokens"] <= 12
    assert len({result["id"] for result in runs.results()}) == 4
    assert sorted(path.name for path in runs.folder.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_results_are_what_each_prompt_gives_alone(runs: Runs) -> None:
    prompts = [f"prompt number {i} " + "la" * (i % 9) for i in range(50)]
    runs.write([{"prompt": prompt, "max_tokens": 1 + i % 20} for i, prompt in enumerate(prompts)])
    assert runs() == 0
    (engine,) = runs.engines
    assert engine.num_closed == 1
    for prompt, result, request in zip(prompts, runs.results(), engine.added, strict=True):
        tokens, reason, text = alone(engine, request)
        assert result["prompt"] == prompt
        assert result["finish_reason"] == reason.value
        assert result["usage"]["completion_tokens"] == len(tokens)
        assert result["text"] == text


def test_text_format(runs: Runs) -> None:
    runs.input.write_bytes(b'"quoted" {json}\r\n\n  spaces  \nbad \xff\nlast')
    assert runs("--format", "text") == 3
    first, second, bad, last = runs.results()
    assert [first["prompt"], second["prompt"], last["prompt"]] == ['"quoted" {json}', "  spaces  ", "last"]
    assert [first["index"], second["index"], bad["index"], last["index"]] == [0, 2, 3, 4]
    assert "not UTF-8" in bad["error"]["message"]


def test_chat_puts_prompts_through_the_template(runs: Runs) -> None:
    runs.write(["hello"])
    assert runs("--format", "text", "--chat") == 0
    (engine,) = runs.engines
    assert list(engine.added[0].prompt) == engine.tokenizer.encode_chat(HELLO)
    assert runs.results()[0]["prompt"] == "hello"


def test_batch_format_is_openai_s(runs: Runs) -> None:
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion

    runs.write(
        [
            batch("a", messages=HELLO, logprobs=True, top_logprobs=2),
            batch("b", prompt=["one", "two"], n=2, temperature=1, logprobs=1),
        ]
    )
    assert runs() == 0
    chat, completion = runs.results()
    for result, custom_id in ((chat, "a"), (completion, "b")):
        assert list(result) == ["id", "custom_id", "response", "error"]
        assert result["custom_id"] == custom_id
        assert result["error"] is None
        assert result["id"].startswith("batch_req_")
        assert result["response"]["status_code"] == 200
        assert result["response"]["request_id"]
    parsed_chat = ChatCompletion.model_validate(chat["response"]["body"], strict=True)
    assert parsed_chat.choices[0].logprobs is not None
    parsed = Completion.model_validate(completion["response"]["body"], strict=True)
    assert [choice.index for choice in parsed.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in parsed.choices}) == 4
    assert parsed.usage is not None
    assert parsed.usage.prompt_tokens == 6


def test_defaults_from_flags_fill_in_plain_lines_only(runs: Runs) -> None:
    runs.write(
        ['"a"', {"prompt": "a", "max_tokens": 3}, {"messages": HELLO, "max_completion_tokens": 4}, batch("b", prompt="a")]
    )
    assert runs("--temperature", "0.5", "--top-p", "0.9", "--top-k", "7", "--stop", "x", "--stop", "y") == 0
    first, second, third, fourth = (request.params for request in runs.added())
    assert (first.max_tokens, first.temperature, first.top_p, first.top_k, first.stop) == (12, 0.5, 0.9, 7, ("x", "y"))
    assert (second.max_tokens, second.temperature) == (3, 0.5)
    assert third.max_tokens == 4
    assert (fourth.max_tokens, fourth.temperature, fourth.top_k, fourth.stop) == (9, 1.0, 0, ())


def test_logprobs_of_plain_lines(runs: Runs) -> None:
    runs.write([{"prompt": "a", "logprobs": 1}, {"messages": HELLO, "logprobs": True}])
    assert runs() == 0
    completion, chat = runs.results()
    assert len(completion["logprobs"]["tokens"]) >= completion["usage"]["completion_tokens"] - 1
    assert len(chat["logprobs"]["content"]) >= chat["usage"]["completion_tokens"] - 1


def test_prompts_in_results(runs: Runs) -> None:
    asks = {"prompt": "a b", "echo": True, "logprobs": 1, "prompt_logprobs": 0, "max_tokens": 0}
    runs.write([asks, {"messages": HELLO, "prompt_logprobs": 1}, batch("b", **asks, n=2)])
    assert runs() == 0
    completion, chat, batched = runs.results()
    assert (completion["text"], completion["usage"]["completion_tokens"]) == ("a b", 0)
    values = completion["logprobs"]["token_logprobs"]
    assert (len(values), values[0]) == (3, None)
    shown = completion["prompt_logprobs"]
    assert shown[0] is None
    assert [entry["logprob"] for each in shown[1:] for entry in each.values()] == values[1:]
    assert chat["prompt_logprobs"][0] is None
    assert "prompt_logprobs" not in chat["text"]
    for choice in batched["response"]["body"]["choices"]:
        assert choice["prompt_logprobs"] == shown
        assert (choice["text"], choice["logprobs"]) == ("a b", completion["logprobs"])


def test_structured_output(runs: Runs) -> None:
    unknown_type = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "?"}}}
    runs.write(
        [
            {"prompt": "once", "structured_outputs": {"regex": "[ab]{3}"}},
            {"prompt": "once", "response_format": unknown_type},
        ]
    )
    assert runs() == 3
    good, bad = runs.results()
    assert re.fullmatch("[ab]{3}", good["text"])
    assert bad["error"]["param"] == "response_format.json_schema.schema"


def test_a_file_without_requests_gives_an_empty_output(runs: Runs) -> None:
    runs.write(["", " "])
    assert runs() == 0
    assert runs.output.read_bytes() == b""
    assert runs() == 0
    assert runs.engines == []


# --- seeds ------------------------------------------------------------------------------------------------------------


def test_seeds_come_from_the_run_and_the_line(runs: Runs) -> None:
    lines = [
        {"prompt": "a", "temperature": 1},
        {"prompt": "a", "temperature": 1},
        {"prompt": "a", "temperature": 1, "custom_id": "x"},
        {"prompt": "a", "temperature": 1, "seed": 5},
        batch("y", prompt="a", temperature=1, n=3),
    ]
    runs.write(lines)
    assert runs() == 0
    seeds = [request.params.seed for request in runs.added()]
    assert None not in seeds
    assert seeds[3] == 5
    assert len(set(seeds)) == 7

    # A named line keeps its seed wherever it stands.
    runs.write(lines[2:])
    assert runs("--restart") == 0
    assert [request.params.seed for request in runs.engines[-1].added] == seeds[2:]

    runs.write(lines)
    assert runs("--restart", "--seed", "1") == 0
    others = [request.params.seed for request in runs.engines[-1].added]
    assert others[3] == 5
    assert set(others) & set(seeds) == {5}


# --- bad lines --------------------------------------------------------------------------------------------------------


def test_bad_lines_are_told_and_the_rest_is_done(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.write(
        [
            '"fine"',
            '{"prompt": "cut',
            {"prompt": "a", "temperature": 1000},
            {"prompt": "a", "temprature": 1},
            {"prompt": "long " * 100},
            {"prompt": "a", "n": 2},
            {"prompt": "a", "stream": True},
            batch("b1", prompt="a", top_p=7),
            batch("b2", prompt="a", model="other"),
            batch("b3", prompt=[10**6]),
            batch("b3", prompt="the id is taken"),
            batch("b4", prompt="fine"),
            {"custom_id": "b5", "method": "GET", "url": "/v1/completions", "body": {}},
        ]
    )
    assert runs() == 3
    results = runs.results()
    assert len(results) == 13
    errors = capsys.readouterr().err
    messages = {
        2: "not JSON",
        3: "temperature must be a number from 0 to 100, found integer 1000",
        4: "unknown field 'temprature'; did you mean 'temperature'",
        5: "context 128",
        6: "one prompt and one choice",
        7: "stream must be false",
        8: "top_p must be a number above 0 and at most 1",
        9: "the model 'other' does not exist",
        10: "prompt must have token ids from 0 to",
        11: "custom_id 'b3' is that of line 10 already",
        13: "method must be POST, found 'GET'",
    }
    for number in range(1, 14):
        result = results[number - 1]
        response = result.get("response") or {"body": {}}
        error = result["error"] or response["body"].get("error")
        if number in messages:
            assert error is not None
            assert messages[number] in error["message"]
            assert f"{runs.input}:{number}: {error['message']}\n" in errors
        else:
            assert error is None
    assert errors.count(f"{runs.input}:") == len(messages)
    assert [results[i]["response"]["status_code"] for i in (7, 8, 9, 11)] == [400, 404, 400, 200]
    assert [results[i]["custom_id"] for i in (7, 8, 9, 10, 11, 12)] == ["b1", "b2", "b3", "b3", "b4", "b5"]
    assert results[2]["error"]["param"] == "temperature"
    assert results[2]["text"] is None
    assert "13 results, 11 of them errors" in errors


# --- wrong flags -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--input", "{folder}/none", "--output", "{folder}/out"], "none: No such file or directory"),
        (["--input", "{folder}", "--output", "{folder}/out"], "not a regular file"),
        (["--input", "{folder}/in"], "--input needs --output"),
        (
            ["--input", "{folder}/in", "--output", "{folder}/none/out"],
            "the folder {folder}/none does not exist; make it first",
        ),
        (["--input", "{folder}/in", "--output", "{folder}"], "is a folder; name a file"),
        (["--input", "{folder}/in", "--output", "{folder}/in"], "is the input"),
        (["--input", "{folder}/in", "--output", "{folder}/out", "--prompt", "a"], "--input excludes --prompt"),
        (["--output", "{folder}/out"], "--output needs --input"),
        (["--prompt", "a", "--demo"], "exclude each other"),
    ],
)
def test_wrong_flags_are_told_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    (tmp_path / "in").write_text('"a"\n')

    def build(config: ServeConfig) -> ToyEngine:
        raise AssertionError("loaded")

    filled = [argument.format(folder=tmp_path) for argument in argv]
    assert main(["--model", "toy", *filled], build_engine=build) == 2
    assert message.format(folder=tmp_path) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_no_model_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--demo"]) == 2
    assert "no model is named" in capsys.readouterr().err


def test_memory_does_not_grow_with_the_file(runs: Runs) -> None:
    """At most twice the slots are in the engine, however many lines there are."""
    runs.write([f'"{i}"' for i in range(300)])
    most = 0

    build = runs._build

    def watched(config: ServeConfig) -> ToyEngine:
        engine = build(config)
        step = engine.core.step

        def counted() -> Any:
            nonlocal most
            stats = engine.core.stats()
            most = max(most, stats.running + stats.waiting)
            return step()

        engine.core.step = counted  # type: ignore[method-assign]
        return engine

    runs._build = watched  # type: ignore[method-assign]
    assert runs("--max-seqs", "3") == 0
    assert len(runs.results()) == 300
    assert 3 <= most <= 6


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_lines_name_an_adapter_as_their_model(runs: Runs) -> None:
    table = AdapterTable(1)
    adapter = table.reserve("mine")
    table.publish(adapter, "folder", 0)
    runs.engine_options["adapters"] = table
    runs.write([batch("a", model="mine", prompt="x"), batch("b", prompt="x"), batch("c", model="nobody", prompt="x")])
    assert runs() == 3
    mine, base, nobody = runs.results()
    assert [request.adapter for request in runs.added()] == [adapter, None]
    assert mine["response"]["body"]["model"] == "mine"
    assert base["response"]["body"]["model"] == "toy"
    assert nobody["response"]["status_code"] == 404
