"""The benches of the host: a step's time and eviction."""

from __future__ import annotations

import json
import timeit
from pathlib import Path

import pytest

from bench import eviction, host_step
from jaxserve.host.prefix import cost_aware, least_recently_used


def yardstick() -> int:
    """Something to do for the interpreter, which takes about a fifth of what a step of 256 sequences does."""
    table: dict[int, list[int]] = {}
    for number in range(2000):
        table[number] = [number]
        table[number].append(number + 1)
    return sum(len(numbers) for numbers in table.values())


@pytest.mark.slow
def test_a_step_of_256_sequences_costs_the_host_no_more_than_it_did() -> None:
    """It was five times the yardstick where that was measured, on a machine where this takes 2.2 ms; an absolute bound told
    machines apart. Of some rounds the best is taken, since neighbours can only add."""
    unit = 1000 * min(timeit.repeat(yardstick, number=1, repeat=200))
    assert min(host_step.measure(256, 1000, 40).median for _ in range(5)) < 9 * unit


def test_the_table_has_a_line_for_each_queue(capsys: pytest.CaptureFixture[str]) -> None:
    assert host_step.main(["--seqs", "4", "--steps", "5", "--waiting", "0,20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["0", "20"]


def test_a_pool_that_holds_everything_finds_everything_that_came_before() -> None:
    outcome = eviction.replay([[1, 2, 3], [1, 2, 4], [1, 2, 3, 5]], 10, least_recently_used)
    assert outcome.token_share == pytest.approx((0 + 2 + 3) / 10)
    assert outcome.num_evicted == 0


def test_policies_differ_where_something_is_used_often() -> None:
    """One page comes five times, then others pass through a pool of four."""
    requests = [[1]] * 5 + [[n] for n in range(10, 14)] + [[1]]
    shares = [eviction.replay(requests, 4, policy).token_share for policy in (least_recently_used, cost_aware(60.0))]
    assert shares == [pytest.approx(4 / 10), pytest.approx(5 / 10)]


def test_a_request_larger_than_the_pool_is_left_out() -> None:
    assert eviction.replay([[1, 2, 3], [1], [1]], 2, least_recently_used).token_share == 0.5


def test_a_trace_is_read_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in ([1, 2], [1, 2], [3])))
    assert eviction.main([str(path), "--blocks", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "trace.jsonl: 3 requests, 5 blocks, 3 different"
    assert [line.split()[1:3] for line in lines[2:]] == [["lru", "40.0%"], ["cost-aware", "40.0%"]]
