"""What callers may read and change at once, on their own threads.

Owned by one opening of an engine, shared by its engine thread and all callers, under one lock that is held for
O(1) and never while allocating much, logging or calling out. Invariant: a request is live from its registration
until its end is decided here, once, by whoever comes first: `leave` or `retire`; and it is told here, once, by
whoever comes first: the engine thread (`note_told`), or a caller that closes while that thread hangs (`give_up`).
"""

from __future__ import annotations

import threading
import traceback
from typing import TYPE_CHECKING, Final

from asyncllm.errors import EngineClosedError, EngineError, EngineFailedError, InvalidRequestError, QueueFullError
from asyncllm.outputs import EngineState, EngineStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.outputs import FinishReason
    from asyncllm.submission import Submission

__all__ = ["FrontDesk", "engine_closed", "engine_failed"]

_WHY_CLOSED: Final = {
    EngineState.NEW: "the engine is not started: use `async with engine`, `await engine.start()` or `with engine`",
    EngineState.STARTING: "the engine is still starting: wait for `await engine.start()`",
    EngineState.DRAINING: "the engine is draining: it finishes what it has and takes no new requests",
    EngineState.CLOSING: "the engine is closing",
    EngineState.CLOSED: "the engine is closed: start it again to use it",
}


def engine_closed(state: EngineState) -> EngineClosedError:
    """Make the error that says why an engine in this state takes no requests."""
    return EngineClosedError(_WHY_CLOSED[state])


def engine_failed(cause: BaseException | None) -> EngineFailedError:
    """Make the error that tells one caller of the engine's failure; a new one for each, the cause chained."""
    error = EngineFailedError(f"the engine has failed: {cause!r}; close it, and open it again to go on")
    error.__cause__ = cause
    return error


class FrontDesk:
    """The state, the live requests, and the count of those that wait."""

    def __init__(self, *, max_waiting: int | None) -> None:
        self._lock = threading.Lock()
        self._max_waiting = max_waiting
        self._state = EngineState.STARTING
        self._cause: BaseException | None = None
        self._gave_up_after_seconds: float | None = None
        self._live: dict[str, Submission] = {}
        self._untold: set[Submission] = set()
        self._waiting = 0
        self._next_sequence = 0
        self._next_id = 0
        self.stats = EngineStats(state=EngineState.STARTING)  # replaced whole by the engine thread after each step

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        return self._state

    @property
    def live_count(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def check_open(self) -> None:
        """Raise EngineClosedError or EngineFailedError unless the engine takes requests."""
        self._check(EngineState.RUNNING)

    def check_serving(self) -> None:
        """Raise EngineClosedError or EngineFailedError unless the engine runs, taking requests or draining."""
        self._check(EngineState.RUNNING, EngineState.DRAINING)

    def _check(self, *allowed: EngineState) -> None:
        state = self._state
        if state is EngineState.FAILED:
            raise engine_failed(self._cause)
        if state not in allowed:
            raise engine_closed(state)

    def new_id(self) -> str:
        """Draw an id that no live request has."""
        with self._lock:
            while True:
                request_id = f"request-{self._next_id}"
                self._next_id += 1
                if request_id not in self._live:
                    return request_id

    def register(self, submissions: Sequence[Submission], *, bounded: bool) -> None:
        """Make requests live and draw their sequence numbers; all of them or none.

        Args:
            submissions: in the order in which they are to wait.
            bounded: whether `max_waiting_requests` applies.

        Raises:
            EngineError: the engine takes no requests.
            QueueFullError: too many wait already.
            InvalidRequestError: an id is in use.
        """
        with self._lock:
            self.check_open()
            if bounded and self._max_waiting is not None and self._waiting + len(submissions) > self._max_waiting:
                raise QueueFullError(
                    f"{self._waiting} requests are waiting, max_waiting_requests={self._max_waiting}: "
                    "try again later, or raise the limit"
                )
            for submission in submissions:
                if submission.request_id in self._live:
                    raise InvalidRequestError(
                        f"request_id {submission.request_id!r} is in use by a live request",
                        request_id=submission.request_id,
                    )
            for submission in submissions:
                self._live[submission.request_id] = submission
                self._untold.add(submission)
                submission.sequence = self._next_sequence
                if submission.request is not None:
                    submission.request.sequence = self._next_sequence
                self._next_sequence += 1
            self._waiting += len(submissions)

    def live(self) -> list[Submission]:
        """The requests that have not ended, those included whose message is still on its way."""
        with self._lock:
            return list(self._live.values())

    def find(self, request_id: str) -> Submission | None:
        """The live request of this id."""
        return self._live.get(request_id)

    def leave(self, submission: Submission, reason: FinishReason) -> bool:
        """Decide that a request ends by its caller's wish; False if its end was decided before."""
        with self._lock:
            if self._live.get(submission.request_id) is not submission or submission.leaving is not None:
                return False
            submission.leaving = reason
            return True

    def retire(self, submission: Submission) -> FinishReason | None:
        """Decide that a request has ended; from now on its id is free.

        Returns:
            The caller's reason if it left before; else None.
        """
        with self._lock:
            self._live.pop(submission.request_id, None)
            return submission.leaving

    def note_told(self, submission: Submission) -> bool:
        """Decide that the engine thread tells a request's end; False if that was done for it."""
        with self._lock:
            if submission not in self._untold:
                return False
            self._untold.remove(submission)
            return True

    def give_up(self, after_seconds: float) -> set[Submission]:
        """Decide that the engine is closed, though its thread has not ended within `after_seconds`.

        Returns:
            the requests whose end that thread has not told, and will not tell any more.
        """
        with self._lock:
            if self._state is not EngineState.FAILED:
                self._state = EngineState.CLOSED
                self._gave_up_after_seconds = after_seconds
            untold, self._untold = self._untold, set()
            self._live.clear()
            return untold

    def left_queue(self, count: int) -> None:
        """Take requests that were admitted, or that ended before, out of the count of waiting ones."""
        with self._lock:
            self._waiting -= count

    def move(self, state: EngineState) -> None:
        """Change the state, unless the engine has failed. Engine thread, and `drain`."""
        with self._lock:
            if self._state is not EngineState.FAILED:
                self._state = state

    def fail(self, cause: BaseException) -> None:
        """Record the first failure. Its frames' locals are dropped: they may hold the KV cache alive."""
        with self._lock:
            if self._state is EngineState.FAILED:
                return
            self._state = EngineState.FAILED
            self._cause = cause
        link: BaseException | None = cause
        while link is not None:
            traceback.clear_frames(link.__traceback__)
            link = link.__cause__ or link.__context__

    def closing_error(self) -> EngineError:
        """What an open stream is told when the engine ends."""
        if self._state is EngineState.FAILED:
            return engine_failed(self._cause)
        why = "the engine was closed before this request ended"
        if self._gave_up_after_seconds is not None:
            why += f": its thread did not end within close_timeout_seconds={self._gave_up_after_seconds:g}"
        return EngineClosedError(why)
