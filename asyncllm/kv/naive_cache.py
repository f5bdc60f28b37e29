"""The prefix cache that keeps nothing.

Runs on the engine thread; owns pages only while a request leases them. Invariant: nothing in it is evictable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from asyncllm.kv.radix_cache import Extension, RadixCache
from asyncllm.kv.radix_tree import NO_PAGES

if TYPE_CHECKING:
    from asyncllm.kv.page_pool import Pages
    from asyncllm.kv.radix_tree import Node, Tokens

__all__ = ["GROUP_PREFIX", "NaiveCache"]

GROUP_PREFIX: Final = "\0"
"""What the namespace of a group of samples begins with, each group's its own: its requests share while they live."""


class NaiveCache(RadixCache):
    """A radix cache that lets go of what nobody leases any more.

    It takes nothing, so nothing is found in it, but for the samples of one prompt: in a namespace that begins with
    `GROUP_PREFIX` they find what the first of them has computed, and it goes with the last one's lease.
    """

    def shares(self, namespace: str) -> bool:
        """Whether requests of this namespace can match what another of it has computed: the samples of one prompt."""
        return namespace.startswith(GROUP_PREFIX)

    def unlock(self, node: Node, below: Node | None = None) -> Pages:
        """Undo one `lock`; return the pages that nobody leases any more: int32 [n]."""
        super().unlock(node, below)
        return self.evict(self.evictable_pages)

    def extend(self, held: Node, tokens: Tokens, pages: Pages) -> Extension:
        """Take pages within a group of samples, and nothing elsewhere."""
        if self.shares(held.namespace):
            return super().extend(held, tokens, pages)
        return Extension(end=held, taken_pages=0, present=NO_PAGES, kept_tail=False, superseded=NO_PAGES)
