"""The radix cache against a naive model of it: a dict from every page's whole prefix to the page."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncllm.kv.radix_cache import RadixCache
from helpers.tokens import ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncllm.kv.radix_tree import Node

Key = tuple[str, tuple[int, ...]]
"""A page: its namespace, and all tokens from the beginning to its end."""


@dataclasses.dataclass(eq=False)
class Page:
    """A cached page, or a leaf page filled in part, in the model."""

    key: Key
    page: int
    last_used: int
    locks: int = 0


@dataclasses.dataclass(eq=False)
class Holder:
    """A request in the model: what it has locked, and the pages that it owns behind that."""

    node: Node
    locked: Page | None
    namespace: str


class NaiveModel:
    """What the radix cache must be seen to do, page by page, without a tree."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[Key, Page] = {}
        self.clock = 0

    def begin(self, key: Key) -> Key:
        """Name the page before one, by its prefix; the empty prefix is none."""
        namespace, tokens = key
        return namespace, tokens[: (len(tokens) - 1) // self.page_size * self.page_size]

    def path(self, page: Page | None) -> Iterator[Page]:
        """Go over a page and those before it."""
        while page is not None:
            yield page
            page = self.pages.get(self.begin(page.key))

    def match(self, namespace: str, tokens: tuple[int, ...]) -> tuple[Page | None, list[Page], int]:
        """Return the last whole page, the pages with the longest common head behind it, and that head's length."""
        last, end = None, self.page_size
        while end <= len(tokens) and (namespace, tokens[:end]) in self.pages:
            last, end = self.pages[namespace, tokens[:end]], end + self.page_size
        start = end - self.page_size
        best: list[Page] = []
        longest = 0
        for page in self.pages.values():
            if page.key[0] == namespace and self.begin(page.key)[1] == tokens[:start]:
                common = next(
                    (i for i, (a, b) in enumerate(zip(page.key[1][start:], tokens[start:], strict=False)) if a != b),
                    min(len(page.key[1]), len(tokens)) - start,
                )
                if common > longest:
                    best, longest = [], common
                if common == longest and common:
                    best.append(page)
        return last, best, longest

    def lock(self, page: Page | None, by: int) -> None:
        """Lock, or with by=-1 unlock, a page and those before it."""
        for one in self.path(page):
            one.locks += by
            assert one.locks >= 0

    def children(self, page: Page) -> list[Page]:
        """Find the pages behind one."""
        return [other for other in self.pages.values() if self.begin(other.key) == page.key]

    def evict(self, count: int) -> list[int]:
        """Take the least recently used unlocked pages that have none behind them, one by one."""
        gone: list[int] = []
        while len(gone) < count:
            leaves = [page for page in self.pages.values() if not page.locks and not self.children(page)]
            if not leaves:
                break
            oldest = min(leaves, key=lambda page: page.last_used)
            assert [page for page in leaves if page.last_used == oldest.last_used] == [oldest]
            gone.append(oldest.page)
            del self.pages[oldest.key]
        return gone


class Comparison:
    """Random matches, locks, extensions and evictions; everything seen must equal the naive model.

    Args:
        rng: chooses everything.
        page_size: tokens of a page.
    """

    def __init__(self, rng: random.Random, page_size: int) -> None:
        self.rng = rng
        self.size = page_size
        self.cache = RadixCache(page_size)
        self.model = NaiveModel(page_size)
        self.holders: list[Holder] = []
        self.new_pages = iter(range(10**6))

    def random_tokens(self, behind: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Choose tokens that continue given ones, or what is cached up to somewhere."""
        rng = self.rng
        tokens = behind
        if not behind and self.model.pages and rng.randrange(3):
            tokens = rng.choice(sorted(key[1] for key in self.model.pages))
            tokens = tokens[: rng.choice([len(tokens), rng.randint(0, len(tokens))])]
        # Runs of one token, so that pages of 16 have long common heads and many lengths occur.
        for _ in range(rng.randrange(4)):
            tokens += (rng.randrange(2),) * rng.randint(1, self.size + 1)
        return tokens

    def match(self) -> None:
        """Match, and perhaps lock both what matched and the source of the copy."""
        tokens = self.random_tokens()
        namespace = self.rng.choice("aab")
        self.model.clock += 1
        last, best, longest = self.model.match(namespace, tokens)
        found = self.cache.match(ids(tokens), namespace)
        assert (found.node is None) == (last is None)
        assert found.whole_pages == (len(last.key[1]) // self.size if last else 0)
        if self.size == 1:
            longest, best = 0, []
        assert found.source_tokens == longest
        assert (found.source is None) == (not best)
        for page in self.model.path(last):
            page.last_used = self.model.clock
        source: Page | None = None
        if found.source is not None:
            assert len(found.source.pages) == 1
            (source,) = [page for page in best if page.page == found.source.pages[0]]
            source.last_used = self.model.clock
        if last is not None and found.node is not None:
            expected = [page.page for page in self.model.path(last)][::-1]
            assert self.cache.prefix_pages(found.node).tolist() == expected
        if self.rng.randrange(2):
            node = found.node or self.cache.root(namespace)
            self.cache.lock(node)
            self.model.lock(last, 1)
            self.holders.append(Holder(node, last, namespace))
            if found.source is not None:
                self.cache.lock(found.source)
                self.model.lock(source, 1)
                self.holders.append(Holder(found.source, source, namespace))

    def unlock(self) -> None:
        """Give one lock up."""
        holder = self.holders.pop(self.rng.randrange(len(self.holders)))
        assert self.cache.unlock(holder.node).tolist() == []
        self.model.lock(holder.locked, -1)

    def extend(self) -> None:
        """Give the cache what a holder computed behind what it holds; also with a tail that fills no page."""
        holder = self.rng.choice(self.holders)
        start = holder.locked.key[1] if holder.locked else ()
        tail = holder.locked if len(start) % self.size else None
        tokens = self.random_tokens(start)
        base = len(start) // self.size * self.size
        count = -(-(len(tokens) - base) // self.size)
        pages = [next(self.new_pages) for _ in range(count)]
        if tail is not None and pages:
            pages[0] = tail.page
        extension = self.cache.extend(holder.node, ids(tokens[base:]), ids(pages))
        self.model.clock += 1
        gone = set(extension.superseded.tolist())
        present = self.extend_model(holder, tail=tail, tokens=tokens, base=base, pages=pages, gone=gone)
        assert extension.present.tolist() == present
        assert extension.taken_pages == (len(tokens) - base) // self.size
        assert extension.kept_tail == bool(holder.locked and len(holder.locked.key[1]) % self.size)
        holder.node = extension.end
        assert not gone, f"pages {gone} were let go without need"

    def extend_model(
        self,
        holder: Holder,
        *,
        tail: Page | None,
        tokens: tuple[int, ...],
        base: int,
        pages: list[int],
        gone: set[int],
    ) -> list[int]:
        """Do the same in the model; `gone` loses the pages whose letting go is right. Returns the pages present."""
        model, size, namespace = self.model, self.size, holder.namespace
        present: list[int] = []
        last = model.pages.get((namespace, tokens[:base]))
        for index, end in enumerate(range(base + size, len(tokens) + 1, size)):
            key = namespace, tokens[:end]
            if key in model.pages:
                present.append(model.pages[key].page)
            elif tail is not None and index == 0:
                del model.pages[tail.key]
                model.pages[key] = tail
                tail.key = key
            else:
                self.drop_superseded(key, gone)
                model.pages[key] = Page(key, pages[index], 0)
            last = model.pages[key]
            last.last_used = model.clock
        end = base + (len(tokens) - base) // size * size
        rest = namespace, tokens
        if tail is not None and end == base:
            last = tail
            if len(tokens) > len(tail.key[1]) and not self.covers(rest):
                del model.pages[tail.key]
                tail.key, tail.last_used = rest, model.clock
                model.pages[rest] = tail
        elif len(tokens) > end and not self.covers(rest):
            self.drop_superseded(rest, gone)
            last = model.pages[rest] = Page(rest, pages[-1], model.clock)
        if last is not holder.locked:
            model.lock(last, 1)
            model.lock(holder.locked, -1)
            holder.locked = last
        return present

    def covers(self, key: Key) -> bool:
        """Whether a page begins with all of a part of a page; the cache refreshes the one it finds."""
        covering = [
            page
            for page in self.model.pages.values()
            if page.key[0] == key[0]
            and page.key[1][: len(key[1])] == key[1]
            and self.model.begin(page.key) == self.model.begin(key)
        ]
        for page in covering:
            (node,) = [node for node, _ in walk(self.cache) if page.page in node.pages]
            if node.last_used == self.cache._clock:
                page.last_used = self.model.clock
        assert not covering or any(page.last_used == self.model.clock for page in covering)
        return bool(covering)

    def drop_superseded(self, key: Key, gone: set[int]) -> None:
        """Drop what the cache let go in favour of a new page: an unlocked leaf that the page begins with."""
        for page in [page for page in self.model.pages.values() if page.page in gone]:
            start = len(self.model.begin(key)[1])
            if page.key[0] == key[0] and page.key[1] == key[1][: len(page.key[1])] and len(page.key[1]) > start:
                assert not page.locks
                assert len(page.key[1]) % self.size
                gone.discard(page.page)
                del self.model.pages[page.key]

    def evict(self) -> None:
        """Evict: the same pages must go."""
        count = self.rng.randint(1, 6)
        gone = self.cache.evict(count).tolist()
        assert sorted(gone) == sorted(self.model.evict(count))

    def check(self) -> None:
        """Compare the tree's pages, keys and counts with the model's."""
        seen: dict[Key, int] = {}
        for node, prefix in walk(self.cache):
            assert node.tokens.base is node.pages.base is None, "a view keeps all of a long prompt alive"
            for index, page in enumerate(node.pages.tolist()):
                end = len(prefix) + min((index + 1) * self.size, len(node.tokens))
                seen[node.namespace, (*prefix, *node.tokens.tolist())[:end]] = page
        assert seen == {key: page.page for key, page in self.model.pages.items()}
        locked = sum(page.locks > 0 for page in self.model.pages.values())
        assert self.cache.leased_pages == locked
        assert self.cache.evictable_pages == len(seen) - locked
        roots = {root.namespace for root in self.cache.roots()}
        assert roots == {key[0] for key in seen} | {holder.namespace for holder in self.holders}

    def finish(self) -> None:
        """Unlock all: then everything can be evicted and nothing is left, not even a root."""
        for holder in self.holders:
            self.cache.unlock(holder.node)
        gone = self.cache.evict(10**6).tolist()
        assert sorted(gone) == sorted(page.page for page in self.model.pages.values())
        assert not list(self.cache.roots())
        assert not self.cache._heap
        assert self.cache.leased_pages == self.cache.evictable_pages == 0


def walk(cache: RadixCache) -> Iterator[tuple[Node, tuple[int, ...]]]:
    """Go over the nodes with the tokens before each."""
    stack: list[tuple[Node, tuple[int, ...]]] = [(root, ()) for root in cache.roots()]
    while stack:
        node, prefix = stack.pop()
        yield node, prefix
        stack += [(child, (*prefix, *node.tokens.tolist())) for child in node.children.values()]


class RadixAgainstModel(RuleBasedStateMachine):
    """Short random runs, which shrink to the shortest one that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.comparison: Comparison | None = None

    @initialize(rng=st.randoms(use_true_random=False), page_size=st.sampled_from([2, 4, 1, 16]))
    def open(self, rng: random.Random, page_size: int) -> None:
        """Make a cache and a model."""
        self.comparison = Comparison(rng, page_size)

    @rule()
    def match(self) -> None:
        """Match, and perhaps lock."""
        assert self.comparison is not None
        self.comparison.match()

    @precondition(lambda self: self.comparison.holders)
    @rule()
    def unlock(self) -> None:
        """Unlock."""
        assert self.comparison is not None
        self.comparison.unlock()

    @precondition(lambda self: self.comparison.holders)
    @rule()
    def extend(self) -> None:
        """Extend."""
        assert self.comparison is not None
        self.comparison.extend()

    @rule()
    def evict(self) -> None:
        """Evict."""
        assert self.comparison is not None
        self.comparison.evict()

    @invariant()
    def totals_are_the_models(self) -> None:
        """Compare after every rule."""
        if self.comparison is not None:
            self.comparison.check()

    def teardown(self) -> None:
        """Unlock and evict everything."""
        if self.comparison is not None:
            self.comparison.finish()


TestRadixAgainstModel = RadixAgainstModel.TestCase
TestRadixAgainstModel.settings = settings(deadline=None, max_examples=100, stateful_step_count=30)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_long_random_runs(page_size: int, seed: int) -> None:
    """Long runs reach what short ones seldom do: deep trees, many locks, outdated heap entries."""
    rng = random.Random(seed)
    comparison = Comparison(rng, page_size)
    for _ in range(150):
        action = rng.choice(["match", "match", "extend", "extend", "unlock", "evict"])
        if action == "match" or (action in {"extend", "unlock"} and not comparison.holders):
            comparison.match()
        elif action == "extend":
            comparison.extend()
        elif action == "unlock":
            comparison.unlock()
        else:
            comparison.evict()
        comparison.check()
    comparison.finish()
