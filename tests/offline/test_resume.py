"""Offline runs that are cut short: carrying on, refusing to carry on what is another run, failing engines and files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxserve import journal as journal_module
from tests.offline.runs import HELLO, Lines, Runs, batch, interrupt_after

# --- carrying on ------------------------------------------------------------------------------------------------------


WORK: Lines = [
    *({"prompt": f"prompt {i}", "max_tokens": 3 + i % 7, "temperature": i % 2} for i in range(12)),
    "{broken",
    *(batch(f"id{i}", messages=HELLO, n=2, temperature=0.7) for i in range(4)),
]


@pytest.mark.parametrize("num_results", [1, 2, 7, 13, 16])
def test_interrupting_and_running_again_is_one_run(
    runs: Runs,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    num_results: int,
) -> None:
    whole = Runs(tmp_path_factory.mktemp("whole"))
    for each in (whole, runs):
        each.write(WORK)
    assert whole() == 3
    interrupt_after(monkeypatch, num_results)
    assert runs() == 130
    monkeypatch.undo()
    assert f"what is done is in {runs.journal}. Run the same command again" in capsys.readouterr().err
    assert not runs.output.exists()
    done = {json.loads(line)["line"] for line in runs.journal.read_text().splitlines()[1:]}
    assert len(done) == num_results

    # Fewer at once is no other run.
    assert runs("--max-seqs", "2") == 3
    assert runs.output.read_bytes() == whole.output.read_bytes()
    assert f"carrying on: {num_results} of {len(WORK)} lines are done" in capsys.readouterr().err
    again = {request.request_id for request in runs.engines[1].added}
    assert len(again) == sum(2 if number > 13 else 1 for number in set(range(1, 18)) - done - {13})
    assert {request.request_id for request in runs.added()} == {request.request_id for request in whole.added()}


def test_a_finished_run_is_not_done_again(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.write(WORK)
    assert runs() == 3
    before = runs.output.read_bytes()
    assert runs() == 3
    assert "finished already" in capsys.readouterr().err
    assert len(runs.engines) == 1
    assert runs.output.read_bytes() == before


def test_an_interrupt_between_the_output_and_the_end_is_no_loss(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.write(['"a"', '"b"'])
    interrupt_after(monkeypatch, 2)
    assert runs() == 130
    monkeypatch.undo()
    assert runs() == 0
    assert len(runs.engines) == 1, "all was done; no engine is needed to put it in order"
    assert [result["prompt"] for result in runs.results()] == ["a", "b"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seed", "1"], "seed was 0, is 1"),
        (["--temperature", "1"], "sampling was"),
        (["--dtype", "bfloat16"], "dtype was 'auto', is 'bfloat16'"),
        (["--chat"], "chat was False, is True"),
        (["--model", "other"], "model was 'toy', is 'other'"),
        (["--format", "text"], "format was 'jsonl', is 'text'"),
        (["--max-context", "64"], "max_context was 0, is 64"),
    ],
)
def test_another_run_is_not_carried_on(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    runs.write(WORK)
    interrupt_after(monkeypatch, 3)
    assert runs() == 130
    monkeypatch.undo()
    assert runs(*flags) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "--restart" in errors
    assert len(runs.engines) == 1
    assert runs() == 3


def test_a_changed_input_is_not_carried_on_unless_restarted(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.write(['"a"', '"b"', '"c"'])
    interrupt_after(monkeypatch, 1)
    assert runs("--max-seqs", "1") == 130
    monkeypatch.undo()
    runs.write(['"a"', '"b"', '"d"'])
    assert runs() == 2
    assert "input sha256 was" in capsys.readouterr().err
    assert runs("--restart") == 0
    assert [result["prompt"] for result in runs.results()] == ["a", "b", "d"]


def test_an_output_of_another_run_is_not_replaced_unless_restarted(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.write(['"a"'])
    runs.output.write_text("precious\n")
    assert runs() == 2
    assert runs.output.read_text() == "precious\n"
    assert "--restart replaces it" in capsys.readouterr().err
    assert runs("--restart") == 0
    assert runs("--seed", "3") == 2
    assert len(runs.engines) == 1


def test_ids_are_taken_by_lines_of_an_earlier_run_too(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.write([batch("a", prompt="one"), '"two"', batch("a", prompt="three")])
    interrupt_after(monkeypatch, 1)
    assert runs("--max-seqs", "1") == 130
    monkeypatch.undo()
    assert runs("--max-seqs", "1") == 3
    assert "is that of line 1 already" in runs.results()[2]["error"]["message"]


# --- trouble ----------------------------------------------------------------------------------------------------------


def test_a_request_under_which_the_engine_fails_is_tried_again(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    runs.write(WORK)
    assert runs() == 3
    expected = runs.output.read_bytes()
    runs.engine_options = {"fail_on_submit": [3, 14]}
    with caplog.at_level("CRITICAL", logger="jaxserve"):
        assert runs("--restart") == 3
    assert runs.output.read_bytes() == expected
    assert len(runs.engines[1].added) > len(runs.engines[0].added)


def test_a_request_under_which_the_engine_fails_every_time_is_an_error(
    runs: Runs, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.write([{"prompt": "long enough", "max_tokens": 50, "ignore_eos": True}, batch("b", prompt="x")])
    runs.engine_options = {"fail_on_submit": [4, 20, 36]}
    with caplog.at_level("CRITICAL", logger="jaxserve"):
        assert runs("--max-seqs", "1") == 3
    plain, in_batch = runs.results()
    assert plain["error"]["type"] == "server_error"
    assert "failed 3 times" in plain["error"]["message"]
    assert in_batch["response"]["status_code"] == 200
    assert f"{runs.input}:1: the engine failed 3 times" in capsys.readouterr().err


def test_a_dead_engine_ends_the_run_and_what_is_done_stays(
    runs: Runs, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.write(WORK)
    runs.engine_options = {"fail_on_submit": range(20, 99)}
    with caplog.at_level("CRITICAL", logger="jaxserve"):
        assert runs("--max-seqs", "2") == 1
    errors = capsys.readouterr().err
    assert "the engine failed too often in a row" in errors
    assert "Run the same command again" in errors
    done = len(runs.journal.read_text().splitlines()) - 1
    assert done > 2
    assert runs.engines[0].num_closed == 1
    runs.engine_options = {}
    assert runs() == 3
    assert f"carrying on: {done} of" in capsys.readouterr().err


def test_an_input_that_changes_during_the_run_is_refused(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def long_lines(letter: str) -> Lines:
        return [f'"{letter * 50_000}"' for _ in range(9)]

    append = journal_module.Journal.append

    def changing(*args: Any, **options: Any) -> None:
        append(*args, **options)
        runs.write(long_lines("b"))

    monkeypatch.setattr(journal_module.Journal, "append", changing)
    # Longer than what is read ahead; too long for the toy's context, so each is done at once.
    runs.write(long_lines("a"))
    assert runs("--max-seqs", "1") == 2
    assert "changed during the run" in capsys.readouterr().err
    assert not runs.output.exists()
