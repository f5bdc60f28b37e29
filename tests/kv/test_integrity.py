"""The integrity check finds every kind of fault, and names the pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from asyncllm.errors import IntegrityError
from asyncllm.kv.cache_manager import CacheManager, RequestPages
from asyncllm.kv.radix_tree import Node
from helpers.tokens import ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.kv.radix_tree import Tokens


class Scene:
    """Two requests in a pool of 12 pages of 2 tokens.

    Pages 0 and 1 hold "aabb", leased by the second; 2 holds "cc" and 3 a tail "d", unlocked; 4 and 5 are the first
    request's own, 6 the second's; the rest is free.
    """

    def __init__(self) -> None:
        self.cache = CacheManager(num_pages=12, page_size=2, num_slots=3, max_pages_per_request=8, prefix_cache="radix")
        self.attach("aabb", 4)
        self.release("aabb")
        self.attach("ccd", 3)
        self.release("ccd")
        self.first = self.attach("xx", 4)
        self.second = self.attach("aabby", 6)
        self.live = [self.first, self.second]

    def attach(self, tokens: str, length: int) -> RequestPages:
        """Admit a request and give it pages."""
        self.last = self.cache.attach(self.cache.lock(self.cache.match(ids(tokens), "")))
        self.cache.grow([(self.last, length)])
        self.cache.take_step_writes()
        return self.last

    def release(self, tokens: str) -> None:
        """End the last request."""
        self.cache.release(self.last, ids(tokens), "")

    def node(self, page: int) -> Node:
        """Find the node that has a page."""
        stack = list(self.cache._cache.roots())
        while stack:
            node = stack.pop()
            if page in node.pages:
                return node
            stack += node.children.values()
        raise LookupError(page)

    def check(self) -> None:
        """Check."""
        self.cache.check_integrity(self.live)


def lose_a_page(scene: Scene) -> None:
    """Allocate a page and hand it to nobody."""
    scene.cache._pool.allocate(1)


def free_a_page_in_use(scene: Scene) -> None:
    """Free a page behind its owner's back."""
    scene.cache._pool.free(ids([4]))


def list_a_free_page_twice(scene: Scene) -> None:
    """Spoil the free list."""
    scene.cache._pool._stack[0] = scene.cache._pool._stack[1]


def own_a_page_of_the_cache(scene: Scene) -> None:
    """Let a row name a page that its request neither owns nor leases."""
    scene.cache._table.rewrite(scene.first.slot, 0, ids([2]))


def own_the_padding_page(scene: Scene) -> None:
    """Let a row name a page outside of the pool."""
    scene.cache._table.rewrite(scene.first.slot, 0, ids([12]))


def name_another_page_than_the_leased(scene: Scene) -> None:
    """Let a row's head differ from the lease."""
    scene.cache._table.rewrite(scene.second.slot, 1, ids([9]))


def shorten_a_row(scene: Scene) -> None:
    """Let a row be shorter than its request believes."""
    scene.cache._table._lengths[scene.first.slot] = 1


def miscount_the_owned(scene: Scene) -> None:
    """Spoil a counter."""
    scene.cache._owned_pages += 1


def miscount_the_evictable(scene: Scene) -> None:
    """Spoil a counter."""
    scene.cache._cache._evictable_pages += 1


def miscount_the_leased(scene: Scene) -> None:
    """Spoil a counter."""
    scene.cache._cache._leased_pages -= 1


def lock_without_a_lease(scene: Scene) -> None:
    """Lock and forget."""
    scene.cache._cache.lock(scene.node(2))


def unlock_twice(scene: Scene) -> None:
    """Unlock what a request leases."""
    scene.cache._cache.unlock(scene.second.node)


def lock_a_parent_less_than_its_children(scene: Scene) -> None:
    """Spoil a lock count above a lease."""
    parent = scene.second.node.parent
    assert parent is not None
    parent.lock_count = 0


def lease_what_is_not_in_the_tree(scene: Scene) -> None:
    """Let a request hold a node that is gone."""
    node = scene.node(2)
    scene.cache.reset_prefix_cache()
    scene.first.source = node


def forget_a_request(scene: Scene) -> None:
    """Let the caller lose a request that is attached."""
    scene.live.remove(scene.first)


def invent_a_request(scene: Scene) -> None:
    """Let the caller hold a request that was released."""
    scene.cache.release(scene.first, ids([]), "")


def hang_a_node_elsewhere(scene: Scene) -> None:
    """Spoil a node's parent."""
    scene.node(3).parent = scene.node(0)


def spoil_tokens(scene: Scene) -> None:
    """Let a node's tokens differ from its key."""
    scene.node(2).tokens[0] = 7


def lose_a_nodes_page(scene: Scene) -> None:
    """Let a node have fewer pages than its tokens fill."""
    scene.node(2).pages = ids([])


def hang_under(parent: Node, tokens: Tokens, pages: Tokens) -> None:
    """Make a child."""
    child = Node(namespace="", parent=parent, tokens=tokens, pages=pages, serial=99)
    parent.children[tokens.tobytes()] = child
    parent.keys = sorted(parent.children)


def empty_a_node(scene: Scene) -> None:
    """Let a node have no tokens."""
    hang_under(scene.node(0), ids([]), ids([]))


def put_a_node_under_a_tail(scene: Scene) -> None:
    """Let a leaf that is filled in part have a child."""
    hang_under(scene.node(3), ids([1, 2]), ids([9]))


def disorder_the_keys(scene: Scene) -> None:
    """Spoil the order in which partial matches are looked up."""
    scene.node(0).parent.keys.reverse()  # type: ignore[union-attr]


def take_a_leaf_off_the_heap(scene: Scene) -> None:
    """Hide an unlocked leaf from eviction."""
    scene.node(3).in_heap = False


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lose_a_page, r"pages \[7\] are neither free, nor owned, nor cached"),
        (free_a_page_in_use, r"pages \[4\] are in two places"),
        (list_a_free_page_twice, r"pages \[10\] are in two places"),
        (own_a_page_of_the_cache, r"pages \[2\] are in two places"),
        (own_the_padding_page, r"pages \[12\] are not of this pool"),
        (name_another_page_than_the_leased, r"slot 1 leases pages \[0, 1\] and its row names \[0, 9\]"),
        (shorten_a_row, r"slot 0 has 1 pages in its row and believes 2"),
        (miscount_the_owned, r"4 pages are counted as owned, 3 are: \[4, 5, 6\]"),
        (miscount_the_evictable, r"counts 2 leased and 3 evictable pages, its nodes have 2 and 2"),
        (miscount_the_leased, r"counts 1 leased and 2 evictable pages, its nodes have 2 and 2"),
        (lock_without_a_lease, r"pages \[2\] are locked 1 times; 0 leases end there and 0 below"),
        (unlock_twice, r"pages \[0, 1\] are locked 0 times; 1 leases end there and 0 below"),
        (lock_a_parent_less_than_its_children, r"pages \[\] are locked 0 times; 1 leases end there and 1 below"),
        (lease_what_is_not_in_the_tree, r"leased pages \[\[2\]\] are not in the cache"),
        (forget_a_request, r"slots \[0\] are attached to no live request"),
        (invent_a_request, r"requests hold slots \[0\], which are not attached to them"),
        (hang_a_node_elsewhere, r"pages \[3\] hang in the wrong place"),
        (spoil_tokens, r"pages \[2\] hang in the wrong place"),
        (lose_a_nodes_page, r"pages \[\] hold 2 tokens, of 2 a page"),
        (empty_a_node, r"pages \[\] have no tokens"),
        (put_a_node_under_a_tail, r"pages \[3\] are filled in part, but not a leaf"),
        (disorder_the_keys, r"the children of the cached pages \[\] are not in order"),
        (take_a_leaf_off_the_heap, r"pages \[\[3\]\] can be evicted, but eviction does not know them"),
    ],
)
def test_a_fault_is_found_and_named(spoil: Callable[[Scene], None], message: str) -> None:
    scene = Scene()
    scene.check()
    spoil(scene)
    with pytest.raises(IntegrityError, match=message):
        scene.check()


def test_the_check_changes_nothing() -> None:
    scene = Scene()
    before = scene.cache.version, scene.cache.free_pages, scene.cache._cache._clock
    scene.check()
    assert before == (scene.cache.version, scene.cache.free_pages, scene.cache._cache._clock)


def test_a_deep_tree_is_walked() -> None:
    """Each decoded page may become a node of its own: no recursion."""
    cache = CacheManager(num_pages=3000, page_size=1, num_slots=1, max_pages_per_request=3000, prefix_cache="radix")
    pages = cache.attach(cache.lock(cache.match(ids([0]), "")))
    for length in range(1, 3000):
        cache.grow([(pages, length)])
        cache.store(pages, ids(range(length)), "")
    cache.check_integrity([pages])
    cache.release(pages, ids(range(2999)), "")
    assert cache.reset_prefix_cache() == 2999
    cache.check_integrity([])
