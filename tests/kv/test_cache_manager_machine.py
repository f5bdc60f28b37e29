"""The cache manager against a simulated device that keeps what every page holds.

A position's KV is a function of the namespace and all tokens up to it, so that is what a simulated cell holds. Steps
run on the device in the order of their launch and as late as they may: just before they are committed. Every row
must read back, cell by cell, what its request's tokens demand.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncllm.kv.cache_manager import CacheManager, Lease, RequestPages
from helpers.tokens import ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncllm.kv.page_pool import Pages
    from asyncllm.kv.radix_cache import Node
    from asyncllm.kv.request_pages import StepWrites

Cell = tuple[str, tuple[int, ...]]
"""What a position's KV is a function of."""


@dataclasses.dataclass(eq=False)
class Run:
    """A request: `tokens` are its prompt and all that it will generate."""

    pages: RequestPages
    namespace: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    launched: int
    committed: int
    worst_case_pages: int
    source_page: int | None
    named: int = 0
    ending: bool = False

    @property
    def promised_pages(self) -> int:
        """Pages that it may still need."""
        return self.worst_case_pages - self.pages.num_pages


@dataclasses.dataclass(eq=False)
class Step:
    """A launched step: what is written before it, the pages freed since the last, and its rows."""

    freed: list[int]
    writes: StepWrites
    rows: list[tuple[Run, int, int]]  # request, positions before and after


class Device:
    """Page table and pages of a device."""

    def __init__(self, page_size: int, slots: int, columns: int) -> None:
        self.page_size = page_size
        self.table = [[-1] * columns for _ in range(slots)]
        self.cells: dict[tuple[int, int], Cell] = {}

    def run(self, step: Step) -> None:
        """Spoil the freed pages, apply the step's writes and copies, then write and check every row."""
        freed = set(step.freed)
        self.cells = {place: cell for place, cell in self.cells.items() if place[0] not in freed}
        for slot, column, page in step.writes.table_writes.T.tolist():
            self.table[slot][column] = page
        copies = step.writes.page_copies.T.tolist()
        for source, target in copies:
            for offset in range(self.page_size):
                self.cells.pop((target, offset), None)
                if (source, offset) in self.cells:
                    self.cells[target, offset] = self.cells[source, offset]
        for run, start, end in step.rows:
            row = self.table[run.pages.slot]
            for position in range(start, end):
                place = row[position // self.page_size], position % self.page_size
                self.cells[place] = run.namespace, run.tokens[: position + 1]
        for run, _, end in step.rows:
            self.check(self.table[run.pages.slot], run.namespace, run.tokens[:end])

    def check(self, row: list[int], namespace: str, tokens: tuple[int, ...], first: int = 0) -> None:
        """Compare what a row holds from position `first` on with what the tokens demand."""
        for position in range(first, len(tokens)):
            place = row[position // self.page_size], position % self.page_size
            assert self.cells.get(place) == (namespace, tokens[: position + 1]), (position, place)


class ManagerAgainstDevice(RuleBasedStateMachine):
    """Random requests in a small pool, two steps in flight, every page accounted for after every rule."""

    prefix_cache = "radix"
    cache: CacheManager

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        num_pages=st.integers(1, 12),
        num_slots=st.integers(1, 4),
    )
    def open(self, page_size: int, num_pages: int, num_slots: int) -> None:
        """Make a manager and a device."""
        self.size = page_size
        self.cache = CacheManager(
            num_pages=num_pages,
            page_size=page_size,
            num_slots=num_slots,
            max_pages_per_request=num_pages,
            prefix_cache="none" if self.prefix_cache == "none" else "radix",
        )
        self.device = Device(page_size, num_slots, num_pages)
        self.freed: list[int] = []
        self.record(self.cache._pool, "free", lambda pages: self.freed.extend(pages.tolist()))
        self.running: list[Run] = []
        self.steps: collections.deque[Step] = collections.deque()
        self.leases: list[Lease] = []
        self.seen: list[tuple[int, ...]] = [()]

    def record(self, owner: object, name: str, note: Callable[[Pages], None]) -> None:
        """Have `note` called with the argument of a method of one pages argument, before the method."""
        method = getattr(owner, name)

        def noting(pages: Pages) -> None:
            note(pages)
            method(pages)

        setattr(owner, name, noting)

    @property
    def promised_pages(self) -> int:
        """Pages that admitted requests may still need."""
        return sum(run.promised_pages for run in self.running)

    def draw_tokens(self, data: st.DataObject) -> tuple[int, ...]:
        """Draw a request's tokens: often those of another one, up to somewhere."""
        known = data.draw(st.sampled_from(self.seen))
        # Cut close to page boundaries half of the time.
        cut = data.draw(st.integers(0, len(known)))
        if data.draw(st.booleans()):
            cut = min(len(known), cut // self.size * self.size + data.draw(st.integers(0, 1)))
        runs = data.draw(st.lists(st.tuples(st.integers(0, 1), st.integers(1, self.size + 1)), max_size=3))
        tokens = known[:cut] + tuple(token for token, times in runs for _ in range(times))
        return (tokens or (0,))[: self.cache.num_pages * self.size]

    @precondition(lambda self: self.cache.free_slots)
    @rule(data=st.data(), namespace=st.sampled_from(["", "", "\0other"]))
    def admit(self, data: st.DataObject, namespace: str) -> None:
        """Admit a request by the rules of reservation; it may go without the copied page."""
        tokens = self.draw_tokens(data)
        prompt_tokens = data.draw(st.integers(1, len(tokens)))
        prompt = ids(tokens[:prompt_tokens])
        match = self.cache.match(prompt, namespace)
        assert match.whole_pages * self.size <= match.tokens < prompt_tokens
        for attempt in (match, match.without_copy(self.size)):
            need = self.cache.pages_needed(attempt, len(tokens))
            if need + self.promised_pages > self.cache.available_pages:
                continue
            lease = self.cache.lock(attempt)
            assert lease.whole_pages == match.whole_pages
            if need + self.promised_pages > self.cache.available_pages:
                self.cache.unlock(lease)
                continue
            pages = self.cache.attach(lease)
            assert pages.cached_tokens == attempt.tokens
            assert pages.leased_tokens == match.whole_pages * self.size
            source_page = None if attempt.source is None else int(attempt.source.pages[0])
            worst = need + lease.whole_pages
            run = Run(pages, namespace, tokens, prompt_tokens, attempt.tokens, attempt.tokens, worst, source_page)
            self.running.append(run)
            self.seen.append(tokens)
            return
        assert self.running or self.leases, "a request that fits the pool is refused though nothing else holds pages"

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        """Lock a prefix and keep the lease for a while, if no promise needs its pages."""
        match = self.cache.match(ids(self.draw_tokens(data)), "")
        lease = self.cache.lock(match)
        if self.promised_pages > self.cache.available_pages:
            self.cache.unlock(lease)
        else:
            self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """Unlock a lease, once."""
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.cache.unlock(lease)
        with pytest.raises(RuntimeError):
            self.cache.unlock(lease)

    @precondition(lambda self: len(self.steps) < 2 and self.running)
    @rule(data=st.data())
    def launch(self, data: st.DataObject) -> None:
        """Launch a step of some requests, a chunk of prompt or one token each; it may have no row of some."""
        rows = []
        for run in self.running:
            left = run.prompt_tokens - run.launched
            most = left if left > 0 else min(1, len(run.tokens) - run.launched)
            count = data.draw(st.integers(0, most))
            if count and not run.ending:
                rows.append((run, run.launched, run.launched + count))
        self.cache.grow([(run.pages, end) for run, _, end in rows])
        for run, _, end in rows:
            run.launched = end
            run.named += 1
        step = Step(self.freed.copy(), self.cache.take_step_writes(), rows)
        self.freed.clear()
        targets = step.writes.page_copies[1].tolist()
        assert len(set(targets)) == len(targets)
        assert not set(targets) & set(step.writes.page_copies[0].tolist())
        self.steps.append(step)

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), lazily=st.booleans())
    def commit(self, data: st.DataObject, lazily: bool) -> None:
        """Run the oldest step on the device, then commit it: store prompts, release what ended."""
        step = self.steps.popleft()
        self.device.run(step)
        if not lazily:
            self.commit_rows(data, step)
            return
        with self.cache.releasing():
            free = self.cache.free_pages
            self.commit_rows(data, step)
            assert self.cache.free_pages == free

    def commit_rows(self, data: st.DataObject, step: Step) -> None:
        """Commit a step's rows."""
        for run, start, end in step.rows:
            run.named -= 1
            self.cache.copy_done(run.pages)
            run.source_page = None
            if not run.ending:
                run.committed = end
                if start < run.prompt_tokens or data.draw(st.booleans()):
                    self.cache.store(run.pages, ids(run.tokens[:end]), run.namespace)
                run.ending = end == len(run.tokens)
            self.release_ended(run, known=run.committed)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Cancel a request, or fail it: then nothing is known of what it wrote."""
        run = data.draw(st.sampled_from(self.running))
        run.ending = True
        self.release_ended(run, known=data.draw(st.sampled_from([0, run.committed])))

    def release_ended(self, run: Run, known: int) -> None:
        """Release a request that ended, when no launched step names it."""
        if run.ending and not run.named and not run.pages.released:
            self.cache.release(run.pages, ids(run.tokens[:known]), run.namespace)
            self.running.remove(run)
            with pytest.raises(RuntimeError):
                self.cache.release(run.pages, ids([]), run.namespace)

    @rule()
    def reset(self) -> None:
        """Empty the prefix cache of all that is not leased."""
        evictable, free = self.cache.evictable_pages, self.cache.free_pages
        assert self.cache.reset_prefix_cache() == evictable
        assert self.cache.evictable_pages == 0
        assert self.cache.free_pages == free + evictable

    @invariant()
    def everything_is_accounted_for(self) -> None:
        """Walk everything; compare the counts; what is promised is there."""
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        cache.check_integrity([run.pages for run in self.running])
        assert cache.free_pages + cache.owned_pages + cache.cached_pages == cache.num_pages
        assert cache.leased_pages + cache.evictable_pages == cache.cached_pages
        assert self.promised_pages <= cache.available_pages
        assert cache.free_slots == len(self.device.table) - len(self.running)
        assert all(run.pages.num_pages <= run.worst_case_pages for run in self.running)

    @invariant()
    def a_copys_source_stays_leased_until_its_step_is_committed(self) -> None:
        """Whether the copy is queued, launched, or run but not committed."""
        if hasattr(self, "cache"):
            leased = {page for node, _ in self.nodes() if node.lock_count for page in node.pages.tolist()}
            assert leased >= {run.source_page for run in self.running} - {None}

    @invariant()
    def cached_pages_hold_what_the_tree_says(self) -> None:
        """On the device, at any moment: what is cached was written by committed steps and is not written again."""
        if hasattr(self, "cache"):
            for node, prefix in self.nodes():
                row = [-1] * (len(prefix) // self.size) + node.pages.tolist()
                self.device.check(row, node.namespace, prefix + tuple(node.tokens.tolist()), first=len(prefix))

    def nodes(self) -> Iterator[tuple[Node, tuple[int, ...]]]:
        """Go over the prefix cache's nodes with the tokens before each."""
        stack: list[tuple[Node, tuple[int, ...]]] = [(root, ()) for root in self.cache._cache.roots()]
        while stack:
            node, prefix = stack.pop()
            yield node, prefix
            stack += [(child, (*prefix, *node.tokens.tolist())) for child in node.children.values()]

    def teardown(self) -> None:
        """End everything: then every page is free or cached and unlocked, and a reset frees all."""
        if not hasattr(self, "cache"):
            return
        self.steps.append(Step(self.freed, self.cache.take_step_writes(), []))
        for step in self.steps:
            self.device.run(step)
        for run in self.running:
            self.device.check(self.device.table[run.pages.slot], run.namespace, run.tokens[: run.launched])
        for run in self.running:
            self.cache.release(run.pages, ids(run.tokens[: run.committed]), run.namespace)
        for lease in self.leases:
            self.cache.unlock(lease)
        self.cache.check_integrity([])
        assert self.cache.leased_pages == self.cache.owned_pages == 0
        if self.prefix_cache == "none":
            assert self.cache.cached_pages == 0
        self.cache.reset_prefix_cache()
        assert self.cache.free_pages == self.cache.num_pages


class NaiveManagerAgainstDevice(ManagerAgainstDevice):
    """The same without a prefix cache; requests of the namespace that begins with NUL are a group of samples."""

    prefix_cache = "none"

    @invariant()
    def nothing_is_kept(self) -> None:
        """Only what live requests lease is cached."""
        if hasattr(self, "cache"):
            assert self.cache.evictable_pages == 0


TestManagerAgainstDevice = ManagerAgainstDevice.TestCase
TestManagerAgainstDevice.settings = settings(deadline=None, max_examples=200, stateful_step_count=40)
TestNaiveManagerAgainstDevice = NaiveManagerAgainstDevice.TestCase
TestNaiveManagerAgainstDevice.settings = settings(deadline=None, max_examples=40, stateful_step_count=40)
