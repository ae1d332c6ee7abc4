"""Pages of layers with a window, in a pool of their own, for models other layers of which see all.

Owns that pool, a tree of the prefixes in it, and what ties both to sequences' local block tables. A sequence gives back what
its window has left, so it holds few of these pages however long it is. There are as many as all sequences that run can hold,
or as many as in the other pool: so whoever gets a page there gets one here, and only pages there need to be counted.

A prefix is there when both pools have it: here, as deep as there is no hole in the window before. Knows neither slots, cursors
nor the other pool; `memory` keeps the two in step.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.host.finding import find_path
from jaxserve.host.pages import PagePool
from jaxserve.host.prefix import Node, PrefixTree
from jaxserve.plan import RunnerLimits
from jaxserve.request import Sequence


class LocalPages:
    """The pool and, if prefixes are kept, those in it."""

    def __init__(self, limits: RunnerLimits, prefixes: PrefixTree | None) -> None:
        local = limits.local
        assert local is not None, "a model without local layers"
        self._limits = local
        self._size = limits.page_size
        self._pool = PagePool(local.num_pages)
        self._tree = None if prefixes is None else PrefixTree(limits.page_size)
        if self._tree is not None:
            self._tree.has_holes = True
        self._leaves: dict[Sequence, Node] = {}  # the last page that each shares

    @property
    def num_evicted(self) -> int:
        """Pages that lost their prefix to make room, since the start."""
        return self._tree.num_evicted if self._tree else 0

    def find(self, seq: Sequence, num_pages: int) -> int:
        """How many of the first `num_pages` pages of `seq` it may start after."""
        tree = self._tree
        assert tree is not None
        root = tree.root(*seq.request.cache_root)
        path = find_path(tree, root, seq, self._limits, num_pages)
        tree.prune(root)
        return len(path)

    def open(self, seq: Sequence) -> None:
        """Let `seq` start after the pages that were just found for it: its `num_shared` first."""
        tree = self._tree
        if tree is None:
            return
        seq.first_local_page = self._limits.first_seen_page(seq.num_shared * self._size)
        node = tree.root(*seq.request.cache_root)
        for index in range(seq.num_shared):
            node = tree.child(node, tree.key(seq.tokens, index))
            if index >= seq.first_local_page:
                assert node.page is not None, f"sequence {seq.seq_id}: page {index} was found, and is not there"
                node.num_uses += 1
                if node.idle:
                    tree.wake(node)
                seq.local_pages.append(node.page)
        self._pool.retain(seq.local_pages)
        node.num_open += 1
        self._leaves[seq] = node

    def grow(self, seq: Sequence, count: int) -> None:
        """Give `seq` `count` more pages of its own."""
        pool = self._pool
        while pool.num_free < count:
            assert self._tree is not None, f"{count} local pages wanted, {pool.num_free} free"
            pool.discard(self._tree.evict()[1])
        seq.local_pages += pool.allocate(count)

    def share(self, seq: Sequence, first: int, end: int) -> None:
        """Put pages `[first, end)` of `seq`, which follow those that it has shared, into the tree."""
        tree = self._tree
        if tree is None:
            return
        node = last = self._leaves[seq]
        for index in range(first, end):
            node = tree.child(node, tree.key(seq.tokens, index))
            place = index - seq.first_local_page
            if node.page is None:
                self._pool.keep(seq.local_pages[place])
                tree.fill(node, seq.local_pages[place])
                continue
            if node.idle:
                tree.wake(node)
            self._pool.retain([node.page])
            self._pool.release([seq.local_pages[place]])
            seq.local_pages[place] = node.page
        node.num_open += 1
        last.num_open -= 1
        self._leaves[seq] = node

    def give_back_unseen(self, seq: Sequence) -> None:
        """Take from `seq`, which has been shared, the pages that no position from its planned cursor on sees. O(those)."""
        first = self._limits.first_seen_page(seq.planned)
        count = first - seq.first_local_page
        if count > 0:
            assert self._tree is None or first <= seq.num_shared, f"sequence {seq.seq_id}: page {first} is not shared yet"
            unseen = seq.local_pages[:count]
            del seq.local_pages[:count]
            seq.first_local_page = first
            for page in self._pool.release(reversed(unseen)):
                assert self._tree is not None
                self._tree.rest(page)

    def close(self, seq: Sequence) -> None:
        """Take all pages from `seq`."""
        tree = self._tree
        for page in self._pool.release(reversed(seq.local_pages)):
            assert tree is not None
            tree.rest(page)
        seq.local_pages, seq.first_local_page = [], 0
        if tree is not None:
            leaf = self._leaves.pop(seq)
            leaf.num_open -= 1
            tree.prune(leaf)

    def drop_idle(self) -> None:
        """Forget every prefix that nobody references."""
        tree = self._tree
        while tree is not None and tree.num_idle:
            self._pool.discard(tree.evict()[1])
            tree.num_evicted -= 1

    def forget_adapter(self, load: int) -> None:
        """Forget every prefix of an adapter that no sequence has any more."""
        for page in [] if self._tree is None else self._tree.forget_adapter(load):
            self._pool.discard(page)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Assert that pool, tree and the local block tables of those that run agree. O(everything)."""
        seqs = list(running)
        tables = [seq.local_pages for seq in seqs]
        for seq in seqs:
            where = f"sequence {seq.seq_id}"
            end = seq.first_local_page + len(seq.local_pages)
            assert end == seq.first_page + len(seq.pages), f"{where}: local pages end at {end}, others do not"
            seen = self._limits.first_seen_page(seq.planned)
            assert seq.first_local_page <= seen, f"{where}: local page {seq.first_local_page - 1} has gone, and is seen"
            most = self._limits.pages_for(seq.planned)
            assert len(seq.local_pages) <= most, f"{where}: {len(seq.local_pages)} local pages, of which {most} are seen"
        tree = self._tree
        if tree is None:
            self._pool.check_integrity(tables)
            return
        tree.check_integrity()
        nodes = [node for node in tree.nodes() if node.page is not None]
        self._pool.check_integrity(tables, [node.page for node in nodes if node.page is not None])
        for node in nodes:
            assert node.page is None or node.idle == (self._pool.num_references(node.page) == 0), f"page {node.page} is idle"
        assert set(seqs) == self._leaves.keys(), "not those that run share local pages"
        for seq in seqs:
            self._check_path(tree, seq)

    def _check_path(self, tree: PrefixTree, seq: Sequence) -> None:
        where = f"sequence {seq.seq_id}"
        assert seq.first_local_page <= seq.num_shared, f"{where}: {seq}"
        node = tree.root(*seq.request.cache_root)
        for index in range(seq.num_shared):
            node = node.children[tree.key(seq.tokens, index)]
            if index >= seq.first_local_page:
                page = seq.local_pages[index - seq.first_local_page]
                assert node.page == page, f"{where}: local page {index} is {page}, its prefix lies in {node.page}"
        for page in seq.local_pages[seq.num_shared - seq.first_local_page :]:
            assert self._pool.num_references(page) == 1, f"{where}: local page {page}, which it writes, is shared"
        assert self._leaves[seq] is node, f"{where}: the last local page that it shares is another"
