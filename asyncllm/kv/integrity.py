"""The check that every page is accounted for.

Runs on the engine thread; owns nothing and changes nothing. It trusts no counter: it walks the free list, the
trees and the rows, and compares what it finds with what the parts say of themselves.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from asyncllm.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from asyncllm.kv.page_pool import PagePool
    from asyncllm.kv.page_table import PageTable
    from asyncllm.kv.radix_cache import RadixCache
    from asyncllm.kv.radix_tree import Node
    from asyncllm.kv.request_pages import Lease, RequestPages

__all__ = ["check"]


def check(
    *,
    pool: PagePool,
    table: PageTable,
    cache: RadixCache,
    page_size: int,
    owned_pages: int,
    leases: Collection[Lease],
    attached: Mapping[int, RequestPages],
    live: Iterable[RequestPages],
) -> None:
    """Raise `IntegrityError`, naming pages, unless all pages and locks are accounted for.

    Args:
        pool: whose free list is walked.
        table: whose rows are walked.
        cache: whose trees are walked.
        page_size: tokens of a page.
        owned_pages: what is believed to belong to requests.
        leases: not ended and not attached.
        attached: by slot, what is believed to be attached.
        live: what the caller's requests hold.
    """
    _check_live(attached, live)
    nodes = [node for root in cache.roots() for node in _walk(root)]
    _check_shape(nodes, page_size)
    _check_locks(nodes, leases, attached)
    _check_sizes(nodes, cache)
    owned = [
        page
        for slot, pages in attached.items()
        for page in table.row(slot)[pages.leased_pages + pages.tail_pages :].tolist()
    ]
    _check_rows(table, cache, attached)
    _check_places(pool, [page for node in nodes for page in node.pages.tolist()], owned)
    if len(owned) != owned_pages:
        raise IntegrityError(f"{owned_pages} pages are counted as owned, {len(owned)} are: {sorted(owned)}")


def _walk(root: Node) -> Iterator[Node]:
    """Go over a tree without recursion: it may be as deep as the pool has pages."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _check_live(attached: Mapping[int, RequestPages], live: Iterable[RequestPages]) -> None:
    given = list(live)
    strangers = [pages.slot for pages in given if attached.get(pages.slot) is not pages]
    if strangers:
        raise IntegrityError(f"requests hold slots {strangers}, which are not attached to them")
    forgotten = sorted(attached.keys() - {pages.slot for pages in given})
    if forgotten:
        raise IntegrityError(f"slots {forgotten} are attached to no live request")


def _check_shape(nodes: list[Node], page_size: int) -> None:
    for node in nodes:
        where = f"the cached pages {node.pages.tolist()}"
        if node.parent is not None and not len(node.tokens):
            raise IntegrityError(f"{where} have no tokens")
        if len(node.pages) != -(-len(node.tokens) // page_size):
            raise IntegrityError(f"{where} hold {len(node.tokens)} tokens, of {page_size} a page")
        if len(node.tokens) % page_size and (len(node.pages) > 1 or node.children):
            raise IntegrityError(f"{where} are filled in part, but not a leaf of one page")
        for key, child in node.children.items():
            if child.parent is not node or child.tokens[:page_size].tobytes() != key:
                raise IntegrityError(f"the cached pages {child.pages.tolist()} hang in the wrong place of the tree")
        if node.keys != (sorted(node.children) if page_size > 1 else []):
            raise IntegrityError(f"the children of {where} are not in order")


def _check_locks(nodes: list[Node], leases: Collection[Lease], attached: Mapping[int, RequestPages]) -> None:
    held: Counter[Node] = Counter()
    for lease in leases:
        held.update(node for node in (lease.node, lease.match.source) if node is not None)
    for pages in attached.values():
        held.update(node for node in (pages.node, pages.source) if node is not None)
    unreached = held.keys() - set(nodes)
    if unreached:
        raise IntegrityError(f"leased pages {[node.pages.tolist() for node in unreached]} are not in the cache")
    for node in nodes:
        below = sum(child.lock_count for child in node.children.values())
        if node.lock_count != below + held[node]:
            raise IntegrityError(
                f"the cached pages {node.pages.tolist()} are locked {node.lock_count} times; "
                f"{held[node]} leases end there and {below} below"
            )


def _check_sizes(nodes: list[Node], cache: RadixCache) -> None:
    locked = sum(len(node.pages) for node in nodes if node.lock_count)
    unlocked = sum(len(node.pages) for node in nodes if not node.lock_count)
    if (cache.leased_pages, cache.evictable_pages) != (locked, unlocked):
        raise IntegrityError(
            f"the cache counts {cache.leased_pages} leased and {cache.evictable_pages} evictable pages, "
            f"its nodes have {locked} and {unlocked}"
        )
    outside = [
        node.pages.tolist()
        for node in nodes
        if node.parent is not None and not (node.lock_count or node.children or node.in_heap)
    ]
    if outside:
        raise IntegrityError(f"pages {outside} can be evicted, but eviction does not know them")


def _check_rows(table: PageTable, cache: RadixCache, attached: Mapping[int, RequestPages]) -> None:
    for slot, pages in attached.items():
        row = table.row(slot)
        if len(row) != pages.num_pages:
            raise IntegrityError(f"slot {slot} has {len(row)} pages in its row and believes {pages.num_pages}")
        leased = cache.prefix_pages(pages.node)
        shared = pages.leased_pages + pages.tail_pages
        if shared != len(leased) or not np.array_equal(row[:shared], leased):
            raise IntegrityError(
                f"slot {slot} leases pages {leased.tolist()} and its row names {row[:shared].tolist()}"
            )


def _check_places(pool: PagePool, cached: list[int], owned: list[int]) -> None:
    places = Counter([*pool.free_list().tolist(), *pool.deferred().tolist(), *cached, *owned])
    pool_pages = set(range(pool.num_pages))
    strange = sorted(places.keys() - pool_pages)
    if strange:
        raise IntegrityError(f"pages {strange} are not of this pool")
    doubled = sorted(page for page, count in places.items() if count > 1)
    if doubled:
        raise IntegrityError(f"pages {doubled} are in two places")
    lost = sorted(pool_pages - places.keys())
    if lost:
        raise IntegrityError(f"pages {lost} are neither free, nor owned, nor cached")
