"""The page allocator against a set of free pages, and the table's snapshots."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from dspark_jax.serving.pages import NO_PAGE, OutOfPages, PageAllocator, PageTable

NUM_PAGES = 12


class AllocatorMachine(RuleBasedStateMachine):
    """Any order of allocations and frees keeps held and free pages apart and complete."""

    grants = Bundle("grants")

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(NUM_PAGES, page_size=4)
        self.free = set(range(NUM_PAGES))

    @rule(target=grants, count=st.integers(0, NUM_PAGES + 2))
    def allocate(self, count: int) -> list[int]:
        if count > len(self.free):
            with pytest.raises(OutOfPages, match=f"{count} pages wanted, {len(self.free)} of 12"):
                self.pages.allocate(count)
            return []
        granted = self.pages.allocate(count)
        assert len(set(granted)) == count
        assert self.free.issuperset(granted)
        self.free -= set(granted)
        return granted

    @rule(granted=consumes(grants))
    def give_back(self, granted: list[int]) -> None:
        self.pages.free(granted)
        self.free |= set(granted)

    @rule(page=st.integers(-2, NUM_PAGES + 2))
    def free_what_is_not_held(self, page: int) -> None:
        if page in self.free or not 0 <= page < NUM_PAGES:
            with pytest.raises(ValueError, match=f"page {page} is freed but not held"):
                self.pages.free([page])

    @invariant()
    def counts_agree(self) -> None:
        assert self.pages.num_free == len(self.free)
        assert self.pages.usage == pytest.approx(1 - len(self.free) / NUM_PAGES)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_freed_pages_come_back_first() -> None:
    pages = PageAllocator(8, page_size=4)
    first = pages.allocate(3)
    pages.allocate(2)
    pages.free(first)
    assert set(pages.allocate(3)) == set(first)


@given(num_tokens=st.integers(0, 100), page_size=st.integers(1, 9))
def test_pages_for_is_the_least_that_holds(num_tokens: int, page_size: int) -> None:
    count = PageAllocator(1, page_size).pages_for(num_tokens)
    assert count * page_size >= num_tokens > (count - 1) * page_size


def test_a_double_free_in_one_call_is_found() -> None:
    pages = PageAllocator(4, page_size=1)
    (page,) = pages.allocate(1)
    with pytest.raises(ValueError, match="not held"):
        pages.free([page, page])


def test_table_appends_and_clears() -> None:
    table = PageTable(num_slots=2, max_pages=4)
    table.append(1, [7])
    table.append(1, [3, 5])
    table.append(0, [2])
    expected = [[2, NO_PAGE, NO_PAGE, NO_PAGE], [7, 3, 5, NO_PAGE]]
    np.testing.assert_array_equal(table.snapshot(), expected)
    table.clear(1)
    np.testing.assert_array_equal(table.snapshot()[1], [NO_PAGE] * 4)
    table.append(1, [6])
    np.testing.assert_array_equal(table.snapshot()[1], [6, NO_PAGE, NO_PAGE, NO_PAGE])


def test_snapshots_are_shared_until_something_changes_and_never_change() -> None:
    table = PageTable(num_slots=1, max_pages=2)
    table.append(0, [4])
    before = table.snapshot()
    assert table.snapshot() is before
    table.append(0, [5])
    np.testing.assert_array_equal(before, [[4, NO_PAGE]])
    np.testing.assert_array_equal(table.snapshot(), [[4, 5]])
    with pytest.raises(ValueError, match="read-only"):
        before[0, 0] = 1
