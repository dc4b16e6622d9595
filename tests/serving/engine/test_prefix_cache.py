"""What the prefix cache finds, shares and forgets, against what was written to every page."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dspark_jax.serving.pages import OutOfPages
from dspark_jax.serving.prefix_cache import Prefix, PrefixCache, extend_digests

SIZE = 4
NUM_PAGES = 9
NUM_SNAPSHOTS = 2


def digests_of(*pages: int) -> list[bytes]:
    """Of a text whose pages hold one number each."""
    digests: list[bytes] = []
    extend_digests(digests, np.repeat(np.array(pages, np.int32), SIZE), SIZE)
    return digests


def make_cache(num_pages: int = NUM_PAGES, num_snapshots: int = NUM_SNAPSHOTS) -> PrefixCache:
    return PrefixCache(num_pages, SIZE, num_snapshots)


def fill(cache: PrefixCache, digests: list[bytes]) -> list[int]:
    """Hold a text's pages, filled and remembered."""
    return [cache.remember(digest, cache.allocate(1)[0]) for digest in digests]


def test_a_digest_stands_for_all_tokens_up_to_the_end_of_its_page() -> None:
    text = np.arange(11, dtype=np.int32)
    whole: list[bytes] = []
    extend_digests(whole, text, SIZE)
    assert len(whole) == 2
    longer = list(whole[:1])
    extend_digests(longer, np.append(text, 11), SIZE)
    assert longer[:2] == whole
    assert len(set(longer)) == 3
    for changed in range(SIZE):
        other: list[bytes] = []
        extend_digests(other, np.where(text == changed, 99, text), SIZE)
        assert not set(other) & set(whole)


def test_the_same_tokens_behind_others_are_another_page() -> None:
    assert digests_of(1, 2)[1] != digests_of(3, 2)[1]
    assert digests_of(1, 1)[0] != digests_of(1, 1)[1]


def test_only_pages_with_a_snapshot_behind_them_can_be_started_from() -> None:
    cache, digests = make_cache(), digests_of(1, 2, 3)
    fill(cache, digests)
    assert cache.find(digests) == Prefix(3, 0)
    assert cache.new_place(digests[1]) is not None
    assert cache.find(digests) == Prefix(3, 2)
    assert cache.find(digests[:1]) == Prefix(1, 0)
    assert cache.find(digests_of(1, 2, 4)) == Prefix(2, 2)
    assert cache.find(digests_of(4, 2)) == Prefix(0, 0)


def test_without_a_place_for_snapshots_it_is_a_plain_allocator() -> None:
    cache = make_cache(num_snapshots=0)
    pages = cache.allocate(NUM_PAGES)
    with pytest.raises(OutOfPages, match=f"1 pages wanted, 0 of {NUM_PAGES} free"):
        cache.allocate(1)
    cache.free(pages)
    assert cache.num_free == NUM_PAGES


def test_a_page_filled_twice_is_held_once() -> None:
    cache, digests = make_cache(), digests_of(1, 2)
    first, second = fill(cache, digests), fill(cache, digests)
    assert first == second
    assert cache.num_free == NUM_PAGES - 2
    cache.free(first)
    assert cache.num_free == NUM_PAGES - 2
    cache.free(second)
    assert cache.num_free == NUM_PAGES
    with pytest.raises(ValueError, match="freed but not held"):
        cache.free(second)


def test_cached_pages_count_as_free_and_are_given_up_from_the_end_of_the_oldest_text() -> None:
    cache = make_cache()
    old, new = digests_of(1, 2, 3), digests_of(1, 4, 5, 6)
    pages = fill(cache, old)
    cache.free(pages)
    newer = fill(cache, new)
    cache.free(newer)
    assert cache.num_free == NUM_PAGES
    cache.allocate(NUM_PAGES - 6)  # those that hold nothing
    assert (cache.find(old), cache.find(new)) == (Prefix(3), Prefix(4))
    for left in ((2, 4), (1, 4), (1, 3), (1, 2), (1, 1), (0, 0)):
        cache.allocate(1)
        assert (cache.find(old).num_pages, cache.find(new).num_pages) == left


def test_a_held_page_is_never_given_up() -> None:
    cache, digests = make_cache(), digests_of(1, 2, 3)
    cache.free(fill(cache, digests))
    held = cache.hold(digests[:2])
    assert cache.num_free == NUM_PAGES - 2
    assert not set(cache.allocate(NUM_PAGES - 2)) & set(held)
    with pytest.raises(OutOfPages):
        cache.allocate(1)
    assert cache.find(digests) == Prefix(2)


def test_asking_for_too_many_pages_forgets_none() -> None:
    cache, digests = make_cache(), digests_of(1, 2, 3)
    cache.free(fill(cache, digests))
    held = cache.allocate(2)
    with pytest.raises(OutOfPages):
        cache.allocate(NUM_PAGES)
    assert cache.find(digests) == Prefix(3)
    cache.free(held)


def test_pages_that_a_hit_would_hold_are_not_free_for_the_rest_of_it() -> None:
    cache, digests = make_cache(), digests_of(1, 2, 3)
    pages = fill(cache, digests)
    assert cache.num_free_beside(digests) == cache.num_free == NUM_PAGES - 3
    cache.free(pages)
    assert cache.num_free_beside(digests[:2]) == NUM_PAGES - 2


def test_the_least_recently_used_snapshot_makes_place() -> None:
    cache, digests = make_cache(), digests_of(1, 2, 3, 4)
    fill(cache, digests)
    places = [cache.new_place(digest) for digest in digests[:2]]
    assert sorted(places) == [0, 1]
    assert cache.new_place(digests[0]) is None
    assert cache.place_of(digests[0]) == places[0]
    assert cache.new_place(digests[2]) == places[1]
    assert cache.find(digests) == Prefix(4, 3)
    assert cache.find(digests[:2]) == Prefix(2, 1)


def test_a_page_that_is_given_up_takes_its_snapshot_with_it() -> None:
    cache, digests = make_cache(num_snapshots=1), digests_of(1, 2)
    cache.free(fill(cache, digests))
    place = cache.new_place(digests[1])
    cache.free(cache.allocate(NUM_PAGES))
    again = fill(cache, digests)
    assert cache.find(digests) == Prefix(2, 0)
    assert cache.new_place(digests[0]) == place
    cache.free(again)


def test_a_cleared_cache_finds_nothing_and_loses_no_page() -> None:
    cache, digests = make_cache(), digests_of(1, 2, 3)
    cache.free(fill(cache, digests))
    cache.new_place(digests[0])
    held, shared = cache.hold(digests[:2]), cache.hold(digests[:2])
    cache.clear()
    assert cache.find(digests) == Prefix()
    assert cache.num_free == NUM_PAGES - 2
    later = fill(cache, digests)
    assert not set(later) & set(held)
    cache.free(held)
    assert cache.num_free == NUM_PAGES - 5
    cache.free(shared)
    assert cache.num_free == NUM_PAGES - 3
    assert cache.find(digests) == Prefix(3)
    cache.free(later)
    assert sorted(cache.allocate(NUM_PAGES)) == list(range(NUM_PAGES))


@dataclass
class Tenant:
    """A request: what its pages are to hold, those that it has, and how many of them it has filled."""

    text: tuple[int, ...]
    digests: list[bytes]
    pages: list[int]
    num_full: int = 0


texts = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)


class CacheMachine(RuleBasedStateMachine):
    """Requests come, fill pages, share them and go; nothing that anybody has is written or given away."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache()
        self.tenants: list[Tenant] = []
        self.contents: dict[int, bytes] = {}  # of pages, as far as they were filled
        self.saved: dict[int, bytes] = {}  # of places

    @property
    def held(self) -> set[int]:
        return {page for tenant in self.tenants for page in tenant.pages}

    @rule(text=texts, num_more=st.integers(0, 2))
    def admit(self, text: tuple[int, ...], num_more: int) -> None:
        digests = digests_of(*text)
        found = self.cache.find(digests)
        cached = digests[: found.num_resumable]
        num_new = len(text) + num_more - len(cached)
        if num_new > self.cache.num_free_beside(cached):
            return
        if cached:
            assert self.saved[self.cache.place_of(cached[-1])] == cached[-1]
        shared = self.cache.hold(cached)
        assert [self.contents[page] for page in shared] == cached
        before = self.held | set(shared)
        new = self.cache.allocate(num_new)
        assert not before & set(new)
        for page in new:
            self.contents.pop(page, None)
        self.tenants.append(Tenant(text, digests, shared + new, len(cached)))

    @precondition(lambda self: self.tenants)
    @rule(data=st.data(), saves=st.booleans())
    def feed(self, data: st.DataObject, saves: bool) -> None:
        tenant = data.draw(st.sampled_from(self.tenants))
        if tenant.num_full == len(tenant.text):
            return
        own, digest = tenant.pages[tenant.num_full], tenant.digests[tenant.num_full]
        others = {page for t in self.tenants if t is not tenant for page in t.pages}
        assert own not in others, "a page that two have would be written"
        self.contents[own] = digest
        page = self.cache.remember(digest, own)
        assert self.contents[page] == digest
        tenant.pages[tenant.num_full] = page
        tenant.num_full += 1
        place = self.cache.new_place(digest) if saves else None
        if place is not None:
            self.saved[place] = digest

    @precondition(lambda self: self.tenants)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        tenant = data.draw(st.sampled_from(self.tenants))
        self.tenants.remove(tenant)
        self.cache.free(tenant.pages)

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    @invariant()
    def held_pages_are_not_free(self) -> None:
        assert self.cache.num_free == NUM_PAGES - len(self.held)
        assert self.cache.usage == pytest.approx(len(self.held) / NUM_PAGES)

    @invariant()
    def pages_of_a_request_hold_what_it_fed(self) -> None:
        for tenant in self.tenants:
            assert len(set(tenant.pages)) == len(tenant.pages)
            full = tenant.pages[: tenant.num_full]
            assert [self.contents[page] for page in full] == tenant.digests[: tenant.num_full]

    def teardown(self) -> None:
        for tenant in self.tenants:
            self.cache.free(tenant.pages)
        assert sorted(self.cache.allocate(NUM_PAGES)) == list(range(NUM_PAGES))


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
