"""Cache pages: which are free, and which slot holds which."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

NO_PAGE = -1


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; nothing was taken."""


class PageAllocator:
    """Pages 0..num_pages - 1, each of `page_size` source positions. Every operation is O(pages moved)."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(
                f"num_pages and page_size must be at least 1, got {num_pages} and {page_size}"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        # A stack: the page freed last is the likeliest to be in a cache of the device.
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_held = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of pages held, 0..1."""
        return 1.0 - self.num_free / self.num_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` positions."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages.

        Raises `OutOfPages`, taking none, when fewer are free.
        """
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.num_pages} free")
        cut = len(self._free) - count
        pages = self._free[cut:][::-1]
        del self._free[cut:]
        for page in pages:
            self._is_held[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back.

        Raises ValueError at the first one that isn't held: somebody else may already be writing to it.
        """
        for page in pages:
            if not (0 <= page < self.num_pages and self._is_held[page]):
                raise ValueError(f"page {page} is freed but not held")
            self._is_held[page] = 0
            self._free.append(page)


class PageTable:
    """The pages of every slot, in the order of the positions they hold."""

    def __init__(self, num_slots: int, max_pages: int) -> None:
        self._table = np.full((num_slots, max_pages), NO_PAGE, np.int32)
        self._counts = [0] * num_slots
        self._snapshot: np.ndarray | None = None

    def append(self, slot: int, pages: list[int]) -> None:
        """Add pages behind those the slot holds."""
        count = self._counts[slot]
        self._table[slot, count : count + len(pages)] = pages
        self._counts[slot] = count + len(pages)
        self._snapshot = None

    def replace(self, slot: int, index: int, page: int) -> None:
        """Put another page in the place of the slot's page number `index`."""
        self._table[slot, index] = page
        self._snapshot = None

    def clear(self, slot: int) -> None:
        """Forget the pages of a slot."""
        self._table[slot, : self._counts[slot]] = NO_PAGE
        self._counts[slot] = 0
        self._snapshot = None

    def snapshot(self) -> np.ndarray:
        """The table as it is now, int32 [slots, max_pages], read-only, `NO_PAGE` where no page is held.

        Later changes don't reach it, because a device may read the host's array after the call that was given it
        has returned. It is copied only when something has changed.
        """
        if self._snapshot is None:
            self._snapshot = self._table.copy()
            self._snapshot.flags.writeable = False
        return self._snapshot
