"""The cache manager against a simulated device that keeps what every page holds.

A position's KV is a function of the namespace and all tokens up to it, so that is what a simulated cell holds. Steps
run on the device in the order of their launch and as late as they may: just before they are committed. Every row
must read back, cell by cell, what its request's tokens demand.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import TYPE_CHECKING, Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncllm.kv.cache_manager import CacheManager, Lease, RequestPages
from helpers.tokens import ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncllm.kv.page_pool import Pages
    from asyncllm.kv.radix_tree import Node
    from asyncllm.kv.request_pages import PrefixMatch, StepWrites

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
    """A launched step: the pages freed since the last one, what is written before it, and its rows."""

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
        for source, target in step.writes.page_copies.T.tolist():
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


class RecordingManager(CacheManager):
    """A manager that tells which pages were freed."""

    def freed_pages(self) -> list[int]:
        """Start to record; the list grows."""
        freed: list[int] = []
        free = self._pool.free

        def recording(pages: Pages) -> None:
            free(pages)
            freed.extend(pages.tolist())

        self._pool.free = recording  # type: ignore[method-assign]
        return freed


class Simulation:
    """Random requests in a small pool, up to two steps in flight.

    Args:
        rng: chooses everything.
        page_size, num_pages, num_slots, prefix_cache: the manager's.
        namespaces: the first is the most frequent.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        page_size: int,
        num_pages: int,
        num_slots: int,
        prefix_cache: Literal["radix", "none"],
        namespaces: tuple[str, ...],
    ) -> None:
        self.rng = rng
        self.size = page_size
        self.namespaces = namespaces
        self.cache = RecordingManager(
            num_pages=num_pages,
            page_size=page_size,
            num_slots=num_slots,
            max_pages_per_request=num_pages,
            prefix_cache=prefix_cache,
        )
        self.freed = self.cache.freed_pages()
        self.device = Device(page_size, num_slots, num_pages)
        self.running: list[Run] = []
        self.steps: collections.deque[Step] = collections.deque()
        self.leases: list[Lease] = []
        self.seen: list[tuple[int, ...]] = [()]

    @property
    def promised_pages(self) -> int:
        """Pages that admitted requests may still need."""
        return sum(run.promised_pages for run in self.running)

    def random_tokens(self) -> tuple[int, ...]:
        """Choose a request's tokens: often those of another one, up to somewhere."""
        rng = self.rng
        known = rng.choice(self.seen[-4:])
        cut = rng.choice([len(known), rng.randint(0, len(known))])
        if rng.randrange(2):  # at a page boundary, or one token behind
            cut = min(len(known), cut // self.size * self.size + rng.randrange(2))
        tokens = known[:cut]
        for _ in range(rng.randrange(4)):
            tokens += (rng.randrange(2),) * rng.randint(1, 2 * self.size)
        return (tokens or (0,))[: self.cache.num_pages * self.size]

    def admit(self) -> None:
        """Admit a request by the rules of reservation; it may go without the copied page."""
        tokens = self.random_tokens()
        prompt_tokens = self.rng.choice([len(tokens), self.rng.randint(1, len(tokens))])
        namespace = self.rng.choice([self.namespaces[0], *self.namespaces])
        match = self.cache.match(ids(tokens[:prompt_tokens]), namespace)
        assert match.whole_pages * self.size <= match.tokens < prompt_tokens
        for attempt in (match, match.without_copy(self.size)):
            pages = self.try_to_attach(attempt, len(tokens))
            if pages is None:
                continue
            assert pages.cached_tokens == attempt.tokens
            assert pages.leased_tokens == match.whole_pages * self.size
            self.running.append(
                Run(
                    pages=pages,
                    namespace=namespace,
                    tokens=tokens,
                    prompt_tokens=prompt_tokens,
                    launched=attempt.tokens,
                    committed=attempt.tokens,
                    worst_case_pages=-(-len(tokens) // self.size),
                    source_page=None if attempt.source is None else int(attempt.source.pages[0]),
                )
            )
            self.seen.append(tokens)
            return
        assert self.running or self.leases, "a request that fits the pool must wait, though nothing else holds a page"

    def try_to_attach(self, match: PrefixMatch, positions: int) -> RequestPages | None:
        """Attach if the worst case fits beside what is promised, before and after locking."""
        need = self.cache.pages_needed(match, positions)
        if need + self.promised_pages > self.cache.available_pages:
            return None
        lease = self.cache.lock(match)
        assert lease.whole_pages == match.whole_pages
        if need + self.promised_pages > self.cache.available_pages:
            self.cache.unlock(lease)
            return None
        return self.cache.attach(lease)

    def hold(self) -> None:
        """Lock a prefix and keep the lease for a while, if no promise needs its pages."""
        lease = self.cache.lock(self.cache.match(ids(self.random_tokens()), self.namespaces[0]))
        if self.promised_pages > self.cache.available_pages:
            self.cache.unlock(lease)
        else:
            self.leases.append(lease)

    def give_up(self) -> None:
        """Unlock a lease, once."""
        lease = self.leases.pop(self.rng.randrange(len(self.leases)))
        self.cache.unlock(lease)
        with pytest.raises(RuntimeError):
            self.cache.unlock(lease)

    def launch(self) -> None:
        """Launch a step of some requests, a chunk of prompt or one token each; some may have no row in it."""
        rows = []
        for run in self.running:
            left = run.prompt_tokens - run.launched
            most = left if left > 0 else min(1, len(run.tokens) - run.launched)
            count = self.rng.choice([most, self.rng.randint(0, most)])
            if count and not run.ending:
                rows.append((run, run.launched, run.launched + count))
        self.cache.grow([(run.pages, end) for run, _, end in rows])
        for run, _, end in rows:
            run.launched = end
            run.named += 1
        step = Step(self.freed.copy(), self.cache.take_step_writes(), rows)
        self.freed.clear()
        sources, targets = step.writes.page_copies.tolist()
        assert len(set(targets)) == len(targets)
        assert not set(targets) & set(sources)
        self.steps.append(step)

    def commit(self) -> None:
        """Run the oldest step on the device, then commit it: store prompts, release what ended."""
        step = self.steps.popleft()
        self.device.run(step)
        if self.rng.randrange(2):
            self.commit_rows(step)
            return
        with self.cache.releasing():
            free = self.cache.free_pages
            self.commit_rows(step)
            assert self.cache.free_pages == free

    def commit_rows(self, step: Step) -> None:
        """Commit a step's rows."""
        for run, start, end in step.rows:
            run.named -= 1
            self.cache.copy_done(run.pages)
            run.source_page = None
            if not run.ending:
                run.committed = end
                if start < run.prompt_tokens or self.rng.randrange(2):
                    self.cache.store(run.pages, ids(run.tokens[:end]), run.namespace)
                run.ending = end == len(run.tokens)
            self.release_ended(run, known=run.committed)

    def end(self) -> None:
        """Cancel a request, or fail it: then nothing is known of what it wrote."""
        run = self.rng.choice(self.running)
        run.ending = True
        self.release_ended(run, known=self.rng.choice([0, run.committed]))

    def release_ended(self, run: Run, known: int) -> None:
        """Release a request that ended, when no launched step names it."""
        if run.ending and not run.named and not run.pages.released:
            self.cache.release(run.pages, ids(run.tokens[:known]), run.namespace)
            self.running.remove(run)
            with pytest.raises(RuntimeError):
                self.cache.release(run.pages, ids([]), run.namespace)

    def reset(self) -> None:
        """Empty the prefix cache of all that is not leased."""
        evictable, free = self.cache.evictable_pages, self.cache.free_pages
        assert self.cache.reset_prefix_cache() == evictable
        assert self.cache.evictable_pages == 0
        assert self.cache.free_pages == free + evictable

    def disturb(self) -> None:
        """Do something that happens beside the steps."""
        what = self.rng.choice(["hold", "end", "give up", "reset"])
        if what == "hold":
            self.hold()
        elif what == "end" and self.running:
            self.end()
        elif what == "give up" and self.leases:
            self.give_up()
        elif what == "reset":
            self.reset()

    def check(self) -> None:
        """Walk everything; compare the counts; what is promised is there; the device holds what is cached."""
        cache = self.cache
        cache.check_integrity([run.pages for run in self.running])
        assert cache.free_pages + cache.owned_pages + cache.cached_pages == cache.num_pages
        assert cache.leased_pages + cache.evictable_pages == cache.cached_pages
        assert self.promised_pages <= cache.available_pages
        assert cache.free_slots == len(self.device.table) - len(self.running)
        assert all(run.pages.num_pages <= run.worst_case_pages for run in self.running)
        leased = {page for node, _ in self.nodes() if node.lock_count for page in node.pages.tolist()}
        assert leased >= {run.source_page for run in self.running} - {None}, "until its copy's step is committed"
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

    def finish(self) -> None:
        """Read every live row, end everything: then all is free or cached and unlocked, and a reset frees all."""
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
        self.cache.reset_prefix_cache()
        assert self.cache.free_pages == self.cache.num_pages


class ManagerAgainstDevice(RuleBasedStateMachine):
    """Short random runs, which shrink to the shortest one that fails."""

    prefix_cache: Literal["radix", "none"] = "radix"
    namespaces: tuple[str, ...] = ("", "other")

    def __init__(self) -> None:
        super().__init__()
        self.simulation: Simulation | None = None

    @initialize(
        rng=st.randoms(use_true_random=False),
        page_size=st.sampled_from([2, 4, 1, 16]),
        num_pages=st.one_of(st.integers(5, 14), st.integers(1, 14)),
        num_slots=st.sampled_from([3, 4, 2, 1]),
    )
    def open(self, rng: random.Random, page_size: int, num_pages: int, num_slots: int) -> None:
        """Make a manager and a device."""
        self.simulation = Simulation(
            rng,
            page_size=page_size,
            num_pages=num_pages,
            num_slots=num_slots,
            prefix_cache=self.prefix_cache,
            namespaces=self.namespaces,
        )

    @precondition(lambda self: self.simulation.cache.free_slots)
    @rule(count=st.integers(1, 3))
    def admit(self, count: int) -> None:
        """Admit up to three requests between two steps."""
        assert self.simulation is not None
        for _ in range(min(count, self.simulation.cache.free_slots)):
            self.simulation.admit()

    @precondition(lambda self: self.simulation.running)
    @rule(lag=st.integers(0, 1))
    def step(self, lag: int) -> None:
        """Launch a step and commit all but the last `lag` of those launched."""
        assert self.simulation is not None
        self.simulation.launch()
        while len(self.simulation.steps) > lag:
            self.simulation.commit()

    @rule()
    def disturb(self) -> None:
        """End a request, hold or give up a lease, or reset the cache."""
        assert self.simulation is not None
        self.simulation.disturb()

    @invariant()
    def everything_is_accounted_for(self) -> None:
        """Check after every rule."""
        if self.simulation is not None:
            self.simulation.check()

    def teardown(self) -> None:
        """End everything."""
        if self.simulation is not None:
            self.simulation.finish()


class NaiveManagerAgainstDevice(ManagerAgainstDevice):
    """The same without a prefix cache; requests of the namespace that begins with NUL are a group of samples."""

    prefix_cache = "none"
    namespaces = "\0group", ""

    @invariant()
    def nothing_is_kept(self) -> None:
        """Only what live requests lease is cached."""
        assert self.simulation is None or self.simulation.cache.evictable_pages == 0


TestManagerAgainstDevice = ManagerAgainstDevice.TestCase
TestManagerAgainstDevice.settings = settings(deadline=None, max_examples=120, stateful_step_count=30)
TestNaiveManagerAgainstDevice = NaiveManagerAgainstDevice.TestCase
TestNaiveManagerAgainstDevice.settings = settings(deadline=None, max_examples=30, stateful_step_count=30)


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_long_random_runs(page_size: int, seed: int) -> None:
    """Long runs reach what short ones seldom do: full pools, deep trees, old leases."""
    rng = random.Random(seed)
    simulation = Simulation(
        rng,
        page_size=page_size,
        num_pages=rng.choice([rng.randint(1, 4), rng.randint(5, 24)]),
        num_slots=rng.randint(1, 5),
        prefix_cache="none" if seed % 4 == 3 else "radix",
        namespaces=("\0group", "") if seed % 4 == 3 else ("", "other"),
    )
    for _ in range(60):
        for _ in range(rng.randrange(3)):
            if simulation.cache.free_slots:
                simulation.admit()
        if not rng.randrange(4):
            simulation.disturb()
        simulation.launch()
        while len(simulation.steps) > rng.randrange(2):
            simulation.commit()
        if not rng.randrange(4):
            simulation.disturb()
        simulation.check()
    simulation.finish()
