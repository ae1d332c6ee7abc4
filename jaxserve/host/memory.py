"""KV pages for sequences: which ones each holds, and which it shares because their prefix has been computed before.

Owns the pool, the prefix tree and what ties them to sequences' block tables. Does not know slots, budgets or order: the
scheduler says when a sequence opens, grows and closes.

What makes sharing safe is the scheduler's invariant that steps run in the order of their plans:

- A page enters the tree once all its tokens are known here and an *earlier* plan computes them. Whoever finds it is in a
  later plan, so it is read after it was written; a failed step ends with `clear`, since the pool may be lost.
- A row writes only positions that its sequence has not dispatched, and these are in pages of its own: full pages are shared,
  the page that a sequence writes never is. Where it starts in the middle of a page that others hold, it gets a copy.
- A page that comes back from the host tier is like one that is computed: the plan that loads it fills a page of the sequence's
  own, which enters the tree with the next plan. An evicted page may be given away in the plan that saves it, since its saves
  come before all that it writes.
- Whoever references a page of the tree references all pages before it that a layer still sees. Two sequences that compute the
  same page at once would break that, so the second to finish gives up its own for the first's.

Where every layer has a window, a sequence gives back the pages that no position still to be planned sees. Those in the tree
become idle, and may be evicted although others after them are there: a prefix has holes then. It is found as deep as there is
none in the window before. Where some layers have a window and others see all, those with one may have pages of their own,
which `local` owns: here are those of the others then.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from jaxserve.errors import ConfigError
from jaxserve.host import integrity
from jaxserve.host.finding import NOTHING, Found, find
from jaxserve.host.local import LocalPages
from jaxserve.host.pages import PagePool
from jaxserve.host.prefix import Node, PrefixTree, take_waiters
from jaxserve.host.tier import HostTier
from jaxserve.plan import RunnerLimits
from jaxserve.request import Sequence


class Memory:
    """The pool and, if `tree` is given, the prefixes in it, and in `tier` those that were evicted.

    Args:
        limits: of these, pages and window.

    Attributes:
        num_asked_tokens, num_hit_tokens: prompt tokens of sequences that ran, and how many of them were found.
    """

    def __init__(self, limits: RunnerLimits, tree: PrefixTree | None = None, tier: HostTier | None = None) -> None:
        page_size = limits.page_size
        assert tree is not None or tier is None, "a host tier without prefixes"
        assert tree is None or tree.page_size == page_size, f"pages of {page_size} tokens, a tree of {tree and tree.page_size}"
        self._limits = limits
        self._size = page_size
        self._pool = PagePool(limits.num_pages)
        self._tree = tree
        if tree is not None:
            tree.has_holes = limits.window is not None
        self.tier = tier
        self._local = None if limits.local is None else LocalPages(limits, tree)
        assert self._local is None or tier is None, "a host tier beside local pages"
        self._leaves: dict[Sequence, Node] = {}  # the last page that each shares
        self._ends: dict[Sequence, Node] = {}  # the last page that was full when it opened
        self.num_asked_tokens = 0
        self.num_hit_tokens = 0

    @property
    def num_free(self) -> int:
        """Pages that can be had: nobody references them, though they may hold a prefix."""
        return self._pool.num_free + (self._tree.num_idle if self._tree else 0)

    @property
    def num_cached(self) -> int:
        """Those of them that hold a prefix."""
        return self._tree.num_idle if self._tree else 0

    @property
    def num_pinned(self) -> int:
        """Pages that are never free, whether they have been computed yet or not."""
        return self._tree.num_pinned if self._tree else 0

    @property
    def num_evicted(self) -> int:
        """Pages that lost their prefix to make room, local ones too, since the start."""
        num_local = 0 if self._local is None else self._local.num_evicted
        return num_local + (self._tree.num_evicted if self._tree else 0)

    def num_only_of(self, seqs: Iterable[Sequence]) -> int:
        """Pages that would become free if all of `seqs` closed. O(their pages)."""
        counts = collections.Counter(itertools.chain.from_iterable(seq.pages for seq in seqs))
        return sum(self._pool.num_references(page) == count for page, count in counts.items())

    # A sequence's life.

    def find(self, seq: Sequence) -> Found:
        """What `seq`, which holds nothing, may start from: `num_skippable` of its tokens at most. O(its pages)."""
        if self._tree is None:
            return NOTHING
        find_local = None if self._local is None else self._local.find
        return find(self._tree, seq, self._limits, tier=self.tier, find_local=find_local)

    def open(self, seq: Sequence, found: Found) -> None:
        """Let `seq` start from what was just found for it: pages, cursors, and a promise to compute the rest."""
        tree = self._tree
        if tree is None:
            seq.cached = 0
            return
        for node in found.nodes:
            node.num_uses += 1
            if node.idle:
                tree.wake(node)
        seq.pages = [node.page for node in found.nodes if node.page is not None]
        self._pool.retain(seq.pages)
        seq.first_page = found.first_page
        seq.num_shared = found.first_page + len(seq.pages)
        seq.dispatched = seq.num_shared * self._size
        seq.planned = seq.computed = seq.dispatched + found.num_copied + len(found.loaded) * self._size
        if found.loaded:
            assert self.tier is not None
            self.tier.hold(found.loaded)
        if seq.cached is None:
            seq.cached = min(seq.planned, seq.num_prompt)
            self.num_asked_tokens += seq.num_prompt
            self.num_hit_tokens += seq.cached
        if self._local is not None:
            self._local.open(seq)
        leaf = found.nodes[-1] if found.nodes else self._anchor(tree, seq)
        self._leaves[seq] = leaf
        self._ends[seq] = self._promise(tree, seq, leaf)

    def _anchor(self, tree: PrefixTree, seq: Sequence) -> Node:
        """The node of the last page before `seq.first_page`, which has no page that `seq` needs; or the root."""
        node = tree.root(*seq.request.cache_root)
        for index in range(seq.first_page):
            node = tree.child(node, tree.key(seq.tokens, index))
        return node

    def _promise(self, tree: PrefixTree, seq: Sequence, node: Node) -> Node:
        """Make nodes for the full pages after `node` that `seq` will compute, so that others can wait for them; the last."""
        for index in range(seq.num_shared, len(seq.tokens) // self._size):
            node = tree.child(node, tree.key(seq.tokens, index))
            if node.page is None and node.owner is None:
                node.owner = seq
        node.num_open += 1
        node.tail = node.tail or seq
        return node

    def grow(self, seq: Sequence, count: int) -> None:
        """Give `seq` `count` more pages of its own. There must be that many free."""
        pool = self._pool
        while pool.num_free < count:
            assert self._tree is not None
            node, page = self._tree.evict()
            if self.tier is not None:
                self.tier.save(node, page)
            pool.discard(page)
        seq.pages += pool.allocate(count)
        if self._local is not None:
            self._local.grow(seq, count)

    def load(self, seq: Sequence, found: Found) -> None:
        """Have the plan in the making fill pages of `seq` with what was found for it in the host tier."""
        if found.loaded:
            assert self.tier is not None
            first = len(found.nodes)
            self.tier.load(found.loaded, seq.pages[first : first + len(found.loaded)])

    def wait(self, seq: Sequence, node: Node) -> None:
        """Have `share` or `close` return `seq` when `node`, which another computes, has its page or loses its owner."""
        assert node.owner is not None
        node.waiters.append(seq)

    def share(self, seq: Sequence) -> list[Sequence]:
        """Put full pages of `seq`, all tokens of which are known and in earlier plans, into the tree; who waited for them."""
        tree = self._tree
        if tree is None:
            return []
        woken = []
        node = self._leaves[seq]
        full = min(seq.planned, len(seq.tokens)) // self._size
        for index in range(seq.num_shared, full):
            node = tree.child(node, tree.key(seq.tokens, index))
            page = seq.pages[index - seq.first_page]
            if node.page is None:
                woken += self._fill(tree, node, page)
            else:
                self._give_up_own(tree, seq, index, node, node.page)
        if self._local is not None:
            self._local.share(seq, seq.num_shared, full)
        seq.num_shared = full
        self._leaves[seq] = node
        return woken

    def _fill(self, tree: PrefixTree, node: Node, page: int) -> list[Sequence]:
        self._pool.keep(page)
        if node.pinned:
            self._pool.retain([page])
        return tree.fill(node, page)

    def _give_up_own(self, tree: PrefixTree, seq: Sequence, index: int, node: Node, page: int) -> None:
        """`node` has a page already, computed by another at the same time."""
        if node.idle:
            tree.wake(node)
        self._pool.retain([page])
        self._pool.release([seq.pages[index - seq.first_page]])
        seq.pages[index - seq.first_page] = page

    def give_back_unseen(self, seq: Sequence) -> None:
        """Take from `seq`, which has been shared, the pages that no position from its planned cursor on sees. O(those)."""
        if self._local is not None:
            self._local.give_back_unseen(seq)
        first = self._limits.first_seen_page(seq.planned)
        count = first - seq.first_page
        if count > 0:
            assert self._tree is None or first <= seq.num_shared, f"sequence {seq.seq_id}: page {first} is not shared yet"
            unseen = seq.pages[:count]
            del seq.pages[:count]
            seq.first_page = first
            self._release(unseen)

    def _release(self, pages: list[int]) -> None:
        for page in self._pool.release(reversed(pages)):
            assert self._tree is not None
            self._tree.rest(page)

    def close(self, seq: Sequence) -> list[Sequence]:
        """Take all pages from `seq`; those that waited for pages which it now will not compute."""
        tree = self._tree
        if tree is None:
            self._release(seq.pages)
            seq.pages, seq.first_page = [], 0
            if self._local is not None:
                self._local.close(seq)
            return []
        woken = self.share(seq)
        if self._local is not None:
            self._local.close(seq)
        del self._leaves[seq]
        end = node = self._ends.pop(seq)
        end.num_open -= 1
        if end.tail is seq:
            end.tail = None
        while node.parent is not None and node.depth >= seq.num_shared:
            if node.owner is seq:
                node.owner = None
                woken += take_waiters(node)
            node = node.parent
        self._release(seq.pages)
        tree.prune(end)
        seq.pages = []
        seq.first_page = seq.num_shared = seq.dispatched = 0
        return woken

    # The whole.

    def take_moves(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """What the plan that has just been made saves to the host tier, as (page, slot), and loads, as (slot, page)."""
        return ((), ()) if self.tier is None else self.tier.take_moves()

    def pin(self, tokens: Seq[int], salt: str) -> int:
        """Keep the full pages of a prefix once they have been computed, now and after a `clear`; how many more those are.

        Raises:
            ConfigError: more than half of the pool would be pinned.
        """
        tree = self._tree
        if tree is None:
            return 0
        if self._local is not None:
            raise ConfigError("no prefix can be pinned where layers with a window have a pool of their own")
        nodes = tree.path(tokens, salt)
        num_new = sum(not node.pinned for node in nodes)
        if 2 * (tree.num_pinned + num_new) > self._limits.num_pages:
            tree.prune(nodes[-1])
            raise ConfigError(
                f"a prefix of {len(tokens)} tokens, {len(nodes)} pages of {self._size}, cannot be pinned: with the "
                f"{tree.num_pinned} pages pinned before it that is more than half of the pool's {self._limits.num_pages}"
            )
        for node in nodes:
            if node.page is not None and not node.pinned:
                if node.idle:
                    tree.wake(node)
                self._pool.retain([node.page])
            tree.pin(node)
        return num_new

    def drop_idle(self) -> int:
        """Forget every prefix that nobody references or has pinned; the pages that held one, those in the host tier too."""
        tree = self._tree
        if tree is None:
            return 0
        count = tree.num_idle
        for _ in range(count):
            self._pool.discard(tree.evict()[1])
        if self._local is not None:
            self._local.drop_idle()
        tree.num_evicted -= count
        if self.tier is not None:
            count += len(self.tier)
            self.tier.clear()
        return count

    def forget_adapter(self, load: int) -> int:
        """Forget every prefix of an adapter that no sequence has any more; the pages that held one.

        The host tier's are left to be given up in their turn: nothing finds them again.
        """
        pages = [] if self._tree is None else self._tree.forget_adapter(load)
        for page in pages:
            self._pool.discard(page)
        if self._local is not None:
            self._local.forget_adapter(load)
        return len(pages)

    def clear(self) -> None:
        """Forget every prefix, since pages may no longer hold anything. No sequence may be open."""
        tree = self._tree
        if tree is None:
            return
        assert not self._leaves, "prefixes are forgotten under a sequence that shares one"
        pinned = [node.page for node in tree.nodes() if node.pinned and node.page is not None]
        self._release(pinned)
        self.drop_idle()

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Assert that pool, tree and the block tables of those that run agree. O(everything)."""
        seqs = list(running)
        if self._local is not None:
            self._local.check_integrity(seqs)
        tables = [seq.pages for seq in seqs]
        tree = self._tree
        if tree is None:
            self._pool.check_integrity(tables)
            return
        tree.check_integrity()
        if self.tier is not None:
            self.tier.check_integrity()
        pinned = [node.page for node in tree.nodes() if node.pinned and node.page is not None]
        self._pool.check_integrity([*tables, pinned], [node.page for node in tree.nodes() if node.page is not None])
        assert set(seqs) == self._leaves.keys() == self._ends.keys(), "not those that run have shared prefixes"
        integrity.check_shared(tree, self._pool, self._leaves, has_window=self._limits.window is not None)
