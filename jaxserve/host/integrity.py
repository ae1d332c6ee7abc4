"""What must hold of sequences, and of prefixes that they share, between any two calls. O(everything): for tests and idle
moments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jaxserve.host.pages import PagePool
from jaxserve.host.prefix import Node, PrefixTree
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


def check_shared(tree: PrefixTree, pool: PagePool, leaves: Mapping[Sequence, Node], *, has_window: bool) -> None:
    """Assert that the tree, the pool whose pages it holds and the block tables of those that share them agree.

    Args:
        leaves: those that run, and the last page that each shares.
    """
    for node in tree.nodes():
        assert node.owner is None or node.owner in leaves, "a sequence that is gone owns a page to be computed"
        assert node.tail is None or node.tail in leaves, "the tail of a node is gone"
        if node.page is None:
            continue
        assert node.idle == (pool.num_references(node.page) == 0), f"page {node.page}: idle is {node.idle}"
        if not has_window and node.parent is not None and node.parent.parent:
            assert node.parent.page is not None, "a page without the one before it"
            assert node.idle or not node.parent.idle, "a page is in use, the one before it is idle"
    for seq, leaf in leaves.items():
        _check_path(tree, pool, seq, leaf)


def _check_path(tree: PrefixTree, pool: PagePool, seq: Sequence, leaf: Node) -> None:
    """Each shared page lies where the tokens say, and no other page of `seq` is in the tree or held by another."""
    where = f"sequence {seq.seq_id}"
    node = tree.root(*seq.request.cache_root)
    assert seq.num_shared * tree.page_size <= seq.dispatched <= seq.planned, f"{where}: {seq}"
    assert seq.first_page <= seq.num_shared, f"{where}: {seq}"
    for index in range(seq.num_shared):
        node = node.children[tree.key(seq.tokens, index)]
        page = node.page if index < seq.first_page else seq.pages[index - seq.first_page]
        assert node.page == page, f"{where}: page {index} is {page}, its prefix lies in {node.page}"
    for page in seq.pages[seq.num_shared - seq.first_page :]:
        assert pool.num_references(page) == 1, f"{where}: page {page}, which it writes, is shared"
    assert leaf is node, f"{where}: the last page that it shares is another"
