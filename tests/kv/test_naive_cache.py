"""Without a prefix cache: nothing is kept, and only the samples of one prompt share."""

from __future__ import annotations

import pytest

from asyncllm.kv.cache_manager import CacheManager, RequestPages
from asyncllm.kv.naive_cache import GROUP_PREFIX
from helpers.tokens import ids


def manager(page_size: int) -> CacheManager:
    """Make a small one."""
    return CacheManager(num_pages=16, page_size=page_size, num_slots=4, max_pages_per_request=8, prefix_cache="none")


def prefill(cache: CacheManager, tokens: str, namespace: str) -> RequestPages:
    """Admit a request and commit its whole prompt."""
    pages = cache.attach(cache.lock(cache.match(ids(tokens), namespace)))
    cache.grow([(pages, len(tokens))])
    cache.take_step_writes()
    cache.copy_done(pages)
    cache.store(pages, ids(tokens), namespace)
    return pages


@pytest.mark.parametrize("page_size", [1, 4])
def test_all_pages_return_at_the_end(page_size: int) -> None:
    cache = manager(page_size)
    pages = prefill(cache, "abcdef", "")
    assert cache.cached_pages == 0
    assert cache.owned_pages == -(-6 // page_size)
    assert cache.match(ids("abcdef"), "").tokens == 0
    cache.release(pages, ids("abcdef"), "")
    assert (cache.free_pages, cache.free_slots) == (16, 4)
    assert cache.match(ids("abcdef"), "").tokens == 0
    cache.check_integrity([])


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_samples_compute_their_prompt_once(page_size: int) -> None:
    """The first sample's pages are leased and counted until the last one ends, whoever ends first."""
    cache = manager(page_size)
    group = GROUP_PREFIX + "request 7"
    live = [prefill(cache, "abcdef", group)]
    for _ in range(2):
        live.append(prefill(cache, "abcdef", group))
        assert live[-1].cached_tokens == 5, "only the last prompt token is computed again"
        cache.check_integrity(live)
    assert cache.leased_pages == cache.cached_pages
    first, *others = live
    cache.grow([(first, 7)])
    cache.release(first, ids("abcdefX"), group)
    cache.check_integrity(others)
    assert cache.evictable_pages == 0, "nothing is kept that nobody leases"
    assert cache.match(ids("abcdef"), group).whole_pages == 5 // page_size
    for pages in others:
        cache.release(pages, ids("abcdef"), group)
    assert cache.free_pages == 16
    assert cache.match(ids("abcdef"), group).tokens == 0
    cache.check_integrity([])


def test_groups_do_not_share_with_one_another() -> None:
    cache = manager(4)
    prefill(cache, "abcdef", GROUP_PREFIX + "one")
    assert cache.match(ids("abcdef"), GROUP_PREFIX + "two").tokens == 0
    assert cache.match(ids("abcdef"), "").tokens == 0


def test_who_shares_is_told() -> None:
    """So that no request waits for another's pages in vain."""
    cache = manager(4)
    assert cache.shares(GROUP_PREFIX + "one")
    assert not cache.shares("")
    assert not cache.shares("a user's")
    radix = CacheManager(num_pages=1, page_size=1, num_slots=1, max_pages_per_request=1, prefix_cache="radix")
    assert radix.shares("")
