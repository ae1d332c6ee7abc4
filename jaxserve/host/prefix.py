"""Which prefixes lie in which pages: a tree over full pages of tokens, and which of its pages to give up first.

Owns the tree's nodes, which of them are idle, and their order of eviction. Does not know reference counts or who holds a
page (`memory`), nor what pages hold.

A node is one full page of tokens after those of its parent, so a path from a root is a prefix; roots tell apart what else
changes K and V (`Request.cache_root`). A child is found by its tokens themselves, which a dictionary hashes with a key of
this process and then compares: a collision costs a comparison and never gives a wrong page, and nobody outside can aim for
one. A node may be without a page: while a sequence computes it (`owner`), and where it is pinned and not computed yet.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

from jaxserve.config import EngineConfig
from jaxserve.request import Sequence


class Node:
    """One full page of tokens in its place after a prefix.

    Attributes:
        parent: None for a root, which has no tokens and no page.
        key: the page's tokens, as `PrefixTree.key` spells them.
        depth: pages before it.
        num_idle: children that are idle.
        page: what holds its K and V; None while nothing does. Where layers have windows, one after it may have a page all the
            same.
        owner: the sequence that computes it now, while there is no page.
        waiters: sequences that wait for it to have a page.
        num_open: running sequences whose full pages, at their start, end here.
        tail: the first of those, whose next page may begin as another's; or None.
        idle: it has a page, which nobody references.
        pinned: never idle, and never forgotten.
        num_uses: times that a sequence found it.
        last_used: number of the tree's event at which it became idle last, which orders such events in time.
        value: what the policy gave it then; the least goes first.
        digest: the name of all tokens up to its end, once the host tier has asked for it.
    """

    __slots__ = (
        *("parent", "key", "depth", "children", "num_idle", "page", "owner", "waiters", "num_open", "tail"),
        *("idle", "pinned", "num_uses", "last_used", "value", "entry", "digest"),
    )

    def __init__(self, parent: Node | None, key: bytes, depth: int) -> None:
        self.parent = parent
        self.key = key
        self.depth = depth
        self.children: dict[bytes, Node] = {}
        self.num_idle = 0
        self.page: int | None = None
        self.owner: Sequence | None = None
        self.waiters: list[Sequence] = []
        self.num_open = 0
        self.tail: Sequence | None = None
        self.idle = False
        self.pinned = False
        self.num_uses = 0
        self.last_used = 0
        self.value = 0.0
        self.entry = -1  # number of its valid entry in the heap
        self.digest = b""


Policy = Callable[[Node, float], float]
"""(a node that has just become idle, the value of what was evicted last) -> its value. The tree evicts the least valuable
leaf among those that are idle, so idle children always go before their parents, unless it may have holes."""


def least_recently_used(node: Node, clock: float) -> float:
    """The leaf that has been idle for longest goes first."""
    return float(node.last_used)


def cost_aware(pages_of_linear_cost: float) -> Policy:
    """What is cheap to compute again and seldom used goes first: GreedyDual-Size with Frequency (Cherkasova, 1998).

    A node is worth what computing its page again costs, times its uses, on top of the value of what was evicted last: so
    what is not used for long is overtaken by what is new.

    Args:
        pages_of_linear_cost: pages before a page at which its attention costs as much as all else of it.
    """

    def value(node: Node, clock: float) -> float:
        return clock + (1.0 + node.depth / pages_of_linear_cost) * (1 + node.num_uses)

    return value


class PrefixTree:
    """Prefixes as pages. Each operation is O(1) a page, or O(log n) where it changes what is evicted next.

    Args:
        page_size: tokens per page.
        policy: which idle leaf goes first.

    Attributes:
        num_idle: nodes with a page that nobody references. All of them can be evicted, one after the other: one is always
            without idle children.
        has_holes: whether pages go without regard to those after them.
        num_evicted: since the start.
    """

    def __init__(self, page_size: int, policy: Policy = least_recently_used) -> None:
        self.page_size = page_size
        self._policy = policy
        self._pack = struct.Struct(f"{page_size}I").pack
        self._unpack = struct.Struct(f"{page_size}I").unpack
        self._roots: dict[bytes, Node] = {}
        self._by_page: dict[int, Node] = {}
        self._heap: list[tuple[float, int, Node]] = []  # idle leaves, and entries that are no longer valid
        self._num_entries = 0
        self._num_leaves = 0
        self._num_events = 0
        self._clock = 0.0
        self.has_holes = False
        self.num_idle = 0
        self.num_pinned = 0
        self.num_evicted = 0

    # Finding and growing.

    def key(self, tokens: Seq[int], index: int) -> bytes:
        """The name that page `index` of `tokens` has among its parent's children. The page must be full."""
        size = self.page_size
        return self._pack(*tokens[index * size : (index + 1) * size])

    def tokens(self, node: Node) -> tuple[int, ...]:
        """The tokens of a node that is no root."""
        return self._unpack(node.key)

    def root(self, salt: str, adapter: int = 0) -> Node:
        """The root of all prefixes under `salt` and of an adapter, as `Request.cache_root` has both, made when it is missing;
        `prune` it if nothing is added."""
        # The number ends where the colon is, whatever the salt has: no salt is another's adapter.
        key = b"%d:%b" % (adapter, salt.encode("utf-8", "surrogatepass"))
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Node(None, key, 0)
        return root

    def child(self, parent: Node, key: bytes) -> Node:
        """The child of that name, made when it is missing."""
        child = parent.children.get(key)
        if child is None:
            child = Node(parent, key, parent.depth + (parent.parent is not None))
            parent.children[key] = child
        return child

    def path(self, tokens: Seq[int], salt: str) -> list[Node]:
        """Nodes of the full pages of `tokens`, made where they are missing."""
        nodes: list[Node] = []
        for index in range(len(tokens) // self.page_size):
            nodes.append(self.child(nodes[-1] if nodes else self.root(salt), self.key(tokens, index)))
        return nodes

    def fill(self, node: Node, page: int) -> list[Sequence]:
        """Give `node` its page, which is in use; those that waited for it."""
        assert node.page is None, f"a node has page {node.page} already, and is given {page}"
        assert page not in self._by_page, f"page {page} has another node"
        node.page = page
        node.owner = None
        self._by_page[page] = node
        return take_waiters(node)

    def prune(self, node: Node) -> None:
        """Forget `node`, and then those before it, while nothing is there to remember."""
        while not (node.children or node.num_open or node.pinned or node.owner is not None or node.page is not None):
            parent = node.parent
            if parent is None:
                del self._roots[node.key]
                return
            del parent.children[node.key]
            node = parent

    # Idleness and eviction.

    def rest(self, page: int) -> None:
        """Nobody references `page` any more. It is cheapest for children to rest before their parents."""
        node = self._by_page[page]
        assert not node.idle
        assert node.parent is not None
        node.idle = True
        node.parent.num_idle += 1
        if not self.has_holes:
            self._forget_entry(node.parent)
        self._num_events += 1
        node.last_used = self._num_events
        node.value = self._policy(node, self._clock)
        self.num_idle += 1
        if self.has_holes or node.num_idle == 0:
            self._push(node)

    def wake(self, node: Node) -> None:
        """An idle node's page is referenced again. It is cheapest for parents to wake before their children."""
        assert node.idle
        parent = node.parent
        assert parent is not None
        node.idle = False
        self.num_idle -= 1
        self._forget_entry(node)
        parent.num_idle -= 1
        if parent.idle and parent.num_idle == 0 and not self.has_holes:
            self._push(parent)

    def evict(self) -> tuple[Node, int]:
        """Take the page of the least valuable idle leaf out of the tree: that node, and the page. One must be idle."""
        while True:
            value, entry, node = heapq.heappop(self._heap)
            if node.entry == entry:
                break
        self._clock = max(self._clock, value)
        self.num_evicted += 1
        return node, self._take_page(node)

    def _take_page(self, node: Node) -> int:
        page = node.page
        assert page is not None
        self.wake(node)
        node.page = None
        del self._by_page[page]
        self.prune(node)
        return page

    def forget_adapter(self, adapter: int) -> list[int]:
        """Take out every page that was computed with an adapter, all of them idle; the pages."""
        prefix = b"%d:" % adapter
        pages = []
        for root in [root for key, root in self._roots.items() if key.startswith(prefix)]:
            for node in reversed(list(_below(root))):
                if node.page is not None:
                    assert node.idle, f"page {node.page} of adapter {adapter} is in use, and to be forgotten"
                    pages.append(self._take_page(node))
        return pages

    def _push(self, node: Node) -> None:
        node.entry = self._num_entries
        heapq.heappush(self._heap, (node.value, node.entry, node))
        self._num_entries += 1
        self._num_leaves += 1
        if len(self._heap) > 2 * self._num_leaves + 64:
            self._heap = [entry for entry in self._heap if entry[2].entry == entry[1]]
            heapq.heapify(self._heap)

    def _forget_entry(self, node: Node) -> None:
        if node.entry >= 0:
            node.entry = -1
            self._num_leaves -= 1

    def pin(self, node: Node) -> None:
        """Never forget `node` again, nor let it be idle. Those before it must be pinned."""
        assert not node.idle, "whoever pins a page references it first"
        self.num_pinned += not node.pinned
        node.pinned = True

    # For tests and idle moments.

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before their children."""
        for root in self._roots.values():
            yield from _below(root)

    def check_integrity(self) -> None:
        """Assert that links, counts and the order of eviction are what the nodes say. O(nodes)."""
        nodes = list(self.nodes())
        paged = {node.page: node for node in nodes if node.page is not None}
        assert paged == self._by_page, "the pages of the nodes are not those that the tree knows"
        for node in nodes:
            self._check_node(node)
        assert self.num_idle == sum(node.idle for node in nodes), f"{self.num_idle} are counted idle"
        assert self.num_pinned == sum(node.pinned for node in nodes), f"{self.num_pinned} are counted pinned"
        leaves = {id(node) for node in nodes if node.idle and (self.has_holes or node.num_idle == 0)}
        entered = {id(node) for _, entry, node in self._heap if node.entry == entry}
        assert leaves == entered, "the heap does not have the idle leaves"
        assert self._num_leaves == len(leaves), f"{self._num_leaves} idle leaves are counted, found {len(leaves)}"
        for key, root in self._roots.items():
            assert root.children or root.num_open, f"{key!r} has a root and nothing else"

    def _check_node(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert parent.children[node.key] is node, "a node is not where its parent has it"
        assert node.num_idle == sum(child.idle for child in node.children.values()), "children that are idle"
        wanted = node.children or node.num_open or node.page is not None or node.owner or node.pinned
        assert wanted, "a node for nothing"
        assert node.tail is None or node.num_open, "the tail of a node where nobody ends"
        assert node.owner is None or node.page is None, "a node that has its page is being computed"
        assert node.owner is not None or not node.waiters, "nobody computes what others wait for"
        assert not node.idle or node.page is not None, "idle without a page"


def _below(root: Node) -> Iterator[Node]:
    """Every node after `root`, parents before their children."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()


def take_waiters(node: Node) -> list[Sequence]:
    """Those that wait for `node`, which then do not."""
    waiters, node.waiters = node.waiters, []
    return waiters


def make_tree(engine: EngineConfig, tokens_of_equal_cost: Callable[[], float]) -> PrefixTree | None:
    """An empty tree for the scheduler, as `engine` wants it.

    Args:
        tokens_of_equal_cost: tokens before a token at which its attention costs as much as all else of it; asked for where
            pages are evicted by their cost.
    """
    if not engine.prefix_cache:
        return None
    if engine.eviction == "lru":
        return PrefixTree(engine.page_size)
    return PrefixTree(engine.page_size, cost_aware(tokens_of_equal_cost() / engine.page_size))
