"""A scheduler with a device that runs each step as late as it may, on host memory.

The device keeps token ids in pages and reads every row back through the page table, so that a page that is freed
too early, shared wrongly, not copied or not written raises. A step runs just before its commit, after the next one
was scheduled. What is free after a commit is poisoned in the device's order: after the steps launched until then.
"""

from __future__ import annotations

import collections
import contextlib
from typing import TYPE_CHECKING

import numpy as np

from asyncllm.errors import IntegrityError
from asyncllm.kv.cache_manager import CacheManager
from asyncllm.request import Request, RequestState, RowSampling
from asyncllm.scheduler.scheduler import ScheduledStep, Scheduler, SchedulingPolicy, Verdict
from asyncllm.testing.paged_tokens import PagedTokens

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import numpy.typing as npt

    from asyncllm.outputs import StepRecord

__all__ = ["EOS", "GREEDY", "Follower", "World", "follow", "make_request", "next_token", "reference"]

GREEDY = RowSampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)
EOS = 0
VOCABULARY = 50


def next_token(sequence: Sequence[int]) -> int:
    """Continue a sequence; depends on all of it and its length."""
    state = len(sequence)
    for token in sequence:
        state = (state * 31 + token + 7) % 1_000_003
    return state % VOCABULARY


def reference(request: Request, *, use_eos: bool = False) -> list[int]:
    """What a request generates when it is alone."""
    sequence = request.prompt.tolist()
    generated: list[int] = []
    while len(generated) < request.max_tokens and not (use_eos and generated[-1:] == [EOS]):
        generated.append(next_token(sequence + generated))
    return generated


def make_request(
    sequence: int,
    prompt: int | Sequence[int],
    max_tokens: int = 4,
    *,
    priority: int = 0,
    namespace: str = "",
    sampling: RowSampling = GREEDY,
) -> Request:
    """Make a request whose id is its number; a prompt given by its length is like no other's."""
    if isinstance(prompt, int):
        prompt = [1000 + 1000 * sequence + place for place in range(prompt)]
    return Request(
        request_id=str(sequence),
        sequence=sequence,
        prompt=np.asarray(prompt, dtype=np.int32),
        max_tokens=max_tokens,
        sampling=sampling,
        priority=priority,
        namespace=namespace,
    )


class Follower:
    """A constraint that allows everything, and whose masks say for which place in which text they were asked."""

    failure: str | None = None

    def __init__(self, request: Request) -> None:
        self.request = request

    def mask(self, generated: Sequence[int]) -> npt.NDArray[np.int32]:
        """Check that no sampled token is missing."""
        assert list(generated) == self.request.generated
        assert len(generated) == self.request.sampled - 1, "the step that asks samples the next one"
        return np.array([self.request.sequence, len(generated)], dtype=np.int32)


def follow(request: Request) -> Request:
    """Give a request a constraint."""
    request.constraint = Follower(request)
    request.needs_committed_token = True
    return request


class World:
    """A scheduler, its cache and its device; checks integrity after every change."""

    def __init__(
        self,
        *,
        pages: int = 64,
        page_size: int = 1,
        slots: int = 8,
        budget: int = 64,
        min_chunk: int = 1,
        prefix_cache: bool = True,
        share: bool = True,
        depth: int = 1,
        use_eos: bool = False,
    ) -> None:
        self.cache = CacheManager(
            num_pages=pages,
            page_size=page_size,
            num_slots=slots,
            max_pages_per_request=pages,
            prefix_cache="radix" if prefix_cache else "none",
        )
        policy = SchedulingPolicy(
            max_running_requests=slots,
            step_token_budget=budget,
            min_prefill_chunk=min_chunk,
            share_inflight_prefixes=share,
        )
        self.scheduler = Scheduler(self.cache, policy)
        self.device = PagedTokens(num_pages=pages, page_size=page_size, num_slots=slots, max_pages_per_request=pages)
        self.depth = depth
        self.use_eos = use_eos
        self.in_flight: collections.deque[ScheduledStep] = collections.deque()
        self._device_work: collections.deque[ScheduledStep | npt.NDArray[np.int64]] = collections.deque()
        self.records: list[StepRecord] = []
        self.requests: list[Request] = []
        self.ended: set[Request] = set()  # by whatever cause: no later launch may name them
        self.cancelled: set[Request] = set()
        self.paused: set[Request] = set()

    def running(self) -> list[Request]:
        """The requests that hold a slot, in the order of their calls."""
        return [request for request in self.requests if request.pages is not None]

    def waiting(self) -> list[Request]:
        """The requests that wait, in the order of their calls."""
        return [request for request in self.requests if request.state is RequestState.WAITING]

    def submit(self, *requests: Request) -> None:
        """Submit requests as one message."""
        self.scheduler.submit(requests)
        self.requests.extend(requests)

    def end(self, request: Request) -> bool:
        """Cancel a request."""
        gone = self.scheduler.end(request)
        self.cancelled.add(request)
        self.ended.add(request)
        assert gone == (request.state is RequestState.FINISHED)
        self._check()
        return gone

    def pause(self, request: Request) -> None:
        """Pause a request."""
        self.scheduler.pause(request)
        self.paused.add(request)
        self._check()

    def resume(self, request: Request) -> None:
        """Let a paused request go on."""
        self.scheduler.resume(request)
        self.paused.remove(request)
        self._check()

    def park(self, request: Request) -> bool:
        """Take a paused request's pages back, if no step in flight names it."""
        named = any(request in step.rows for step in self.in_flight)
        parked = self.scheduler.park(request)
        assert parked == (not named)
        assert (request.pages is None) == parked
        self._check()
        return parked

    def launch(self, only: Collection[Request] | None = None) -> ScheduledStep | None:
        """Schedule a step and put it in flight."""
        step = self.scheduler.schedule(only)
        self._check()
        if step is None:
            return None
        assert not self.ended.intersection(step.rows), "a launch names a request that is to end"
        assert not self.paused.intersection(step.rows), "a launch names a paused request"
        assert len(step.batch.token_ids) <= self.scheduler._policy.step_token_budget
        self.in_flight.append(step)
        self._device_work.append(step)
        self.records.append(step.record)
        return step

    def commit(self) -> tuple[Request, ...]:
        """Run the oldest step in flight and commit it."""
        step = self.in_flight.popleft()
        verdicts: list[Verdict | None] = []
        for request, token in zip(step.sampled, self._run(step), strict=True):
            if request.state in {RequestState.ENDING, RequestState.FINISHED}:
                verdicts.append(None)
                continue
            ends = len(request.generated) + 1 == request.max_tokens or (self.use_eos and token == EOS)
            verdicts.append(Verdict(token, ends))
            if ends:
                self.ended.add(request)
        finished = self.scheduler.commit(step, verdicts)
        assert all(request.state is RequestState.FINISHED for request in finished)
        self._check()
        for later in self.in_flight:
            assert all(r.pages is not None for r in later.rows), "a launched step names a request that was released"
        pool = self.cache._pool
        self._device_work.append(pool._stack[: pool.free_pages].astype(np.int64))
        return finished

    def fail(self, *, written: bool, later_written: bool) -> None:
        """Let the steps in flight fail, after the device has done all that it does for them, or nothing."""
        for step, runs in zip(self.in_flight, [written, later_written], strict=False):
            with contextlib.suppress(IntegrityError):  # a step behind one that did nothing reads what nobody wrote
                self._run(step, runs=runs)
        self.in_flight.clear()
        self.scheduler.roll_back()
        self._check()

    def turn(self) -> bool:
        """Launch as many steps as may be in flight, commit the oldest; return whether there was one."""
        return len(list(self.steps(1))) == 1

    def steps(self, most: int = 10_000) -> Iterator[ScheduledStep]:
        """Go on until nothing can run any more or `most` steps were committed; yield each just before its commit."""
        for _ in range(most):
            while len(self.in_flight) < self.depth and self.launch() is not None:
                pass
            if not self.in_flight:
                return
            yield self.in_flight[0]
            self.commit()
        assert most < 10_000, "not idle after so many steps"

    def run(self) -> list[StepRecord]:
        """Go on until nothing can run any more; return the records of the steps."""
        return [step.record for step in self.steps()]

    def assert_idle(self) -> None:
        """Nothing runs or waits, and every page, slot and promise is back."""
        assert self.scheduler.running == self.scheduler.waiting == self.scheduler.paused == 0
        assert self.scheduler.reserved_tokens == 0
        assert self.cache.free_pages + self.cache.evictable_pages == self.cache.num_pages
        assert self.cache.owned_pages == self.cache.leased_pages == 0
        self._check()

    def _run(self, step: ScheduledStep, *, runs: bool = True) -> list[int]:
        while (work := self._device_work.popleft()) is not step:
            assert not isinstance(work, ScheduledStep)
            self.device.poison_pages(work)
        if not runs:
            return []
        batch = step.batch
        for sample, mask in batch.masks.items():
            assert mask.tolist()[0] == step.sampled[sample].sequence
        rows = self.device.step(batch)
        tokens = [next_token(rows.sequence(row).tolist()) for row in batch.sample_rows.tolist()]
        slots = batch.slots[batch.sample_rows].astype(np.int64)
        positions = (batch.starts + batch.query_lens)[batch.sample_rows].astype(np.int64)
        self.device.keep_sampled(slots, positions, np.asarray(tokens, dtype=np.int64))
        return tokens

    def _check(self) -> None:
        self.scheduler.check_integrity()
