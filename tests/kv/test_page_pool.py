"""The page pool: what is free, and when."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncllm.errors import IntegrityError
from asyncllm.kv.page_pool import PagePool
from helpers.tokens import ids


def test_pages_are_given_from_zero_on_and_the_last_freed_first() -> None:
    """Allocation is deterministic, so that runs repeat."""
    pool = PagePool(6)
    assert pool.allocate(3).tolist() == [0, 1, 2]
    pool.free(ids([1]))
    pool.free(ids([0]))
    assert pool.allocate(3).tolist() == [0, 1, 3]


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    pool = PagePool(4)
    pool.allocate(2)
    with pytest.raises(RuntimeError, match="3 pages asked for, 2 of 4 are free"):
        pool.allocate(3)
    assert pool.free_pages == 2
    assert pool.allocate(2).tolist() == [2, 3]


def test_a_page_freed_twice_is_an_error_and_nothing_is_freed() -> None:
    pool = PagePool(4)
    pages = pool.allocate(3)
    pool.free(pages[1:2])
    with pytest.raises(IntegrityError, match=r"pages \[1\] are freed a second time"):
        pool.free(pages)
    assert sorted(pool.free_list().tolist()) == [1, 3]


def test_a_page_deferred_is_freed_too_for_that_check() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    with pool.lazy_free():
        pool.free(pages)
        with pytest.raises(IntegrityError):
            pool.free(pages)
    assert pool.free_pages == 4


def test_pages_freed_in_a_region_join_at_its_end() -> None:
    pool = PagePool(4)
    pages = pool.allocate(4)
    with pool.lazy_free():
        pool.free(pages[:2])
        assert pool.free_pages == 0
        pool.free(pages[2:])
        assert pool.free_pages == 0
        assert pool.deferred().tolist() == [0, 1, 2, 3]
    assert pool.free_pages == 4
    assert pool.deferred().tolist() == []


def test_regions_nest_and_the_outermost_joins() -> None:
    pool = PagePool(4)
    pages = pool.allocate(4)
    with pool.lazy_free():
        with pool.lazy_free():
            pool.free(pages[:2])
        assert pool.free_pages == 0
        pool.free(pages[2:])
    assert pool.free_pages == 4


def test_an_exception_in_a_region_loses_no_page() -> None:
    pool = PagePool(4)
    pages = pool.allocate(4)
    with contextlib.suppress(KeyError), pool.lazy_free(), pool.lazy_free():
        pool.free(pages)
        raise KeyError
    assert sorted(pool.free_list().tolist()) == [0, 1, 2, 3]
    pool.allocate(1)
    pool.free(ids([pool.allocate(1)[0]]))
    assert pool.free_pages == 3, "no region is left open"


def test_a_region_is_a_value_that_is_entered_once() -> None:
    pool = PagePool(1)
    region = pool.lazy_free()
    with region:
        pass
    with pytest.raises(RuntimeError, match="entered once"), region:
        pass
    pool.free(pool.allocate(1))
    assert pool.free_pages == 1, "the failed entry opened nothing"


def test_freed_pages_are_copied() -> None:
    """A caller frees views on rows of the page table, which change before the region ends."""
    pool = PagePool(4)
    pages = pool.allocate(4)
    with pool.lazy_free():
        pool.free(pages)
        pages[:] = 0
    assert sorted(pool.free_list().tolist()) == [0, 1, 2, 3]


def test_a_pool_has_pages() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PagePool(0)


class PoolAgainstSets(RuleBasedStateMachine):
    """The pool against sets: allocate, free and nested regions, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(9)
        self.free = set(range(9))
        self.held: set[int] = set()
        self.deferred: set[int] = set()
        self.regions: list[contextlib.ExitStack] = []

    @rule(count=st.integers(0, 10))
    def allocate(self, count: int) -> None:
        """Allocate some, or too many."""
        if count > len(self.free):
            with pytest.raises(RuntimeError):
                self.pool.allocate(count)
            return
        pages = self.pool.allocate(count).tolist()
        assert len(pages) == len(set(pages)) == count
        assert set(pages) <= self.free
        self.free -= set(pages)
        self.held |= set(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """Free some of what is held."""
        pages = data.draw(st.sets(st.sampled_from(sorted(self.held))))
        self.pool.free(ids(sorted(pages)))
        self.held -= pages
        (self.deferred if self.regions else self.free).update(pages)

    @precondition(lambda self: len(self.regions) < 3)
    @rule()
    def open_region(self) -> None:
        """Defer from here on."""
        self.regions.append(contextlib.ExitStack())
        self.regions[-1].enter_context(self.pool.lazy_free())

    @precondition(lambda self: self.regions)
    @rule()
    def close_region(self) -> None:
        """End the innermost region."""
        self.regions.pop().close()
        if not self.regions:
            self.free |= self.deferred
            self.deferred = set()

    @invariant()
    def every_page_is_where_the_sets_say(self) -> None:
        """Compare everything."""
        listed = self.pool.free_list().tolist()
        assert sorted(listed) == sorted(self.free)
        assert sorted(self.pool.deferred().tolist()) == sorted(self.deferred)
        assert self.pool.free_pages == len(self.free)
        assert self.pool.num_pages == len(self.free) + len(self.deferred) + len(self.held)


TestPoolAgainstSets = PoolAgainstSets.TestCase
TestPoolAgainstSets.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


def test_ids_are_int32() -> None:
    assert PagePool(3).allocate(2).dtype == np.int32
