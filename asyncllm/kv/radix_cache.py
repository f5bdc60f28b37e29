"""The prefix cache: a radix tree of token runs, each with the pages that hold their KV.

Runs on the engine thread; owns the pages in the tree and who has locked them. Invariants: every edge begins at a
page boundary and a run is whole pages, but for partial leaves, one page filled in part; a node's lock count is
at least the sum of its children's; evictable + leased pages are all pages of the tree; every unlocked leaf is in
the heap.

Source of the idea: RadixAttention of SGLang, in the form of mini-sglang's cache manager. Different here: a match
may end inside a page, a lock ends where its match ends, and eviction takes as many pages as are missing.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncllm.kv.page_pool import Pages

__all__ = ["Extension", "Node", "RadixCache", "RadixMatch", "Tokens"]

Tokens = npt.NDArray[np.int32]
"""Token ids: int32 [n]."""

_TOKEN_BYTES: Final = 4
_NO_PAGES: Final[Pages] = np.empty(0, dtype=np.int32)
_NO_PAGES.setflags(write=False)


class Node:
    """A run of tokens behind its parent's; a root has no tokens and no parent.

    Attributes:
        namespace: of the tree it is in.
        parent: None for a root and for a node that was evicted.
        tokens: int32 [n]; whole pages, or less than one page in a partial leaf.
        pages: int32 [ceil(n / page_size)].
        children: by the bytes of their first page's tokens, a partial leaf by all its tokens' bytes.
        keys: the keys of `children` in order, where partial matches are possible (page_size > 1).
        lock_count: leases on this node and on those below it.
        last_used: the cache's counter when a match or an insertion last passed here.
        serial: order of creation, breaks ties of `last_used`.
        in_heap: whether the heap of unlocked leaves has an entry for it (perhaps an outdated one).
    """

    __slots__ = (
        "children",
        "in_heap",
        "keys",
        "last_used",
        "lock_count",
        "namespace",
        "pages",
        "parent",
        "serial",
        "tokens",
    )

    def __init__(self, *, namespace: str, parent: Node | None, tokens: Tokens, pages: Pages, serial: int) -> None:
        self.namespace = namespace
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.keys: list[bytes] = []
        self.lock_count = 0
        self.last_used = 0
        self.serial = serial
        self.in_heap = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RadixMatch:
    """What the tree has of some tokens.

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
    """Radix trees, one for each namespace.

    Args:
        page_size: tokens of a page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._roots: dict[str, Node] = {}
        self._heap: list[tuple[int, int, Node]] = []  # last_used (perhaps outdated), serial, unlocked leaf
        self._clock = 0
        self._serial = 0
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
        return iter(self._roots.values())

    def root(self, namespace: str) -> Node:
        """Find or make a namespace's root; lock it at once, or it may stay behind empty."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = self._new_node(namespace, None, _NO_PAGES, _NO_PAGES)
        return root

    def shares(self, namespace: str) -> bool:  # noqa: ARG002
        """Whether requests of this namespace can match what another of it has computed."""
        return True

    def match(self, tokens: Tokens, namespace: str) -> RadixMatch:
        """Find the longest prefix of `tokens` (int32 [n]) that the tree has; refresh the recency of what matched.

        Nodes are split where the match ends, so that a lock on it pins nothing else.
        """
        self._clock += 1
        root = self._roots.get(namespace)
        if root is None:
            return RadixMatch(node=None, whole_pages=0, source=None, source_tokens=0)
        node, runs = self._descend(root, tokens)
        whole_pages = sum(map(len, runs))
        end = whole_pages * self._page_size
        source, source_tokens = self._closest_child(node, tokens[end : end + self._page_size])
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
        return _NO_PAGES

    def extend(self, held: Node, tokens: Tokens, pages: Pages) -> Extension:
        """Take a request's pages behind the node that it holds, and move its lock to their end.

        Args:
            held: a locked node; a partial leaf stays the page that the request writes on in.
            tokens: int32 [n], the tokens behind the held whole pages, those of a held partial leaf included.
            pages: int32 [ceil(n / page_size)], the pages that hold them; the first is the partial leaf's, if held.
        """
        self._clock += 1
        size = self._page_size
        whole = len(tokens) // size
        tail = held if len(held.tokens) % size else None
        base = held if tail is None or tail.parent is None else tail.parent
        superseded: list[Pages] = []
        end, runs = self._descend(base, tokens[: whole * size])
        taken = sum(map(len, runs))
        if tail is not None and whole and not taken:
            self._rekey(tail, tokens[:size], tail.pages)
            base = end = tail
            taken = 1
        if taken < whole:
            end = self._add(end, tokens[taken * size : whole * size], pages[taken:whole], superseded)
        rest = tokens[whole * size :]
        if tail is not None and not whole:
            end = tail
            if len(rest) > len(tail.tokens) and not self._covered(base, rest):
                self._rekey(tail, rest, tail.pages)
        elif len(rest) and not self._covered(end, rest):
            end = self._add(end, rest, pages[whole:], superseded)
        self.lock(end, base)
        if held is not base:
            superseded.append(self.unlock(held, base))
        return Extension(
            end=end,
            taken_pages=whole,
            present=np.concatenate([_NO_PAGES, *runs]),
            kept_tail=len(end.tokens) % size != 0,
            superseded=np.concatenate([_NO_PAGES, *superseded]),
        )

    def evict(self, count: int) -> Pages:
        """Drop the least recently used unlocked pages, leaves first, parents after their children, ends first.

        Returns:
            int32 [min(count, evictable_pages)].
        """
        runs: list[Pages] = [_NO_PAGES]
        missing = min(count, self._evictable_pages)
        while missing:
            leaf = self._pop_leaf()
            if len(leaf.pages) > missing:
                # What goes is the end. What stays is a new node: a match on the old one is void.
                self._split(leaf, len(leaf.pages) - missing)
            runs.append(leaf.pages)
            missing -= len(leaf.pages)
            self._remove(leaf)
        return np.concatenate(runs)

    def _descend(self, node: Node, tokens: Tokens) -> tuple[Node, list[Pages]]:
        """Follow the whole pages of `tokens` from `node` down; split where they part; return the end and its pages."""
        size = self._page_size
        runs: list[Pages] = []
        while len(tokens) >= size:
            child = node.children.get(tokens[:size].tobytes())
            if child is None:
                break
            common = _common_length(child.tokens, tokens) // size
            if common < len(child.pages):
                child = self._split(child, common)
            child.last_used = self._clock
            runs.append(child.pages)
            tokens = tokens[common * size :]
            node = child
        return node, runs

    def _closest_child(self, node: Node, tokens: Tokens) -> tuple[Node | None, int]:
        """Find the child with the longest common prefix with `tokens`, at most a page of them; its length in tokens.

        Keys that share a prefix are neighbours in byte order, so the best one is next to where `tokens` would stand.
        """
        if not len(tokens) or not node.keys:
            return None, 0
        place = bisect.bisect_left(node.keys, tokens.tobytes())
        best, best_length = b"", 0
        for key in node.keys[max(place - 1, 0) : place + 1]:
            length = _common_length(np.frombuffer(key, dtype=np.int32), tokens)
            if length > best_length:
                best, best_length = key, length
        return (node.children[best], best_length) if best_length else (None, 0)

    def _use_first_page(self, node: Node) -> Node:
        """Refresh a node's first page alone; return the node that it is now."""
        if len(node.pages) > 1:
            node = self._split(node, 1)
        node.last_used = self._clock
        return node

    def _covered(self, node: Node, tokens: Tokens) -> bool:
        """Whether a child of `node` begins with `tokens`, less than a page of them; refresh it if so."""
        child, length = self._closest_child(node, tokens)
        if child is None or length < len(tokens):
            return False
        self._use_first_page(child)
        return True

    def _add(self, parent: Node, tokens: Tokens, pages: Pages, superseded: list[Pages]) -> Node:
        """Hang a new run under `parent`; an unlocked partial leaf whose tokens it begins with makes place for it."""
        closest, length = self._closest_child(parent, tokens[: self._page_size])
        if closest is not None and length == len(closest.tokens) and not closest.lock_count:
            superseded.append(closest.pages)
            self._evictable_pages += len(pages) - len(closest.pages)
            self._rekey(closest, tokens, pages.copy())
            node = closest
        else:
            # Copies: a view would keep all of a long prompt alive for the sake of one page.
            node = self._new_node(parent.namespace, parent, tokens.copy(), pages.copy())
            self._evictable_pages += len(pages)
            self._link(node)
        node.last_used = self._clock
        return node

    def _split(self, node: Node, pages: int) -> Node:
        """Cut a node after `pages` pages; return the upper part, a new node. The lower keeps identity and locks."""
        tokens = pages * self._page_size
        parent = node.parent
        upper = self._new_node(node.namespace, parent, node.tokens[:tokens].copy(), node.pages[:pages].copy())
        upper.lock_count = node.lock_count
        upper.last_used = node.last_used
        if parent is not None:
            parent.children[self._key(upper)] = upper
        node.parent = upper
        node.tokens = node.tokens[tokens:].copy()
        node.pages = node.pages[pages:].copy()
        self._link(node)
        return upper

    def _rekey(self, leaf: Node, tokens: Tokens, pages: Pages) -> None:
        self._unlink(leaf)
        leaf.tokens = tokens.copy()
        leaf.pages = pages
        leaf.last_used = self._clock
        self._link(leaf)

    def _key(self, node: Node) -> bytes:
        return node.tokens[: self._page_size].tobytes()

    def _link(self, node: Node) -> None:
        if node.parent is not None:
            key = self._key(node)
            node.parent.children[key] = node
            if self._page_size > 1:
                bisect.insort(node.parent.keys, key)

    def _unlink(self, node: Node) -> None:
        if node.parent is not None:
            key = self._key(node)
            del node.parent.children[key]
            if self._page_size > 1:
                del node.parent.keys[bisect.bisect_left(node.parent.keys, key)]

    def _new_node(self, namespace: str, parent: Node | None, tokens: Tokens, pages: Pages) -> Node:
        self._serial += 1
        return Node(namespace=namespace, parent=parent, tokens=tokens, pages=pages, serial=self._serial)

    def _remove(self, leaf: Node) -> None:
        """Take an unlocked leaf out of the tree; its parent may become a leaf, a root without children goes."""
        parent = leaf.parent
        self._unlink(leaf)
        leaf.parent = None
        self._evictable_pages -= len(leaf.pages)
        if parent is not None:
            self._settle(parent)

    def _settle(self, node: Node) -> None:
        """Put a node that became an unlocked leaf where it belongs: in the heap, or, a root, away."""
        if node.lock_count or node.children:
            return
        if node.parent is None:
            del self._roots[node.namespace]
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


def _common_length(one: Tokens, other: Tokens) -> int:
    """Count how many tokens both begin with."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
