"""The steps that are launched and not committed: launch, read, advance text, commit, or recover.

Runs on the engine thread; owns them and their counts. Invariant: steps are committed in launch order, at most two
are in flight, and behind one that failed nothing is launched or read until all are done and it was taken back.
"""

from __future__ import annotations

import collections
import dataclasses
import time
import traceback
from typing import TYPE_CHECKING

from asyncllm.errors import IntegrityError
from asyncllm.recovery import Recovery

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.backend import LaunchedStep, StepRunner
    from asyncllm.live_requests import LiveRequests
    from asyncllm.outputs import StepRecord
    from asyncllm.scheduler.batch import StepResult
    from asyncllm.scheduler.scheduler import ScheduledStep, Scheduler

__all__ = ["StepsInFlight"]


@dataclasses.dataclass(frozen=True, slots=True)
class _NotLaunched:
    """A `LaunchedStep` whose launch raised: it has failed."""

    error: Exception

    def done(self) -> bool:
        return True

    def call_when_done(self, callback: Callable[[], None]) -> bool:
        callback()
        return True

    def wait(self) -> None:
        """Return at once."""

    def result(self) -> StepResult:
        raise self.error


@dataclasses.dataclass(frozen=True, slots=True)
class _Flight:
    """A step that is launched and not committed."""

    scheduled: ScheduledStep
    launched: LaunchedStep


class StepsInFlight:
    """Launch steps and bring them home.

    Args:
        scheduler: builds steps and takes in what they did.
        runner: runs them.
        live: makes text of their tokens.
        overlap: whether a step may be launched before the one before is committed.
        debug_checks: whether the pages are checked after each step.
        before_launch: called before each launch.

    Attributes:
        committed: steps committed.
        prompt_tokens, generated_tokens: in committed steps.
        last_commit_at: on the clock of `time.monotonic`; None before the first.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        live: LiveRequests,
        *,
        overlap: bool,
        debug_checks: bool,
        before_launch: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._live = live
        self._recovery = Recovery(scheduler, live)
        self._flights: collections.deque[_Flight] = collections.deque()
        self._most_ahead = 1 if overlap else 0
        self._debug_checks = debug_checks
        self._before_launch = before_launch
        self._failed: tuple[ScheduledStep, Exception] | None = None
        self.committed = self.prompt_tokens = self.generated_tokens = 0
        self.last_commit_at: float | None = None

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def is_full(self) -> bool:
        """Whether no step can be launched before the oldest is committed."""
        if self._failed is not None or (self._flights and isinstance(self._flights[-1].launched, _NotLaunched)):
            return True  # nothing may run behind a failed step: it would count on what that did not do
        return len(self._flights) > (0 if self._recovery.is_trying else self._most_ahead)

    @property
    def oldest(self) -> LaunchedStep:
        """The step to wait for."""
        return self._flights[0].launched

    def launch(self) -> bool:
        """Schedule and launch a step, if there is room and something to run."""
        if self.is_full:
            return False
        scheduled = self._recovery.schedule()
        while self._scheduler.blocked and self._live.park_longest_paused() and scheduled is None:
            scheduled = self._scheduler.schedule()
        if scheduled is None:
            return False
        self._before_launch()
        try:
            launched = self._runner.launch(scheduled.batch)
        except Exception as error:  # noqa: BLE001  # a step that failed, as if it had been launched
            launched = _NotLaunched(error)
        self._flights.append(_Flight(scheduled, launched))
        self._live.note_admitted(chunk.request for chunk in scheduled.chunks)
        return True

    def finish_oldest(self) -> StepRecord | None:
        """Commit the oldest step; blocks until it is done.

        Returns:
            its record; None if it failed, or if it belongs to no caller.

        Raises:
            IntegrityError: a page was read that something else was written to: no fault of a request.
            Exception: a step failed, and the engine cannot go on.
        """
        flight = self._flights[0]
        result = self._read(flight)
        self._flights.popleft()
        if result is not None:
            return self._commit(flight.scheduled, result)
        if self._failed is not None and not self._flights:
            failed, self._failed = self._failed, None
            self._recovery.step_failed(*failed)
            self._check()
        return None

    def clear(self) -> None:
        """Forget them: the engine ends."""
        self._flights.clear()

    def _read(self, flight: _Flight) -> StepResult | None:
        """Return a step's result; None if it, or one before it, failed."""
        try:
            result = flight.launched.result()
        except Exception as error:
            if self._failed is not None:
                _without_frames(error)
                return None  # as was to be expected behind a failed one
            if isinstance(error, IntegrityError):
                raise
            self._failed = (flight.scheduled, _without_frames(error))
            return None
        return result if self._failed is None else None

    def _commit(self, scheduled: ScheduledStep, result: StepResult) -> StepRecord | None:
        now = self.last_commit_at = time.monotonic()
        is_probe = self._recovery.is_probe(scheduled)
        if is_probe:
            self._scheduler.end(scheduled.rows[0], keep_kv=False)
        if result.logprobs or result.prompt_logprobs or result.failures:
            self._live.note_findings(scheduled, result)
        verdicts = [
            self._live.advance(request, token_id, finite=finite, now=now)
            for request, token_id, finite in zip(scheduled.sampled, result.token_ids, result.finite, strict=True)
        ]
        self._scheduler.commit(scheduled, verdicts)
        self.committed += 1
        self.generated_tokens += sum(verdict is not None for verdict in verdicts)
        self.prompt_tokens += sum(
            max(0, min(chunk.end, len(chunk.request.prompt)) - chunk.start) for chunk in scheduled.chunks
        )
        self._recovery.step_ran(scheduled)
        self._check()
        return None if is_probe else scheduled.record

    def _check(self) -> None:
        if self._debug_checks:
            self._scheduler.check_integrity()


def _without_frames(error: Exception) -> Exception:
    """Say in a note where an error comes from, and let its frames go: who keeps it keeps no request and no memory."""
    if not hasattr(error, "__notes__"):
        error.add_note("In the step:\n" + "".join(traceback.format_tb(error.__traceback__)))
    traceback.clear_frames(error.__traceback__)
    return error.with_traceback(None)
