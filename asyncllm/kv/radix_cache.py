"""The prefix cache: which runs of tokens have KV, who has locked it, and what goes first when pages are short.

Runs on the engine thread; owns the pages in its trees. Invariants: a node's lock count is at least the sum of its
children's; evictable + leased pages are all pages of the trees; every unlocked leaf is in the heap.

Source of the idea: RadixAttention of SGLang, in the form of mini-sglang's cache manager. Different here: a match
may end inside a page, a lock ends where its match ends, and eviction takes as many pages as are missing.
"""

from __future__ import annotations

import dataclasses
import heapq
from typing import TYPE_CHECKING

import numpy as np

from asyncllm.kv.radix_tree import NO_PAGES, Node, RadixTree, Tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncllm.kv.page_pool import Pages

__all__ = ["Extension", "RadixCache", "RadixMatch"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RadixMatch:
    """What the cache has of some tokens.

    Args:
        node: where the whole pages end; None if there are none.
        whole_pages: how many whole pages match.
        source: a node of one page, of which a head matches beyond `node`; None if there is none.
        source_tokens: how many tokens of the source match.
    """

    node: Node | None
    whole_pages: int
    source: Node | None
    source_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """What `RadixCache.extend` did.

    Args:
        end: the node that is locked now in place of the one held before.
        taken_pages: how many of the given pages, whole ones from the first on, are in the cache now.
        present: int32 [n], the cache's own pages for the first n of those: the given ones stay the caller's.
        kept_tail: whether the last page, filled in part, is in the cache as `end`.
        superseded: int32 [n], pages that the cache let go.
    """

    end: Node
    taken_pages: int
    present: Pages
    kept_tail: bool
    superseded: Pages


class RadixCache:
    """Keeps what requests have computed, for others to share.

    Args:
        page_size: tokens of a page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._tree = RadixTree(page_size)
        self._heap: list[tuple[int, int, Node]] = []  # last_used (perhaps outdated), serial, unlocked leaf
        self._clock = 0  # counts matches and extensions: recency needs no more
        self._evictable_pages = 0
        self._leased_pages = 0

    @property
    def evictable_pages(self) -> int:
        """How many pages `evict` can give: those of unlocked nodes."""
        return self._evictable_pages

    @property
    def leased_pages(self) -> int:
        """How many pages are in locked nodes."""
        return self._leased_pages

    def roots(self) -> Iterator[Node]:
        """Go over the trees; for checks, which walk them."""
        return self._tree.roots()

    def root(self, namespace: str) -> Node:
        """Find or make a namespace's root, to be locked at once: it goes when nothing is in it or holds it."""
        return self._tree.root(namespace)

    def shares(self, namespace: str) -> bool:  # noqa: ARG002 - the naive cache looks at it
        """Whether requests of this namespace can match what another of it has computed."""
        return True

    def match(self, tokens: Tokens, namespace: str) -> RadixMatch:
        """Find the longest prefix of `tokens` (int32 [n]) that is cached; refresh the recency of what matched.

        Nodes are split where the match ends, so that a lock on it pins nothing else.
        """
        self._clock += 1
        root = self._tree.find_root(namespace)
        if root is None:
            return RadixMatch(node=None, whole_pages=0, source=None, source_tokens=0)
        node, runs = self._tree.descend(root, tokens, self._clock)
        whole_pages = sum(map(len, runs))
        end = whole_pages * self._page_size
        source, source_tokens = self._tree.closest_child(node, tokens[end : end + self._page_size])
        return RadixMatch(
            node=node if runs else None,
            whole_pages=whole_pages,
            source=None if source is None else self._use_first_page(source),
            source_tokens=source_tokens,
        )

    def prefix_pages(self, node: Node) -> Pages:
        """Collect the pages from the root to the end of `node`: int32 [n]."""
        runs = [node.pages]
        while node.parent is not None:
            node = node.parent
            runs.append(node.pages)
        return np.concatenate(runs[::-1])

    def lock(self, node: Node, below: Node | None = None) -> None:
        """Make the pages of `node` and of all above it unevictable, until as many `unlock`s.

        Args:
            node: where the lock begins.
            below: an ancestor that has this lock already, all above it included; None: nobody has.
        """
        above: Node | None = node
        while above is not below and above is not None:
            if above.lock_count == 0:
                self._evictable_pages -= len(above.pages)
                self._leased_pages += len(above.pages)
            above.lock_count += 1
            above = above.parent

    def unlock(self, node: Node, below: Node | None = None) -> Pages:
        """Undo one `lock`.

        Args:
            node: where the lock begins.
            below: an ancestor that keeps it, all above it included.

        Returns:
            int32 [n]: pages that the cache lets go with it.
        """
        above: Node | None = node
        while above is not below and above is not None:
            above.lock_count -= 1
            if above.lock_count == 0:
                self._evictable_pages += len(above.pages)
                self._leased_pages -= len(above.pages)
                self._settle(above)
            above = above.parent
        return NO_PAGES

    def extend(self, held: Node, tokens: Tokens, pages: Pages) -> Extension:
        """Take a request's pages behind the node that it holds, and move its lock to their end.

        Args:
            held: a locked node; if a partial leaf, its page is the one that the request goes on writing to.
            tokens: int32 [n], the tokens behind the held whole pages, those of a held partial leaf included.
            pages: int32 [ceil(n / page_size)], the pages that hold them; the first is the partial leaf's, if held.
        """
        self._clock += 1
        size = self._page_size
        whole = len(tokens) // size
        tail = held if self._tree.is_partial(held) else None
        base = held if tail is None or tail.parent is None else tail.parent
        superseded: list[Pages] = []
        end, runs = self._tree.descend(base, tokens[: whole * size], self._clock)
        taken = sum(map(len, runs))
        if tail is not None and whole and not taken:
            self._replace(tail, tokens[:size], tail.pages)
            base = end = tail
            taken = 1
        if taken < whole:
            end = self._add(end, tokens[taken * size : whole * size], pages[taken:whole], superseded)
        rest = tokens[whole * size :]
        if tail is not None and not whole:
            end = tail
            if len(rest) > len(tail.tokens) and not self._covered(base, rest):
                self._replace(tail, rest, tail.pages)
        elif len(rest) and not self._covered(end, rest):
            end = self._add(end, rest, pages[whole:], superseded)
        self.lock(end, base)
        if held is not base:
            superseded.append(self.unlock(held, base))
        return Extension(
            end=end,
            taken_pages=whole,
            present=np.concatenate([NO_PAGES, *runs]),
            kept_tail=self._tree.is_partial(end),
            superseded=np.concatenate([NO_PAGES, *superseded]),
        )

    def evict(self, count: int) -> Pages:
        """Drop the least recently used unlocked pages, leaves first, parents after their children, ends first.

        Returns:
            int32 [min(count, evictable_pages)].
        """
        runs: list[Pages] = [NO_PAGES]
        missing = min(count, self._evictable_pages)
        while missing:
            leaf = self._pop_leaf()
            if len(leaf.pages) > missing:
                # What goes is the end. What stays is a new node: a match on the old one is void.
                self._tree.split(leaf, len(leaf.pages) - missing)
            runs.append(leaf.pages)
            missing -= len(leaf.pages)
            self._evictable_pages -= len(leaf.pages)
            parent = leaf.parent
            self._tree.remove(leaf)
            if parent is not None:
                self._settle(parent)
        return np.concatenate(runs)

    def _use_first_page(self, node: Node) -> Node:
        """Refresh a node's first page alone; return the node that it is now."""
        if len(node.pages) > 1:
            node = self._tree.split(node, 1)
        node.last_used = self._clock
        return node

    def _covered(self, node: Node, tokens: Tokens) -> bool:
        """Whether a child of `node` begins with `tokens`, less than a page of them; refresh it if so."""
        child, length = self._tree.closest_child(node, tokens)
        if child is None or length < len(tokens):
            return False
        self._use_first_page(child)
        return True

    def _add(self, parent: Node, tokens: Tokens, pages: Pages, superseded: list[Pages]) -> Node:
        """Hang a new run under `parent`; an unlocked partial leaf whose tokens it begins with makes place for it."""
        node, length = self._tree.closest_child(parent, tokens[: self._page_size])
        if node is not None and length == len(node.tokens) and not node.lock_count:
            superseded.append(node.pages)
            self._evictable_pages += len(pages) - len(node.pages)
            self._replace(node, tokens, pages)
            return node
        node = self._tree.add(parent, tokens, pages)
        self._evictable_pages += len(pages)
        node.last_used = self._clock
        return node

    def _replace(self, leaf: Node, tokens: Tokens, pages: Pages) -> None:
        self._tree.replace(leaf, tokens, pages)
        leaf.last_used = self._clock

    def _settle(self, node: Node) -> None:
        """Put a node that became an unlocked leaf where it belongs: in the heap, or, a root, away."""
        if node.lock_count or node.children:
            return
        if node.parent is None:
            self._tree.remove(node)
        elif not node.in_heap:
            self._push(node)

    def _push(self, node: Node) -> None:
        node.in_heap = True
        heapq.heappush(self._heap, (node.last_used, node.serial, node))

    def _pop_leaf(self) -> Node:
        """Take the least recently used unlocked leaf off the heap.

        A node has one entry at most, which may be outdated: used since, locked since, or with children since.
        """
        while True:
            last_used, _, node = heapq.heappop(self._heap)
            node.in_heap = False
            if node.lock_count or node.children:
                continue  # it comes back when it is an unlocked leaf again
            if last_used == node.last_used:
                return node
            self._push(node)
