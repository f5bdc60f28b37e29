"""The cache manager, case by case: growing, matching, giving pages to the cache, returning everything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.kv.cache_manager import CacheManager, RequestPages
from asyncllm.kv.page_pool import PagePool
from asyncllm.kv.page_table import PageTable
from helpers.tokens import ids

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncllm.kv.page_pool import Pages


class Fixture(CacheManager):
    """A manager with short words for what tests do often."""

    def row(self, pages: RequestPages) -> list[int]:
        """A request's pages."""
        row: list[int] = self._table.row(pages.slot).tolist()
        return row

    def admit(self, tokens: str, namespace: str = "", *, copy: bool = True) -> RequestPages:
        """Match, lock and attach; the step that names it comes later."""
        match = self.match(ids(tokens), namespace)
        return self.attach(self.lock(match if copy else match.without_copy(self.page_size)))

    def launch(self, *needs: tuple[RequestPages, int]) -> tuple[list[list[int]], list[list[int]]]:
        """Grow and take the step's writes: (slot, column, page) and (source, target) each."""
        self.grow(needs)
        writes = self.take_step_writes()
        return writes.table_writes.T.tolist(), writes.page_copies.T.tolist()

    def compute(self, pages: RequestPages, tokens: str) -> None:
        """Launch and commit a step up to the end of `tokens`, all of them prompt."""
        self.launch((pages, len(tokens)))
        self.copy_done(pages)
        self.store(pages, ids(tokens), pages.namespace)

    def finish(self, tokens: str, namespace: str = "") -> None:
        """Run a request from its admission to its end."""
        pages = self.admit(tokens, namespace)
        self.launch((pages, len(tokens)))
        self.copy_done(pages)
        self.release(pages, ids(tokens), namespace)

    def counts(self) -> tuple[int, int, int, int]:
        """Free, owned, leased and evictable pages: all there are."""
        counts = self.free_pages, self.owned_pages, self.leased_pages, self.evictable_pages
        assert sum(counts) == self.num_pages
        assert self.available_pages == self.free_pages + self.evictable_pages
        assert self.cached_pages == self.leased_pages + self.evictable_pages
        return counts


def manager(*, page_size: int, num_pages: int = 8, num_slots: int = 4, max_pages_per_request: int = 8) -> Fixture:
    """Make a manager with a radix cache."""
    return Fixture(
        num_pages=num_pages,
        page_size=page_size,
        num_slots=num_slots,
        max_pages_per_request=max_pages_per_request,
        prefix_cache="radix",
    )


# Growing


def test_a_row_grows_by_whole_pages_when_its_length_passes_one() -> None:
    """Page size 4, 8 pages: 6 positions take 2 pages, 7 no more, 9 one more."""
    cache = manager(page_size=4)
    pages = cache.admit("abcdef")
    assert cache.launch((pages, 6)) == ([[0, 0, 0], [0, 1, 1]], [])
    assert (cache.row(pages), pages.num_pages, cache.free_pages) == ([0, 1], 2, 6)
    assert cache.launch((pages, 7)) == ([], [])
    assert cache.launch((pages, 8)) == ([], [])
    assert (pages.num_pages, cache.free_pages) == (2, 6)
    assert cache.launch((pages, 9)) == ([[0, 2, 2]], [])
    assert (cache.row(pages), pages.num_pages, cache.free_pages) == ([0, 1, 2], 3, 5)
    cache.check_integrity([pages])


@given(page_size=st.integers(1, 256), lengths=st.lists(st.integers(1, 600), min_size=1, max_size=6))
@settings(deadline=None, max_examples=60)
def test_a_row_has_exactly_the_pages_of_its_length(page_size: int, lengths: list[int]) -> None:
    cache = manager(page_size=page_size, num_pages=600, max_pages_per_request=600)
    pages = cache.admit("x")
    for length in sorted(lengths):
        cache.launch((pages, length))
        assert pages.num_pages == len(cache.row(pages)) == -(-length // page_size)
        assert pages.capacity_tokens == pages.num_pages * page_size
        assert cache.counts() == (600 - pages.num_pages, pages.num_pages, 0, 0)


def test_a_step_is_one_allocation_and_one_table_write_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is done for rows that need no page, and nothing at all if none does."""
    cache = manager(page_size=4)
    rows = [cache.admit(word) for word in ("a", "b", "c")]
    calls: list[int] = []
    allocate, extend = PagePool.allocate, PageTable.extend

    def counting_allocate(pool: PagePool, count: int) -> Pages:
        calls.append(count)
        return allocate(pool, count)

    def counting_extend(table: PageTable, slots: list[int], counts: list[int], pages: Pages) -> None:
        calls.append(len(slots))
        extend(table, slots, counts, pages)

    monkeypatch.setattr(PagePool, "allocate", counting_allocate)
    monkeypatch.setattr(PageTable, "extend", counting_extend)
    assert cache.launch((rows[0], 5), (rows[1], 4), (rows[2], 9))[0] == [
        [0, 0, 0],
        [0, 1, 1],
        [1, 0, 2],
        [2, 0, 3],
        [2, 1, 4],
        [2, 2, 5],
    ]
    assert calls == [6, 3]
    cache.launch((rows[0], 8), (rows[1], 5), (rows[2], 12))
    assert calls == [6, 3, 1, 1]
    cache.launch((rows[0], 8), (rows[1], 6), (rows[2], 12))
    assert calls == [6, 3, 1, 1]


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_a_short_free_list_is_filled_by_evicting_what_is_missing(page_size: int) -> None:
    """The pages got are distinct and none is leased."""
    cache = manager(page_size=page_size)
    cache.finish("a" * 2 * page_size)
    cache.finish("b" * 3 * page_size)
    leased = cache.admit("a" * 2 * page_size + "x")
    assert (leased.leased_pages, cache.counts()) == (2, (3, 0, 2, 3))
    grown = cache.admit("c")
    cache.launch((grown, 5 * page_size))
    assert cache.counts() == (0, 5, 2, 1)
    assert len({*cache.row(leased), *cache.row(grown)}) == 7
    cache.check_integrity([leased, grown])
    assert cache.match(ids("b" * 3 * page_size), "").tokens == page_size, "what is not missing is not evicted"


def test_what_cannot_be_had_changes_nothing() -> None:
    cache = manager(page_size=2, max_pages_per_request=6)
    cache.finish("aabb")
    one, two = cache.admit("aabbX"), cache.admit("cc")
    before = cache.counts()
    with pytest.raises(RuntimeError, match="8 pages asked for, 6 are free or evictable"):
        cache.grow([(one, 12), (two, 8)])
    with pytest.raises(ValueError, match="asks for 13 positions, a row holds 12"):
        cache.grow([(two, 4), (one, 13)])
    assert cache.counts() == before
    cache.check_integrity([one, two])
    assert cache.match(ids("aabbX"), "").whole_pages == 2, "nothing was evicted"


def test_pages_are_ids_of_the_pool() -> None:
    """The padding page of CUDA graphs has the id behind the last one: it is never given."""
    cache = manager(page_size=1)
    pages = cache.admit("abc")
    cache.launch((pages, 8))
    assert sorted(cache.row(pages)) == list(range(8))


# Matching


def test_the_last_token_is_never_matched() -> None:
    cache = manager(page_size=2)
    cache.finish("abcd")
    assert cache.match(ids("abcd"), "").tokens == 3
    assert cache.match(ids("abcde"), "").tokens == 4
    assert cache.match(ids("a"), "").tokens == 0
    with pytest.raises(ValueError, match="at least one token"):
        cache.match(ids(""), "")


@pytest.mark.parametrize("page_size", [1, 2, 4, 16, 256])
@pytest.mark.parametrize("prompt_pages", [1, 2, 3])
def test_a_prompt_of_whole_pages_sent_again_computes_its_last_token(page_size: int, prompt_pages: int) -> None:
    """B59, and B30: three times the same."""
    prompt = "".join(chr(1000 + index) for index in range(page_size * prompt_pages))
    cache = manager(page_size=page_size)
    cache.finish(prompt)
    for _ in range(2):
        pages = cache.admit(prompt)
        assert pages.cached_tokens == len(prompt) - 1
        cache.compute(pages, prompt)
        cache.check_integrity([pages])
        cache.release(pages, ids(prompt), "")
        assert cache.counts() == (8 - prompt_pages, 0, 0, prompt_pages)


@given(
    page_size=st.integers(1, 256),
    known=st.integers(1, 600),
    common=st.integers(0, 600),
    more=st.integers(0, 20),
)
@settings(deadline=None, max_examples=100)
def test_a_match_is_exact_to_the_token_for_every_page_size(page_size: int, known: int, common: int, more: int) -> None:
    """All that a finished request wrote is found again, wherever the prompts part."""
    cache = manager(page_size=page_size, num_pages=700, max_pages_per_request=700)
    stored = "".join(chr(1000 + index) for index in range(known))
    cache.finish(stored)
    common = min(common, known)
    prompt = stored[:common] + "x" * more
    if prompt:
        match = cache.match(ids(prompt), "")
        assert match.tokens == min(common, len(prompt) - 1)
        assert match.whole_pages == match.tokens // page_size
        pages = cache.admit(prompt)
        cache.compute(pages, prompt)
        cache.check_integrity([pages])


def test_a_match_inside_a_page_copies_its_head() -> None:
    """The whole pages are leased, the target is the request's own, the source stays leased until its step's commit."""
    cache = manager(page_size=4)
    cache.finish("abcdefgh")
    match = cache.match(ids("abcdefXX"), "")
    assert (match.tokens, match.whole_pages) == (6, 1)
    assert cache.pages_needed(match, 8) == 1, "the target counts in the need"
    assert cache.counts() == (6, 0, 0, 2), "a match locks nothing"
    lease = cache.lock(match)
    assert lease.whole_pages == 1
    assert cache.counts() == (6, 0, 2, 0)
    pages = cache.attach(lease)
    assert (pages.cached_tokens, pages.leased_tokens, pages.num_pages, pages.owned_pages) == (6, 4, 2, 1)
    assert cache.counts() == (5, 1, 2, 0)
    cache.check_integrity([pages])
    assert cache.launch((pages, 8)) == ([[0, 0, 0], [0, 1, 2]], [[1, 2]])
    assert cache.counts() == (5, 1, 2, 0)
    cache.copy_done(pages)
    assert cache.counts() == (5, 1, 1, 1)
    cache.copy_done(pages)
    assert cache.counts() == (5, 1, 1, 1), "done once"
    cache.release(pages, ids("abcdefXX"), "")
    assert cache.counts() == (5, 0, 0, 3)
    cache.check_integrity([])


def test_the_tail_of_a_finished_request_is_found() -> None:
    cache = manager(page_size=256)
    cache.finish("a short prompt, and its answer")
    pages = cache.admit("a short prompt, and another")
    assert pages.cached_tokens == len("a short prompt, and ")
    assert cache.launch((pages, 30))[1] == [[0, 1]]


@pytest.mark.parametrize("page_size", [1, 2, 4, 16, 256])
def test_samples_of_one_prompt_compute_it_once(page_size: int) -> None:
    """Those behind the first lease its whole pages and copy the partial one while it runs on."""
    cache = manager(page_size=page_size, num_pages=64, max_pages_per_request=16)
    prompt = "abcdefg"
    first = cache.admit(prompt)
    cache.compute(first, prompt)
    cache.launch((first, len(prompt) + 3))
    others = [cache.admit(prompt) for _ in range(3)]
    assert [pages.cached_tokens for pages in others] == [6, 6, 6]
    assert [pages.leased_pages for pages in others] == [6 // page_size] * 3
    _, copies = cache.launch(*[(pages, 7) for pages in others])
    assert len(copies) == (3 if 6 % page_size else 0)
    assert {source for source, _ in copies} <= set(cache.row(first))
    cache.check_integrity([first, *others])
    cache.release(first, ids(prompt + "hij"), "")
    cache.check_integrity(others)
    assert {source for source, _ in copies} <= {*leased_page_ids(cache)}, "until the copies' step is committed"
    for pages in others:
        cache.copy_done(pages)
        cache.store(pages, ids(prompt), "")
        cache.check_integrity(others)
    assert cache.match(ids(prompt + "hijk"), "").tokens == 10


def leased_page_ids(cache: CacheManager) -> Iterable[int]:
    """Go over the cached pages that are locked."""
    stack = list(cache._cache.roots())
    while stack:
        node = stack.pop()
        stack += node.children.values()
        if node.lock_count:
            yield from node.pages.tolist()


def test_a_shared_tail_grows_with_its_request() -> None:
    """A partial page is shared from its first committed chunk on, and becomes a whole one in place."""
    cache = manager(page_size=4)
    pages = cache.admit("abcdefghij")
    for end, found in ((2, 2), (3, 3), (6, 6), (8, 8), (10, 10)):
        cache.compute(pages, "abcdefghij"[:end])
        assert cache.match(ids("abcdefghijX"), "").tokens == found
        assert cache.counts() == (8 - pages.num_pages, 0, pages.num_pages, 0)
        cache.check_integrity([pages])
    assert cache.row(pages) == [0, 1, 2]


def test_the_copied_head_costs_a_request_as_large_as_the_pool_its_start() -> None:
    """The source is pinned beside the copy: so such a request goes without the copy, and does start."""
    cache = manager(page_size=4, num_pages=4)
    cache.finish("abcdefghijklmnop")
    match = cache.match(ids("abcdefXXXXXXXXXX"), "")
    assert cache.pages_needed(match, 16) == 3
    lease = cache.lock(match)
    assert cache.available_pages == 2
    cache.unlock(lease)
    lease = cache.lock(match.without_copy(4))
    assert cache.available_pages == 3
    pages = cache.attach(lease)
    assert pages.cached_tokens == 4
    cache.compute(pages, "abcdefXXXXXXXXXX")
    cache.check_integrity([pages])


@pytest.mark.parametrize(
    ("page_size", "matched_pages", "positions", "need"),
    [(16, 0, 17, 2), (16, 1, 17, 1), (128, 0, 2, 1), (1, 0, 7, 7), (4, 2, 8, 0), (4, 2, 9, 1)],
)
def test_need_is_exact_in_pages(page_size: int, matched_pages: int, positions: int, need: int) -> None:
    """Invariant 4: each request is rounded up by itself; one of 17 with a token to go needs a whole page of 16."""
    cache = manager(page_size=page_size)
    prompt = "".join(chr(1000 + index) for index in range(page_size * matched_pages))
    if prompt:
        cache.finish(prompt)
    match = cache.match(ids(prompt + "x"), "")
    assert cache.pages_needed(match, positions) == need


def test_two_requests_of_two_tokens_do_not_share_the_last_page() -> None:
    cache = manager(page_size=128, num_pages=1)
    match = cache.match(ids("ab"), "")
    assert cache.pages_needed(match, 2) == 1 == cache.available_pages
    cache.launch((cache.admit("ab"), 2))
    assert cache.pages_needed(match, 2) > cache.available_pages


def test_two_equal_prompts_of_one_admission_round_have_pages_of_their_own() -> None:
    """B60: nothing that the first one writes is promised to the second before it is committed."""
    cache = manager(page_size=2)
    one, two = cache.admit("aabbcc"), cache.admit("aabbcc")
    cache.launch((one, 6), (two, 6))
    assert not set(cache.row(one)) & set(cache.row(two))
    cache.check_integrity([one, two])


def test_namespaces_never_share() -> None:
    cache = manager(page_size=2)
    cache.finish("aabb", "one")
    assert cache.match(ids("aabbX"), "two").tokens == 0
    assert cache.match(ids("aabbX"), "one").tokens == 4
    pages = cache.admit("aabb", "two")
    cache.launch((pages, 4))
    for give in (cache.store, cache.release):
        with pytest.raises(ValueError, match="in namespace 'two', not 'one'"):
            give(pages, ids("aabb"), "one")


# Leases


def test_a_lease_ends_once() -> None:
    """B53: no lock count goes below zero."""
    cache = manager(page_size=2)
    cache.finish("aabb")
    lease = cache.lock(cache.match(ids("aabb"), ""))
    cache.check_integrity([])
    cache.unlock(lease)
    for end in (cache.unlock, cache.attach):
        with pytest.raises(RuntimeError, match="ended already"):
            end(lease)
    attached = cache.lock(cache.match(ids("aabb"), ""))
    pages = cache.attach(attached)
    for end in (cache.unlock, cache.attach):
        with pytest.raises(RuntimeError, match="ended already"):
            end(attached)
    cache.check_integrity([pages])
    cache.release(pages, ids(""), "")
    assert cache.counts() == (6, 0, 0, 2)


def test_a_match_whose_pages_were_evicted_is_refused() -> None:
    cache = manager(page_size=4)
    cache.finish("abcdefgh")
    whole, inside = cache.match(ids("abcdefghX"), ""), cache.match(ids("abXX"), "")
    cache.reset_prefix_cache()
    for match in (whole, inside):
        with pytest.raises(RuntimeError, match="evicted"):
            cache.lock(match)
    cache.check_integrity([])


def test_a_match_is_good_though_its_node_was_split() -> None:
    cache = manager(page_size=2)
    cache.finish("aabbcc")
    match = cache.match(ids("aabbccX"), "")
    cache.match(ids("aaX"), "")
    lease = cache.lock(match)
    assert cache.counts() == (5, 0, 3, 0)
    assert cache.row(cache.attach(lease)) == [0, 1, 2]


def test_a_match_of_nothing_is_good_though_its_tree_is_gone() -> None:
    cache = manager(page_size=2)
    cache.finish("aabb")
    match = cache.match(ids("cc"), "")
    cache.reset_prefix_cache()
    pages = cache.attach(cache.lock(match))
    cache.compute(pages, "cc")
    cache.check_integrity([pages])


def test_attach_without_a_slot_or_a_page_changes_nothing() -> None:
    cache = manager(page_size=4, num_pages=3, num_slots=1, max_pages_per_request=2)
    cache.finish("abcdefgh")
    pages = cache.admit("x")
    lease = cache.lock(cache.match(ids("abcdefXX"), ""))
    with pytest.raises(RuntimeError, match="no slot is free"):
        cache.attach(lease)
    cache.launch((pages, 4))
    cache.check_integrity([pages])
    cache = manager(page_size=4, num_pages=3, max_pages_per_request=2)
    cache.finish("abcdefgh")
    pages = cache.admit("x")
    cache.launch((pages, 4))
    lease = cache.lock(cache.match(ids("abcdefXX"), ""))
    with pytest.raises(RuntimeError, match="1 pages asked for, 0 are free or evictable"):
        cache.attach(lease)
    cache.check_integrity([pages])
    cache.unlock(lease)
    cache.check_integrity([pages])


# Giving pages to the cache


def test_whole_pages_are_shared_at_every_commit_of_a_chunk() -> None:
    cache = manager(page_size=2)
    pages = cache.admit("aabbccdd")
    cache.compute(pages, "aabb")
    assert (pages.leased_tokens, pages.owned_pages) == (4, 0)
    other = cache.admit("aabbccXX")
    assert other.cached_tokens == 4
    cache.compute(pages, "aabbccdd")
    assert cache.counts() == (4, 0, 4, 0)
    cache.check_integrity([pages, other])


def test_duplicates_are_replaced_in_the_row_before_they_are_freed() -> None:
    """The four ranges: leased, present, inserted, tail. The row's new pages are in the next launch's writes."""
    cache = manager(page_size=2, num_pages=16)
    cache.finish("aa")
    one, two = cache.admit("aabbccdde"), cache.admit("aabbccffg")
    cache.launch((one, 9), (two, 9))
    assert cache.row(one) == [0, 1, 2, 3, 4]
    assert cache.row(two) == [0, 5, 6, 7, 8]
    cache.store(one, ids("aabbccdde"), "")
    assert cache.launch((one, 10)) == ([], [])
    cache.store(two, ids("aabbccffg"), "")
    assert cache.row(two) == [0, 1, 2, 7, 8]
    assert cache.counts() == (9, 0, 7, 0)
    cache.check_integrity([one, two])
    # The request is not in the next step, the rewrite is; and there its old pages are handed out again.
    writes, _ = cache.launch((one, 13))
    assert [[two.slot, 1, 1], [two.slot, 2, 2]] == [write for write in writes if write[0] == two.slot]
    assert set(cache.row(one)[5:]) <= {5, 6}
    cache.check_integrity([one, two])


@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
@pytest.mark.parametrize("first", ["decoding", "prompt"])
def test_a_prompt_that_is_anothers_prompt_and_coming_output(page_size: int, first: str) -> None:
    """Both compute the output's KV; whoever gives it second finds duplicates."""
    cache = manager(page_size=page_size, num_pages=32, max_pages_per_request=16)
    decoding = cache.admit("abcd")
    cache.compute(decoding, "abcd")
    prompt = cache.admit("abcdefgh")
    assert prompt.cached_tokens == 4
    cache.launch((decoding, 8), (prompt, 8))
    cache.copy_done(prompt)
    if first == "prompt":
        cache.store(prompt, ids("abcdefgh"), "")
        cache.check_integrity([decoding, prompt])
        cache.release(decoding, ids("abcdefgh"), "")
    else:
        cache.release(decoding, ids("abcdefgh"), "")
        cache.check_integrity([prompt])
        cache.store(prompt, ids("abcdefgh"), "")
    cache.check_integrity([prompt])
    cache.launch((prompt, 12))
    cache.release(prompt, ids("abcdefghijkl"), "")
    cache.check_integrity([])
    assert cache.match(ids("abcdefghijklm"), "").tokens == 12
    assert cache.cached_pages <= -(-12 // page_size) + 1


def test_a_tail_that_fills_no_page_is_kept_as_a_leaf_when_the_request_ends() -> None:
    cache = manager(page_size=4)
    pages = cache.admit("abcdef")
    cache.launch((pages, 7))
    cache.release(pages, ids("abcdefg"), "")
    assert cache.counts() == (6, 0, 0, 2)
    assert cache.match(ids("abcdefgX"), "").tokens == 7


def test_only_known_positions_enter_the_cache() -> None:
    """Of a step whose token is dropped, nothing enters; what no known token needs is freed."""
    cache = manager(page_size=2)
    pages = cache.admit("aabb")
    cache.launch((pages, 7))
    cache.release(pages, ids("aabbc"), "")
    assert cache.counts() == (5, 0, 0, 3)
    assert cache.match(ids("aabbcdX"), "").tokens == 5
    failed = cache.admit("ddee")
    cache.launch((failed, 4))
    cache.release(failed, ids(""), "")
    assert cache.counts() == (5, 0, 0, 3)
    assert cache.match(ids("ddee"), "").tokens == 0


def test_no_more_tokens_can_be_given_than_the_row_has_place_for() -> None:
    cache = manager(page_size=4)
    pages = cache.admit("abcdefgh")
    cache.launch((pages, 4))
    for give in (cache.store, cache.release):
        with pytest.raises(ValueError, match="has place for 4 tokens, not 5"):
            give(pages, ids("abcde"), "")


# Returning everything


def test_pages_lease_and_slot_return_once_and_together() -> None:
    """Invariant 2: one door."""
    cache = manager(page_size=2)
    cache.finish("aabb")
    pages = cache.admit("aabbccdd")
    cache.launch((pages, 7))
    assert (cache.counts(), cache.free_slots) == ((4, 2, 2, 0), 3)
    cache.release(pages, ids("aabbcc"), "")
    assert (cache.counts(), cache.free_slots) == ((5, 0, 0, 3), 4)
    with pytest.raises(RuntimeError, match="released already"):
        cache.release(pages, ids("aabbcc"), "")
    with pytest.raises(RuntimeError, match="released already"):
        cache.store(pages, ids("aabbcc"), "")
    assert (cache.counts(), cache.free_slots) == ((5, 0, 0, 3), 4)


def test_a_release_drops_what_no_step_has_taken() -> None:
    """A request that ends before its first launch: neither its copy nor its row is written, nor its head trusted."""
    cache = manager(page_size=4)
    cache.finish("abcdefgh")
    pages = cache.admit("abcdefXX")
    assert cache.counts() == (5, 1, 2, 0)
    with pytest.raises(RuntimeError, match="was not launched"):
        cache.copy_done(pages)
    cache.release(pages, ids("abcdef"), "")
    assert cache.counts() == (6, 0, 0, 2)
    assert cache.launch() == ([], [])


def test_a_copy_that_no_committed_step_made_is_not_trusted() -> None:
    """Nor can it be stored; the source is unlocked with the release."""
    cache = manager(page_size=4)
    cache.finish("abcdefgh")
    pages = cache.admit("abcdefXX")
    assert len(cache.launch((pages, 8))[1]) == 1
    with pytest.raises(RuntimeError, match="before its page copy is done"):
        cache.store(pages, ids("abcdefXX"), "")
    cache.release(pages, ids("abcdefXX"), "")
    assert cache.counts() == (6, 0, 0, 2)
    assert cache.match(ids("abcdefXXX"), "").tokens == 6


def test_pages_released_in_a_region_are_free_at_its_end() -> None:
    """Also when a result raises; and a step that is built within it evicts what it lacks."""
    cache = manager(page_size=2)
    one, two, three = (cache.admit(word) for word in ("aa", "bb", "cc"))
    cache.launch((one, 4), (two, 4), (three, 8))
    with cache.releasing():
        cache.release(one, ids("a"), "")
        cache.release(two, ids(""), "")
        assert (cache.free_pages, cache.evictable_pages) == (0, 1)
        cache.launch((three, 10))
        cache.check_integrity([three])
    assert cache.counts() == (3, 5, 0, 0)
    with pytest.raises(ZeroDivisionError), cache.releasing():
        fail_after(cache, three)
    assert cache.counts() == (8, 0, 0, 0)


def fail_after(cache: CacheManager, pages: RequestPages) -> None:
    """Release, then raise."""
    cache.release(pages, ids(""), "")
    raise ZeroDivisionError


def test_a_reset_frees_what_nobody_leases() -> None:
    cache = manager(page_size=2)
    cache.finish("aabbcc")
    pages = cache.admit("aaX")
    assert cache.reset_prefix_cache() == 2
    assert cache.counts() == (7, 0, 1, 0)
    assert cache.match(ids("aabbccX"), "").tokens == 2
    cache.release(pages, ids(""), "")
    assert cache.reset_prefix_cache() == 1
    assert cache.counts() == (8, 0, 0, 0)


def test_the_version_grows_when_more_may_fit_or_match() -> None:
    """And not otherwise: a blocked head is not matched again in vain."""
    cache = manager(page_size=4)
    seen = cache.version

    def grew() -> bool:
        nonlocal seen
        before, seen = seen, cache.version
        assert seen >= before
        return seen > before

    pages = cache.admit("abcdef")
    cache.launch((pages, 6))
    assert not grew()
    cache.store(pages, ids("abcdef"), "")
    assert grew()
    copy = cache.admit("abcdeX")
    cache.launch((pages, 9), (copy, 6))
    cache.match(ids("abc"), "")
    assert not grew()
    cache.copy_done(copy)
    assert grew()
    cache.copy_done(copy)
    assert not grew()
    cache.release(pages, ids("abcdefghi"), "")
    assert grew()
    lease = cache.lock(cache.match(ids("abcdef"), ""))
    assert not grew()
    cache.unlock(lease)
    assert grew()
    cache.reset_prefix_cache()
    assert grew()


def test_step_writes_cannot_be_changed() -> None:
    """A device reads them as late as it likes."""
    cache = manager(page_size=2)
    cache.grow([(cache.admit("ab"), 2)])
    writes = cache.take_step_writes()
    for array in (writes.table_writes, writes.page_copies):
        assert not array.flags.writeable


def test_a_page_holds_tokens() -> None:
    with pytest.raises(ValueError, match="page_size must be at least 1"):
        manager(page_size=0)
