"""The engine loop without engine: schedule, launch and commit on the calling thread, checked after every move.

Overlap or not, as `asyncllm.engine_loop` does it, but with tokens instead of text and no callers. What must hold
between scheduler and device is checked here, so that every test that drives a workload checks it.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from asyncllm.kv.cache_manager import CacheManager
from asyncllm.request import Request, RequestState, RowSampling
from asyncllm.scheduler.scheduler import Scheduler
from asyncllm.scheduler.step import ScheduledStep, SchedulingPolicy, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import numpy.typing as npt

    from asyncllm.backend import LaunchedStep, StepRunner

__all__ = ["Driver", "DriverSettings", "Poison", "make_request"]


class Poison(Protocol):
    """Spoils what the host freed, behind the steps that were launched so far."""

    def pages(self, pages: npt.NDArray[np.int64]) -> None:
        """Spoil the contents of these pages."""

    def slots(self, slots: npt.NDArray[np.int64]) -> None:
        """Spoil these rows of the page table and what was sampled for them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """The pool and the bounds of a step."""

    num_pages: int = 24
    page_size: int = 4
    num_slots: int = 6
    max_pages_per_request: int = 24
    step_token_budget: int = 24
    min_prefill_chunk: int = 8
    prefix_cache: Literal["radix", "none"] = "radix"
    share_inflight_prefixes: bool = True


def make_request(
    name: str, prompt: Sequence[int], max_tokens: int, *, sequence: int = 0, seed: int = 0, temperature: float = 0.0
) -> Request:
    """Make a request that is ready to be submitted."""
    return Request(
        request_id=name,
        sequence=sequence,
        prompt=np.asarray(prompt, dtype=np.int32),
        max_tokens=max_tokens,
        sampling=RowSampling(temperature=temperature, top_p=1.0, top_k=0, min_p=0.0, seed=seed),
    )


class Driver:
    """Run requests on a runner.

    Args:
        runner: runs the steps; closed by whoever made it.
        settings: pool and bounds.
        overlap: launch a step before the one before is committed.
        eos_token_ids: tokens that end a request.
        poison: told what became free.
    """

    def __init__(
        self,
        runner: StepRunner,
        settings: DriverSettings,
        *,
        overlap: bool,
        eos_token_ids: Collection[int] = (),
        poison: Poison | None = None,
    ) -> None:
        self.cache = CacheManager(
            num_pages=settings.num_pages,
            page_size=settings.page_size,
            num_slots=settings.num_slots,
            max_pages_per_request=settings.max_pages_per_request,
            prefix_cache=settings.prefix_cache,
        )
        policy = SchedulingPolicy(
            max_running_requests=settings.num_slots,
            step_token_budget=settings.step_token_budget,
            min_prefill_chunk=settings.min_prefill_chunk,
            share_inflight_prefixes=settings.share_inflight_prefixes,
        )
        self.scheduler = Scheduler(self.cache, policy)
        self.steps: list[ScheduledStep] = []
        self.after_commit: Callable[[], None] = lambda: None
        self._runner = runner
        self._depth = 1 if overlap else 0
        self._eos = frozenset(eos_token_ids)
        self._poison = poison
        self._flights: collections.deque[tuple[ScheduledStep, LaunchedStep]] = collections.deque()
        self._free_pages = set(self._pool_free())
        self._free_slots = set(self._slots_free())

    def submit(self, *requests: Request) -> None:
        """Queue requests, as one message."""
        self.scheduler.submit(requests)

    def end(self, request: Request) -> bool:
        """End a request; see `Scheduler.end`."""
        gone = self.scheduler.end(request)
        assert gone == (request.state is RequestState.FINISHED)
        self._check()
        return gone

    def turn(self) -> bool:
        """Do what the engine's loop does in one turn; False if there is nothing to do."""
        launched = self._launch()
        if self._flights and (not launched or len(self._flights) > self._depth):
            self._commit()
            return True
        return launched

    def run(self) -> None:
        """Run until nothing is left to do."""
        while self.turn():
            pass
        assert self.scheduler.waiting == 0
        assert self.scheduler.running == self.scheduler.paused

    def check_all_is_back(self) -> None:
        """Check that no request holds anything, and that every page can be had."""
        assert self.cache.owned_pages == self.cache.leased_pages == 0
        assert self.cache.free_pages + self.cache.cached_pages == self.cache.num_pages
        self.cache.reset_prefix_cache()
        assert self.cache.free_pages == self.cache.num_pages
        self.scheduler.check_integrity()

    def _launch(self) -> bool:
        if len(self._flights) > self._depth:
            return False
        step = self.scheduler.schedule()
        if step is None:
            return False
        self.steps.append(step)
        self._flights.append((step, self._runner.launch(step.batch)))
        self._note_free()
        return True

    def _commit(self) -> None:
        step, launched = self._flights[0]
        result = launched.result()
        self._flights.popleft()
        verdicts = [
            None if request.state is RequestState.ENDING else Verdict(token, token in self._eos)
            for request, token in zip(step.sampled, result.token_ids, strict=True)
        ]
        finished = self.scheduler.commit(step, verdicts)
        assert all(request.state is RequestState.FINISHED for request in finished)
        self._check()
        self.after_commit()

    def _check(self) -> None:
        """Check what must hold between the scheduler and the steps that the device may still be reading."""
        self.scheduler.check_integrity()
        free = set(self._pool_free())
        named = {request for step, _ in self._flights for request in step.rows}
        for request in named:
            # Invariant 2: nothing of a request that a launched step names has gone back.
            assert request.pages is not None, f"{request!r} was released under a step in flight"
            assert not request.pages.released
            row = set(self.cache._table.row(request.pages.slot).tolist())
            assert not row & free, f"pages {row & free} of {request!r} are free under a step in flight"
            assert request.pages.slot not in self._slots_free()
        for step, _ in self._flights:
            # ... and what ended is gone as soon as none does.
            assert all(r.state is not RequestState.FINISHED for r in step.rows)
        for request in self.steps[-1].rows if self.steps else ():
            assert request.state is not RequestState.ENDING or request in named, f"{request!r} should be gone"
        self._spoil(free)

    def _spoil(self, free: set[int]) -> None:
        slots = set(self._slots_free())
        if self._poison is not None:
            if free - self._free_pages:
                self._poison.pages(np.array(sorted(free - self._free_pages)))
            if slots - self._free_slots:
                self._poison.slots(np.array(sorted(slots - self._free_slots)))
        self._free_pages, self._free_slots = free, slots

    def _note_free(self) -> None:
        self._free_pages, self._free_slots = set(self._pool_free()), set(self._slots_free())

    def _pool_free(self) -> list[int]:
        return list(self.cache._pool.free_list().tolist())

    def _slots_free(self) -> list[int]:
        return self.cache._table._free_slots
