"""The radix cache, case by case; the state machine holds it as a whole."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import pytest

from asyncllm.kv import radix_tree
from asyncllm.kv.radix_cache import RadixCache, RadixMatch
from helpers.tokens import ids

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncllm.kv.radix_tree import Node, Tokens


def put(cache: RadixCache, tokens: str, pages: Iterable[int], namespace: str = "") -> list[int]:
    """Give the cache a finished request's pages, from the root on; return the pages that were present."""
    root = cache.root(namespace)
    cache.lock(root)
    extension = cache.extend(root, ids(tokens), ids(pages))
    cache.unlock(extension.end)
    present: list[int] = extension.present.tolist()
    return present


def matched(cache: RadixCache, tokens: str, namespace: str = "") -> tuple[list[int], list[int], int]:
    """Match; return the pages of the whole pages, of the source, and how many tokens of the source match."""
    found = cache.match(ids(tokens), namespace)
    whole = [] if found.node is None else cache.prefix_pages(found.node).tolist()
    assert found.whole_pages == len(whole)
    return whole, [] if found.source is None else found.source.pages.tolist(), found.source_tokens


def locked(cache: RadixCache, found: RadixMatch) -> Node:
    """Lock what matched in whole pages."""
    assert found.node is not None
    cache.lock(found.node)
    return found.node


def test_an_empty_tree_matches_nothing_and_keeps_no_root() -> None:
    cache = RadixCache(4)
    assert matched(cache, "abcdefgh") == ([], [], 0)
    assert list(cache.roots()) == []


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("abcdefgh", ([7, 8], [], 0)),  # exactly
        ("abcdefghij", ([7, 8], [], 0)),  # and more
        ("abcdXXXX", ([7], [], 0)),  # ends between two pages of a node
        ("abcdefXX", ([7], [8], 2)),  # ends inside a page of a node
        ("abXXefgh", ([], [7], 2)),  # ends inside the first page
        ("abcdefg", ([7], [8], 3)),  # the tokens end inside a page
        ("abc", ([], [7], 3)),  # less than a page of tokens
        ("", ([], [], 0)),
        ("XbcdefghX", ([], [], 0)),
    ],
)
def test_a_match_ends_between_or_inside_pages(tokens: str, expected: tuple[list[int], list[int], int]) -> None:
    cache = RadixCache(4)
    put(cache, "abcdefgh", [7, 8])
    assert matched(cache, tokens) == expected


def test_tails_that_fill_no_page_are_found() -> None:
    """Prompts of less than a page share too, which matters where a page is 256 tokens."""
    cache = RadixCache(4)
    put(cache, "ab", [7])
    put(cache, "abcdef", [8, 9])
    assert matched(cache, "abcdefXX") == ([8], [9], 2)
    cache = RadixCache(4)
    put(cache, "abc", [7])
    assert matched(cache, "abcdef") == ([], [7], 3)
    assert matched(cache, "abX") == ([], [7], 2)


def test_of_several_children_the_one_with_the_longest_common_head_is_the_source() -> None:
    cache = RadixCache(4)
    for page, tokens in enumerate(["aXXX", "abXX", "abcX", "abd", "b"]):
        put(cache, tokens, [page])
    assert matched(cache, "abce") == ([], [2], 3)
    assert matched(cache, "abde") == ([], [3], 3)
    assert matched(cache, "abe") in [([], [page], 2) for page in (1, 2, 3)]
    assert matched(cache, "c") == ([], [], 0)


def test_page_size_one_never_copies() -> None:
    cache = RadixCache(1)
    put(cache, "abc", [0, 1, 2])
    assert matched(cache, "abX") == ([0, 1], [], 0)


def test_namespaces_never_share() -> None:
    cache = RadixCache(2)
    put(cache, "abcd", [0, 1], namespace="one")
    assert matched(cache, "abcd", namespace="two") == ([], [], 0)
    put(cache, "abcd", [2, 3], namespace="two")
    assert matched(cache, "abcd", namespace="one") == ([0, 1], [], 0)
    assert matched(cache, "abcd", namespace="two") == ([2, 3], [], 0)


def test_what_is_present_stays_and_is_reported() -> None:
    cache = RadixCache(2)
    put(cache, "abcd", [0, 1])
    assert put(cache, "abcdef", [5, 6, 7]) == [0, 1]
    assert matched(cache, "abcdef") == ([0, 1, 7], [], 0)
    assert put(cache, "abXX", [8, 9]) == [0]
    assert cache.evictable_pages == 4


def test_a_tail_that_is_covered_is_not_kept() -> None:
    cache = RadixCache(4)
    put(cache, "abcdef", [0, 1])
    assert put(cache, "abcdef", [2, 3]) == [0]
    assert put(cache, "abcde", [4, 5]) == [0]
    assert put(cache, "abc", [6]) == []
    assert cache.evictable_pages == 2
    assert matched(cache, "abcdefXX") == ([0], [1], 2)


@pytest.mark.parametrize(("later", "pages"), [("abc", [1]), ("abcdefgh", [1, 2]), ("abcdef", [1, 2])])
def test_a_tail_makes_place_for_what_begins_with_it(later: str, pages: list[int]) -> None:
    """Each turn of a conversation replaces the tail of the one before."""
    cache = RadixCache(4)
    put(cache, "ab", [0])
    root = cache.root("")
    cache.lock(root)
    extension = cache.extend(root, ids(later), ids(pages))
    assert extension.superseded.tolist() == [0]
    cache.unlock(extension.end)
    assert cache.evictable_pages == len(pages)
    assert sorted(cache.evict(9).tolist()) == pages


def test_a_locked_tail_stays_beside_what_begins_with_it() -> None:
    cache = RadixCache(4)
    put(cache, "ab", [0])
    source = cache.match(ids("abX"), "").source
    assert source is not None
    cache.lock(source)
    put(cache, "abcd", [1])
    assert (cache.leased_pages, cache.evictable_pages) == (1, 1)
    cache.unlock(source)
    assert sorted(cache.evict(9).tolist()) == [0, 1]


def test_locking_moves_pages_from_evictable_to_leased_and_back() -> None:
    cache = RadixCache(2)
    put(cache, "abcdef", [0, 1, 2])
    assert (cache.evictable_pages, cache.leased_pages) == (3, 0)
    node = locked(cache, cache.match(ids("abcd"), ""))
    assert (cache.evictable_pages, cache.leased_pages) == (1, 2)
    cache.lock(node)
    assert (cache.evictable_pages, cache.leased_pages) == (1, 2), "twice locked pages count once"
    cache.unlock(node)
    assert (cache.evictable_pages, cache.leased_pages) == (1, 2)
    cache.unlock(node)
    assert (cache.evictable_pages, cache.leased_pages) == (3, 0)


def test_pages_that_many_prompts_share_count_once() -> None:
    """B52: counting is by page, not by prompt."""
    cache = RadixCache(2)
    for index in range(20):
        put(cache, "abcdefghij" + chr(65 + index) * 2, range(6 * index, 6 * index + 6))
    assert cache.evictable_pages == 5 + 20
    assert len(cache.evict(99)) == 25
    assert cache.evictable_pages == 0


def test_the_matched_node_itself_is_locked_and_all_above_it() -> None:
    """B54: what matched survives any eviction."""
    cache = RadixCache(2)
    put(cache, "ab", [0])
    put(cache, "abcd", [5, 1])
    put(cache, "abcdef", [5, 6, 2])
    node = locked(cache, cache.match(ids("abcd"), ""))
    assert cache.evict(99).tolist() == [2]
    assert matched(cache, "abcdef") == ([0, 1], [], 0)
    cache.unlock(node)
    assert cache.evict(99).tolist() == [1, 0]


def test_a_split_keeps_the_sums() -> None:
    """B55: evictable + leased = all, when a locked or an unlocked node is split."""
    cache = RadixCache(2)
    put(cache, "abcdefgh", [0, 1, 2, 3])
    node = locked(cache, cache.match(ids("abcdefgh"), ""))
    put(cache, "abcdXX", [7, 8, 4])
    assert (cache.evictable_pages, cache.leased_pages) == (1, 4)
    cache.unlock(node)
    assert (cache.evictable_pages, cache.leased_pages) == (5, 0)
    matched(cache, "ab")
    assert (cache.evictable_pages, cache.leased_pages) == (5, 0)
    assert sorted(cache.evict(99).tolist()) == [0, 1, 2, 3, 4]


def test_a_lock_pins_no_more_than_was_matched() -> None:
    """B56: prompts A+B, then A+C: finishing both leaves nothing that cannot be evicted."""
    cache = RadixCache(4)
    put(cache, "aaaaaaaabbbb", [0, 1, 2])
    node = locked(cache, cache.match(ids("aaaaaaaacccc"), ""))
    assert (cache.leased_pages, cache.evictable_pages) == (2, 1)
    extension = cache.extend(node, ids("cccc"), ids([3]))
    assert (cache.leased_pages, cache.evictable_pages) == (3, 1)
    cache.unlock(extension.end)
    assert sorted(cache.evict(99).tolist()) == [0, 1, 2, 3]
    assert list(cache.roots()) == []


def test_the_source_of_a_copy_is_one_page() -> None:
    """B56: locking the source pins its page, not the run that it is in."""
    cache = RadixCache(4)
    put(cache, "aaaabbbbccccdddd", [0, 1, 2, 3])
    found = cache.match(ids("aaaabbXX"), "")
    assert found.source is not None
    cache.lock(found.source)
    assert (cache.leased_pages, cache.evictable_pages) == (2, 2)


def test_the_least_recently_used_goes_first() -> None:
    cache = RadixCache(2)
    for page, tokens in enumerate(["aa", "bb", "cc"]):
        put(cache, tokens, [page])
    matched(cache, "aa")
    assert cache.evict(1).tolist() == [1]
    assert cache.evict(2).tolist() == [2, 0]


def test_a_partial_match_of_a_node_refreshes_what_matched() -> None:
    """The part that matched is young, the rest of the run stays as old as it was."""
    cache = RadixCache(2)
    put(cache, "aaaa", [0, 1])
    put(cache, "bb", [2])
    matched(cache, "aacc")
    assert cache.evict(1).tolist() == [1]
    assert cache.evict(1).tolist() == [2]
    cache = RadixCache(2)
    put(cache, "aa", [0])
    put(cache, "bb", [1])
    matched(cache, "ac")
    assert cache.evict(1).tolist() == [1], "the source of a copy is refreshed too"


def test_parents_go_after_their_children_and_ends_before_beginnings() -> None:
    cache = RadixCache(1)
    put(cache, "abc", [0, 1, 2])
    put(cache, "abd", [7, 8, 3])
    assert cache.evict(1).tolist() == [2]
    assert cache.evict(1).tolist() == [3]
    assert cache.evict(1).tolist() == [1]
    assert matched(cache, "abc") == ([0], [], 0)


def test_eviction_takes_as_many_pages_as_are_missing() -> None:
    cache = RadixCache(2)
    put(cache, "abcdefgh", [0, 1, 2, 3])
    assert cache.evict(3).tolist() == [1, 2, 3]
    assert matched(cache, "abcdefgh") == ([0], [], 0)
    assert cache.evict(0).tolist() == []


def test_a_root_goes_with_its_last_page_or_lease() -> None:
    """Namespaces come and go; none leaves anything behind."""
    cache = RadixCache(2)
    put(cache, "ab", [0], namespace="one")
    root = cache.root("two")
    cache.lock(root)
    cache.evict(9)
    assert [root.namespace for root in cache.roots()] == ["two"]
    cache.unlock(root)
    assert list(cache.roots()) == []


def test_many_children_do_not_slow_a_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """A match compares runs along its path and two neighbours, whatever the number of children."""
    cache = RadixCache(4)
    for index in range(3000):
        put(cache, chr(1000 + index) + "abc", [index])
    compared = 0
    compare = radix_tree.common_length

    def counting(one: Tokens, other: Tokens) -> int:
        nonlocal compared
        compared += 1
        return compare(one, other)

    monkeypatch.setattr(radix_tree, "common_length", counting)
    assert matched(cache, chr(2500) + "abX") == ([], [1500], 3)
    assert matched(cache, chr(2500) + "abc") == ([1500], [], 0)
    assert compared <= 4


def test_eviction_looks_at_what_it_evicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heap holds unlocked leaves; each eviction takes few entries off it, whatever the number of nodes."""
    cache = RadixCache(2)
    for index in range(3000):
        put(cache, chr(1000 + index) + "a", [index])
    popped = 0
    pop = heapq.heappop

    def counting(heap: list[tuple[int, int, Node]]) -> tuple[int, int, Node]:
        nonlocal popped
        popped += 1
        return pop(heap)

    monkeypatch.setattr(heapq, "heappop", counting)
    assert cache.evict(10).tolist() == list(range(10))
    assert popped == 10


def test_use_does_not_grow_the_heap() -> None:
    """However often a leaf is locked, unlocked and matched, it has one entry."""
    cache = RadixCache(2)
    put(cache, "ab", [0])
    put(cache, "cd", [1])
    for _ in range(100):
        cache.unlock(locked(cache, cache.match(ids("ab"), "")))
    assert len(cache._heap) == 2
