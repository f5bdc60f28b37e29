"""Radix trees of token runs, one for each namespace: the structure, without who uses it and why.

Runs on the engine thread; owned by the radix cache. Invariants: every edge begins at a page boundary; a run is
whole pages, but for partial leaves, which are one page filled in part; a node's children begin with different
pages.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncllm.kv.page_pool import Pages

__all__ = ["NO_PAGES", "Node", "RadixTree", "Tokens"]

Tokens = npt.NDArray[np.int32]
"""Token ids: int32 [n]."""

NO_PAGES: Final[Pages] = np.empty(0, dtype=np.int32)
NO_PAGES.setflags(write=False)


class Node:
    """A run of tokens behind its parent's; a root has no tokens and no parent.

    Attributes:
        namespace: of the tree it is in.
        parent: None for a root and for a node that was taken out.
        tokens: int32 [n]; whole pages, or less than one page in a partial leaf.
        pages: int32 [ceil(n / page_size)].
        children: by the bytes of their first page's tokens, a partial leaf by all its tokens' bytes.
        keys: the keys of `children` in order, where a head of a page can match (page_size > 1).
        lock_count: leases on this node and on those below it.
        last_used: when a match or an insertion last passed here, by the cache's counter.
        serial: order of creation.
        in_heap: whether the cache's heap of unlocked leaves has an entry for it.
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


class RadixTree:
    """The trees of all namespaces.

    Args:
        page_size: tokens of a page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._roots: dict[str, Node] = {}
        self._serial = 0

    def roots(self) -> Iterator[Node]:
        """Go over the roots."""
        return iter(self._roots.values())

    def find_root(self, namespace: str) -> Node | None:
        """Find a namespace's root."""
        return self._roots.get(namespace)

    def root(self, namespace: str) -> Node:
        """Find or make a namespace's root."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = self._new_node(namespace, None, NO_PAGES, NO_PAGES)
        return root

    def is_partial(self, node: Node) -> bool:
        """Whether a node is a leaf of one page that is filled in part."""
        return len(node.tokens) % self._page_size != 0

    def descend(self, node: Node, tokens: Tokens, now: int) -> tuple[Node, list[Pages]]:
        """Follow the whole pages of `tokens` from a node down, splitting where they part.

        Args:
            node: where to begin.
            tokens: int32 [n], behind the node's.
            now: becomes `last_used` of what is passed.

        Returns:
            the node where they end, and the pages passed, node by node.
        """
        size = self._page_size
        runs: list[Pages] = []
        while len(tokens) >= size:
            child = node.children.get(tokens[:size].tobytes())
            if child is None:
                break
            common = common_length(child.tokens, tokens) // size
            if common < len(child.pages):
                child = self.split(child, common)
            child.last_used = now
            runs.append(child.pages)
            tokens = tokens[common * size :]
            node = child
        return node, runs

    def closest_child(self, node: Node, tokens: Tokens) -> tuple[Node | None, int]:
        """Find the child with the longest common head with `tokens`, at most a page of them; its length in tokens.

        Keys that share a head are neighbours in byte order, so the best one is next to where `tokens` would stand.
        """
        if not len(tokens) or not node.keys:
            return None, 0
        place = bisect.bisect_left(node.keys, tokens.tobytes())
        best, best_length = b"", 0
        for key in node.keys[max(place - 1, 0) : place + 1]:
            length = common_length(np.frombuffer(key, dtype=np.int32), tokens)
            if length > best_length:
                best, best_length = key, length
        return (node.children[best], best_length) if best_length else (None, 0)

    def add(self, parent: Node, tokens: Tokens, pages: Pages) -> Node:
        """Hang a new run under a node; no child may begin with its first page."""
        # Copies, here and below: a view would keep all of a long prompt alive for the sake of one page.
        node = self._new_node(parent.namespace, parent, tokens.copy(), pages.copy())
        self._link(node)
        return node

    def split(self, node: Node, pages: int) -> Node:
        """Cut a node after so many pages; return the upper part, a new node.

        The lower part keeps the identity, so that whoever holds the node still holds the path to its end.
        """
        tokens = pages * self._page_size
        upper = self._new_node(node.namespace, node.parent, node.tokens[:tokens].copy(), node.pages[:pages].copy())
        upper.lock_count = node.lock_count
        upper.last_used = node.last_used
        if node.parent is not None:
            node.parent.children[self._key(upper)] = upper
        node.parent = upper
        node.tokens = node.tokens[tokens:].copy()
        node.pages = node.pages[pages:].copy()
        self._link(node)
        return upper

    def replace(self, leaf: Node, tokens: Tokens, pages: Pages) -> None:
        """Give a leaf other tokens and pages, in the same place of the tree."""
        self._unlink(leaf)
        leaf.tokens = tokens.copy()
        leaf.pages = pages.copy()
        self._link(leaf)

    def remove(self, leaf: Node) -> None:
        """Take a leaf, or a root without children, out."""
        if leaf.parent is None:
            del self._roots[leaf.namespace]
        else:
            self._unlink(leaf)
            leaf.parent = None

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


def common_length(one: Tokens, other: Tokens) -> int:
    """Count how many tokens both begin with."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
