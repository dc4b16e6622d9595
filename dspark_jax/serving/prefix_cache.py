"""Cache pages that outlive their request: found again by the tokens they hold, given up when pages run short.

A page holds compressed entries; the rest of what a request keeps, its rings, is per slot and changes with every
token. So a prompt goes on behind pages that are there only where a *snapshot* of the rings was saved too.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dspark_jax.serving.pages import OutOfPages, PageAllocator

_DIGEST_BYTES = 32


def extend_digests(digests: list[bytes], token_ids: np.ndarray, page_size: int) -> None:
    """Append the digests that full pages of `token_ids` int32 [n] still lack.

    A digest stands for every token up to the end of its page, as the contents of the page do. It is cryptographic:
    whoever made two texts with the same one would be answered from what somebody else had asked.
    """
    for first in range(len(digests) * page_size, len(token_ids) - page_size + 1, page_size):
        before = digests[-1] if digests else bytes(_DIGEST_BYTES)
        page = token_ids[first : first + page_size].astype("<i4")
        digest = hashlib.blake2b(before + page.tobytes(), digest_size=_DIGEST_BYTES)
        digests.append(digest.digest())


class Prefix(NamedTuple):
    """How many of a text's first pages are there, and behind how many of them the rings were saved."""

    num_pages: int = 0
    num_resumable: int = 0


class _CachedPage:
    """A full page that can be found. It is never written again."""

    __slots__ = ("digest", "num_holders", "page")

    def __init__(self, digest: bytes, page: int) -> None:
        self.digest, self.page = digest, page
        self.num_holders = 1


class PrefixCache(PageAllocator):
    """A `PageAllocator` that keeps what it was told of the contents of pages until they are taken again.

    A cached page has any number of holders; without one it counts as free. The least recently held goes first, and
    of a text the last page before those it follows: who holds a page holds those before it, and gives them back
    behind it. Of the snapshots the least recently used makes place for a new one.
    """

    def __init__(self, num_pages: int, page_size: int, num_snapshots: int = 0) -> None:
        """Without snapshots nothing can be found again."""
        super().__init__(num_pages, page_size)
        self.num_snapshots = num_snapshots
        self._by_digest: dict[bytes, _CachedPage] = {}
        self._by_page: dict[int, _CachedPage] = {}
        self._unheld: OrderedDict[_CachedPage, None] = OrderedDict()  # next to go first
        self._places: OrderedDict[bytes, int] = OrderedDict()  # of snapshots, next to go first
        self._free_places = list(range(num_snapshots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return super().num_free + len(self._unheld)

    def num_free_beside(self, digests: Sequence[bytes]) -> int:
        """Pages that would be free if the cached ones of `digests` were held."""
        return self.num_free - sum(not self._by_digest[d].num_holders for d in digests)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, forgetting cached ones for them.

        Raises `OutOfPages`, taking and forgetting none, when fewer are free.
        """
        if count > self.num_free:
            raise OutOfPages(f"{count} pages wanted, {self.num_free} of {self.num_pages} free")
        while super().num_free < count:
            self._forget(next(iter(self._unheld)))
        return super().allocate(count)

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back, in the order of the positions they hold; cached ones stay for whoever shares them.

        Raises ValueError at the first one that isn't held.
        """
        for page in reversed(list(pages)):
            cached = self._by_page.get(page)
            if cached is None:
                super().free([page])
                continue
            if not cached.num_holders:
                raise ValueError(f"page {page} is freed but not held")
            cached.num_holders -= 1
            if not cached.num_holders:
                self._unheld[cached] = None
                if self._by_digest.get(cached.digest) is not cached:
                    self._forget(cached)  # `clear` was called meanwhile

    def find(self, digests: Sequence[bytes]) -> Prefix:
        """How much of a text with these pages is cached."""
        num_pages = num_resumable = 0
        for digest in digests:
            if digest not in self._by_digest:
                break
            num_pages += 1
            if digest in self._places:
                num_resumable = num_pages
        return Prefix(num_pages, num_resumable)

    def hold(self, digests: Sequence[bytes]) -> list[int]:
        """Take the cached pages of a text's beginning, all of which must be there."""
        return [self._hold(self._by_digest[digest]) for digest in digests]

    def remember(self, digest: bytes, page: int) -> int:
        """Let a held page, which is full and will not be written again, be found.

        Returns the page to hold from now on: another one if it holds the same, and `page` has been given back.
        """
        cached = self._by_digest.get(digest)
        if cached is not None:
            super().free([page])
            return self._hold(cached)
        self._by_digest[digest] = self._by_page[page] = _CachedPage(digest, page)
        return page

    def place_of(self, digest: bytes) -> int:
        """Where the snapshot behind this page is, which must be there."""
        self._places.move_to_end(digest)
        return self._places[digest]

    def new_place(self, digest: bytes) -> int | None:
        """Where to save a snapshot behind this cached page; None if there is one already."""
        if digest in self._places:
            return None
        if self._free_places:
            place = self._free_places.pop()
        else:
            _, place = self._places.popitem(last=False)
        self._places[digest] = place
        return place

    def clear(self) -> None:
        """Forget everything. Pages that are held stay so, and are plain ones afterwards for all who look."""
        while self._unheld:
            self._forget(next(iter(self._unheld)))
        self._by_digest.clear()
        self._free_places += self._places.values()
        self._places.clear()

    def _hold(self, cached: _CachedPage) -> int:
        self._unheld.pop(cached, None)
        cached.num_holders += 1
        return cached.page

    def _forget(self, cached: _CachedPage) -> None:
        """Make an unheld page a free one that nobody finds."""
        del self._unheld[cached], self._by_page[cached.page]
        if self._by_digest.get(cached.digest) is cached:
            del self._by_digest[cached.digest]
            if cached.digest in self._places:
                self._free_places.append(self._places.pop(cached.digest))
        super().free([cached.page])
