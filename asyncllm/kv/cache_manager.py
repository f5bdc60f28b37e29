"""The only door to the KV's pages.

Runs on the engine thread; owns the pool, the page table, the prefix cache and the copies not yet launched.
Invariants: every page is free, owned by one request, or in the cache, never two of these; a row names only pages
that its request owns or leases; what a request holds returns once, together, in `release`.

Longer than most files, by its documentation: one class, since there is one door.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from asyncllm.kv.integrity import check
from asyncllm.kv.naive_cache import NaiveCache
from asyncllm.kv.page_pool import LazyFreeRegion, PagePool
from asyncllm.kv.page_table import PageTable
from asyncllm.kv.radix_cache import RadixCache
from asyncllm.kv.request_pages import Lease, PrefixMatch, RequestPages, StepWrites

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from asyncllm.kv.page_pool import Pages

__all__ = ["CacheManager", "Lease", "PrefixMatch", "RequestPages", "StepWrites"]


def _no_writes() -> StepWrites:
    none = StepWrites(table_writes=np.empty((3, 0), dtype=np.int32), page_copies=np.empty((2, 0), dtype=np.int32))
    none.table_writes.setflags(write=False)
    none.page_copies.setflags(write=False)
    return none


_NO_WRITES: Final = _no_writes()


class CacheManager:
    """Gives pages to requests, shares what they have in common, takes everything back.

    A request's way: `match`, `lock`, `attach`; for each step `grow` and one `take_step_writes` for all; at a step's
    commit `copy_done` and `store`; in the end `release`.

    Args:
        num_pages: pages of the pool.
        page_size: tokens of a page.
        num_slots: most requests attached at once.
        max_pages_per_request: columns of the page table.
        prefix_cache: "radix" keeps what finished requests leave; "none" keeps nothing.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        max_pages_per_request: int,
        prefix_cache: Literal["radix", "none"],
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self._page_size = page_size
        self._pool = PagePool(num_pages)
        self._table = PageTable(num_slots, max_pages_per_request)
        self._cache = RadixCache(page_size) if prefix_cache == "radix" else NaiveCache(page_size)
        self._leases: set[Lease] = set()
        self._attached: dict[int, RequestPages] = {}
        self._copies: dict[int, tuple[int, int]] = {}  # slot: source, target; not yet in a step
        self._owned_pages = 0
        self._version = 0

    @property
    def num_pages(self) -> int:
        """Pages of the pool: free + owned + cached, outside of a `releasing` region."""
        return self._pool.num_pages

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._page_size

    @property
    def max_pages_per_request(self) -> int:
        """Columns of the page table."""
        return self._table.max_pages

    @property
    def free_pages(self) -> int:
        """Pages on the free list."""
        return self._pool.free_pages

    @property
    def owned_pages(self) -> int:
        """Pages that belong to one request each."""
        return self._owned_pages

    @property
    def cached_pages(self) -> int:
        """Pages in the prefix cache, leased ones included."""
        return self._cache.evictable_pages + self._cache.leased_pages

    @property
    def leased_pages(self) -> int:
        """Pages in the prefix cache that a lease or a request keeps there."""
        return self._cache.leased_pages

    @property
    def evictable_pages(self) -> int:
        """Pages in the prefix cache that can be had for the asking."""
        return self._cache.evictable_pages

    @property
    def available_pages(self) -> int:
        """Pages that requests can still get: free + evictable."""
        return self._pool.free_pages + self._cache.evictable_pages

    @property
    def free_slots(self) -> int:
        """Rows of the page table that no request has."""
        return self._table.free_slots

    @property
    def version(self) -> int:
        """A number that grows whenever more may fit or match than before; until then a blocked request stays so."""
        return self._version

    def shares(self, namespace: str) -> bool:
        """Whether requests of this namespace can match what another of it has computed."""
        return self._cache.shares(namespace)

    def match(self, tokens: npt.NDArray[np.int32], namespace: str) -> PrefixMatch:
        """Find the longest cached prefix, without the last token: that one is always computed.

        Refreshes the recency of what it finds. Changes no lock.

        Args:
            tokens: int32 [n], n >= 1.
            namespace: only prefixes of this namespace match.
        """
        if not len(tokens):
            raise ValueError("there must be at least one token to match")
        found = self._cache.match(np.ascontiguousarray(tokens[:-1], dtype=np.int32), namespace)
        return PrefixMatch(
            tokens=found.whole_pages * self._page_size + found.source_tokens,
            whole_pages=found.whole_pages,
            namespace=namespace,
            node=found.node,
            source=found.source,
        )

    def pages_needed(self, match: PrefixMatch, positions: int) -> int:
        """Count the pages that a request with this match takes from the pool until it has `positions` positions."""
        return -(-positions // self._page_size) - match.whole_pages

    def lock(self, match: PrefixMatch) -> Lease:
        """Keep what matched from being evicted, the source of a copy included, until `unlock` or `release`.

        The pages leave `evictable_pages`, so a request's need is to be compared with `available_pages` again. If
        it does not fit though nothing else runs, it does with `match.without_copy(page_size)`.

        Raises:
            RuntimeError: what matched was evicted since.
        """
        if match.node is not None and match.node.parent is None:
            raise RuntimeError("the matched pages were evicted; match and lock in one go")
        node = match.node or self._cache.root(match.namespace)
        if match.source is not None and match.source.parent is not node:
            raise RuntimeError("the matched page to copy was evicted; match and lock in one go")
        self._cache.lock(node)
        if match.source is not None:
            self._cache.lock(match.source)
        lease = Lease(match, node)
        self._leases.add(lease)
        return lease

    def unlock(self, lease: Lease) -> None:
        """Give a lease up.

        Raises:
            RuntimeError: it was given up or attached before.
        """
        self._check_lease(lease)
        self._leases.remove(lease)
        if lease.match.source is not None:
            self._pool.free(self._cache.unlock(lease.match.source))
        self._pool.free(self._cache.unlock(lease.node))
        self._version += 1

    def attach(self, lease: Lease) -> RequestPages:
        """Admit a request: take a slot and write the leased prefix into its row.

        A match that ends inside a page takes a page of the pool at once, and its head is copied there by the next
        step; the copy's source stays locked until `copy_done`.

        Raises:
            RuntimeError: no slot is free, a page is missing, or the lease has ended; nothing is changed then.
        """
        self._check_lease(lease)
        if not self._table.free_slots:
            raise RuntimeError("no slot is free")
        row = self._cache.prefix_pages(lease.node)  # it was a row before, so it fits one
        source = lease.match.source
        if source is not None:
            row = np.concatenate([row, self._take(1)])
        self._leases.remove(lease)
        slot = self._table.take_slot()
        self._table.extend([slot], [len(row)], row)
        pages = RequestPages(slot=slot, num_pages=len(row), page_size=self._page_size, lease=lease)
        self._attached[slot] = pages
        self._owned_pages += pages.owned_pages
        if source is not None:
            self._copies[slot] = int(source.pages[0]), int(row[-1])
        return pages

    def copy_done(self, pages: RequestPages) -> None:
        """Unlock the page that a request's prefix was copied from; at the commit of the first step that names it.

        Without such a page it does nothing.

        Raises:
            RuntimeError: the copy is in no step yet.
        """
        if pages.slot in self._copies:
            raise RuntimeError(f"the page copy of slot {pages.slot} was not launched")
        self._unlock_source(pages)

    def grow(self, needs: Sequence[tuple[RequestPages, int]]) -> None:
        """Give every request the pages that it lacks in the next step, in one allocation for all.

        Args:
            needs: for each request in the step, how many positions it has after it.

        Raises:
            ValueError: more positions than a row holds; nothing is changed then.
            RuntimeError: fewer pages are free or evictable; nothing is changed then.
        """
        short = [(pages, positions) for pages, positions in needs if positions > pages.capacity_tokens]
        if not short:
            return
        size, longest = self._page_size, self._table.max_pages * self._page_size
        counts = []
        for pages, positions in short:
            if positions > longest:
                raise ValueError(f"slot {pages.slot} asks for {positions} positions, a row holds {longest}")
            counts.append(-(-positions // size) - pages.num_pages)
        total = sum(counts)
        self._table.extend([pages.slot for pages, _ in short], counts, self._take(total))
        self._owned_pages += total
        for (pages, _), count in zip(short, counts, strict=True):
            pages.num_pages += count
            pages.capacity_tokens += count * size

    def take_step_writes(self) -> StepWrites:
        """Take everything that the device's KV and page table lack; it belongs to the step that is launched next."""
        if not self._copies and not self._table.has_writes:
            return _NO_WRITES  # as in most steps
        table_writes = self._table.take_writes()
        page_copies = np.asarray(list(self._copies.values()), dtype=np.int32).reshape(-1, 2).T.copy()
        self._copies.clear()
        table_writes.setflags(write=False)
        page_copies.setflags(write=False)
        return StepWrites(table_writes=table_writes, page_copies=page_copies)

    def send_again(self) -> None:
        """Have the next step write all rows and make all copies that no committed step has made.

        For when a step failed: whether the device did its writes is not known then, and doing them twice is the
        same as once.
        """
        self._table.send_again()
        for slot, pages in self._attached.items():
            if pages.source is not None:
                target = self._table.row(slot)[pages.leased_pages]
                self._copies[slot] = int(pages.source.pages[0]), int(target)

    def store(self, pages: RequestPages, tokens: npt.NDArray[np.int32], namespace: str) -> None:
        """Share what a running request has computed; at the commit of a prefill chunk.

        Whole pages go into the cache and stay leased. Where the cache has them already, the row is rewritten to
        the cache's and the request's own are freed. A last page filled in part is shared too, for others to copy,
        while the request goes on writing behind its tokens.

        Args:
            pages: the request's.
            tokens: int32 [n], of positions 0 to n - 1, all written by committed steps.
            namespace: the one it was matched in.

        Raises:
            RuntimeError: it was released, or its page copy is not done.
            ValueError: another namespace, or more tokens than its row has place for.
        """
        self._check_tokens(pages, tokens, namespace)
        if pages.source is not None:
            raise RuntimeError(f"slot {pages.slot} cannot be stored before its page copy is done")
        self._pool.free(self._give(pages, tokens))
        self._version += 1

    def release(self, pages: RequestPages, tokens: npt.NDArray[np.int32], namespace: str) -> None:
        """Take everything back: slot, lease and pages; at the commit of the last launched step that names it.

        What is known to be written goes into the cache, a last page filled in part included; the rest is freed.
        Writes and copies that no step has taken are dropped.

        Args:
            pages: the request's.
            tokens: int32 [n], of positions 0 to n - 1, all written by committed steps; empty if that is not known.
            namespace: the one it was matched in.

        Raises:
            RuntimeError: it was released before.
            ValueError: another namespace, or more tokens than its row has place for.
        """
        self._check_tokens(pages, tokens, namespace)
        if pages.source is not None:
            tokens = tokens[: pages.leased_tokens]  # no committed step has made the copy
            self._copies.pop(pages.slot, None)
            self._unlock_source(pages)
        duplicates = self._give(pages, tokens)
        rest = self._table.row(pages.slot)[pages.leased_pages + pages.tail_pages :]
        self._pool.free(np.concatenate([duplicates, rest, self._cache.unlock(pages.node)]))
        self._owned_pages -= pages.owned_pages
        self._table.release_slot(pages.slot)
        del self._attached[pages.slot]
        pages.released = True
        self._version += 1

    def releasing(self) -> LazyFreeRegion:
        """Make a region within which freed pages are collected; they are free together, at its end."""
        return self._pool.lazy_free()

    def reset_prefix_cache(self) -> int:
        """Evict everything that is not locked; return how many pages that freed."""
        evicted = self._cache.evict(self._cache.evictable_pages)
        self._pool.free(evicted)
        self._version += 1
        return len(evicted)

    def check_integrity(self, live: Iterable[RequestPages]) -> None:
        """Walk everything and compare; O(pool).

        Args:
            live: of all requests that are attached.

        Raises:
            IntegrityError: names the pages that are not accounted for.
        """
        check(
            pool=self._pool,
            table=self._table,
            cache=self._cache,
            page_size=self._page_size,
            owned_pages=self._owned_pages,
            leases=self._leases,
            attached=self._attached,
            live=live,
        )

    def _take(self, count: int) -> Pages:
        """Allocate, evicting what is missing."""
        missing = count - self._pool.free_pages
        if missing <= 0:
            return self._pool.allocate(count)
        if missing > self._cache.evictable_pages:
            raise RuntimeError(f"{count} pages asked for, {self.available_pages} are free or evictable")
        # Not by way of the pool: in a lazy-free region they would not be free yet.
        return np.concatenate([self._pool.allocate(count - missing), self._cache.evict(missing)])

    def _give(self, pages: RequestPages, tokens: npt.NDArray[np.int32]) -> Pages:
        """Extend the cache by a request's pages and rewrite its row to the cache's; return what is to be freed."""
        owned = pages.owned_pages
        start, end = pages.leased_pages, -(-len(tokens) // self._page_size)
        row = self._table.row(pages.slot)
        behind = np.ascontiguousarray(tokens[pages.leased_tokens :], dtype=np.int32)
        extension = self._cache.extend(pages.node, behind, row[start:end])
        present = extension.present
        duplicates = row[start + pages.tail_pages : start + len(present)].copy()
        if len(present):
            self._table.rewrite(pages.slot, start, present)
        pages.node = extension.end
        pages.leased_pages += extension.taken_pages
        pages.tail_pages = int(extension.kept_tail)
        self._owned_pages += pages.owned_pages - owned
        return np.concatenate([duplicates, extension.superseded])

    def _unlock_source(self, pages: RequestPages) -> None:
        if pages.source is not None:
            self._pool.free(self._cache.unlock(pages.source))
            pages.source = None
            self._version += 1

    def _check_lease(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise RuntimeError("the lease has ended already")

    def _check_tokens(self, pages: RequestPages, tokens: npt.NDArray[np.int32], namespace: str) -> None:
        if pages.released:
            raise RuntimeError(f"the pages of slot {pages.slot} were released already")
        if namespace != pages.namespace:
            raise ValueError(f"slot {pages.slot} is in namespace {pages.namespace!r}, not {namespace!r}")
        if len(tokens) > pages.capacity_tokens:
            raise ValueError(f"slot {pages.slot} has place for {pages.capacity_tokens} tokens, not {len(tokens)}")
