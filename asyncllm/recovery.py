"""After a step that failed: who made it fail, and how the others go on.

Runs on the engine thread; owns the suspicion. Invariant: a request fails only after a step with it alone has failed
twice and some other step has run since; where none runs, it is the engine that has failed.

What a device did of a failed step is not known, so the scheduler forgets it and everybody starts again from their
committed tokens. The step's requests are then tried in halves, nobody else beside them, no step ahead of another's
result. A fault that does not come back costs these steps and nothing else. For a request that fails alone before
any other step has run, a step of one token that belongs to nobody tells whether steps run at all.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import numpy as np

from asyncllm.request import Request, RequestState, RowSampling

if TYPE_CHECKING:
    from asyncllm.live_requests import LiveRequests
    from asyncllm.scheduler.scheduler import ScheduledStep, Scheduler

__all__ = ["Recovery", "is_out_of_memory"]

MOST_FAULTS_OF_NOBODY: Final = 8
"""So many steps may fail, one after the other, though none of their requests fails when they are tried."""

_NO_MEMORY: Final = ("out of memory", "allocate memory", "not enough memory", "alloc_failed")

log = logging.getLogger("asyncllm")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a step's error says that the device, or the host, had no memory for it."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _NO_MEMORY)


class Recovery:
    """Choose the next step; after a fault, out of those under suspicion.

    Args:
        scheduler: forgets failed steps and builds the ones that are tried.
        live: tells a request that it has failed.
    """

    def __init__(self, scheduler: Scheduler, live: LiveRequests) -> None:
        self._scheduler = scheduler
        self._live = live
        self._groups: list[tuple[Request, ...]] = []  # under suspicion, the next to be tried last
        self._failed_alone: set[Request] = set()
        self._some_step_ran = False  # since the fault
        self._faults_of_nobody = 0
        self._probe: Request | None = None  # of nobody's; while it is tried,
        self._failed: tuple[Request, Exception] | None = None  # this one waits to be told
        self._told_of_memory = False

    @property
    def is_trying(self) -> bool:
        """Whether requests are under suspicion: then each step's result is awaited before the next is launched."""
        return bool(self._groups)

    def schedule(self) -> ScheduledStep | None:
        """Build the next step, of the next group under suspicion if there is one."""
        while self._groups:
            group = [r for r in self._groups[-1] if r.state is RequestState.PREFILLING]  # the others have left
            step = self._scheduler.schedule(group) if group else None
            if step is not None:
                return step
            self._groups.pop()
        return self._scheduler.schedule()

    def is_probe(self, step: ScheduledStep) -> bool:
        """Whether the step belongs to no caller."""
        return self._probe is not None and self._probe in step.rows

    def step_ran(self, step: ScheduledStep) -> None:
        """Note a step that ran, after its commit."""
        if not self._groups:
            self._faults_of_nobody = 0
            return
        self._some_step_ran = True
        self._groups.pop()
        if self._failed is not None and self._probe in step.rows:
            self._tell(*self._failed)
            self._probe = self._failed = None
        if self._groups:
            self._live.check_pauses()  # who begins again is given one more token, and so must have room for it
            self._scheduler.roll_back()  # those that ran stand by until the others were tried

    def step_failed(self, step: ScheduledStep, error: Exception) -> None:
        """Take a step back that failed; no other is in flight.

        Raises:
            Exception: the first one, if no step runs, or if steps fail whoever is in them.
        """
        self._scheduler.roll_back()
        self._live.resume_those_with_room()  # first: who was paused for a token of this step is under suspicion, too
        if self._failed is not None and self._probe in step.rows:
            raise self._failed[1]
        if is_out_of_memory(error) and self._scheduler.shrink_steps(step):
            if not self._told_of_memory:
                log.warning("no memory for a step of %d tokens: smaller ones from now on", step.batch.query_tokens)
                self._told_of_memory = True
            return
        if self._groups:
            self._groups.pop()
        else:
            self._begin(step, error)
        suspects = [request for request in step.rows if request.state is RequestState.PREFILLING]
        if len(suspects) > 1:
            half = len(suspects) // 2
            self._groups += [tuple(suspects[half:]), tuple(suspects[:half])]
        elif suspects:
            self._note_failed_alone(suspects[0], error)

    def _begin(self, step: ScheduledStep, error: Exception) -> None:
        log.warning("step %d failed (%r); its %d requests are tried again", step.batch.index, error, len(step.rows))
        self._failed_alone.clear()
        self._some_step_ran = False
        self._faults_of_nobody += 1
        if self._faults_of_nobody > MOST_FAULTS_OF_NOBODY:
            raise error

    def _note_failed_alone(self, request: Request, error: Exception) -> None:
        if request not in self._failed_alone:
            self._failed_alone.add(request)
            self._groups.append((request,))  # once more, since a fault may pass
            return
        self._scheduler.end(request, keep_kv=False)
        probe = _request_of_nobody()
        if not self._some_step_ran and self._scheduler.start_alone(probe):
            self._probe, self._failed = probe, (request, error)
            self._groups.append((probe,))
        else:
            self._tell(request, error)

    def _tell(self, request: Request, error: Exception) -> None:
        self._faults_of_nobody = 0
        log.warning("request %r failed alone: %r", request.request_id, error)
        self._live.step_failed(request, error)


def _request_of_nobody() -> Request:
    return Request(
        request_id="",
        sequence=-1,
        prompt=np.zeros(1, dtype=np.int32),
        max_tokens=1,
        sampling=RowSampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0),
        namespace="\0nobody",
    )
