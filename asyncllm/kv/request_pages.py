"""What a request holds of the KV: a match, a lease, its pages.

Runs on the engine thread; the cache manager alone makes these and changes them. Invariant: a lease ends once, by
`unlock` or by becoming a `RequestPages`; that ends once, by `release`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from asyncllm.kv.radix_tree import Node

__all__ = ["Lease", "PrefixMatch", "RequestPages", "StepWrites"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """What the prefix cache has of some tokens at this moment; locks nothing, so lock it before anything else.

    Args:
        tokens: matched positions, fewer than the tokens that were given.
        whole_pages: pages of them that are leased; the positions behind are copied to a page of the request.
        namespace: in which it was found.
        node: where the whole pages end; None if there are none. For `kv` alone.
        source: the node of the page whose head is copied; None if there is none. For `kv` alone.
    """

    tokens: int
    whole_pages: int
    namespace: str
    node: Node | None
    source: Node | None

    def without_copy(self, page_size: int) -> PrefixMatch:
        """Give up the copied part: it pins its source, so a request as large as the pool may not fit beside it."""
        return dataclasses.replace(self, tokens=self.whole_pages * page_size, source=None)


class Lease:
    """A locked prefix, not yet anybody's; single use.

    Attributes:
        match: what is locked.
        node: where the locked whole pages end. For `kv` alone.
    """

    __slots__ = ("match", "node")

    def __init__(self, match: PrefixMatch, node: Node) -> None:
        self.match = match
        self.node = node

    @property
    def whole_pages(self) -> int:
        """How many pages it leases."""
        return self.match.whole_pages


class RequestPages:
    """One admitted request's KV. Its row is leased pages first, then its own.

    Attributes:
        slot: its row of the page table.
        namespace: whose prefixes it shares.
        num_pages: length of its row.
        capacity_tokens: positions that the row has place for.
        leased_pages: whole pages at the row's beginning that are the cache's.
        tail_pages: 1 if the cache has the row's next page too, as a partial leaf that the request goes on writing
            behind; else 0.
        page_size: tokens of a page.
        cached_tokens: positions that the cache answered when it was admitted, the copied ones included.
        node: the locked node where its leased pages end. For `kv` alone.
        source: the locked node that its first step copies a page from, until then. For `kv` alone.
        released: whether everything went back.
    """

    __slots__ = (
        "cached_tokens",
        "capacity_tokens",
        "leased_pages",
        "namespace",
        "node",
        "num_pages",
        "page_size",
        "released",
        "slot",
        "source",
        "tail_pages",
    )

    def __init__(self, *, slot: int, num_pages: int, page_size: int, lease: Lease) -> None:
        self.slot = slot
        self.namespace = lease.match.namespace
        self.num_pages = num_pages
        self.page_size = page_size
        self.capacity_tokens = num_pages * page_size
        self.leased_pages = lease.match.whole_pages
        self.tail_pages = 0
        self.cached_tokens = lease.match.tokens
        self.node = lease.node
        self.source = lease.match.source
        self.released = False

    @property
    def owned_pages(self) -> int:
        """How many pages of its row are nobody else's."""
        return self.num_pages - self.leased_pages - self.tail_pages

    @property
    def leased_tokens(self) -> int:
        """How many positions lie in leased whole pages."""
        return self.leased_pages * self.page_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepWrites:
    """What a step does to the device's KV before it computes.

    Args:
        table_writes: int32 [3, writes]: slots, columns, pages; no cell twice. Done first.
        page_copies: int32 [2, copies]: sources and targets; no target twice, none is a source. Done second.
    """

    table_writes: npt.NDArray[np.int32]
    page_copies: npt.NDArray[np.int32]
