"""A device for steps in Python: a thread of its own that runs them in the order in which they are launched.

Made and closed on the engine thread. Steps do not run inside `launch`, since a real device's do not: a held or
slow step would stop the engine that is to be tested. Invariant: results become done in launch order.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.scheduler.batch import StepResult

__all__ = ["DeviceThread", "ThreadStep"]


class ThreadStep:
    """A `LaunchedStep` of a `DeviceThread`."""

    __slots__ = ("_future", "_run")

    def __init__(self, run: Callable[[], StepResult]) -> None:
        self._run = run
        self._future: concurrent.futures.Future[StepResult] = concurrent.futures.Future()

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self._future.done()

    def call_when_done(self, callback: Callable[[], None]) -> bool:
        """Have `callback` called once when the step is done, from the device's thread (at once if it is)."""
        self._future.add_done_callback(lambda _: callback())
        return True

    def wait(self) -> None:
        """Block until the step is done."""
        concurrent.futures.wait((self._future,))

    def result(self) -> StepResult:
        """Return what was sampled; raise what the step raised. Blocks until done."""
        return self._future.result()

    def execute(self) -> None:
        """Run the step; called by the device's thread."""
        try:
            result = self._run()
        except BaseException as error:  # noqa: BLE001  (whatever it is, it belongs to whoever reads the result)
            self._future.set_exception(error)
        else:
            self._future.set_result(result)


class DeviceThread:
    """Run steps one after the other on a daemon thread."""

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[ThreadStep | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="asyncllm scripted device", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], StepResult]) -> ThreadStep:
        """Queue a step and return without waiting for it."""
        step = ThreadStep(run)
        self._steps.put(step)
        return step

    def close(self) -> None:
        """Run what is queued, then end the thread. Idempotent."""
        self._steps.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (step := self._steps.get()) is not None:
            step.execute()
