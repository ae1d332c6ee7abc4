"""The tier below the pool: pages that were evicted and lie in host memory, found again by the tokens up to their end.

Owns which host slot holds which page of which prefix, what is given up first, and whether a page had better come back or be
computed again. Knows neither what slots hold nor which pages of the pool are free: it notes what a plan is to save and load.

An entry stands alone: it is named by a digest of its salt and all tokens up to its end, not by a place in the tree. So a page
keeps its slot when it comes back, and costs no second copy when it is evicted again; and one whose predecessors are gone is
merely not reached until they are there, or until it is the oldest.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxserve.host.cost import BucketFor, StepCost, StepWork, chunk_products
from jaxserve.host.prefix import Node, PrefixTree
from jaxserve.request import Sequence

Pays = Callable[[int, int, int], bool]
"""(tokens before the first page, pages in a row, tokens that the sequence has) -> whether to load them, not compute them."""

DIGEST_BYTES = 32
"""So long that two prefixes of one name cannot be made, nor met by chance."""


class HostTier:
    """Slots for evicted pages. Each operation is O(1), or O(pages) where it says so.

    Args:
        num_slots: pages that host memory holds, at least one.
        pays: decides between loading and computing.

    Attributes:
        num_saved, num_loaded: pages copied out and back since the start.
        num_lost: pages that were evicted from the pool and found no slot, or lost theirs to another.
    """

    def __init__(self, num_slots: int, pays: Pays) -> None:
        assert num_slots > 0, f"a tier of {num_slots} slots"
        self._num_slots = num_slots
        self._pays = pays
        self.num_saved = self.num_loaded = self.num_lost = 0
        self.clear()

    def __len__(self) -> int:
        """Pages held."""
        return len(self._slots)

    def clear(self) -> None:
        """Forget everything, and what the plan in the making was to save or load."""
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # the one to give up first comes first
        self._free = list(range(self._num_slots - 1, -1, -1))
        self._in_use: set[bytes] = set()  # entries that the plan in the making saves or loads; each moved to the end
        self._saves: list[tuple[int, int]] = []
        self._loads: list[tuple[int, int]] = []

    def find(self, tree: PrefixTree, node: Node, seq: Sequence, first: int, end: int) -> tuple[bytes, ...]:
        """Entries of the pages `[first, end)` of `seq`, the first of which follows `node`, up to one that is not here; none
        where it is cheaper to compute them. O(pages found and before them)."""
        digest = _digest(node)
        found = []
        for index in range(first, end):
            digest = _extend(digest, tree.key(seq.tokens, index))
            if digest not in self._slots:
                break
            found.append(digest)
        if not found or not self._pays(first * tree.page_size, len(found), len(seq.tokens)):
            return ()
        return tuple(found)

    def hold(self, entries: tuple[bytes, ...]) -> None:
        """Keep `entries`, which were just found, until the plan in the making is made."""
        for digest in reversed(entries):  # a page is given up before those that it follows
            self._use(digest)

    def load(self, entries: tuple[bytes, ...], pages: list[int]) -> None:
        """Have the plan in the making fill `pages` from `entries`, which are held."""
        self._loads += zip((self._slots[digest] for digest in entries), pages, strict=True)
        self.num_loaded += len(pages)

    def save(self, node: Node, page: int) -> None:
        """Have the plan in the making save `page`, just taken from `node`, unless it is here or everything here is in use."""
        digest = _digest(node)
        if digest not in self._slots:
            if not self._free and not self._give_up_oldest():
                self.num_lost += 1
                return
            self._slots[digest] = slot = self._free.pop()
            self._saves.append((page, slot))
            self.num_saved += 1
        self._use(digest)

    def _use(self, digest: bytes) -> None:
        self._slots.move_to_end(digest)
        self._in_use.add(digest)

    def _give_up_oldest(self) -> bool:
        digest = next(iter(self._slots))
        if digest in self._in_use:  # then all are, since those in use are at the end
            return False
        self._free.append(self._slots.pop(digest))
        self.num_lost += 1
        return True

    def take_moves(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """What the plan that has just been made saves, as (page, slot), and loads, as (slot, page)."""
        moves = tuple(self._saves), tuple(self._loads)
        if self._in_use:
            self._saves, self._loads = [], []
            self._in_use.clear()
        return moves

    def check_integrity(self) -> None:
        """Assert, between two plans, that each slot is free or holds one page. O(slots)."""
        slots = sorted([*self._slots.values(), *self._free])
        assert slots == list(range(self._num_slots)), f"slots are not each free or held once: {slots}"
        left_over = self._in_use or self._saves or self._loads
        assert not left_over, "moves are left over from a plan"


def _digest(node: Node) -> bytes:
    """The name of all tokens up to the end of `node`. O(nodes before it that have not been named yet)."""
    unnamed = []
    while not node.digest:
        unnamed.append(node)
        if node.parent is None:
            break
        node = node.parent
    digest = node.digest
    for node in reversed(unnamed):
        digest = node.digest = _hash(b"salt", node.key) if node.parent is None else _extend(digest, node.key)
    return digest


def _extend(digest: bytes, key: bytes) -> bytes:
    return _hash(b"page", digest + key)


def _hash(kind: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=kind).digest()


@dataclass(frozen=True, slots=True)
class LoadOrCompute:
    """Compares the seconds of loading pages with those of the steps that computing them takes, both measured.

    Steps are costed as if the sequence ran alone, with what it must compute in any case in both sums: so a page that only
    makes a step fuller saves nothing.

    Attributes:
        load_seconds: of a batch of so many pages; of one page at least. A load is cut into the largest that fit.
        step_cost, bucket_for: of steps.
        page_size: tokens.
        prefill_chunk: tokens of a step at most.
    """

    load_seconds: Mapping[int, float]
    step_cost: StepCost
    bucket_for: BucketFor
    page_size: int
    prefill_chunk: int

    def __call__(self, start: int, num_pages: int, num_tokens: int) -> bool:
        """Whether to load `num_pages` after `start` tokens, of a sequence of `num_tokens`."""
        loaded = start + num_pages * self.page_size
        saved = self.seconds_to_compute(start, num_tokens) - self.seconds_to_compute(loaded, num_tokens)
        return self.seconds_to_load(num_pages) < saved

    def ever(self, max_tokens: int) -> bool:
        """Whether a sequence of at most `max_tokens` would ever load: all pages but the last, or half of them."""
        for num_pages in ((max_tokens - 1) // self.page_size, max_tokens // (2 * self.page_size)):
            if num_pages and (self(0, num_pages, max_tokens) or self(0, num_pages, num_pages * self.page_size + 1)):
                return True
        return False

    def seconds_to_load(self, num_pages: int) -> float:
        """Seconds of loading so many pages."""
        seconds = 0.0
        for size in sorted(self.load_seconds, reverse=True):
            count, num_pages = divmod(num_pages, size)
            seconds += count * self.load_seconds[size]
        return seconds

    def seconds_to_compute(self, start: int, end: int) -> float:
        """Seconds of the steps that compute `[start, end)`."""
        seconds = 0.0
        while start < end:
            count = min(self.prefill_chunk, end - start)
            chunks = int(count > 1)
            bucket = self.bucket_for(1 - chunks, chunks * count, chunks)
            seconds += self.step_cost.seconds(
                StepWork(
                    places=bucket.num_tokens,
                    chunked=bucket.has_chunks,
                    num_rows=1,
                    num_chunks=chunks,
                    context_read=(1 - chunks) * (start + 1),
                    chunk_context=chunks * (start + count),
                    chunk_products=chunks * chunk_products(start, count),
                )
            )
            start += count
        return seconds
