"""Owns which KV pages are free and how often the others are referenced. Knows ids, not what they hold or who holds them."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Page ids `0 .. num_pages - 1` with reference counts. The page freed last is given out first.

    A page that is kept does not become free when its last reference goes: it stays as it is, to be referenced again or
    discarded.

    Misuse (more pages than are free, a page released too often) is a bug of the caller and fails an assertion.
    """

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._kept = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        """Pages that nobody references or keeps."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each then referenced once."""
        split = len(self._free) - count
        assert 0 <= split <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        pages = self._free[split:]
        del self._free[split:]
        for page in pages:
            self._references[page] = 1
        return pages

    def num_references(self, page: int) -> int:
        """How often `page` is referenced."""
        return self._references[page]

    def retain(self, pages: Iterable[int]) -> None:
        """Reference pages that are in use or kept once more."""
        for page in pages:
            assert self._references[page] > 0 or self._kept[page], f"page {page} is free, so it holds nothing to share"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """Drop one reference of each page; of those without any left, the kept ones are returned and the others free."""
        kept: list[int] = []
        for page in pages:
            left = self._references[page] - 1
            assert left >= 0, f"page {page} is released, yet nobody references it"
            self._references[page] = left
            if left == 0:
                (kept if self._kept[page] else self._free).append(page)
        return kept

    def keep(self, page: int) -> None:
        """Keep a page, which is in use, beyond its last reference."""
        assert self._references[page] > 0, f"page {page} is free"
        assert not self._kept[page], f"page {page} is kept already"
        self._kept[page] = 1

    def discard(self, page: int) -> None:
        """Free a kept page that nobody references."""
        assert self._kept[page], f"page {page} is not kept"
        assert self._references[page] == 0, f"page {page} is discarded, yet referenced"
        self._kept[page] = 0
        self._free.append(page)

    def check_integrity(self, tables: Iterable[list[int]], kept: Iterable[int] = ()) -> None:
        """Assert that each page is free, in `kept`, or referenced, exactly as often as the block tables `tables` name it."""
        named = [0] * len(self._references)
        for table in tables:
            for page in table:
                named[page] += 1
        assert named == self._references, f"block tables name pages {named} times, the pool counts {self._references}"
        found = sorted(kept)
        expected = [page for page, is_kept in enumerate(self._kept) if is_kept]
        assert found == expected, f"pages {found} are kept, the pool knows of {expected}"
        free = sorted(self._free)
        expected = [page for page, count in enumerate(self._references) if count == 0 and not self._kept[page]]
        assert free == expected, f"the free list has pages {free}, unreferenced are {expected}"
