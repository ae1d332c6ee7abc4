"""What must hold of the scheduler's sequences between any two calls. O(everything): for tests and idle moments."""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.host.rows import importance, is_known
from jaxserve.plan import RunnerLimits, StepPlan
from jaxserve.request import Sequence


def check_everyone_is_somewhere(live: Iterable[Sequence], running: list[Sequence], waiting: list[Sequence]) -> None:
    """Assert that each live sequence runs or waits, once, and that no other does."""
    found = sorted(seq.seq_id for seq in [*running, *waiting])
    expected = sorted(seq.seq_id for seq in live)
    assert found == expected, f"sequences {expected} are live, those that run or wait are {found}"


def check_running(running: list[Sequence], limits: RunnerLimits) -> None:
    """Assert order, cursors and block tables of those that run."""
    order = [importance(seq) for seq in running]
    assert order == sorted(order), f"running sequences are out of order: {order}"
    for seq in running:
        where = f"sequence {seq.seq_id}"
        assert seq.finish_reason is None, f"{where} has finished, yet runs"
        assert 0 <= seq.computed <= seq.planned <= min(seq.num_tokens, seq.max_positions), (
            f"{where}: cursors out of order: {seq}"
        )
        pages = -(-seq.planned // limits.page_size)
        found = seq.first_page + len(seq.pages)
        assert found == pages, f"{where}: {found} pages for {seq.planned} positions"
        assert seq.first_page <= limits.first_seen_page(seq.planned), (
            f"{where}: page {seq.first_page - 1} has gone, and is seen"
        )
        most = limits.pages_for(seq.planned)
        assert len(seq.pages) <= most, f"{where}: {len(seq.pages)} pages, of which a layer sees {most}"


def check_waiting(waiting: Iterable[Sequence]) -> None:
    """Assert that those that wait hold nothing."""
    for seq in waiting:
        holds = seq.slot, seq.pages, seq.planned, seq.computed
        assert holds == (None, [], 0, 0), f"sequence {seq.seq_id} waits, yet has (slot, pages, planned, computed) {holds}"
        assert not seq.local_pages, f"sequence {seq.seq_id} waits, yet holds local pages {seq.local_pages}"
        assert seq.first_page == seq.first_local_page == 0, f"sequence {seq.seq_id} waits, yet has given back pages"


def check_in_flight(live: Iterable[Sequence], in_flight: Iterable[tuple[StepPlan, list[Sequence]]]) -> None:
    """Assert that each live sequence counts its rows and sampled tokens in flight as the plans do."""
    rows: dict[Sequence, int] = {}
    samples: dict[Sequence, int] = {}
    for plan, seqs in in_flight:
        for seq, row in zip(seqs, plan.rows, strict=True):
            rows[seq] = rows.get(seq, 0) + 1
            samples[seq] = samples.get(seq, 0) + (row.sample and not is_known(seq, row))
    for seq in live:
        where = f"sequence {seq.seq_id}"
        assert seq.rows_in_flight == rows.get(seq, 0), f"{where}: {seq.rows_in_flight} rows in flight, found {rows.get(seq)}"
        assert seq.in_flight == samples.get(seq, 0), f"{where}: {seq.in_flight} tokens in flight, found {samples.get(seq)}"
        assert seq.num_output < max(1, seq.max_output), f"{where} has all its output, yet goes on"
