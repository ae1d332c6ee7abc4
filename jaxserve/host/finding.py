"""How far a sequence's tokens have been computed before: the way down the prefix tree, and what lies at its end.

Looks at a tree and changes nothing in it. Knows neither the pool nor who runs on what.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jaxserve.host.prefix import Node, PrefixTree
from jaxserve.host.tier import HostTier
from jaxserve.plan import RunnerLimits
from jaxserve.request import Sequence

MAX_CANDIDATES = 4
"""Pages, the newest first, that are looked at for one that agrees with the beginning of a page."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a sequence that is about to run need not compute.

    Attributes:
        nodes: full pages in order, the first of which is page `first_page` of the sequence: no layer sees those before it.
        num_idle: how many of them count as free until they are taken.
        copied: a further page that agrees in its first `num_copied` tokens; None for none.
        loaded: entries of the host tier for full pages after `nodes`.
        computing: the last page of its prefix that a more important sequence computes now, for which it had better wait.
    """

    nodes: tuple[Node, ...] = ()
    num_idle: int = 0
    copied: int | None = None
    num_copied: int = 0
    loaded: tuple[bytes, ...] = ()
    computing: Node | None = None
    first_page: int = 0


NOTHING = Found()


def find(
    tree: PrefixTree,
    seq: Sequence,
    limits: RunnerLimits,
    *,
    tier: HostTier | None,
    find_local: Callable[[Sequence, int], int] | None,
) -> Found:
    """What `seq`, which holds nothing, may start from: `num_skippable` of its tokens at most. O(its pages).

    Args:
        tier: where more may be found than is in the tree; None where there is none.
        find_local: how many of the first so many pages it may also start after in a pool of its own for layers with a window;
            None where there is no such pool.
    """
    size = tree.page_size
    root = tree.root(*seq.request.cache_root)
    last = seq.num_skippable // size
    path = find_path(tree, root, seq, limits, last)
    depth, first_seen = len(path), limits.first_seen_page
    nodes = path[first_seen(depth * size) :]
    computing = next((node for node in reversed(nodes) if node.page is None), None)
    if computing is not None:
        return Found(computing=computing)
    if find_local is not None:
        nodes = path[: find_local(seq, depth)]
        tree.prune(root)
        return Found(tuple(nodes), sum(node.idle for node in nodes))
    leaf = path[-1] if path else root
    loaded: tuple[bytes, ...] = ()
    copied, num_copied = None, 0
    if tier is not None:
        loaded = tier.find(tree, leaf, seq, depth, last)
    if not loaded:
        copied, num_copied = find_beginning(tree, leaf, seq, depth)
    tree.prune(root)
    first = first_seen((depth + len(loaded)) * size + num_copied)
    nodes = path[first:]
    idle = sum(node.idle for node in nodes)
    return Found(tuple(nodes), idle, copied, num_copied, loaded[max(0, first - depth) :], first_page=first)


def find_path(tree: PrefixTree, root: Node, seq: Sequence, limits: RunnerLimits, num_pages: int) -> list[Node]:
    """The nodes of the longest prefix of `seq`, of at most `num_pages`, that has, from the first page that the token after it
    sees, only pages that are there or that a more important sequence computes now."""
    tokens, size, first_seen = seq.tokens, tree.page_size, limits.first_seen_page
    path: list[Node] = []
    node, length, after_hole = root, 0, 0
    for index in range(num_pages):
        child = node.children.get(tree.key(tokens, index))
        if child is None:
            break
        path.append(child)
        if child.page is None and (child.owner is None or not _runs_before(child.owner, seq)):
            after_hole = index + 1
            if limits.window is None:
                break
        elif after_hole <= first_seen((index + 1) * size):
            length = index + 1
        node = child
    return path[:length]


def find_beginning(tree: PrefixTree, node: Node, seq: Sequence, depth: int) -> tuple[int | None, int]:
    """A page after `node` that begins as `seq` goes on, and in how many tokens it agrees, if they are worth a copy."""
    size = tree.page_size
    rest = seq.tokens[depth * size : min((depth + 1) * size, seq.num_skippable)]
    best, most = None, max(1, size // 8) - 1
    for child in itertools.islice(reversed(node.children.values()), MAX_CANDIDATES):
        if child.page is not None and (count := _agreement(rest, tree.tokens(child))) > most:
            best, most = child.page, count
    other = node.tail
    if other is not None and other.dispatched > depth * size and depth >= other.first_page:
        written = other.tokens[depth * size : min(other.dispatched, (depth + 1) * size)]
        if (count := _agreement(rest, written)) > most:
            best, most = other.pages[depth - other.first_page], count
    return best, 0 if best is None else most


def _runs_before(owner: Sequence, seq: Sequence) -> bool:
    """Whether `owner`, which runs, would get its share of each step before `seq`."""
    if owner.request.priority != seq.request.priority:
        return owner.request.priority < seq.request.priority
    return seq.turn < 0 or owner.turn < seq.turn


def _agreement(left: Seq[int], right: Seq[int]) -> int:
    """In how many tokens, from the first, the two agree."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
